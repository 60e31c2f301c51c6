"""Results of an evaluation: its file has every line, the table that eval prints every metric."""

import pytest

from t5x_gpu.errors import AccessError
from t5x_gpu.evaluation.checkpoint_evaluator import EvalResults, table
from tests.helpers_disk import fill, small_disk


def test_metrics_that_a_full_disk_does_not_take_end_the_evaluation(tmp_path, caplog):
  with small_disk(tmp_path / 'disk', size='256k') as disk:
    with pytest.raises(AccessError, match='No space left on device'):
      with EvalResults(disk, 'validation', {}) as results:
        results.add(0, {'eval/loss': 1.0})
        filler = fill(disk)
        for step in range(1, 200):  # more than the last page of the file holds
          results.add(step, {'eval/loss': 1.0})
    kept = list(results.records)
    assert 0 < len(kept) < 200 and 'wait in memory' not in caplog.text
    filler.unlink()
    with EvalResults(disk, 'validation', {}) as again:
      again.add(200, {'eval/loss': 1.0})
    assert list(again.records) == [*kept, 200]


def test_the_table_of_an_evaluation_has_every_metric_of_every_step():
  records = {
    step: {f'infer_eval/task_{i}/metric': i + step / 1000 for i in range(12)}
    for step in range(1000, 21000, 1000)
  }
  text = table(records, width=80)
  assert max(map(len, text.splitlines())) <= 80
  for block in text.split('\n\n'):
    assert [line.split()[0] for line in block.splitlines()] == [
      'step',
      *(f'task_{i}/metric' for i in range(12)),
    ]
  steps = [step for block in text.split('\n\n') for step in block.splitlines()[0].split()[1:]]
  assert steps == [str(step) for step in records]
  assert '31.0000' in text  # task 11 at step 20000
