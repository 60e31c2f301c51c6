"""Pictures are drawn from the files of any run, and the smoothed curve follows the loss."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from t5x_gpu.errors import ConfigError
from t5x_gpu.metrics import pictures

PNG = b'\x89PNG\r\n\x1a\n'


def _metrics(path, records):
  path.write_text(''.join(json.dumps(record) + '\n' for record in records))
  return path


def _run(steps):
  return [
    {'step': s, 'train/loss': 2 + 4 * math.exp(-s / 50), 'train/learning_rate': 0.01}
    for s in range(1, steps + 1)
  ]


@pytest.mark.parametrize(
  'records',
  [
    _run(1),
    _run(10),
    _run(100),
    _run(100) + [{'step': 100, 'eval/loss': 2.5}],
    [{'step': 1, 'eval/loss': 2.5}],
    [{'step': s, 'train/loss': None, 'train/loss_nonfinite': 'nan'} for s in (1, 2)],
  ],
  ids=['one step', 'few', 'many', 'with eval', 'eval alone', 'all nan'],
)
def test_any_run_gives_a_picture_without_warnings(tmp_path, records):
  path = _metrics(tmp_path / 'metrics.jsonl', records)
  png = pictures.plot_losses(path, tmp_path / 'loss.png', guess_loss=5.95, title='a $title_1')
  assert png.read_bytes().startswith(PNG) and len(png.read_bytes()) > 5000
  assert sorted(p.name for p in tmp_path.iterdir()) == ['loss.png', 'metrics.jsonl']


def test_the_picture_shows_what_the_file_holds(tmp_path):
  pngs = []
  for scale in (1, 2):
    records = [{**r, 'train/loss': r['train/loss'] * scale} for r in _run(40)]
    pngs.append(
      pictures.plot_losses(
        _metrics(tmp_path / f'{scale}.jsonl', records), tmp_path / f'{scale}.png'
      ).read_bytes()
    )
  assert pngs[0] != pngs[1]


def test_a_file_without_losses_is_not_plotted(tmp_path):
  path = _metrics(tmp_path / 'metrics.jsonl', [{'step': 1, 'train/grad_norm': 1.0}])
  assert pictures.plot_losses(path, tmp_path / 'loss.png') is None
  assert not (tmp_path / 'loss.png').exists()


def test_matplotlib_is_imported_only_when_drawing():
  code = 'import sys; from t5x_gpu.metrics import pictures; assert "matplotlib" not in sys.modules'
  subprocess.run([sys.executable, '-c', code], check=True)


def test_missing_matplotlib_names_the_pip_command(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
  path = _metrics(tmp_path / 'metrics.jsonl', _run(3))
  with pytest.raises(ConfigError, match='matplotlib') as e:
    pictures.plot_losses(path, tmp_path / 'loss.png')
  assert 'pip install' in e.value.fix


def test_smoothing_keeps_a_straight_line_at_both_ends():
  line = [10 - 0.05 * i for i in range(100)]
  np.testing.assert_allclose(pictures.smooth(line, span=20), line, rtol=1e-9)


def test_smoothing_reduces_noise_and_passes_over_nan():
  noise = np.random.default_rng(0).normal(size=400)
  values = (3 + noise).tolist()
  values[100] = math.nan
  smoothed = np.array(pictures.smooth(values, span=40))
  assert np.isfinite(smoothed).all()
  assert smoothed[50:350].std() < noise.std() / 4 and abs(smoothed.mean() - 3) < 0.1


def test_smoothing_of_nothing_known_is_nan_not_a_number():
  assert all(math.isnan(v) for v in pictures.smooth([math.nan] * 5, span=2))
  assert pictures.smooth([4.0], span=20) == [4.0]


def test_repeated_steps_count_once_with_their_last_value():
  records = [{'step': 2, 'x': 1.0}, {'step': 1, 'x': 5.0}, {'step': 2, 'x': 3.0}, {'step': 3}]
  assert pictures.series(records, 'x') == ([1, 2], [5.0, 3.0])
