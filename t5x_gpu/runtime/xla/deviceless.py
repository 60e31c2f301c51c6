"""GPUs that this machine does not have but XLA can compile for, as devices for a mesh.

    gpus = described_gpus('h100', num_hosts=8, gpus_per_host=8)
    with kernels_for(gpus.target):
      lowered = jax.jit(f, in_shardings=...).lower(...)       # a mesh of gpus.devices
      compiled = lowered.compile()

Nothing can run on them. The CUDA plugin of JAX contains the compiler; it works without a driver and
without NVIDIA's libraries. `analysis/gpu_compile.py` compiles a training step this way.
"""

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Iterator, Sequence

import jax
from jax.experimental import topologies
from jax.extend import backend

from t5x_gpu.errors import ConfigError, first_line
from t5x_gpu.runtime.cluster.topology import Device, Topology
from t5x_gpu.runtime.xla import probe
from t5x_gpu.runtime.xla.gpu_targets import GpuTarget, find_target


@dataclasses.dataclass(frozen=True)
class DescribedGpus:
  """GPUs of one kind that exist only as a description.

  Attributes:
    target: kind of GPU.
    topology: hosts, and GPUs of each host.
    devices: devices in host-major order, for a mesh.
  """

  target: GpuTarget
  topology: Topology
  devices: Sequence[Device]


def described_gpus(name: str, *, num_hosts: int = 1, gpus_per_host: int = 8) -> DescribedGpus:
  """Returns GPUs to compile for. On a machine without a driver, JAX's platform must be 'cpu'.

  Args:
    name: a name in `gpu_targets.find_target`, 'h100'.
    num_hosts, gpus_per_host: numbers of hosts and GPUs; each host is a separate process.
  Raises:
    ConfigError: no such GPU, or no CUDA plugin of the installed version of JAX.
  """
  target = find_target(name)
  topology = Topology(num_hosts, gpus_per_host, reason=f'described as {target.device_kind}')
  _check_plugin(target)
  try:
    described = topologies.get_topology_desc(
      platform='cuda', topology=f'1x{num_hosts}x{gpus_per_host}', target_config=target.config_text()
    )
  except (NotImplementedError, RuntimeError) as e:
    raise ConfigError(
      f'The CUDA plugin of JAX cannot compile for {target.device_kind}: {first_line(e)}.',
      fix=f'{_install()}\nWithout an NVIDIA driver, start with the variable JAX_PLATFORMS=cpu.',
      docs='plan.md#a-gpu-that-you-do-not-have',
    ) from e
  return DescribedGpus(target, topology, tuple(described.devices))


def can_compile() -> bool:
  """Returns whether the CUDA plugin of the installed JAX is there, which `described_gpus` needs."""
  system = probe.installed()
  return system.plugin is not None and system.plugin == system.jaxlib


def _check_plugin(target: GpuTarget) -> None:
  system = probe.installed()
  if not can_compile():
    found = f'{system.plugin} is installed' if system.plugin else 'it is not installed'
    raise ConfigError(
      f'Compiling for {target.device_kind} needs the CUDA plugin of JAX {jax.__version__}, and '
      f'{found}.',
      fix=_install(),
      docs='plan.md#a-gpu-that-you-do-not-have',
    )


def _install() -> str:
  """Returns instructions to install the compiler: two wheels, without NVIDIA's libraries."""
  version = importlib.metadata.version('jaxlib')
  return (
    'Install it; the download is 126 MB, and no driver or GPU is needed:\n'
    f"  pip install 't5x_gpu[plan]'   # or: pip install jax-cuda13-plugin=={version}"
  )


@dataclasses.dataclass(frozen=True)
class _Device:
  """The attributes of a device that kernels read; hashable, because Tokamax puts them into sets."""

  device_kind: str
  compute_capability: str
  core_count: int
  platform: str = 'gpu'


@contextlib.contextmanager
def kernels_for(target: GpuTarget) -> Iterator[None]:
  """Context in which kernels are chosen and lowered for `target`.

  Pallas kernels, and the code that chooses among them, ask
  `jax.extend.backend.get_default_device()` for compute capability and core count; described devices
  do not have these attributes. Traces are dropped before and after, because JAX would reuse the
  traces of another GPU.
  """
  device = _Device(
    device_kind=target.device_kind,
    compute_capability=target.compute_capability,
    core_count=target.num_cores,
  )
  before = backend.get_default_device
  jax.clear_caches()
  backend.get_default_device = lambda: device
  try:
    yield
  finally:
    backend.get_default_device = before
    jax.clear_caches()
