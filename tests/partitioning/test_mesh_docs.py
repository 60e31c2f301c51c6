"""docs/mesh.md shows the output of the code."""

import contextlib
import io
import pathlib
import re

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'mesh.md'


def test_every_example_of_the_page_prints_what_the_page_says():
  blocks = re.findall(r'```python\n(.*?)```\n\n```text\n(.*?)```\n', PAGE.read_text(), re.DOTALL)
  assert len(blocks) >= 7
  scope = {}
  for code, expected in blocks:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
      exec(code, scope)
    assert printed.getvalue() == expected


def test_the_anchor_that_errors_name_exists():
  assert '<a name="sizes"></a>' in PAGE.read_text()
