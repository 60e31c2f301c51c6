"""docs/add_a_model.md, done word for word by a user with an empty folder."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests.helpers_xla import xla_flags

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / 'docs' / 'add_a_model.md').read_text(encoding='utf-8')


def code(language: str) -> str:
  """Returns the one block of code in this language."""
  blocks = re.findall(rf'```{language}\n(.*?)```', PAGE, re.DOTALL)
  assert len(blocks) == 1
  return blocks[0]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A folder with the two files of the page, in which its two commands that train were run."""
  path = tmp_path_factory.mktemp('user')
  (path / 'my_model.py').write_text(code('python'))
  (path / 'my_model.gin').write_text(code('gin'))
  for number, command in enumerate(code('sh').splitlines()[:2]):
    (path / f'output_{number}').write_text(run(path, command))
  return path


def run(folder: pathlib.Path, command: str) -> str:
  """Returns what a command of the page prints, run in `folder` on two devices."""
  program, *arguments = shlex.split(command)
  assert program == 'python'
  environment = {
    **os.environ,
    'PYTHONPATH': os.pathsep.join([str(folder), str(ROOT)]),
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': xla_flags(2),
  }
  done = subprocess.run(
    [sys.executable, *arguments],
    cwd=folder,
    env=environment,
    text=True,
    capture_output=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
  return done.stdout


def test_the_model_trains_saves_and_decodes(folder):
  output = (folder / 'output_0').read_text()
  assert (folder / 'runs/my_model/checkpoint_4').is_dir()
  assert "Sample (temperature 0.7, prompt 'def ')" in output


def test_it_goes_on_from_its_checkpoint_on_another_mesh(folder):
  output = (folder / 'output_1').read_text()
  assert 'checkpoint_4' in output
  assert (folder / 'runs/my_model/checkpoint_6').is_dir()


@pytest.mark.slow
def test_it_equals_one_device_layer_by_layer(folder):
  assert 'layers/1' in run(folder, code('sh').splitlines()[2])
