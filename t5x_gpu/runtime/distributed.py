"""Several processes as one run: start them, number them, agree on values.

Everything here does nothing, or returns its input, when there is one process.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Optional

import jax
import numpy as np
from jax.experimental import multihost_utils

from t5x_gpu.errors import ConfigError

# A difference is shown up to this many characters per process.
SHOWN_CHARACTERS = 300


def initialize_from_flags(coordinator_address: Optional[str] = None,
                          process_count: Optional[int] = None,
                          process_index: Optional[int] = None, *,
                          local_device_ids: Optional[Sequence[int]] = None,
                          timeout_seconds: int = 300) -> bool:
  """Returns whether this process joined others; False when none of the three flags is set.

  Must run before anything uses a device.

  Args:
    coordinator_address: 'host:port' of process 0, which listens there.
    process_count: processes of the run.
    process_index: of this process, from 0.
    local_device_ids: GPUs of this host that belong to this process; all that it sees by default.
    timeout_seconds: how long to wait for the others.
  Raises:
    ConfigError: some flags are set and others are not, or their values cannot be.
  Source: flag names of Rosetta-T5X, https://github.com/NVIDIA/JAX-Toolbox.
  """
  flags = {'--coordinator_address': coordinator_address, '--process_count': process_count,
           '--process_index': process_index}
  missing = [flag for flag, value in flags.items() if value is None]
  if len(missing) == len(flags):
    return False
  if missing:
    given = ', '.join(f'{flag}={value}' for flag, value in flags.items() if value is not None)
    raise ConfigError(f'{given} without {" and ".join(missing)}: to join processes, all three must '
                      'be set.', fix=f'Set {" and ".join(missing)} too, or remove the others to '
                      'run one process.')
  host, colon, port = coordinator_address.rpartition(':')
  if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
    raise ConfigError(f'--coordinator_address={coordinator_address} is not HOST:PORT.',
                      fix='Write the name or address of the first host and a free port, such as '
                          '--coordinator_address=node01:62000.')
  if process_count < 1 or not 0 <= process_index < process_count:
    raise ConfigError(
        f'--process_index={process_index} is not one of --process_count={process_count} '
        'processes.', fix='Number the processes from 0'
        + (f' to {process_count - 1}.' if process_count > 0 else ' and start at least one.'))
  # 'deactivate': beside explicit flags JAX must not pick up Slurm's variables, which would leave
  # each process one GPU of the host (jax._src.clusters.cluster, local_device_ids).
  jax.distributed.initialize(
      coordinator_address, process_count, process_index,
      local_device_ids=None if local_device_ids is None else list(local_device_ids),
      cluster_detection_method='deactivate', initialization_timeout=timeout_seconds)
  return True


def process_index() -> int:
  """Returns the number of this process, from 0."""
  return jax.process_index()


def process_count() -> int:
  """Returns how many processes take part."""
  return jax.process_count()


def is_main_process() -> bool:
  """Returns whether this process is the one that prints and writes."""
  return jax.process_index() == 0


def barrier(name: str) -> None:
  """Returns once every process has called `barrier` with this name.

  Raises:
    AssertionError: another process waits at a barrier of another name.
  """
  if process_count() > 1:
    multihost_utils.sync_global_devices(name)


def broadcast_json(value: Any) -> Any:
  """Returns what process 0 passed, on every process; the others' `value` is not looked at.

  Args:
    value: anything that JSON can hold.
  """
  if process_count() == 1:
    return value
  text = json.dumps(value).encode() if is_main_process() else b''
  length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
  data = np.frombuffer(text.ljust(length, b' '), np.uint8)
  return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(data)).tobytes())


def gather_json(value: Any) -> list[Any]:
  """Returns what every process passed, by process index, on every process.

  Args:
    value: anything that JSON can hold.
  """
  if process_count() == 1:
    return [value]
  text = json.dumps(value).encode()
  lengths = multihost_utils.process_allgather(np.int32(len(text)))
  data = np.frombuffer(text.ljust(int(lengths.max()), b' '), np.uint8)
  return [json.loads(row.tobytes()) for row in multihost_utils.process_allgather(data)]


def assert_equal_across_hosts(value: Any, name: str) -> None:
  """Raises ConfigError, on every process, unless all passed an equal `value`.

  Only a hash travels, unless there is a difference to show.

  Args:
    value: anything that JSON can hold; dictionaries may differ in order.
    name: what it is, for the message: 'the configuration'.
  """
  if process_count() == 1:
    return
  text = json.dumps(value, sort_keys=True)
  digest = hashlib.sha256(text.encode()).hexdigest()
  digests = gather_json(digest)
  if len(set(digests)) == 1:
    return
  texts = gather_json(_around_difference(text, broadcast_json(text)))
  first_with = {}
  for process, d in enumerate(digests):
    first_with.setdefault(d, process)
  shown = '\n'.join(f'  process {process} (and {digests.count(d) - 1} more): {texts[process]}'
                    for d, process in first_with.items())
  raise ConfigError(f'{name} is not the same on all {process_count()} processes:\n{shown}',
                    fix='Start every process with the same files and flags, and the same versions '
                        'of the code.')


def _around_difference(text: str, other: str) -> str:
  """Returns the part of `text` from a little before it differs from `other`, cut to a line."""
  same = next((i for i, (a, b) in enumerate(zip(text, other)) if a != b),
              min(len(text), len(other)))
  start = max(same - 60, 0)
  end = start + SHOWN_CHARACTERS
  return ('...' if start else '') + text[start:end] + ('...' if end < len(text) else '')
