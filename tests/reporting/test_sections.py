"""Smoothed curves follow the loss; the matrix of a classifier and the guess are in its report."""

import math

import numpy as np
import pytest

from t5x_gpu.metrics import scores
from t5x_gpu.reporting import sections
from t5x_gpu.reporting.page import page
from t5x_gpu.reporting.run_record import read_run
from tests.reporting.pages import Page
from tests.reporting.runs import write_run


def test_smoothing_keeps_a_straight_line_at_both_ends():
  line = [10 - 0.05 * i for i in range(100)]
  np.testing.assert_allclose(sections.smooth(line, span=20), line, rtol=1e-9)


def test_smoothing_reduces_noise_and_passes_over_nan():
  noise = np.random.default_rng(0).normal(size=400)
  values = (3 + noise).tolist()
  values[100] = math.nan
  smoothed = np.array(sections.smooth(values, span=40))
  assert np.isfinite(smoothed).all()
  assert smoothed[50:350].std() < noise.std() / 4 and abs(smoothed.mean() - 3) < 0.1


def test_smoothing_of_nothing_known_is_nan_not_a_number():
  assert all(math.isnan(v) for v in sections.smooth([math.nan] * 5, span=2))
  assert sections.smooth([4.0], span=20) == [4.0]


def shown(*made) -> Page:
  found = Page(page('x', made))
  found.check()
  return found


def test_the_latest_confusion_matrix_of_each_evaluation_is_shown_in_percent(tmp_path):
  folder = write_run(tmp_path / 'a')
  names = ('a "b", <c>', 'd' * 100, 'never seen')
  matrix = np.array([[3, 1, 0], [0, 199, 1], [0, 0, 0]])
  scores.write_confusion_csv(matrix, names, folder / 'confusion.csv')
  for step in (9, 10):
    path = folder / 'eval' / f'test_confusion_{step}.csv'
    scores.write_confusion_csv(matrix * step, names, path)
  found = shown(sections.classes_section([read_run(folder)]))
  assert 'Validation at the end of training   accuracy 0.990' in found.text
  assert 'test, step 10' in found.text and 'step 9' not in found.text
  assert 'a "b", <c> (4)7525' in found.text and 'never seen (0)' in found.text
  assert f'{"d" * 37}... (200)100' in found.text  # 1 of 200 is drawn as 0.5%, rounded to even
  styles = [a['style'] for _, a in found.tags if 'shade' in a.get('class', '')]
  assert styles[:2] == ['--share:0.75', '--share:0.25']


def test_many_classes_and_damaged_matrices_are_named(tmp_path):
  folder = write_run(tmp_path / 'a')
  many = sections._MOST_CLASSES + 1
  names = scores.all_names((), many)
  scores.write_confusion_csv(np.eye(many), names, folder / 'confusion.csv')
  (folder / 'eval' / 'test_confusion_1.csv').write_text('"x",a,b\na,1\n')
  (folder / 'eval' / 'other_confusion_1.csv').write_text('')
  text = shown(sections.classes_section([read_run(folder)])).text
  assert f'The matrix of {many} classes is in confusion.csv' in text
  assert 'test_confusion_1.csv cannot be read' in text
  assert 'other_confusion_1.csv cannot be read' in text


@pytest.mark.parametrize('guess', [None, 4.0, math.nan])
def test_the_loss_of_guessing_is_a_line(tmp_path, guess):
  run = read_run(write_run(tmp_path / 'a', facts={'guess_loss': guess}))
  found = shown(sections.loss_section([run]))
  assert ('Dashed line: loss of guessing: 4.00.' in found.text) == (guess == 4.0)


def test_losses_that_are_not_finite_are_marked(tmp_path):
  folder = write_run(tmp_path / 'a')
  with open(folder / 'metrics.jsonl', 'a') as f:
    f.write('{"step": 41, "train/loss": null, "train/loss_nonfinite": "nan"}\n')
  assert (
    'train/loss is not finite at step 41' in shown(sections.loss_section([read_run(folder)])).text
  )
