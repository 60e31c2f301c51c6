"""Metrics of tasks are the same on all processes."""

import types

from t5x_gpu.evaluation.evaluator import TaskEvaluator
from t5x_gpu.runtime import distributed


def test_all_processes_return_the_metrics_of_process_0(monkeypatch):
  task = types.SimpleNamespace(
    name='sampled', needs_predictions=False, needs_scores=False, metrics=lambda outputs: {'f1': 0.5}
  )
  generator = types.SimpleNamespace(with_params=lambda params: None)
  evaluator = types.SimpleNamespace(_generator=generator, tasks=[task])
  monkeypatch.setattr(distributed, 'broadcast_json', lambda own: {**own, 'f1': 0.25})
  assert TaskEvaluator.run(evaluator, None) == {'infer_eval/sampled/f1': 0.25}
