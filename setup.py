"""Package metadata. Released versions only; the tests run on these ranges."""

import pathlib

import setuptools
from setuptools.command import build_py

ROOT = pathlib.Path(__file__).parent

# The ends of each range are tested: `make test-versions`. On jax 0.11.1, tokamax 0.0.17, which pip
# picks for it, lowers no kernel for Hopper: "module 'jax.experimental.mosaic.gpu.utils' has no
# attribute 'inline_ptx'".
JAX = {'python_version < "3.12"': '>=0.10.2,<0.11', 'python_version >= "3.12"': '>=0.11.2,<0.13'}


def jax(extra: str, condition: str = '') -> list[str]:
  """Returns the requirements of jax with an `extra`, one per range of Pythons."""
  return [f'jax{extra}{versions}; {python}{condition}' for python, versions in JAX.items()]


LINUX = ' and platform_system == "Linux"'
CORE = [
  *jax(''),
  'flax>=0.12.8,<0.13',
  'optax>=0.2.8,<0.3',
  'orbax-checkpoint>=0.12.8,<0.13',
  'tensorstore>=0.1.84,<0.2',  # Orbax's files; it brings it
  'gin-config==0.5.0',
  'absl-py>=2.1',
  'numpy>=2.0,<3',
  'rich>=13.7',
  'tensorboardX>=2.6.4,<3',
  'nvidia-ml-py>=13.580,<14',  # pure Python; without a driver it reports no GPUs
]
# Attention kernels for GPUs: an extra, because a run on a CPU does not import it, and it pins
# typeguard. Without it, a run on GPUs continues with attention in plain JAX.
# Python 3.12 and newer take jax 0.11 or 0.12, on which tokamax 0.0.12 stops with
# "Mesh.__init__() got an unexpected keyword argument 'out_shape'". 0.0.15 would admit jax 0.10,
# on which nothing has lowered it. Newer ones do not install on Python 3.11.
KERNELS = [
  'tokamax>=0.0.12,<0.1; python_version < "3.12"',
  'tokamax>=0.0.13,!=0.0.15,<0.1; python_version >= "3.12"',
]
# Text to batches. Only t5x_gpu/data imports these.
DATA = [
  'seqio==0.0.20',
  'tensorflow>=2.21,<2.22',  # from PyPI it sees no GPU without its and-cuda extra; we hide them too
  'tensorflow-datasets>=4.9.10,<5',
  'grain>=0.2.18,<0.3',  # prepared rows: it brings cloudpickle and portpicker, no TensorFlow
  'array-record>=0.8.3,<0.9',
  'pyarrow>=26.0,<27',  # Parquet, Arrow, and what is compressed with zstd
]
# Hugging Face's models and tokenizers. python -m t5x_gpu.convert compares logits with them if torch
# is installed too; conversion itself needs neither.
HF = ['transformers>=5.24,<6', 'safetensors>=0.8,<0.9', 'jinja2>=3.1.6,<4']
# The documentation site (`make docs`).
DOCS = ['sphinx>=9.0,<10', 'myst-parser>=5.2,<6', 'furo>=2025.12']
# torch: tests compare with Hugging Face models, on one Python because it is large. moto and flask:
# an S3-compatible server. kubernetes-validate: schemas for scripts/train_k8s.yaml.
DEV = [
  'pytest>=9.0',
  'pytest-xdist>=3.6',
  'hypothesis>=6.120',
  'ruff==0.17.6',
  'matplotlib>=3.9',  # draws pictures of docs/: scripts/draw_*.py, benchmarks/layouts.py
  *HF,
  *KERNELS,
  *DOCS,
  'moto[s3]>=5.1,<6',
  'flask>=3.0,<4',
  'flask-cors>=5.0,<7',
  'kubernetes-validate>=1.37,<2',
  'torch==2.13.0; python_version < "3.12"',
]


class BuildPy(build_py.build_py):
  """Takes the launch scripts of scripts/, and not the Python files of the repository."""

  def find_package_modules(self, package, package_dir):
    return (
      [] if package == 't5x_gpu.scripts' else super().find_package_modules(package, package_dir)
    )


gin_folders = [''] + [f'/{p.name}' for p in sorted((ROOT / 'gin_configs').iterdir()) if p.is_dir()]

setuptools.setup(
  name='t5x_gpu',
  version='0.3.0.dev0',
  description='Gin-configured T5X-style training in JAX on NVIDIA GPUs.',
  long_description=(ROOT / 'README.md').read_text(),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  license_files=['LICENSE'],
  python_requires='>=3.11',
  # Those that make test, test-py312 and test-py313 run on.
  classifiers=[f'Programming Language :: Python :: 3.{minor}' for minor in (11, 12, 13)],
  packages=setuptools.find_packages(include=['t5x_gpu', 't5x_gpu.*'])
  + ['t5x_gpu.scripts']
  + ['t5x_gpu.gin_configs' + folder.replace('/', '.') for folder in gin_folders],
  package_dir={'t5x_gpu.gin_configs': 'gin_configs', 't5x_gpu.scripts': 'scripts'},
  package_data={'': ['*.gin'], 't5x_gpu': ['py.typed'], 't5x_gpu.scripts': ['train*']},
  cmdclass={'build_py': BuildPy},
  install_requires=CORE + DATA,
  extras_require={
    'gpu': [*jax('[cuda13]', LINUX), *KERNELS],
    'dev': DEV,
    'docs': DOCS,
    'hf': HF,
    # Loggers: LOGGERS in gin files (docs/monitor.md).
    'wandb': ['wandb>=0.31,<0.32'],
    'mlflow': ['mlflow-skinny>=3.17,<4'],  # the client, without the server
    # Tasks of lm-evaluation-harness (docs/eval.md).
    'harness': ['lm_eval>=0.4.13,<0.5'],
    # XLA for GPUs without NVIDIA's libraries: python -m t5x_gpu.plan, anywhere.
    'plan': [*jax('[cuda13-local]', LINUX), *KERNELS],
    'pile': [],  # pyarrow of the base reads and writes .zst; kept for `pip install .[pile]`
  },
  entry_points={'console_scripts': ['t5x_gpu = t5x_gpu.__main__:main']},
)
