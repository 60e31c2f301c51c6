"""The instructions of a compiled step: their kind, place in the model and bytes sent."""

import dataclasses
import re
from collections.abc import Mapping

from t5x_gpu.analysis import hlo_text
from t5x_gpu.analysis.collectives import KINDS, collectives_of

_CONTROL = ('while', 'call', 'conditional')  # only the operations inside are counted
_COLLECTIVE_NAME = re.compile('|'.join(KINDS))
_NCCL = re.compile(r'nccl\w*?_(AllGather|AllReduce|ReduceScatter|SendRecv|AllToAll)')
_NCCL_KINDS = {
  'AllGather': 'all-gather',
  'AllReduce': 'all-reduce',
  'ReduceScatter': 'reduce-scatter',
  'SendRecv': 'collective-permute',
  'AllToAll': 'all-to-all',
}


@dataclasses.dataclass(frozen=True)
class ProgramOp:
  """One instruction.

  Attributes:
    kind: opcode; for a collective one of KINDS.
    op_name: path in the traced Python program.
    is_collective: whether it sends data between devices.
    axes: mesh axes over which it sends.
    bytes_sent: bytes sent by each device per run, in a ring.
  """

  kind: str
  op_name: str = ''
  is_collective: bool = False
  axes: tuple[str, ...] = ()
  bytes_sent: int = 0


class ProgramOps:
  """The instructions of a step by name.

  Args:
    hlo: `compiled.as_text()`.
    mesh_shape: mesh axis -> size.
  """

  def __init__(self, hlo: str, mesh_shape: Mapping[str, int]):
    self._ops: dict[str, ProgramOp] = {}
    module = hlo_text.parse(hlo)
    for visit in module.walk():
      instruction = visit.instruction
      if instruction.name in self._ops:
        continue
      sent = collectives_of(module, visit, mesh_shape)
      kind = instruction.opcode.removesuffix('-start')
      self._ops[instruction.name] = ProgramOp(
        kind=sent[0].kind if sent else kind,
        op_name=visit.op_name,
        is_collective=kind in KINDS,
        axes=sent[0].axes if sent else (),
        bytes_sent=sum(collective.bytes_per_device for collective in sent),
      )

  def find(self, name: str) -> ProgramOp | None:
    """Returns the instruction of an operation in a trace; None for control flow."""
    op = self._ops.get(name)
    if op is None:  # a kernel without a known instruction
      nccl = _NCCL.search(name)
      named = _COLLECTIVE_NAME.match(name)
      kind = _NCCL_KINDS[nccl.group(1)] if nccl else named.group() if named else ''
      return ProgramOp(kind=kind or 'kernel', is_collective=bool(kind))
    return None if op.kind in _CONTROL else op
