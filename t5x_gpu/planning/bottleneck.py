"""One sentence on what limits a step, and how much faster the step would be without it."""

import dataclasses
from collections.abc import Iterator

from t5x_gpu.planning.formulas.links import NETWORK
from t5x_gpu.planning.formulas.work import ATTENTION, MODEL, OPTIMIZER, WEIGHTS
from t5x_gpu.planning.prediction import MICROBATCHES, PIPELINE, REMAT, Prediction
from t5x_gpu.terminal.quantities import seconds as shown

# Below this share of the step, no cost is worth removing, except the matrix products' own time.
_WORTH = 0.05


@dataclasses.dataclass(frozen=True)
class Cost:
  """A part of the step that a change could remove.

  Attributes:
    what: the cost in words, as the subject of a sentence.
    seconds: seconds per step.
    remedy: change that would reduce it.
  """

  what: str
  seconds: float
  remedy: str


_REMEDIES = {
  'data': 'more tokens per GPU and step, or fewer replicas, make it a smaller share',
  'fsdp': 'more tokens per GPU and step',
  'model': 'fewer NUM_PARTITIONS, with Partitioner.fsdp in its place',
  'context': 'fewer Partitioner.context, if the rows fit',
  'expert': 'fewer Partitioner.expert, with Partitioner.fsdp in its place',
  'stage': 'fewer stages, or several blocks per stage (circular)',
}
_RECOMPUTATION = {
  REMAT: "a remat_policy that stores more ('minimal', 'dots', 'none'), where memory is left",
  PIPELINE: 'a layout without pipeline stages, which recompute layers with every remat_policy',
  MICROBATCHES: 'fewer NUM_MICROBATCHES, or '
  "Partitioner.accumulate_by = 'microbatch', which gathers parameters for each microbatch",
}


def costs(prediction: Prediction) -> list[Cost]:
  """Returns the costs of a step besides its necessary work, largest first."""
  return sorted(_costs(prediction), key=lambda cost: -cost.seconds)


def sentence(prediction: Prediction) -> str:
  """Returns a sentence on what limits the step and what removing it would save."""
  total = prediction.seconds_per_step
  found = costs(prediction)
  if found and found[0].seconds >= _WORTH * total:
    worst = found[0]
    rest = total - worst.seconds
    faster = f' ({total / rest:.2f}x as fast)' if rest > 0 else ''
    return (
      f'{worst.what} takes {shown(worst.seconds)}, {worst.seconds / total:.0%} of the step: '
      f'without it, {shown(rest)} per step{faster}. To reduce it: {worst.remedy}.'
    )
  gemms, attention = (
    sum(part.seconds for part in prediction.time.parts if kind in part.kind)
    for kind in ('gemm', 'attention')
  )
  largest, needed = f'Matrix products take {gemms / total:.0%}', _faster_dtype(prediction)
  if attention > gemms:
    largest, needed = f'Attention takes {attention / total:.0%}', 'shorter rows, '
  return (
    f'{largest} of the step, and nothing else that a setting could remove takes {_WORTH:.0%}: '
    f'a faster step needs {needed}a faster GPU or more of them.'
  )


def _faster_dtype(prediction: Prediction) -> str:
  """Returns the precision that would be faster on this GPU, to begin a list with, or ''."""
  if any(part.part == MODEL for part in prediction.time.parts):
    return ''  # a custom model has its own precision
  if prediction.dtype == 'float32':
    return 'bfloat16, '
  return 'FP8, ' if prediction.dtype == 'bfloat16' and prediction.gpu.has_fp8 else ''


def _costs(prediction: Prediction) -> Iterator[Cost]:
  time = prediction.time
  by_axes: dict[tuple[tuple[str, ...], str], float] = {}
  for c in time.collectives:
    key = c.axes, c.link
    by_axes[key] = by_axes.get(key, 0.0) + c.exposed_seconds
  for (axes, link), seconds in by_axes.items():
    remedy = _REMEDIES[axes[0]]
    if axes[0] == 'fsdp' and link == NETWORK and prediction.num_gpus > prediction.num_hosts:
      remedy += ', or fsdp inside a host with data across hosts (hsdp.gin)'
    yield Cost(f'Waiting for collectives over {" and ".join(axes)} ({link})', seconds, remedy)
  if time.bubble_seconds:
    yield Cost(
      'The bubble of the pipeline',
      time.bubble_seconds,
      'more Partitioner.num_pipeline_microbatches, or fewer stages',
    )
  again = sum(part.recomputed_seconds for part in time.parts)
  if again:
    yield Cost(
      'Computing layers again in the backward pass',
      again,
      _RECOMPUTATION[prediction.recomputes_for],
    )
  attention = [p for p in time.parts if p.part == ATTENTION and p.bound == 'memory']
  if attention:
    slow = next(choice for choice in prediction.attention if choice.no_kernel)
    yield Cost(
      f'Attention without a kernel, whose logits go through memory ({slow.no_kernel}),',
      attention[0].seconds,
      slow.remedy,
    )
  moved = [p for p in time.parts if p.bound == 'memory' and p.part != ATTENTION]
  update = sum(p.seconds for p in moved if p.part in (OPTIMIZER, WEIGHTS))
  if update:
    yield Cost(
      'Reading and writing weights, gradients and optimizer state',
      update,
      'more tokens per step, or splitting them over more GPUs (Partitioner.fsdp)',
    )
  launch = sum(p.launch_seconds for p in time.parts)
  if launch:
    yield Cost(
      'Starting kernels that are too small for this GPU',
      launch,
      'more tokens per GPU and pass, or fewer GPUs',
    )
