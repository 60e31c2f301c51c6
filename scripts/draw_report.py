"""Takes the picture of a report for the docs: docs/images/report.png.

    python scripts/draw_report.py                      # of the demo, killed once: trains it first
    python scripts/draw_report.py MODEL_DIR [OUTPUT]   # of a run that is there

Needs Chromium (`apt-get install chromium`). Train on a machine that does nothing else: the picture
shows tokens/s and goodput. That takes four minutes on two cores.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from t5x_gpu.metrics.writers import read_json_lines

ROOT = pathlib.Path(__file__).parents[1]
PICTURE = ROOT / 'docs' / 'images' / 'report.png'
SIZE = '1000,1130'  # down to the end of the second chart
DEMO = '--gin_file=gin_configs/examples/demo.gin'
KILLED_AFTER = 240  # of 400 steps; the last checkpoint before it is checkpoint_200


def train_and_kill_once(model_dir: pathlib.Path, *flags: str, after: int) -> None:
  """Trains to the end; after the log line of step `after` the process is killed and continued.

  Raises:
    RuntimeError: the run ended before that step.
  """
  command = [sys.executable, '-m', 't5x_gpu.train', *flags, f'--gin.MODEL_DIR={model_dir}']
  metrics = model_dir / 'metrics.jsonl'
  with subprocess.Popen(command) as run:
    while not (metrics.exists() and any(r['step'] >= after for r in read_json_lines(metrics))):
      if run.poll() is not None:
        raise RuntimeError(f'The run ended before step {after}.')
      time.sleep(0.05)
    run.kill()
  subprocess.run(command, check=True)


def main() -> int:
  """Writes the picture; returns the exit code."""
  browser = shutil.which('chromium') or shutil.which('chromium-browser')
  if browser is None:
    print('Chromium is not installed: apt-get install chromium', file=sys.stderr)
    return 1
  picture = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else PICTURE
  with tempfile.TemporaryDirectory() as folder:
    model_dir = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else f'{folder}/runs/demo')
    if len(sys.argv) == 1:
      train_and_kill_once(model_dir, DEMO, after=KILLED_AFTER)
    page = pathlib.Path(folder) / 'report.html'
    # From the folder that holds the run: the page is titled 'runs/demo'.
    shown, cwd = model_dir, None
    if len(sys.argv) == 1:
      shown, cwd = pathlib.Path('runs/demo'), folder
    command = [sys.executable, '-m', 't5x_gpu.report', str(shown), f'--out={page}']
    subprocess.run(command, check=True, cwd=cwd)
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
