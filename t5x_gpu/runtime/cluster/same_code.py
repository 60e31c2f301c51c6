"""Checks that all processes run the same code: this package, the user's modules, versions.

A host with an old checkout or another release trains without an error, but to a different loss.
Facts are as in `agreement`: a file's identity is the sha256 of its bytes, independent of its path.
"""

import functools
import hashlib
import os
import pathlib
import platform
import sys
import sysconfig
from collections.abc import Sequence

from t5x_gpu.errors import ClusterError
from t5x_gpu.runtime import host
from t5x_gpu.runtime.cluster.agreement import Facts

# Packages that affect numbers. Versions come from metadata, without imports.
_CUDA = ('12', '13')
PACKAGES = (
  'jax',
  'jaxlib',
  *(f'jax-cuda{cuda}-{part}' for cuda in _CUDA for part in ('plugin', 'pjrt')),
  *(f'nvidia-{part}-cu{cuda}' for cuda in _CUDA for part in ('cudnn', 'nccl', 'cublas')),
  'nvidia-cublas',
  'transformer-engine',
  'transformer-engine-jax',
  'tokamax',
  'ml-dtypes',
  'flax',
  'optax',
  'chex',
  'orbax-checkpoint',
  'tensorstore',
  'numpy',
  'scipy',
  'gin-config',
  'seqio',
  'seqio-nightly',
  't5',
  'tensorflow',
  'tensorflow-cpu',
  'tensorflow-text',
  'tensorflow-datasets',
  'tfds-nightly',
  'sentencepiece',
  'tokenizers',
  'transformers',
  'safetensors',
  'grain',
  'array-record',
  'pyarrow',
)
error = functools.partial(
  ClusterError,
  fix='Give all hosts the same checkout and the same environment: a shared folder, one container '
  'image, or the same lock file.',
  docs='slurm.md#hosts-that-disagree',
)
_PACKAGE = pathlib.Path(__file__).resolve().parents[2]
# Modules of launchers, which differ on purpose, and modules that TensorFlow generates.
_NOT_COMPARED = (
  '__main__',
  '__mp_main__',
  'sitecustomize',
  'usercustomize',
  '__autograph_generated_file',
)


def facts() -> Facts:
  """Returns facts about the package's sources, the user's modules and installed versions."""
  found = {
    f'{_PACKAGE.name}/{path.relative_to(_PACKAGE).as_posix()}': _of_file(path)
    for path in sorted(_PACKAGE.rglob('*.py'))
  }
  return found | user_modules() | versions()


def user_modules() -> Facts:
  """Returns facts about the modules imported so far that are not installed packages.

  These are the modules that gin files import from the working directory or PYTHONPATH, and the
  modules that they import in turn.
  """
  library = {pathlib.Path(sysconfig.get_path(name)).resolve() for name in ('stdlib', 'platstdlib')}
  found = {}
  for name, module in sorted(sys.modules.items()):
    file = getattr(module, '__file__', None)
    if name.startswith(_NOT_COMPARED) or not isinstance(file, str) or not os.path.isfile(file):
      continue
    path = pathlib.Path(file).resolve()
    installed = {'site-packages', 'dist-packages'} & set(path.parts)
    if not (installed or library & set(path.parents) or path.is_relative_to(_PACKAGE)):
      found[f'module {name}'] = _of_file(path)
  return found


def versions() -> Facts:
  """Returns facts about Python and `PACKAGES`; a missing package is a fact too."""
  found = {
    'python': '.'.join(platform.python_version_tuple()[:2]),
    **dict.fromkeys(PACKAGES, 'not installed'),
    **host.versions(PACKAGES),
  }
  return {f'version of {name}': (version, version) for name, version in found.items()}


def _of_file(path: pathlib.Path) -> tuple[str, str]:
  try:
    content = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
  except OSError as e:
    content = f'unreadable: {e.strerror}'
  return content, f'{path} ({content})'


def raise_if_any(lines: Sequence[str]) -> None:
  """Raises ClusterError if `lines`, the differences between processes, is not empty."""
  if lines:
    raise error('The processes do not run the same code:\n  ' + '\n  '.join(lines))
