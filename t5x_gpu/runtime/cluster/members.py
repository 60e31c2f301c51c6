"""The facts that processes of a run share, and checks of these facts.

`ClusterMember` holds a process's host, GPUs and versions. `code_facts` identifies its code: a host
with an old checkout or another release would train without an error, but to a different loss.
"""

import base64
import collections
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import platform
import socket
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from typing import Optional, Self

import jax
import jaxlib

from t5x_gpu.errors import ClusterError, number_ranges
from t5x_gpu.runtime import machine
from t5x_gpu.runtime.cluster.agreement import Facts
from t5x_gpu.runtime.cluster.cluster import ClusterInfo
from t5x_gpu.storage.json_schema import Json, JsonValue

# Packages that affect numbers. Versions come from metadata, without imports.
_CUDA = ('12', '13')
PACKAGES = (
  'jax',
  'jaxlib',
  *(f'jax-cuda{cuda}-{part}' for cuda in _CUDA for part in ('plugin', 'pjrt')),
  *(f'nvidia-{part}-cu{cuda}' for cuda in _CUDA for part in ('cudnn', 'nccl', 'cublas')),
  'nvidia-cublas',
  'transformer-engine',
  'transformer-engine-jax',
  'tokamax',
  'ml-dtypes',
  'flax',
  'optax',
  'chex',
  'orbax-checkpoint',
  'tensorstore',
  'numpy',
  'scipy',
  'gin-config',
  'seqio',
  'seqio-nightly',
  't5',
  'tensorflow',
  'tensorflow-cpu',
  'tensorflow-text',
  'tensorflow-datasets',
  'tfds-nightly',
  'sentencepiece',
  'tokenizers',
  'transformers',
  'safetensors',
  'grain',
  'array-record',
  'pyarrow',
)
_error = functools.partial(
  ClusterError,
  fix='Give all hosts the same checkout and the same environment: a shared folder, one container '
  'image, or the same lock file.',
  docs='slurm.md#hosts-that-disagree',
)
_PACKAGE = pathlib.Path(__file__).resolve().parents[2]
_LIBRARY = {pathlib.Path(sysconfig.get_path(name)).resolve() for name in ('stdlib', 'platstdlib')}
# Modules of launchers, which differ on purpose, and modules that TensorFlow generates.
_NOT_COMPARED = (
  '__main__',
  '__mp_main__',
  'sitecustomize',
  'usercustomize',
  '__autograph_generated_file',
)


def code_facts() -> Facts:
  """Returns facts about the package's sources, the user's modules and installed versions.

  A file's identity is the sha256 of its bytes, independent of its path.
  """
  return {**package_facts(), **user_modules(), **_version_facts()}


@functools.cache
def package_facts() -> Facts:
  """Returns facts about the package's sources, once: hundreds of files, perhaps on a file server.

  The fork server calls this, so its processes have them: a host reads the sources once.
  """
  return {
    f'{_PACKAGE.name}/{path.relative_to(_PACKAGE).as_posix()}': _file_fact(path)
    for path in sorted(_PACKAGE.rglob('*.py'))
  }


def user_modules() -> Facts:
  """Returns facts about the modules imported so far that are not installed packages.

  These are the modules that gin files import from the working directory or PYTHONPATH, and the
  modules that they import in turn.
  """
  found = {}
  for name, module in sorted(sys.modules.items()):
    file = getattr(module, '__file__', None)
    if name.startswith(_NOT_COMPARED) or not isinstance(file, str):
      continue
    if not _is_compared_elsewhere(os.path.dirname(file)) and os.path.isfile(file):
      found[f'module {name}'] = _file_fact(pathlib.Path(file).resolve())
  return found


@functools.cache
def _is_compared_elsewhere(folder: str) -> bool:
  """Returns whether the modules of a folder are Python's, installed, or this package's.

  By folder, because thousands of modules are imported, and links are looked up on a file server.
  """
  path = pathlib.Path(folder).resolve()
  return bool(
    {'site-packages', 'dist-packages'} & set(path.parts)
    or _LIBRARY & {path, *path.parents}
    or path.is_relative_to(_PACKAGE)
  )


def _version_facts() -> Facts:
  """Returns facts about Python and `PACKAGES`; a missing package is a fact too."""
  found = {
    'python': '.'.join(platform.python_version_tuple()[:2]),
    **dict.fromkeys(PACKAGES, 'not installed'),
    **machine.versions(PACKAGES),
  }
  return {f'version of {name}': (version, version) for name, version in found.items()}


def _file_fact(path: pathlib.Path) -> tuple[str, str]:
  try:
    content = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
  except OSError as e:
    content = f'unreadable: {e.strerror}'
  return content, f'{path} ({content})'


def raise_if_code_differs(lines: Sequence[str]) -> None:
  """Raises ClusterError if `lines`, the differences between processes, is not empty."""
  if lines:
    raise _error('The processes do not run the same code:\n  ' + '\n  '.join(lines))


# Variable that names a process's domain of fast links if it is larger than its host (NVL72 rack).
DOMAIN_VARIABLE = 'T5X_GPU_DOMAIN'


