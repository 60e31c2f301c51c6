"""Opens a page in a real browser, without a window."""

import json
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

  Fails if the console has an entry, the screenshot next to `page` is blank, or the page asks for
  anything that is not a file.
  """
  # A window is at least 500 wide, a frame is not; its script reports how wide the page became.
  frame = page.with_name('frame.html')
  frame.write_text(
    f'<iframe id=f src={page.name} style="border:0;width:{width}px;height:3000px"></iframe>'
    '<p id=out></p><script>f.onload = () => { const d = f.contentDocument; out.textContent = '
    '"WIDTH " + d.documentElement.scrollWidth + " COUNT " + '
    f"d.querySelectorAll('{count}').length }}</script>"
  )
  shot, net_log = page.with_name('shot.png'), page.with_name('net.json')
  done = subprocess.run(
    [
      BROWSER,
      '--headless',
      '--no-sandbox',
      '--disable-gpu',
      '--allow-file-access-from-files',
      '--enable-logging=stderr',
      '--virtual-time-budget=5000',
      f'--log-net-log={net_log}',
      '--proxy-server=127.0.0.1:9',  # nothing listens: what Chromium itself asks for goes nowhere
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
  assert not (asked := requests(net_log)), asked
  assert 'CONSOLE' not in done.stderr, done.stderr
  assert shot.read_bytes().startswith(b'\x89PNG') and shot.stat().st_size > 30_000
  found = re.search(r'>WIDTH (\d+) COUNT (\d+)<', done.stdout)
  return int(found[1]), int(found[2])


def requests(net_log: pathlib.Path) -> list[str]:
  """Returns the addresses that pages, not the browser itself, asked for; files are left out."""
  events = json.loads(net_log.read_text())['events']
  started = [e['params'] for e in events if 'initiator' in e.get('params', {})]
  asked = [p['url'] for p in started if p['initiator'] != 'not an origin']
  return [url for url in asked if not url.startswith('file:')]
