"""Several processes as one run: join them, number them, agree on values.

Everything here does nothing, or returns its input, when there is one process.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, Optional

import jax
import numpy as np
from jax.experimental import multihost_utils

from t5x_gpu import errors
from t5x_gpu.errors import ConfigError, UserError
from t5x_gpu.runtime import machine, process_exit
from t5x_gpu.runtime.cluster import addresses, agreement, coordination, rendezvous
from t5x_gpu.runtime.cluster import members as members_lib
from t5x_gpu.runtime.cluster.cluster import ClusterInfo
from t5x_gpu.runtime.cluster.coordination import exchange
from t5x_gpu.runtime.cluster.members import ClusterMember
from t5x_gpu.runtime.cluster.rendezvous import meet
from t5x_gpu.runtime.xla import flags
from t5x_gpu.storage.json_schema import JsonValue

# A difference is shown with up to this many characters per process.
SHOWN_CHARACTERS = 300
# Bytes of the first collective of `gather_json`: the length of the text, and the text if it fits.
_FRAME, _HEADER = 1024, 4
SAME_START = 'Start every process with the same files, flags and versions of the code.'

_members: list[ClusterMember] = []


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
  """How long processes wait for each other.

  Attributes:
    initialization_timeout_seconds: deadline for all processes to start; queues and file systems can
      be slow.
    heartbeat_timeout_seconds: a process that is silent for longer counts as dead. Shorter than
      Slurm's SlurmdTimeout (300 s), so that the processes of a disconnected host have ended
      before the job restarts elsewhere.
    shutdown_timeout_seconds: deadline for all processes to end, once the first has ended.
  """

  initialization_timeout_seconds: int = 300
  heartbeat_timeout_seconds: int = 60
  shutdown_timeout_seconds: int = 120

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      if getattr(self, field.name) < 1:
        raise ConfigError(
          f'DistributedConfig.{field.name} = {getattr(self, field.name)}: must be at least 1.',
          fix='Give a number of seconds.',
        )


def start(cluster: ClusterInfo, config: DistributedConfig, *, xla_preset: str) -> flags.Applied:
  """Joins this process to the other processes of its run; returns the XLA settings in force.

  Call it before anything uses a device.

  Args:
    cluster: from `cluster.detect`.
    config: how long to wait for the other processes.
    xla_preset: preset of XLA and NCCL settings.
  Raises:
    ClusterError: see `join`.
  """
  join(cluster, config)
  return flags.prepare_environment(xla_preset, num_hosts=num_hosts())


def join(cluster: ClusterInfo, config: DistributedConfig = DistributedConfig()) -> bool:
  """Joins this process to the other processes of its run; returns False if it is alone.

  Call it before anything uses a device.

  Args:
    cluster: from `cluster.detect`.
    config: how long to wait.
  Raises:
    ClusterError: some processes did not come or cannot reach process 0, two use the same GPU, or
      they run different code.
  """
  machine.allow_open_files()
  if cluster.process_count == 1:
    if cluster.local_device_ids:
      jax.config.update('jax_cuda_visible_devices', ','.join(map(str, cluster.local_device_ids)))
    return False
  # CUDA must number GPUs as NVML does, because GPUs are identified by NVML. Set before CUDA starts.
  os.environ.setdefault('CUDA_DEVICE_ORDER', 'PCI_BUS_ID')
  code = members_lib.code_facts()
  me = dataclasses.replace(members_lib.describe_this_process(cluster), code=agreement.digest(code))
  with meet(
    cluster,
    me,
    timeout_seconds=config.initialization_timeout_seconds,
    secret=rendezvous.secret_from_environment(os.environ),
  ) as meeting:
    domains = list(dict.fromkeys(member.domain for member in meeting.members))
    _bypass_proxies(meeting.address)
    if meeting.own_host:
      coordination.let_gloo_listen_on(meeting.own_host)
    # 'deactivate': from Slurm's variables JAX would give each process one GPU, the one with the
    # number of the process's local rank (jax._src.clusters.cluster).
    jax.distributed.initialize(
      meeting.address,
      cluster.process_count,
      cluster.process_index,
      coordinator_bind_address=meeting.bind_address,
      local_device_ids=cluster.local_device_ids,
      cluster_detection_method='deactivate',
      initialization_timeout=config.initialization_timeout_seconds,
      heartbeat_timeout_seconds=config.heartbeat_timeout_seconds,
      shutdown_timeout_seconds=config.shutdown_timeout_seconds,
      # Sets device.slice_index, so that JAX's create_hybrid_device_mesh sees the same hosts.
      partition_index=domains.index(meeting.members[cluster.process_index].domain),
    )
  _members[:] = meeting.members
  process_exit.joined(cluster.process_index, process_count=cluster.process_count)
  # Ignore modules that only some processes have imported: the importing code would differ too.
  members_lib.raise_if_code_differs(
    agreement.differences(
      code,
      digests=[member.code for member in _members],
      hostnames=hostnames(),
      process_index=cluster.process_index,
      exchange=exchange,
      only_common=True,
    )
  )
  return True


def _bypass_proxies(address: str) -> None:
  """Makes gRPC connect to process 0 directly.

  Compute nodes often have http_proxy set for downloads. gRPC uses it for everything, and JAX then
  waits for process 0 until it aborts, although the rendezvous reached process 0 without a proxy.
  """
  hosts = [
    host
    for host in os.environ.get('no_grpc_proxy', os.environ.get('no_proxy', '')).split(',')
    if host
  ]
  os.environ['no_grpc_proxy'] = ','.join([*hosts, addresses.split(address)[0]])
  jax.config.update('jax_check_proxy_envs', False)  # would warn and advise to unset the proxies


def members() -> tuple[ClusterMember, ...]:
  """Returns the facts that each process sent, by process index; () for a single process."""
  return tuple(_members)


def hostnames() -> tuple[str, ...]:
  """Returns the host of each process; () for a single process."""
  return tuple(member.hostname for member in _members)


def num_hosts() -> int:
  """Returns the number of hosts (domains of fast links) of the run; 1 for a single process."""
  return len({member.domain for member in _members}) or 1


def num_machines() -> int:
  """Returns the number of machines of the run; a host of `num_hosts` may be several machines."""
  return len({member.host_key for member in _members}) or process_count()


def members_table() -> str:
  """Returns a line per host with its processes and their GPUs; see `members.table`."""
  return members_lib.table(_members)


def process_index() -> int:
  """Returns the number of this process, from 0."""
  return jax.process_index()


def process_count() -> int:
  """Returns the number of processes of the run."""
  return jax.process_count()


def is_main_process() -> bool:
  """Returns whether this is process 0, which prints and writes for all."""
  return jax.process_index() == 0


def broadcast_json(value: JsonValue) -> Any:
  """Returns process 0's value on every process; the others' `value` is ignored."""
  if process_count() == 1:
    return value
  text = json.dumps(value).encode() if is_main_process() else b''
  return _sent(text, lambda frame: multihost_utils.broadcast_one_to_all(frame)[None])[0]


def gather_json(value: JsonValue) -> list[Any]:
  """Returns every process's value, by process index, on every process."""
  if process_count() == 1:
    return [value]
  return _sent(json.dumps(value).encode(), multihost_utils.process_allgather)


