"""A prediction as JSON."""

import dataclasses
from typing import Any, Union

from t5x_gpu.errors import UserError
from t5x_gpu.planning import bottleneck
from t5x_gpu.planning.prediction import Prediction


def prediction_json(p: Prediction) -> dict[str, Any]:
  """Returns all values of a prediction; seconds, bytes, FLOPs, and shares of 1."""
  memory, time = p.memory, p.time
  return {
    'gpu': p.gpu.name,
    'num_gpus': p.num_gpus,
    'num_hosts': p.num_hosts,
    'mesh': dict(p.mesh),
    'num_params': p.num_params,
    'params_by_part': dict(p.params_by_part),
    'recomputes_for': p.recomputes_for,
    'dtype': p.dtype,
    'source': p.source,
    'fits': memory.fits,
    'left_bytes': memory.left_bytes,
    'seconds_per_step': p.seconds_per_step,
    'tokens_per_step': p.tokens_per_step,
    'tokens_per_second': p.tokens_per_second,
    'model_flops_per_step': p.model_flops_per_step,
    'flops_per_gpu': p.flops_per_gpu,
    'peak_flops': p.peak_flops,
    'mfu': p.mfu,
    'total_steps': p.total_steps,
    'total_tokens': p.total_tokens,
    'days': p.days,
    'bottleneck': bottleneck.sentence(p),
    'costs': [dataclasses.asdict(cost) for cost in bottleneck.costs(p)],
    'memory': {
      'components': dict(memory.components),
      'formula_bytes': memory.formula_bytes,
      'compiled': memory.compiled and dataclasses.asdict(memory.compiled),
      'needed_bytes': memory.needed_bytes,
      'pool_bytes': memory.pool_bytes,
      'gpu_bytes': memory.gpu_bytes,
    },
    'time': {
      'parts': [dataclasses.asdict(part) for part in time.parts],
      'collectives': [dataclasses.asdict(c) for c in time.collectives],
      'bubble_fraction': time.bubble_fraction,
      'bubble_seconds': time.bubble_seconds,
    },
    'sent_by_formula': [dataclasses.asdict(s) for s in p.formula_sent],
    'checkpoint': dataclasses.asdict(p.checkpoint),
    'assumptions': {
      name: effective._asdict() for name, effective in p.assumed.effective(p.gpu).items()
    },
  }


def outcome_json(outcome: Union[Prediction, UserError]) -> dict[str, Any]:
  """Returns `prediction_json`, or the error instead."""
  if isinstance(outcome, UserError):
    return {'error': str(outcome)}
  return prediction_json(outcome)
