"""Whether the GPUs of this host can serve another start of a run: all there, none to be reset.

`python -m t5x_gpu.runtime.health.fitness` asks NVML and prints JSON. `gpu_problem` runs it as a
child process with a deadline, because a GPU that fell off its bus can block NVML. Only an answer of
NVML makes a host unfit: without one, its GPUs may be healthy.
https://docs.nvidia.com/deploy/nvml-api/
"""

import json
import sys
import types
from typing import Any

from t5x_gpu.runtime import machine

# Without persistence mode, NVML initializes each GPU of a host whose processes have just ended.
_SECONDS = 45
# The driver asks for these before the GPU can be used; it advises others for a better time.
_ACTIONS = {
  'GPU_RESET': 'a reset of the GPU',
  'NODE_REBOOT': 'a reboot of the host',
  'BUS_RESET': 'a reset of the bus',
  'SYSTEM_REBOOT': 'a reboot of the host',
}


def gpu_problem(expected: int) -> str:
  """Returns why the GPUs of this host cannot serve another start; '' if they can.

  Args:
    expected: GPUs of this host at its first start; 0 asks nothing.
  Raises:
    TimeoutError: NVML did not answer in time.
    RuntimeError: NVML could not be asked.
  """
  if not expected:
    return ''
  done = machine.run_with_deadline([sys.executable, '-m', __name__], seconds=_SECONDS)
  if done.code is None:
    raise TimeoutError(done.problem)
  if done.code:
    raise RuntimeError(' '.join(done.errors.split())[-200:])
  found = json.loads(done.output)
  if 'failure' in found:
    return f'its GPUs cannot be read: {found["failure"]}'
  if found['count'] != expected:
    return f'it had {expected} GPUs at its first start and has {found["count"]} now'
  return '; '.join(found['problems'])


def read(pynvml: types.ModuleType) -> dict[str, Any]:
  """Returns the number of GPUs that answer, and what makes some of them unfit."""

  def ask(function: str, *args: object) -> Any:
    try:
      return getattr(pynvml, function)(*args)
    except (pynvml.NVMLError, AttributeError):  # an older driver, a GPU without this
      return None

  count, problems = 0, []
  for index in range(pynvml.nvmlDeviceGetCount()):
    handle = ask('nvmlDeviceGetHandleByIndex', index)
    uuid = None if handle is None else ask('nvmlDeviceGetUUID', handle)
    if uuid is None:
      continue
    count += 1
    rows = ask('nvmlDeviceGetRemappedRows', handle)
    if rows is not None and rows[3]:
      problems.append(f'GPU {index} ({uuid}) has damaged memory that it cannot replace')
    field = getattr(pynvml, 'NVML_FI_DEV_GET_GPU_RECOVERY_ACTION', None)
    values = None if field is None else ask('nvmlDeviceGetFieldValues', handle, [field])
    if values is None or values[0].nvmlReturn:
      continue
    for name, text in _ACTIONS.items():
      if values[0].value.uiVal == getattr(pynvml, f'NVML_GPU_RECOVERY_ACTION_{name}', None):
        problems.append(f'GPU {index} ({uuid}) needs {text}')
  return {'count': count, 'problems': problems}


def _main() -> None:
  import pynvml

  try:
    pynvml.nvmlInit()
    found = read(pynvml)
  except pynvml.NVMLError as error:
    found = {'failure': f'{type(error).__name__}: {error}'}
  print(json.dumps(found))


if __name__ == '__main__':
  _main()
