"""A page of docs/, followed by a user: its code blocks as files, its commands run in a folder."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

from tests.helpers_xla import xla_flags

ROOT = pathlib.Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
  """Returns the code blocks of docs/`page` in this language, in order."""
  text = (ROOT / 'docs' / page).read_text(encoding='utf-8')
  return re.findall(rf'^```{language}\n(.*?)^```', text, re.DOTALL | re.MULTILINE)


def run(
  folder: pathlib.Path, command: str, *options: str, devices: int = 2, package: pathlib.Path = ROOT
) -> str:
  """Returns the output of a command of a page, run in `folder` on simulated devices.

  Args:
    folder: the user's folder.
    command: `python ...`, a line of the page.
    *options: more arguments, such as a smaller size.
    devices: CPU devices.
    package: the folder that has `t5x_gpu`.
  """
  program, *arguments = shlex.split(command)
  assert program == 'python'
  environment = {
    **os.environ,
    'PYTHONPATH': os.pathsep.join([str(folder), str(package)]),
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': xla_flags(devices),
  }
  done = subprocess.run(
    [sys.executable, *arguments, *options],
    cwd=folder,
    env=environment,
    text=True,
    capture_output=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
  return done.stdout


def apply_diff(text: str, folder: pathlib.Path) -> None:
  """Applies a page's diff, whose hunks (after `---` or `@@`) have no line numbers.

  Raises:
    AssertionError: the old lines of a hunk do not occur in its file exactly once.
  """
  for name, hunks in re.findall(r'^--- (\S+)\n(.*?)(?=^--- |\Z)', text, re.DOTALL | re.MULTILINE):
    path = folder / name
    for hunk in hunks.split('@@\n'):
      lines = hunk.splitlines(keepends=True)
      old, new = (
        '\n' + ''.join(line[1:] for line in lines if line[0] in kept) for kept in (' -', ' +')
      )
      content = path.read_text(encoding='utf-8')
      assert content.count(old) == 1, f'{name} has {content.count(old)} times:\n{old}'
      path.write_text(content.replace(old, new), encoding='utf-8')
