"""The operations of a profiler trace: device, HLO instruction, begin and end.

    operations = read_trace('runs/demo/profiles/10')

It reads XLA's own events, which name the HLO instruction: kernels and copies on the streams of a
GPU, thunks of the CPU client. `jax.profiler.ProfileData` parses the file.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import jax

from t5x_gpu.errors import DataError

_GPU_PLANE = re.compile(r'/device:GPU:(\d+)')
_STREAM = 'Stream'  # other lines of a GPU are derived from these
_END = 'end: '  # of a CPU operation that another thread finished


@dataclasses.dataclass(frozen=True)
class Operation:
  """One run of an HLO instruction.

  Attributes:
    device: local number of the device.
    name: name of the instruction, or of the kernel if the trace does not name an instruction.
    start_ns, end_ns: nanoseconds since the trace began.
  """

  device: int
  name: str
  start_ns: float
  end_ns: float


def trace_file(folder: pathlib.Path) -> pathlib.Path:
  """Returns the newest trace under `folder`; raises DataError if there is none."""
  found = sorted(folder.rglob('*.xplane.pb'), key=lambda path: path.stat().st_mtime)
  if not found:
    raise DataError(f'{folder} has no trace (*.xplane.pb).')
  return found[-1]


def read_trace(folder: pathlib.Path, *, module: Optional[str] = None) -> list[Operation]:
  """Returns the operations of a trace, ordered by start.

  Args:
    folder: folder that was passed to `jax.profiler.start_trace`.
    module: keeps only the operations of this HLO module ('jit_train_step').
  Raises:
    DataError: there is no trace, or it cannot be read.
  """
  path = trace_file(folder)
  try:
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    operations = [operation for plane in planes for operation in _operations(plane, module)]
  except (ValueError, RuntimeError) as e:
    raise DataError(f'The trace {path} cannot be read: {e}') from e
  return sorted(operations, key=lambda operation: operation.start_ns)


def _operations(plane: Any, module: Optional[str]) -> Iterator[Operation]:
  gpu = _GPU_PLANE.search(plane.name)
  if gpu:
    for line in plane.lines:
      if line.name.startswith(_STREAM):
        yield from _of_stream(line, int(gpu.group(1)), module)
  elif plane.name.startswith('/host:CPU'):
    yield from _of_cpu(list(plane.lines), module)


def _of_stream(line: Any, device: int, module: Optional[str]) -> Iterator[Operation]:
  for event in line.events:
    stats = dict(event.stats)
    if module is None or stats.get('hlo_module', module) == module:
      name = str(stats.get('hlo_op') or event.name)
      yield Operation(device, name, event.start_ns, event.start_ns + event.duration_ns)


def _of_cpu(lines: Sequence[Any], module: Optional[str]) -> Iterator[Operation]:
  """Yields the thunks; a thunk that another thread finishes ends there."""
  started, ends = [], {}
  for line in lines:
    for event in line.events:
      if event.name.startswith(_END):
        ends[dict(event.stats).get('_c')] = event.start_ns
      elif event.duration_ns:
        stats = dict(event.stats)
        if 'hlo_op' in stats and module in (None, stats.get('hlo_module')):
          started.append((event.start_ns, event.duration_ns, stats))
  for start, duration, stats in started:
    end = max(start + duration, ends.get(stats.get('_p'), 0))
    yield Operation(int(stats.get('device_ordinal', 0)), str(stats['hlo_op']), start, end)
