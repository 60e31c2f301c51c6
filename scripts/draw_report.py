"""Takes the picture of a report for the docs: docs/images/report.png.

    python scripts/draw_report.py MODEL_DIR [OUTPUT]

MODEL_DIR is that of a real run. Needs Chromium (`apt-get install chromium`).
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
PICTURE = ROOT / 'docs' / 'images' / 'report.png'
SIZE = '1000,1130'  # down to the end of the second chart


def main() -> int:
  """Writes the picture of the run that the command line names; returns the exit code."""
  model_dir = sys.argv[1]
  picture = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else PICTURE
  browser = shutil.which('chromium') or shutil.which('chromium-browser')
  if browser is None:
    print('Chromium is not installed: apt-get install chromium', file=sys.stderr)
    return 1
  with tempfile.TemporaryDirectory() as folder:
    page = pathlib.Path(folder) / 'report.html'
    command = [sys.executable, '-m', 't5x_gpu.report', model_dir, f'--out={page}']
    subprocess.run(command, check=True, cwd=pathlib.Path.cwd())
    options = ['--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars']
    options += [f'--user-data-dir={folder}/profile', f'--window-size={SIZE}']
    subprocess.run(
      [browser, *options, f'--screenshot={picture}', page.as_uri()],
      check=True,
      stderr=subprocess.DEVNULL,
    )
  return 0


if __name__ == '__main__':
  sys.exit(main())