@functools.cache
def _check_equal_processes() -> None:
  """Raises MeshError, on all processes, unless all have the same number of devices.

  JAX's exchange of values between processes needs it, and fails without a name.
  """
  counts = collections.Counter(device.process_index for device in jax.devices())
  usual = collections.Counter(counts.values()).most_common(1)[0][0]
  odd = [
    f'{count} in process {process}'
    + (f' on {hostnames()[process]}' if process < len(hostnames()) else '')
    for process, count in sorted(counts.items())
    if count != usual
  ]
  if odd:
    raise errors.MeshError(
      f'The processes do not have the same number of devices: {usual} in most of them, but '
      f'{", ".join(errors.listed(odd, 4))}.',
      fix='Compare the hosts (nvidia-smi -L, env | grep -e CUDA -e XLA_FLAGS), and start the same '
      'number of processes on each, or leave the odd hosts out.',
      docs='slurm.md#hosts-that-disagree',
    )


def _sent(text: bytes, send: Callable[[np.ndarray], np.ndarray]) -> list[Any]:
  """Returns the values that `send` brings from other processes, for this one's `text`.

  JAX compiles a program for each size, in a quarter of a second, so sizes are few: `_FRAME`, which
  fits most values, and four times as much until the largest value fits. The store of
  `jax.distributed` compiles nothing, but process 0 serves it alone: 1,024 processes exchange in
  seconds what the devices do in milliseconds (benchmarks/ranks.py, 'agreement').
  """
  _check_equal_processes()
  size = _FRAME
  while True:
    header = len(text).to_bytes(_HEADER, 'little')
    frame = np.frombuffer((header + text).ljust(size)[:size], np.uint8)
    found = [np.asarray(row).tobytes() for row in send(frame)]
    lengths = [int.from_bytes(row[:_HEADER], 'little') for row in found]
    if max(lengths) <= size - _HEADER:
      return [json.loads(row[_HEADER:][:length]) for row, length in zip(found, lengths)]
    while size - _HEADER < max(lengths):
      size *= 4


