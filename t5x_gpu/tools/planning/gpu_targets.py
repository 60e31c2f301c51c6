"""GPUs that XLA can compile for without having one: their properties, and devices for a mesh.

    gpus = described_gpus('h100', num_hosts=8, gpus_per_host=8)
    with kernels_for(gpus.target):
      lowered = jax.jit(f, in_shardings=...).lower(...)       # a mesh of gpus.devices
      compiled = lowered.compile()

Nothing can run on them. The CUDA plugin of JAX contains the compiler; it works without a driver and
without NVIDIA's libraries. `gpu_compile` compiles a training step this way. The figures are from
openxla/xla, xla/backends/gpu/target_config/specs/*.txtpb (Apache-2.0), only the fields that jaxlib
0.10 to 0.12 read.
"""

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Iterator, Sequence
from typing import Optional

import jax
from jax.experimental import topologies
from jax.extend import backend

from t5x_gpu.errors import ConfigError, did_you_mean, first_line
from t5x_gpu.runtime import hardware
from t5x_gpu.runtime.topology import Device, Topology
from t5x_gpu.runtime.xla import probe

_SPECS = 'https://github.com/openxla/xla/blob/main/xla/backends/gpu/target_config/specs/'

# Fields of stream_executor.GpuTargetConfigProto. Library versions decide which cuDNN and cuBLAS
# rewrites XLA tries; these are the versions that `jax[cuda13]` installs.
_PROTO = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_memory_per_block}
  shared_memory_per_core: {shared_memory_per_core}
  core_count: {num_cores}
  fpus_per_core: {fpus_per_core}
  clock_rate_ghz: {clock_ghz}
  l2_cache_size: {l2_bytes}
  memory_bandwidth: {memory_bandwidth}
  device_memory_size: {memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  device_interconnect_info {{ active_links: {nvlinks} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{device_kind}"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTarget:
  """One kind of GPU.

  Attributes:
    name: name on the command line, 'h100'.
    device_kind: the driver's name, as in `jax.Device.device_kind` (runtime/hardware.py).
    compute_capability: '9.0', as in `jax.Device.compute_capability`.
    num_cores: streaming multiprocessors.
    memory_bytes: memory that the driver reports. XLA compiles programs that need more, so compare.
    memory_bandwidth: bytes per second.
    shared_memory_per_block, shared_memory_per_core: bytes that a kernel can request at most, and
      bytes of a multiprocessor.
    nvlinks: active links to other GPUs.
    nvlink_bandwidth: bytes per second of one link, in one direction.
    nvlink_domain: GPUs that NVLink connects in the vendor's largest system.
    network_gigabits: bandwidth per GPU of the vendor's hosts' network adapters, in Gbit/s.
    source: URL of the figures.
  """

  name: str
  device_kind: str
  compute_capability: str
  num_cores: int
  memory_bytes: int
  memory_bandwidth: int
  l2_bytes: int
  clock_ghz: float
  fpus_per_core: int = 128
  shared_memory_per_block: int = 232448
  shared_memory_per_core: int = 233472
  nvlinks: int = 18
  nvlink_bandwidth: int = 25 * 10**9  # generations 3 and 4: NVIDIA's A100 and H100 whitepapers
  nvlink_domain: int = 8
  network_gigabits: int = 400  # DGX H100, H200 and B200: eight ConnectX-7 for eight GPUs
  source: str

  def peak_flops(self, dtype: str) -> float:
    """Returns the dense peak in FLOP/s, or the peak of the next wider type if `dtype` has no units.

    Args:
      dtype: dtype of TransformerConfig. Matrices in float32 are multiplied in TF32, JAX's default.
    """
    wider = {'float32': ('tf32',), 'fp8': ('fp8', 'bfloat16'), 'fp8_float32': ('fp8', 'tf32')}
    for name in wider.get(dtype, (dtype,)):
      peak = hardware.peak_flops(self.device_kind, name)
      if peak is not None:
        return peak
    raise ValueError(f'No peak of {dtype} is known for {self.device_kind}.')

  @property
  def has_fp8(self) -> bool:
    """Whether the tensor cores multiply eight-bit floats: Ada, Hopper and later."""
    return float(self.compute_capability) >= 8.9

  def config_text(self) -> str:
    """Returns the GpuTargetConfigProto as text, for `topologies.get_topology_desc`."""
    major, minor = self.compute_capability.split('.')
    # sm_90a and sm_100a: wgmma, TMA and tcgen05 exist only in the accelerated feature set.
    features = 'feature_extension: ACCELERATED_FEATURES' if int(major) >= 9 else ''
    return _PROTO.format(**dataclasses.asdict(self), major=major, minor=minor, features=features)


def _a100(name: str, device_kind: str, *, memory_bytes: int, memory_bandwidth: int, source: str):
  return GpuTarget(
    name=name,
    device_kind=device_kind,
    compute_capability='8.0',
    num_cores=108,
    memory_bytes=memory_bytes,
    memory_bandwidth=memory_bandwidth,
    l2_bytes=41943040,
    clock_ghz=1.41,
    fpus_per_core=64,
    shared_memory_per_block=166912,
    shared_memory_per_core=167936,
    network_gigabits=200,  # DGX A100: eight HDR adapters for eight GPUs
    nvlinks=12,  # SXM4 board: NVIDIA's A100 whitepaper, "12 NVLinks"
    source=_SPECS + source,
  )


def _hopper(name: str, device_kind: str, *, memory_bytes: int, memory_bandwidth: int, source: str):
  return GpuTarget(
    name=name,
    device_kind=device_kind,
    compute_capability='9.0',
    num_cores=132,
    memory_bytes=memory_bytes,
    memory_bandwidth=memory_bandwidth,
    l2_bytes=52428800,
    clock_ghz=1.98,
    source=_SPECS + source,
  )


TARGETS = {
  target.name: target
  for target in (
    _a100(
      'a100-40',
      'NVIDIA A100-SXM4-40GB',
      memory_bytes=42331013120,
      memory_bandwidth=1555200000000,
      source='a100_sxm_40.txtpb',
    ),
    _a100(
      'a100-80',
      'NVIDIA A100-SXM4-80GB',
      memory_bytes=85100068864,
      memory_bandwidth=2039040000000,
      source='a100_sxm_80.txtpb',
    ),
    _hopper(
      'h100',
      'NVIDIA H100 80GB HBM3',
      memory_bytes=84942979072,
      memory_bandwidth=3352320000000,
      source='h100_sxm.txtpb',
    ),
    _hopper(
      'h200',
      'NVIDIA H200',
      memory_bytes=151397597184,
      memory_bandwidth=4800000000000,
      source='h200.txtpb',
    ),
    GpuTarget(
      name='b200',
      device_kind='NVIDIA B200',
      compute_capability='10.0',
      num_cores=148,
      memory_bytes=191514411008,
      memory_bandwidth=7672320000000,
      l2_bytes=132644864,
      clock_ghz=1.965,
      nvlink_bandwidth=50 * 10**9,  # generation 5: 1.8 TB/s of 18 links in both directions
      source=_SPECS + 'b200.txtpb',
    ),
    GpuTarget(
      name='gb200',
      device_kind='NVIDIA GB200',
      compute_capability='10.0',
      num_cores=152,
      memory_bytes=197897748480,
      memory_bandwidth=7928064000000,
      l2_bytes=135528448,
      clock_ghz=2.062,
      nvlink_bandwidth=50 * 10**9,
      nvlink_domain=72,  # the rack GB200 NVL72
      source=_SPECS + 'gb200.txtpb',
    ),
  )
}


def target_of_kind(device_kind: str) -> Optional[GpuTarget]:
  """Returns the GPU that the driver calls `device_kind`; None if it is not in the table."""
  return next((t for t in TARGETS.values() if t.device_kind == device_kind), None)


_ALIASES = {'a100': 'a100-80'}


def find_target(name: str) -> GpuTarget:
  """Returns the GPU called `name`; 'a100' is the 80 GB version.

  Raises:
    ConfigError: no such GPU in the table.
  """
  key = name.lower().removeprefix('nvidia ').replace(' ', '-').replace('_', '-')
  key = _ALIASES.get(key, key)
  if key not in TARGETS:
    raise ConfigError(
      f'{name!r} is not a GPU that a plan can compile for.'
      f'{did_you_mean(name, [*TARGETS, *_ALIASES])}',
      fix=f'Choose one of {", ".join(TARGETS)}.',
      docs='plan.md#a-gpu-that-you-do-not-have',
    )
  return TARGETS[key]


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
