"""Opens a page in a real browser, without a window."""

import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable

import pytest

BROWSER = next(
  filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None
)


def needs_browser(test: Callable[..., None]) -> Callable[..., None]:
  """Marks a test that starts a browser; it is skipped where there is none."""
  skip = pytest.mark.skipif(BROWSER is None, reason='no Chromium: apt-get install chromium')
  return pytest.mark.process(skip(test))


def open_page(page: pathlib.Path, *, width: int, count: str) -> tuple[int, int]:
  """Returns (width that the page became, elements that the CSS selector `count` finds).

  Fails if the console has an entry or the screenshot next to `page` is blank.
  """
  # A window is at least 500 wide, a frame is not; its script reports how wide the page became.
  frame = page.with_name('frame.html')
  frame.write_text(
    f'<iframe id=f src={page.name} style="border:0;width:{width}px;height:3000px"></iframe>'
    '<p id=out></p><script>f.onload = () => { const d = f.contentDocument; out.textContent = '
    '"WIDTH " + d.documentElement.scrollWidth + " COUNT " + '
    f"d.querySelectorAll('{count}').length }}</script>"
  )
  shot = page.with_name('shot.png')
  done = subprocess.run(
    [
      BROWSER,
      '--headless',
      '--no-sandbox',
      '--disable-gpu',
      '--allow-file-access-from-files',
      '--enable-logging=stderr',
      '--virtual-time-budget=5000',
      f'--user-data-dir={page.with_name("profile")}',
      '--window-size=1300,3100',
      f'--screenshot={shot}',
      '--dump-dom',
      frame.as_uri(),
    ],
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert 'CONSOLE' not in done.stderr, done.stderr
  assert shot.read_bytes().startswith(b'\x89PNG') and shot.stat().st_size > 30_000
  found = re.search(r'>WIDTH (\d+) COUNT (\d+)<', done.stdout)
  return int(found[1]), int(found[2])