@contextlib.contextmanager
def errors_together() -> Iterator[None]:
  """At the end of the block, raises the first UserError of any process on all processes.

  All processes must enter the block. If they wait for each other inside it (a collective, a
  gather), put the code before the wait into a separate block: otherwise a process that fails before
  the wait would leave the others waiting.
  """
  error: Optional[UserError] = None
  try:
    yield
  except UserError as e:
    error = e
  raise_together(error)


def raise_together(error: Optional[UserError]) -> None:
  """Raises the first error of any process on all processes. Pass None for no error."""
  if process_count() == 1:
    if error is not None:
      raise error
    return
  facts = None
  if error is not None:
    kind = next(c.__name__ for c in type(error).__mro__ if c is getattr(errors, c.__name__, None))
    facts = [kind, error.what, error.fix, error.parameters, error.docs]
  found = gather_json(facts)
  for process, other in enumerate(found):
    if other is not None:
      kind, what, fix, parameters, docs = other
      alone = sum(each == other for each in found) < process_count()
      where = f'{agreement.who_text([process], hostnames())}: ' if alone else ''
      together = getattr(errors, kind)(f'{where}{what}', fix=fix, parameters=parameters)
      together.docs = docs
      raise together from error


def assert_equal_across_hosts(
  value: JsonValue, name: str, *, fix: str = SAME_START, error: type[UserError] = ConfigError
) -> None:
  """Raises `error`, on every process, unless `value` is equal on all.

  Processes exchange only a hash unless there is a difference to show.

  Args:
    value: dictionaries may differ in order.
    name: the value's name for the message: 'The configuration'.
    fix: advice if the values differ.
    error: class to raise; schedulers do not retry a ConfigError.
  """
  if process_count() == 1:
    return
  text = json.dumps(value, sort_keys=True)
  digest = hashlib.sha256(text.encode()).hexdigest()
  digests = gather_json(digest)
  if len(set(digests)) == 1:
    return
  differing = [
    at for at in gather_json(_first_difference(text, broadcast_json(text))) if at is not None
  ]
  texts = gather_json(_cut(text, max(min(differing) - 60, 0)))
  first_with = {}
  for process, d in enumerate(digests):
    first_with.setdefault(d, process)
  shown = '\n'.join(
    f'  {agreement.who_text([i for i, x in enumerate(digests) if x == d], hostnames())}: '
    f'{texts[process]}'
    for d, process in first_with.items()
  )
  raise error(f'{name} is not the same on all {process_count()} processes:\n{shown}', fix=fix)


def first_on_host(process: int) -> int:
  """Returns the lowest process on the host of `process`, and in its domain."""
  keys = [(member.host_key, member.domain) for member in _members]
  return keys.index(keys[process])


def differences(facts: Optional[agreement.Facts], *, only_common: bool = False) -> list[str]:
  """Returns a line per fact that differs between processes, the same on all of them.

  Args:
    facts: facts of this process; see runtime/cluster/agreement.py. None for the facts of the first
      process on this host.
    only_common: ignore facts that only some processes have.
  """
  digests = gather_json(None if facts is None else agreement.digest(facts))
  return agreement.differences(
    facts or {},
    digests=[digest or digests[first_on_host(i)] for i, digest in enumerate(digests)],
    hostnames=hostnames(),
    process_index=process_index(),
    exchange=gather_json,
    only_common=only_common,
  )


def check_same_modules() -> None:
  """Raises ClusterError, on every process, unless all have imported the same user modules so far.

  `join` has compared the modules that were imported before it ran.
  """
  if process_count() > 1:
    members_lib.raise_if_code_differs(differences(members_lib.user_modules(), only_common=True))


def _first_difference(text: str, other: str) -> Optional[int]:
  """Returns the length of the common prefix of two texts; None if they are equal."""
  if text == other:
    return None
  return next(
    (i for i, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other))
  )


def _cut(text: str, start: int) -> str:
  end = start + SHOWN_CHARACTERS
  return ('...' if start else '') + text[start:end] + ('...' if end < len(text) else '')
