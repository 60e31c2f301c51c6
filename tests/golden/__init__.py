"""Expected texts, one file each; `pytest --update_golden` rewrites them, git diff shows the change."""

import difflib
import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parent


def check(name: str, text: str, *, update: bool) -> None:
  """Fails with a diff unless the file `name` of this folder holds `text`.

  Args:
    name: relative path.
    text: what the code gives now.
    update: write it instead.
  """
  path = FOLDER / name
  if update:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding='utf-8')
    return
  again = 'If it should be so now: pytest --update_golden, then read git diff.'
  if not path.exists():
    pytest.fail(f'There is no tests/golden/{name}. {again}', pytrace=False)
  want = path.read_text(encoding='utf-8')
  if text != want:
    diff = '\n'.join(difflib.unified_diff(want.splitlines(), text.splitlines(), 'golden', 'now',
                                          lineterm='', n=1))
    pytest.fail(f'tests/golden/{name} says otherwise. {again}\n{diff}', pytrace=False)
