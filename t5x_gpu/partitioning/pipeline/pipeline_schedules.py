"""Which stage of a pipeline does what when, and what follows: bubble and traffic.

Time is counted in ticks; at the end of each, every stage hands one activation to its neighbour. A
unit is one microbatch in one of the stage's blocks of layers. Everything here is arithmetic on
ints, NumPy arrays or traced values alike; `pipeline_parallel` runs what `Timetable` says.
"""

import dataclasses
from typing import Any, Optional

import numpy as np

# gpipe: all forward, then all backward. 1f1b: backward of each microbatch as soon as it can be.
# circular: gpipe with several blocks of layers per stage, which microbatches visit in turn.
SCHEDULES = ('gpipe', '1f1b', 'circular')


@dataclasses.dataclass(frozen=True)
class Timetable:
  """Who does what when.

  Attributes:
    schedule: one of SCHEDULES.
    num_stages: S, at least 2.
    num_microbatches: M; at least S where microbatches come round.
    repeats: R, blocks of layers per stage and stack; 1 unless 'circular'. Block r of stage s is
      block r * S + s of the stack.
    num_stacks: K, of the model: 2 for encoder-decoders, else 1. A stage has its R blocks of the
      first stack, then those of the second.
  """

  schedule: str
  num_stages: int
  num_microbatches: int
  repeats: int = 1
  num_stacks: int = 1

  def __post_init__(self) -> None:
    assert self.schedule in SCHEDULES, self
    assert self.num_stages > 1 and self.num_microbatches > 0 and self.repeats > 0, self
    assert self.repeats == 1 or self.schedule == 'circular', self
    assert self.num_stacks == 1 or self.schedule != '1f1b', self
    assert self.num_blocks == 1 or self.num_microbatches >= self.num_stages, self

  @property
  def num_blocks(self) -> int:
    """Blocks of layers of every stage, K*R: so often a microbatch comes to it."""
    return self.num_stacks * self.repeats

  @property
  def num_units(self) -> int:
    """Units of every stage: unit u is microbatch u % M in the stage's block u // M."""
    return self.num_blocks * self.num_microbatches

  @property
  def forward_ticks(self) -> int:
    """Ticks until the last stage has done its last unit."""
    return self.num_units + self.num_stages - 1

  @property
  def interleaved_ticks(self) -> int:
    """Ticks of a 1f1b step, in which a stage goes forward with one unit and back with another."""
    return self.num_units + 2 * (self.num_stages - 1)

  @property
  def head_share(self) -> int:
    """Microbatches whose head a stage computes, rounded up; under 1f1b the last does all."""
    return -(-self.num_microbatches // self.num_stages)

  @property
  def kept_inputs(self) -> int:
    """Stage inputs kept for the backward pass of a step: a ring under 1f1b, else all of them."""
    return 2 * self.num_stages - 1 if self.schedule == '1f1b' else self.forward_ticks

  def forward_unit(self, tick: Any, stage: Any) -> Any:
    """Returns the unit that `stage` takes forward; it idles where that is not in [0, num_units)."""
    return tick - stage

  def backward_unit(self, tick: Any, stage: Any) -> Any:
    """Returns the unit that `stage` takes back under 1f1b: the last stage's is its forward one."""
    return tick - (2 * (self.num_stages - 1) - stage)


def bubble_fraction(
  schedule: str,
  num_stages: int,
  num_microbatches: int,
  repeats: int = 1,
  *,
  num_stacks: int = 1,
  skip_idle: bool = True,
) -> float:
  """Returns the part of a step in which a stage waits for others.

  (S-1) / (K*R*M + S-1): of the K*R*M + S-1 forward slots a stage has work in K*R*M, and likewise
  backward. With two stacks this takes a block of either to last as long: else stages also wait for
  one that has the slower block. Idle slots of 1f1b cost nothing while all stages idle in them;
  computed and discarded (`skip_idle=False`) they cost 2(S-1) of M + 2(S-1).

  Source: Narayanan et al. 2021 (arXiv:2104.04473), sections 2.2.1 and 2.2.2, which give it
  relative to the ideal time, (S-1) / (R*M); Huang et al. 2019 (GPipe), section 2.2.
  """
  table = Timetable(schedule, num_stages, num_microbatches, repeats, num_stacks)
  slots = table.forward_ticks
  if schedule == '1f1b' and not skip_idle:
    slots = table.interleaved_ticks
  return 1.0 - table.num_units / slots


def layer_order(num_layers: int, num_stages: int, repeats: int = 1) -> np.ndarray:
  """Returns p [layers]: layer i of the parameters in memory is layer p[i] of the model.

  Split over `stage` in contiguous parts, the parameters then give stage s its blocks r * S + s for
  r in range(repeats), one after the other.
  """
  blocks = np.arange(num_layers).reshape(repeats, num_stages, -1)
  return blocks.swapaxes(0, 1).reshape(-1)


def traffic_per_step(
  *,
  schedule: str,
  num_stages: int,
  num_microbatches: int,
  activation_bytes: int,
  repeats: int = 1,
  num_stacks: int = 1,
  output_bytes: Optional[int] = None,
  shared_gradient_bytes: int = 0,
) -> dict[str, float]:
  """Returns the bytes that a device sends over `stage` in one training step, by collective.

  'collective-permute': one activation per tick and direction, and where the backward sweep follows
  the forward sweep, the last stage's outputs for the head of other stages and their gradients
  back. 'all-reduce', once, by the caller: gradients of what every stage holds, counted as a ring.
  Evaluation sends half of the former.

  Args:
    schedule, num_stages, num_microbatches, repeats, num_stacks: as in `Timetable`.
    activation_bytes: of one microbatch between two layers, on one device; of all stacks together.
    output_bytes: of that, what the head takes, the last stack's; None for all.
    shared_gradient_bytes: on one device, of all parameters but the layers.
  """
  table = Timetable(schedule, num_stages, num_microbatches, repeats, num_stacks)
  if schedule == '1f1b':
    sent = table.interleaved_ticks * activation_bytes
  else:
    output_bytes = activation_bytes if output_bytes is None else output_bytes
    sent = (
      table.forward_ticks * activation_bytes + table.head_share * (num_stages - 1) * output_bytes
    )
  traffic = {'collective-permute': 2.0 * sent}
  if shared_gradient_bytes:
    traffic['all-reduce'] = 2.0 * (num_stages - 1) / num_stages * shared_gradient_bytes
  return traffic