@dataclasses.dataclass(frozen=True)
class ClusterMember:
  """The facts that a process sends to the others.

  Attributes:
    process_index: index in the run.
    hostname: from the operating system.
    host_key: equal for processes that share a host, and only for these.
    domain: domain of fast links: T5X_GPU_DOMAIN if set, else the host_key.
    gpus: UUIDs of the GPUs it will use, () if unknown.
    versions: versions of jax and jaxlib; processes with other versions cannot join.
    code: digest of all code and versions (runtime/cluster/members.py).
  """

  process_index: int
  hostname: str
  host_key: str
  domain: str
  gpus: tuple[str, ...] = ()
  versions: str = ''
  code: str = ''

  @classmethod
  def from_json(cls, values: Json) -> Self:
    """Returns the member; ignores fields that this version of t5x_gpu does not have."""
    known = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
    return cls(**{**known, 'gpus': tuple(values['gpus'])})


_OF_ROWS = ('hostname', 'host_key', 'domain', 'versions', 'code')


@dataclasses.dataclass(frozen=True)
class Meeting:
  """The result of the rendezvous of all processes.

  Attributes:
    address: 'host:port' at which this process reaches process 0; the host is numeric.
    members: the processes, by process index; only process 0 knows the GPUs of the others.
    own_host: numeric address of this process on the network of process 0; None if the processes use
      several networks.
    bind_address: 'host:port' on which process 0 must start JAX's service; None for other processes.
  """

  address: str
  members: tuple[ClusterMember, ...]
  own_host: Optional[str] = None
  bind_address: Optional[str] = None


def to_rows(members: Sequence[ClusterMember]) -> JsonValue:
  """Returns members as JSON, with a row per host and without GPUs: every process gets this table.

  4,096 members, each with all of its facts, would be 1.6 MB, and 6.4 GB for process 0 to send.
  """
  rows: dict[tuple[str, ...], list[int]] = {}
  for member in members:
    facts = dataclasses.asdict(member)
    rows.setdefault(tuple(facts[name] for name in _OF_ROWS), []).append(member.process_index)
  text = json.dumps([[*row, processes] for row, processes in rows.items()])
  return base64.b64encode(zlib.compress(text.encode())).decode()


def from_rows(rows: str) -> tuple[ClusterMember, ...]:
  """Returns the members of `to_rows`, by process index, without their GPUs."""
  found = {
    index: ClusterMember(process_index=index, **dict(zip(_OF_ROWS, row, strict=True)))
    for *row, processes in json.loads(zlib.decompress(base64.b64decode(rows)))
    for index in processes
  }
  return tuple(found[index] for index in range(len(found)))


def describe_this_process(cluster: ClusterInfo) -> ClusterMember:
  """Returns the facts that this process sends to the others.

  As in NCCL, processes share a host if kernel (boot id) and host name agree: two containers on one
  machine have two names, and no NVLink between them unless they share more than NCCL assumes.
  Source: getHostHash in https://github.com/NVIDIA/nccl/blob/master/src/misc/utils.cc.
  """
  hostname = socket.gethostname()
  host_key = '/'.join((hostname, cluster.node, machine.boot_id()))
  return ClusterMember(
    process_index=cluster.process_index,
    hostname=hostname,
    host_key=host_key,
    domain=os.environ.get(DOMAIN_VARIABLE) or host_key,
    gpus=machine.own_gpus(machine.physical_gpus(), os.environ, cluster.local_device_ids),
    versions=f'jax {jax.__version__}, jaxlib {jaxlib.__version__}',
  )


def check(members: Sequence[ClusterMember]) -> None:
  """Raises ClusterError if the members cannot be one run.

  They cannot if two processes use one GPU, if only some have T5X_GPU_DOMAIN or send a digest of
  their code, or if versions of jax differ.
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
      fix='Give each process its own GPUs: on one host, python -m t5x_gpu.launch --nproc N does '
      'that; in Slurm set --ntasks-per-node and --gpus-per-node to the same number; by hand, use '
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
    raise _error(
      f'Process {other[0].process_index} on {other[0].hostname} runs {other[0].versions}, '
      f'process 0 on {members[0].hostname} {members[0].versions}.'
    )
  old = [member for member in members if not member.code]
  if 0 < len(old) < len(members):
    raise _error(
      f'Process {old[0].process_index} on {old[0].hostname} runs an older t5x_gpu than the '
      'others: it sends no digest of its code.'
    )


def table(members: Sequence[ClusterMember]) -> str:
  """Returns a line per host, `gpu-001   0: 5f1c2a3b   1: 77aa01b2`: its processes, their GPUs.

  A GPU is shown by the first eight characters of its UUID (as `nvidia-smi -L` lists them), a MIG
  slice by its whole UUID.
  """
  hosts = collections.defaultdict(list)
  for member in members:
    hosts[member.host_key].append(member)
  title = f'processes: {len(members)} on {len(hosts)} host{"s" if len(hosts) > 1 else ""}'
  if not any(member.gpus for member in members):
    reason = 'no GPUs' if jax.default_backend() == 'cpu' else 'GPUs unknown: no NVML'
    return '\n'.join(
      [
        f'{title}, {reason}',
        *(
          f'  {group[0].hostname}   '
          + number_ranges((member.process_index for member in group), separator=', ')
          for group in hosts.values()
        ),
      ]
    )

  def shown(member: ClusterMember) -> str:
    gpus = [gpu if gpu.startswith('MIG') else gpu.removeprefix('GPU-')[:8] for gpu in member.gpus]
    return f'{member.process_index}: {",".join(gpus) or "no GPU"}'

  return '\n'.join(
    [
      title,
      *(f'  {group[0].hostname}   ' + '   '.join(map(shown, group)) for group in hosts.values()),
    ]
  )
