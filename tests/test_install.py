"""What a wheel holds and can do: gin files found from any folder, the console script."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[1]
BUILD = 'import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])'
LAUNCH_SCRIPTS = ('train.pbs', 'train.slurm', 'train_k8s.yaml', 'train_mpi.sh')
# What the script that pip writes for a console entry point does.
CONSOLE = (
  "import importlib.metadata as m; m.distribution('t5x_gpu').entry_points['t5x_gpu'].load()()"
)


def python(*arguments: str, cwd: pathlib.Path, **environment: str) -> str:
  """Returns what a Python process printed; fails with its errors unless it left with 0."""
  done = subprocess.run(
    [sys.executable, *arguments],
    cwd=cwd,
    capture_output=True,
    text=True,
    timeout=200,
    env={**os.environ, **environment},
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def build(kind: str, folder: pathlib.Path) -> pathlib.Path:
  """Returns the wheel or sdist, built without a network from what the repository tracks."""
  source = folder / 'source'
  for name in ('t5x_gpu', 'gin_configs', 'scripts'):
    shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns('__pycache__'))
  for name in ('setup.py', 'README.md', 'LICENSE'):
    shutil.copy(ROOT / name, source)
  python('-W', 'ignore', '-c', BUILD.format(kind=kind), str(folder), cwd=source)
  (built,) = folder.glob('t5x_gpu-*')
  return built


@pytest.fixture(scope='module')
def wheel(tmp_path_factory) -> pathlib.Path:
  return build('wheel', tmp_path_factory.mktemp('wheel'))


@pytest.fixture(scope='module')
def installed(wheel, tmp_path_factory) -> pathlib.Path:
  """A folder to put on PYTHONPATH, with the wheel as pip would unpack it."""
  folder = tmp_path_factory.mktemp('installed')
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder)
  return folder


def test_wheel_holds_all_modules_and_gin_files(wheel):
  with zipfile.ZipFile(wheel) as archive:
    names = {name for name in archive.namelist() if '.dist-info/' not in name}
    assert any(name.endswith('/LICENSE') for name in archive.namelist())
  files = {
    *(ROOT / 't5x_gpu').rglob('*.py'),
    *(ROOT / 'gin_configs').rglob('*.gin'),
    ROOT / 't5x_gpu' / 'py.typed',
    *(ROOT / 'scripts' / name for name in LAUNCH_SCRIPTS),
  }
  relative = {path.relative_to(ROOT).as_posix() for path in files}
  assert names == {name if name.startswith('t5x_gpu/') else f't5x_gpu/{name}' for name in relative}


def test_sdist_holds_the_gin_files_and_launch_scripts(tmp_path):
  with tarfile.open(build('sdist', tmp_path)) as archive:
    names = {name.partition('/')[2] for name in archive.getnames()}
  assert {name for name in names if name.endswith('.gin')} == {
    path.relative_to(ROOT).as_posix() for path in (ROOT / 'gin_configs').rglob('*.gin')
  }
  assert {f'scripts/{name}' for name in LAUNCH_SCRIPTS} <= names


def test_console_script_finds_shipped_gin_files_from_any_folder(installed, tmp_path):
  out = python(
    '-c',
    CONSOLE,
    'train',
    '--gin_file=gin_configs/examples/demo.gin',
    '--dry_run',
    '--gin.train/DatasetConfig.module=t5x_gpu.data.synthetic',
    '--gin.train_eval/DatasetConfig.module=t5x_gpu.data.synthetic',
    '--gin.train.sample_cfg=None',
    cwd=tmp_path,
    PYTHONPATH=str(installed),
    COLUMNS='200',
  )
  assert 'gin_configs/examples/demo.gin:' in out
  assert 'Dry run: the run could start.' in out
  assert list(tmp_path.iterdir()) == []


def test_launch_writes_the_scripts_of_the_repository_in_any_folder(installed, tmp_path):
  command = ('-c', CONSOLE, 'launch', '--write_scripts=scripts')
  out = python(*command, cwd=tmp_path, PYTHONPATH=str(installed))
  assert out.splitlines() == [f'scripts/{name}' for name in LAUNCH_SCRIPTS]
  for name in LAUNCH_SCRIPTS:
    assert (tmp_path / 'scripts' / name).read_text() == (ROOT / 'scripts' / name).read_text()
  assert os.access(tmp_path / 'scripts/train_mpi.sh', os.X_OK)
  assert sorted(p.name for p in tmp_path.iterdir()) == ['scripts']


def test_installed_package_is_the_one_that_ran(installed, tmp_path):
  out = python(
    '-c', 'import t5x_gpu.errors as e; print(e.__file__)', cwd=tmp_path, PYTHONPATH=str(installed)
  )
  assert pathlib.Path(out.strip()).is_relative_to(installed)


def test_requirements_are_what_the_tests_run_on(installed):
  # Else the tests would not test the package that users get.
  (distribution,) = importlib.metadata.distributions(path=[str(installed)])
  requirements = [Requirement(text) for text in distribution.requires]
  wrong = [
    f'{r} but {importlib.metadata.version(r.name)} is installed'
    for r in requirements
    if (r.marker is None or r.marker.evaluate({'extra': 'dev'}))
    and not r.specifier.contains(importlib.metadata.version(r.name))
  ]
  assert wrong == []


def test_every_python_of_the_metadata_has_a_make_target(installed):
  (distribution,) = importlib.metadata.distributions(path=[str(installed)])
  named = [text.rpartition(' ')[2] for text in distribution.metadata.get_all('Classifier')]
  lowest = distribution.metadata['Requires-Python'].removeprefix('>=')  # of make test
  others = re.findall(r'^test-py3(\d+):', (ROOT / 'Makefile').read_text(), re.MULTILINE)
  assert named == [lowest, *(f'3.{minor}' for minor in others)]


def test_the_readme_names_the_versions_of_jax_that_are_tested():
  makefile, readme = (ROOT / 'Makefile').read_text(), (ROOT / 'README.md').read_text()
  pairs = re.findall(r'^JAX3(\d+) := (\S+)$', makefile, re.MULTILINE)
  assert len(pairs) == 2
  for minor, version in pairs:
    assert f'Python 3.{minor} with jax {version}' in readme.replace('\n', ' ')


@pytest.mark.skipif(not (ROOT / '.git').exists(), reason='not a git checkout')
def test_git_ignores_no_file_of_the_project():
  # `runs/` in .gitignore once hid gin_configs/runs/ from every clone.
  done = subprocess.run(
    [
      'git',
      'ls-files',
      '--others',
      '--ignored',
      '--exclude-standard',
      't5x_gpu',
      'gin_configs',
      'tests',
      'docs',
      'scripts',
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert [name for name in done.stdout.splitlines() if '__pycache__' not in name] == []


@pytest.mark.parametrize(
  ('package', 'python_version', 'works', 'fails'),
  [
    ('tokamax', '3.11', ['0.0.12'], []),
    ('tokamax', '3.12', ['0.0.13', '0.0.17'], ['0.0.12', '0.0.15']),
    ('jax', '3.11', ['0.10.2'], ['0.11.2', '0.12.0.1']),
    ('jax', '3.12', ['0.11.2', '0.12.0.1'], ['0.10.2', '0.11.0', '0.11.1']),
    ('jax', '3.13', ['0.11.2', '0.12.0.1'], ['0.10.2', '0.11.0', '0.11.1']),
  ],
)
@pytest.mark.parametrize('extra', ['gpu', 'plan'])
def test_no_python_takes_a_version_that_lowers_no_kernel_there(
  installed, extra, package, python_version, works, fails
):
  (distribution,) = importlib.metadata.distributions(path=[str(installed)])
  environment = {'extra': extra, 'python_version': python_version, 'platform_system': 'Linux'}
  specifiers = [
    r.specifier
    for r in map(Requirement, distribution.requires)
    if r.name == package and (r.marker is None or r.marker.evaluate(environment))
  ]
  assert specifiers and all(s.contains(version) for s in specifiers for version in works)
  assert not any(s.contains(version) for s in specifiers for version in fails)
