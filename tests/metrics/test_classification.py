"""Scores of classification equal the textbook's for any batches, and the picture shows them."""

import csv
import math

import numpy as np
import pytest

from t5x_gpu.metrics import scores

# Ten examples of three classes, worked out by hand below.
MATRIX = np.array([[3, 1, 0], [0, 2, 1], [1, 0, 2]])
NAMES = ('a', 'b', 'c')


def test_scores_are_those_worked_out_by_hand():
  # precision 3/4 2/3 2/3, recall 3/4 2/3 2/3: F1 3/4 2/3 2/3.
  # MCC: (7*10 - (4*4 + 3*3 + 3*3)) / sqrt((100 - 34) * (100 - 34)) = 36 / 66.
  got = scores.class_scores(MATRIX, prefix='eval/')
  assert got == pytest.approx(
    {
      'eval/accuracy': 0.7,
      'eval/macro_f1': (0.75 + 4 / 3) / 3,
      'eval/matthews_corrcoef': 36 / 66,
      'eval/majority': 0.4,
    }
  )


def test_two_classes_have_matthews_own_formula():
  tp, fn, fp, tn = 17, 5, 3, 40
  matrix = np.array([[tn, fp], [fn, tp]])
  want = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
  assert scores.matthews_corrcoef(matrix) == pytest.approx(want)


@pytest.mark.parametrize('seed', range(5))
def test_scores_equal_formulas_over_examples(seed):
  random = np.random.default_rng(seed)
  classes = int(random.integers(2, 7))
  labels = random.integers(0, classes, 200)
  predictions = np.where(random.random(200) < 0.5, labels, random.integers(0, classes, 200))
  matrix = np.zeros((classes, classes))
  np.add.at(matrix, (labels, predictions), 1)
  f1 = []
  for k in range(classes):
    right = sum((labels == k) & (predictions == k))
    precision, recall = right / sum(predictions == k), right / sum(labels == k)
    f1.append(2 * precision * recall / (precision + recall))
  assert scores.macro_f1(matrix) == pytest.approx(np.mean(f1))
  assert scores.accuracy(matrix) == pytest.approx(np.mean(labels == predictions))
  # R_K is the correlation of the one-hot rows, covariances summed over classes.
  x, y = np.eye(classes)[labels], np.eye(classes)[predictions]
  x, y = x - x.mean(0), y - y.mean(0)
  want = (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())
  assert scores.matthews_corrcoef(matrix) == pytest.approx(want)


def test_the_ends_of_the_scales():
  assert scores.class_scores(np.diag([3, 2, 1]))['matthews_corrcoef'] == pytest.approx(1)
  assert scores.matthews_corrcoef(np.array([[0, 4], [4, 0]])) == pytest.approx(-1)
  one_prediction = np.array([[7, 0], [3, 0]])
  got = scores.class_scores(one_prediction)
  assert got['matthews_corrcoef'] == 0 and got['accuracy'] == got['majority'] == 0.7
  assert got['macro_f1'] == pytest.approx(14 / 17 / 2)  # the class that is never said counts as 0


def test_classes_that_do_not_occur_do_not_pull_macro_f1_down():
  matrix = np.zeros((5, 5))
  matrix[:2, :2] = [[2, 0], [1, 1]]
  assert scores.macro_f1(matrix) == pytest.approx((4 / 5 + 2 / 3) / 2)


def test_nothing_counted_has_no_scores():
  empty = np.zeros((3, 3))
  assert scores.class_scores(empty) == {}
  assert math.isnan(scores.matthews_corrcoef(empty))
  assert math.isnan(scores.macro_f1(empty))


def test_table_has_a_line_per_class_and_what_it_is_taken_for():
  lines = scores.confusion_table(MATRIX, ('one', 'two', 'three')).splitlines()
  assert lines[1].split() == ['one', '4', '0.750', '0.750', '0.750', 'two', '(1)']
  assert scores.confusion_table(np.zeros((2, 2)), ('x', 'y')).splitlines()[1].split() == [
    'x',
    '0',
    '-',
    '-',
    '-',
  ]


def test_csv_reads_back(tmp_path):
  path = scores.write_confusion_csv(MATRIX, ('a', 'b "quoted", and', 'c'), tmp_path / 'm.csv')
  rows = list(csv.reader(path.read_text().splitlines()))
  assert rows[0][2] == 'b "quoted", and'
  assert [[float(x) for x in row[1:]] for row in rows[1:]] == MATRIX.tolist()


def test_f1_of_several_labels_by_hand():
  # Class 0: 2 of 3 predictions right, 4 labels. Class 1: none right. Class 2 never occurs.
  hits = np.array([[2.0, 3.0, 4.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
  found = scores.hit_scores(hits, prefix='eval/')
  assert found == pytest.approx(
    {
      'eval/micro_precision': 2 / 4,
      'eval/micro_recall': 2 / 4,
      'eval/micro_f1': 2 * 2 / (4 + 4),
      'eval/macro_f1': (4 / 7 + 0.0) / 2,
    }
  )
  assert scores.hit_scores(hits[2:]) == dict.fromkeys(
    ('micro_precision', 'micro_recall', 'micro_f1'), 0.0
  )
  assert scores.hits_table(hits, ('a', 'b', 'c')).splitlines()[1].split() == [
    *('a', '4', '0.667', '0.500', '0.571')
  ]
