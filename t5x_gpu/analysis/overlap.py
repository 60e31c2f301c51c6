"""How many of the bytes sent are hidden behind matrix kernels, in the order of XLA's schedule.

    for row in overlaps(compiled.as_text(), program.layout.mesh.shape):
      print(row.kind, row.axes, row.num_bytes, row.share)

A collective counts as hidden if a matrix kernel, or a loop with one in it, stands between its start
and its done. That is an order, not a duration: the kernel may be shorter than the transfer.
"""

import collections
import dataclasses
from collections.abc import Mapping

from t5x_gpu.analysis import hlo_text
from t5x_gpu.analysis.collectives import Collective, collectives_of
from t5x_gpu.analysis.hlo_text import Computation
from t5x_gpu.analysis.kernels import Kernels


@dataclasses.dataclass(frozen=True)
class Scheduled:
  """A collective and the number of matrix kernels (or loops with some) that run during it."""

  collective: Collective
  kernels_during: int


@dataclasses.dataclass(frozen=True)
class Overlap:
  """All collectives of one kind over the same mesh axes.

  Attributes:
    kind, axes: as in `Collective`.
    num_bytes: bytes that each device sends per step.
    hidden_bytes: bytes of collectives during which a matrix kernel runs.
  """

  kind: str
  axes: tuple[str, ...]
  num_bytes: int
  hidden_bytes: int

  @property
  def share(self) -> float:
    return self.hidden_bytes / self.num_bytes


def overlaps(hlo: str, mesh_shape: Mapping[str, int]) -> list[Overlap]:
  """Returns the sums per kind and mesh axes, the largest first.

  Args:
    hlo: `compiled.as_text()` of a program for a GPU; its instructions are in scheduled order.
    mesh_shape: mesh axis -> size, in the order of the mesh.
  """
  total, hidden = collections.Counter(), collections.Counter()
  for scheduled in schedule(hlo, mesh_shape):
    collective = scheduled.collective
    key = collective.kind, collective.axes
    total[key] += collective.bytes_per_call
    hidden[key] += collective.bytes_per_call if scheduled.kernels_during else 0
  return [Overlap(*key, num_bytes, hidden[key]) for key, num_bytes in total.most_common()]


def schedule(hlo: str, mesh_shape: Mapping[str, int]) -> list[Scheduled]:
  """Returns every collective of a scheduled program, in program order; arguments as `overlaps`."""
  module = hlo_text.parse(hlo)
  kernels = Kernels(module)
  during: dict[str, dict[str, int]] = {}  # computation -> start -> kernels until its done
  found = []
  for visit in module.walk():
    collectives = collectives_of(module, visit, mesh_shape)
    if collectives:
      name = visit.computation.name
      if name not in during:
        during[name] = _kernels_during(visit.computation, kernels)
      number = during[name].get(visit.instruction.name, 0)
      found += [Scheduled(collective, number) for collective in collectives]
  return found


def _kernels_during(computation: Computation, kernels: Kernels) -> dict[str, int]:
  """Returns the name of each `...-start` -> matrix kernels between it and its `...-done`."""
  running: set[str] = set()
  during: collections.Counter[str] = collections.Counter()
  for name, instruction in computation.instructions.items():
    if kernels.kind(computation, instruction) or kernels.multiplies(instruction):
      during.update(running)
    if instruction.opcode.endswith('-start'):
      running.add(name)
    elif instruction.opcode.endswith('-done'):
      running.discard(instruction.operands[0])
  return during
