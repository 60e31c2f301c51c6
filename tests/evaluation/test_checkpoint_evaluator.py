"""The table that eval prints fits the terminal and leaves no metric out."""

from t5x_gpu.evaluation.checkpoint_evaluator import table


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
