"""Several processes as one run: start them, number them, agree on values.

Everything here does nothing, or returns its input, when there is one process.
"""

import collections
import dataclasses
import hashlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import jax
import jaxlib
import numpy as np
from jax.experimental import multihost_utils

from t5x_gpu.errors import ClusterError, ConfigError, UserError
from t5x_gpu.runtime import gpus as nvml
from t5x_gpu.runtime import process_exit
from t5x_gpu.runtime.cluster import addresses, agreement, coordination, job_secret, same_code
from t5x_gpu.runtime.cluster.cluster import ClusterInfo
from t5x_gpu.runtime.cluster.coordination import exchange
from t5x_gpu.runtime.cluster.rendezvous import Member, meet, numbers
from t5x_gpu.runtime.host import boot_id
from t5x_gpu.runtime.xla import flags as xla_flags

# A difference is shown up to this many characters per process.
SHOWN_CHARACTERS = 300
SAME_START = 'Start every process with the same files and flags, and the same versions of the code.'
# Names the domain of fast links of a process where that is more than its host (an NVL72 rack).
DOMAIN_VARIABLE = 'T5X_GPU_DOMAIN'

_members: list[Member] = []


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
  """How long processes wait for each other.

  Attributes:
    initialization_timeout_seconds: for all to start; queues and file systems can be slow.
    heartbeat_timeout_seconds: without a sign of life, until a process is taken for dead. Shorter
      than Slurm's SlurmdTimeout (300 s), so that a host that was cut off has ended by the time the
      job runs again elsewhere.
    shutdown_timeout_seconds: for all to end, once one has.
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
          parameters=(f'DistributedConfig.{field.name}',),
        )


def start(cluster: ClusterInfo, arguments: Mapping[str, Any]) -> xla_flags.Applied:
  """Returns the XLA settings in force, once this process has joined the others of its run.

  Must run before anything uses a device.

  Args:
    cluster: from `cluster.detect`.
    arguments: of `train`; its `distributed_cfg` and `xla_preset` are used.
  Raises:
    ClusterError: see `initialize`.
  """
  initialize(cluster, arguments.get('distributed_cfg', DistributedConfig()))
  return xla_flags.prepare_environment(
    arguments.get('xla_preset', 'default'), num_hosts=num_hosts()
  )


def initialize(cluster: ClusterInfo, config: DistributedConfig = DistributedConfig()) -> bool:
  """Returns whether this process joined others; False for a single one.

  Must run before anything uses a device.

  Args:
    cluster: from `cluster.detect`.
    config: how long to wait.
  Raises:
    ClusterError: some processes did not come, or cannot reach process 0; two use the same GPU, or
      run different code.
  """
  if cluster.process_count == 1:
    if cluster.local_device_ids:
      jax.config.update('jax_cuda_visible_devices', ','.join(map(str, cluster.local_device_ids)))
    return False
  # NVML's order, by which GPUs are told apart; must be set before CUDA starts.
  os.environ.setdefault('CUDA_DEVICE_ORDER', 'PCI_BUS_ID')
  code = same_code.facts()
  me = dataclasses.replace(describe_this_process(cluster), code=agreement.digest(code))
  with meet(
    cluster,
    me,
    timeout_seconds=config.initialization_timeout_seconds,
    secret=job_secret.from_environment(os.environ),
  ) as meeting:
    check_members(meeting.members)
    domains = list(dict.fromkeys(member.domain for member in meeting.members))
    _go_past_proxies(meeting.address)
    if meeting.own_host:
      coordination.let_gloo_listen_on(meeting.own_host)
    # 'deactivate': JAX must not pick up Slurm's variables, which would leave each process the one
    # GPU that has the number of its local rank (jax._src.clusters.cluster).
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
      # device.slice_index on GPUs: JAX's create_hybrid_device_mesh then sees our hosts.
      partition_index=domains.index(meeting.members[cluster.process_index].domain),
    )
  _members[:] = meeting.members
  process_exit.joined(cluster.process_index, process_count=cluster.process_count)
  # A module that only some have imported is no difference: what imports it would be one.
  same_code.raise_if_any(
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


def _go_past_proxies(address: str) -> None:
  """Tells gRPC to connect to process 0 directly.

  Compute nodes often have http_proxy set, for downloads; gRPC takes it for everything, and JAX
  then waits for process 0 until it aborts. The plain connection of the rendezvous did get there.
  """
  hosts = [
    host
    for host in os.environ.get('no_grpc_proxy', os.environ.get('no_proxy', '')).split(',')
    if host
  ]
  os.environ['no_grpc_proxy'] = ','.join([*hosts, addresses.split(address)[0]])
  jax.config.update('jax_check_proxy_envs', False)  # its warning says to unset them


def describe_this_process(cluster: ClusterInfo) -> Member:
  """Returns what the others learn of this process.

  Processes share a host if kernel (boot id) and host name agree, as NCCL has it: two containers on
  one machine have two names, and no NVLink between them unless they share more than NCCL assumes.
  Source: getHostHash in https://github.com/NVIDIA/nccl/blob/master/src/misc/utils.cc.
  """
  hostname = socket.gethostname()
  host_key = '/'.join((hostname, cluster.node, boot_id()))
  return Member(
    process_index=cluster.process_index,
    hostname=hostname,
    host_key=host_key,
    domain=os.environ.get(DOMAIN_VARIABLE) or host_key,
    gpus=nvml.own_gpus(nvml.physical_gpus(), os.environ, cluster.local_device_ids),
    versions=f'jax {jax.__version__}, jaxlib {jaxlib.__version__}',
  )


def check_members(members: Sequence[Member]) -> None:
  """Raises ClusterError if two processes use one GPU, if only some have T5X_GPU_DOMAIN or a digest
  of their code, or if their jax differs.

  All processes hold the same table, so all of them raise.
  """
  users = collections.defaultdict(list)
  for member in members:
    for gpu in member.gpus:
      users[gpu].append(member)
  shared = {gpu: who for gpu, who in users.items() if len(who) > 1}
  if shared:
    gpu, who = next(iter(shared.items()))
    names = ', '.join(str(member.process_index) for member in who[:8])
    raise ClusterError(
      f'{len(shared)} of {len(users)} GPUs are each used by several processes: {gpu} on '
      f'{who[0].hostname} by processes {names}. Each would take most of its memory.',
      fix='Give each process its own: python -m t5x_gpu.launch --nproc N does on one host; in '
      'Slurm set --ntasks-per-node and --gpus-per-node to the same number; by hand, use '
      'CUDA_VISIBLE_DEVICES.',
      docs='slurm.md#which-gpus',
    )
  without = [member for member in members if member.domain == member.host_key]
  if 0 < len(without) < len(members):
    raise ClusterError(
      f'{DOMAIN_VARIABLE} is set for {len(members) - len(without)} of {len(members)} processes, '
      f'but not for process {without[0].process_index} on {without[0].hostname}.',
      fix=f'Set {DOMAIN_VARIABLE} for all processes, or for none.',
    )
  other = [member for member in members if member.versions != members[0].versions]
  if other:
    raise ClusterError(
      f'Process {other[0].process_index} on {other[0].hostname} runs {other[0].versions}, '
      f'process 0 on {members[0].hostname} {members[0].versions}.',
      fix=same_code.FIX,
      docs='slurm.md#hosts-that-disagree',
    )
  old = [member for member in members if not member.code]
  if 0 < len(old) < len(members):
    raise ClusterError(
      f'Process {old[0].process_index} on {old[0].hostname} runs an older t5x_gpu than the '
      'others: it sends no digest of its code.',
      fix=same_code.FIX,
      docs='slurm.md#hosts-that-disagree',
    )


def members() -> tuple[Member, ...]:
  """Returns what all processes told of themselves, by process index; () for a single process."""
  return tuple(_members)


def hostnames() -> tuple[str, ...]:
  """Returns the host of each process; () for a single process."""
  return tuple(member.hostname for member in _members)


def num_hosts() -> int:
  """Returns how many hosts (domains of fast links) the processes are on; 1 for a single process."""
  return len({member.domain for member in _members}) or 1


def num_machines() -> int:
  """Returns how many machines the processes are on; several may be one host of `num_hosts`."""
  return len({member.host_key for member in _members}) or process_count()


def members_table() -> str:
  """Returns a line per host, `gpu-001   0: 5f1c2a3b   1: 77aa01b2`: its processes, their GPUs.

  A GPU is shown by the first eight characters of its UUID (nvidia-smi -L tells which it is), a part
  of one (MIG) by all of them.
  """
  hosts = collections.defaultdict(list)
  for member in _members:
    hosts[member.host_key].append(member)
  title = f'processes: {len(_members)} on {len(hosts)} host{"s" if len(hosts) > 1 else ""}'
  if not any(member.gpus for member in _members):
    why = 'no GPUs' if jax.default_backend() == 'cpu' else 'which GPUs is not known without NVML'
    return '\n'.join(
      [
        f'{title}, {why}',
        *(
          f'  {group[0].hostname}   {numbers([member.process_index for member in group])}'
          for group in hosts.values()
        ),
      ]
    )

  def shown(member: Member) -> str:
    gpus = [gpu if gpu.startswith('MIG') else gpu.removeprefix('GPU-')[:8] for gpu in member.gpus]
    return f'{member.process_index}: {",".join(gpus) or "no GPU"}'

  return '\n'.join(
    [
      title,
      *(f'  {group[0].hostname}   ' + '   '.join(map(shown, group)) for group in hosts.values()),
    ]
  )


def process_index() -> int:
  """Returns the number of this process, from 0."""
  return jax.process_index()


def process_count() -> int:
  """Returns how many processes take part."""
  return jax.process_count()


def is_main_process() -> bool:
  """Returns whether this process is the one that prints and writes."""
  return jax.process_index() == 0


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


def assert_equal_across_hosts(
  value: Any, name: str, *, fix: str = SAME_START, error: type[UserError] = ConfigError
) -> None:
  """Raises `error`, on every process, unless all passed an equal `value`.

  Only a hash travels, unless there is a difference to show.

  Args:
    value: anything that JSON can hold; dictionaries may differ in order.
    name: what it is, for the message: 'The configuration'.
    fix: what to do where they differ.
    error: its class; a ConfigError is not worth a retry.
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


def differences(facts: agreement.Facts, *, only_common: bool = False) -> list[str]:
  """Returns a line per fact in which processes differ, the same on all of them; [] for none.

  Args:
    facts: of this process, see runtime/cluster/agreement.py.
    only_common: ignore facts that only some processes have.
  """
  return agreement.differences(
    facts,
    digests=gather_json(agreement.digest(facts)),
    hostnames=hostnames(),
    process_index=process_index(),
    exchange=gather_json,
    only_common=only_common,
  )


def check_same_modules() -> None:
  """Raises ClusterError, on every process, unless the user's modules imported by now are the same.

  `initialize` has compared those that were imported before it.
  """
  if process_count() > 1:
    same_code.raise_if_any(differences(same_code.user_modules(), only_common=True))


def _first_difference(text: str, other: str) -> Optional[int]:
  """Returns the number of characters that two texts begin alike; None if they are equal."""
  if text == other:
    return None
  return next(
    (i for i, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other))
  )


def _cut(text: str, start: int) -> str:
  end = start + SHOWN_CHARACTERS
  return ('...' if start else '') + text[start:end] + ('...' if end < len(text) else '')
