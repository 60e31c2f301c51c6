"""Seconds of a step: a roofline per kernel, collectives that are not hidden, and the bubble.

A matrix product takes the longer of two times: FLOPs at its efficiency, or bytes at memory speed.
Its efficiency is the assumed efficiency times the filled share of the last wave of tiles. A
collective takes the time of its bytes on its `Link`, NVLink or network, and the latency.
Source: Williams et al. 2009 (roofline); NVIDIA, Matrix Multiplication Background User's Guide,
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Optional

from t5x_gpu.partitioning.mesh_sizes import MeshSizes
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.formulas.traffic import CollectiveTraffic
from t5x_gpu.tools.planning.formulas.work import Work
from t5x_gpu.tools.planning.gpu_targets import GpuTarget

# Source of the time of a collective: the model by which NCCL chooses its algorithms (ring or tree),
# src/graph/tuning.cc; bytes of a ring as in
# https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
NVLINK, NETWORK = 'NVLink', 'network'


@dataclasses.dataclass(frozen=True)
class Link:
  """The link over which the devices of some mesh axes exchange data.

  Attributes:
    name: NVLINK, or NETWORK if the slowest hop is between hosts.
    bandwidth: bytes per second and device.
    inside, hosts: devices of a group on one host, and hosts of a group.
  """

  name: str
  bandwidth: float
  inside: int
  hosts: int


def link_of(
  kind: str, axes: Sequence[str], sizes: MeshSizes, gpu: GpuTarget, assumed: Assumptions
) -> Link:
  """Returns the link of collectives of one kind over `axes`.

  In a ring over several hosts, each GPU of a host carries a part of the ring's bytes over its
  network adapters: a group with k GPUs on each host has k adapters. The same holds for an
  all-to-all of gradients, which the devices of a host add first (partitioning/fsdp.py). In a
  permute or an all-to-all of tokens, bytes that leave the host use only the GPU's own adapters.
  """
  inside = math.prod(sizes.ici[axis] for axis in axes)
  hosts = math.prod(sizes.dcn[axis] for axis in axes)
  nvlink = gpu.nvlinks * gpu.nvlink_bandwidth * assumed.nvlink_efficiency
  if hosts == 1:
    return Link(NVLINK, nvlink, inside, 1)
  network = 1e9 / 8 * assumed.gigabits(gpu)
  network *= assumed.network_efficiency
  if kind == 'all-to-all' and 'expert' in axes and len(axes) == 1:
    network *= (inside * hosts - 1) / (inside * (hosts - 1))
  elif kind != 'collective-permute':
    network *= inside
  return Link(NETWORK, min(nvlink, network), inside, hosts)


def link_seconds(sent: CollectiveTraffic, link: Link, assumed: Assumptions) -> float:
  """Returns how long the collectives of `sent` take, one after the other."""
  return sent.num_bytes / link.bandwidth + sent.calls * _latency(sent.kind, link, assumed)


def _latency(kind: str, link: Link, assumed: Assumptions) -> float:
  inside, between = assumed.nvlink_hop_seconds, assumed.network_hop_seconds
  if kind == 'collective-permute':
    return assumed.collective_seconds + (between if link.hosts > 1 else inside)
  steps = link.inside * link.hosts - 1
  ring = (steps - (link.hosts - 1)) * inside + (link.hosts - 1) * between
  # Over many devices NCCL reduces in a tree, and gathers in one (PAT, NCCL 2.23).
  tree = (link.inside - 1) * inside + math.ceil(math.log2(link.hosts)) * between
  twice = 2 if kind == 'all-reduce' else 1
  return assumed.collective_seconds + twice * min(ring, tree)


# Tile of cuBLAS and Triton kernels for large products.
_TILE = 128


@dataclasses.dataclass(frozen=True)
class PartTime:
  """The time of one part of the model on one GPU.

  Attributes:
    part: name, as in `work`.
    kind: kind of its kernels, as in `Work`.
    seconds: seconds per step, without a pipeline's bubble.
    flops, num_bytes: FLOPs and bytes per step.
    recomputed_seconds: the share of `seconds` that repeats the forward pass.
    bound: 'compute', 'memory' or 'launch': the limit of most of its time.
    launch_seconds: extra time of small kernels due to their start.
  """

  part: str
  kind: str
  seconds: float
  flops: float
  num_bytes: float
  recomputed_seconds: float
  bound: str
  launch_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
  """The time of all collectives of one kind over the same mesh axes.

  Attributes:
    kind, axes: as in `CollectiveTraffic`.
    link: links.NVLINK or links.NETWORK.
    num_bytes: bytes that a GPU sends per step.
    calls: calls per step.
    seconds: duration if nothing else ran.
    hidden_share: share of the bytes that is behind matrix kernels in the schedule.
    from_schedule: whether the share is from XLA's schedule for the GPU; otherwise it is assumed.
    exposed_seconds: seconds during which the GPU waits.
  """

  kind: str
  axes: tuple[str, ...]
  link: str
  num_bytes: float
  calls: float
  seconds: float
  hidden_share: float
  from_schedule: bool
  exposed_seconds: float


@dataclasses.dataclass(frozen=True)
class StepTime:
  """Where the seconds of a step go.

  Attributes:
    parts: computation of a GPU, longest first.
    collectives: collectives of a GPU, longest exposed first.
    bubble_fraction: share of the layers' time in which a stage waits for others.
    bubble_seconds: the bubble in seconds.
  """

  parts: tuple[PartTime, ...]
  collectives: tuple[CollectiveTime, ...]
  bubble_fraction: float
  bubble_seconds: float

  @property
  def compute_seconds(self) -> float:
    return math.fsum(part.seconds for part in self.parts)

  @property
  def exposed_seconds(self) -> float:
    return math.fsum(c.exposed_seconds for c in self.collectives)

  @property
  def seconds(self) -> float:
    return self.compute_seconds + self.exposed_seconds + self.bubble_seconds


def step_time(
  work: Sequence[Work],
  sent: Sequence[CollectiveTraffic],
  *,
  sizes: MeshSizes,
  gpu: GpuTarget,
  dtype: str,
  assumed: Assumptions,
  bubble_fraction: float = 0.0,
) -> StepTime:
  """Returns the time of a step.

  Args:
    work: work of the busiest device.
    sent: traffic of the busiest device.
    sizes: sizes of the mesh.
    gpu: the GPU that computes.
    dtype: TransformerConfig's dtype, in which matrices are multiplied.
    assumed: efficiencies and links.
    bubble_fraction: share of the layers' time.
  """
  parts, in_layers, kernels = [], 0.0, 0.0
  for w in work:
    timed = part_time(w, gpu=gpu, dtype=dtype, assumed=assumed)
    parts.append(timed)
    in_layers += timed.seconds * w.in_layers
    kernels += timed.seconds * (w.kind != 'memory')
  collectives = _exposed(sent, kernels, sizes, gpu, assumed)
  inside = math.fsum(c.exposed_seconds for c in collectives if c.axes == ('model',))
  return StepTime(
    parts=tuple(sorted(_merged(parts), key=lambda part: -part.seconds)),
    collectives=tuple(sorted(collectives, key=lambda c: -c.exposed_seconds)),
    bubble_fraction=bubble_fraction,
    bubble_seconds=(in_layers + inside) * bubble_fraction / (1 - bubble_fraction),
  )


def part_time(w: Work, *, gpu: GpuTarget, dtype: str, assumed: Assumptions) -> PartTime:
  """Returns the roofline time of `w`."""
  bandwidth = gpu.memory_bandwidth * assumed.memory_efficiency
  wide = 'float32' if dtype.endswith('float32') else 'bfloat16'
  if w.kind == 'fp8_gemm' and gpu.has_fp8:
    rate = gpu.peak_flops('fp8') * assumed.fp8_gemm_efficiency
  elif w.kind == 'attention':
    rate = gpu.peak_flops(wide) * _attention_efficiency(w.backend, gpu, assumed)
  else:
    rate = gpu.peak_flops(wide) * assumed.gemm_share(gpu)
  rate *= _full_waves(w.size, gpu.num_cores)
  of = {
    'compute': w.flops / rate,
    'memory': w.num_bytes / bandwidth,
    'launch': w.runs * assumed.kernel_seconds,
  }
  bound = max(of, key=lambda name: of[name])
  again = max(w.recomputed_flops / rate, w.recomputed_bytes / bandwidth)
  launch = of[bound] - max(of['compute'], of['memory'])
  return PartTime(w.part, w.kind, of[bound], w.flops, w.num_bytes, again, bound, launch)


def _attention_efficiency(backend: str, gpu: GpuTarget, assumed: Assumptions) -> float:
  if 'mosaic' in backend:
    return assumed.mosaic_efficiency
  return assumed.triton_efficiency if 'triton' in backend else assumed.gemm_share(gpu)


def _full_waves(size: Sequence[int], num_cores: int) -> float:
  """Returns the share of the multiprocessors that tiles of a product keep busy."""
  if not size:
    return 1.0
  rows, _, columns = size
  tiles = math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
  waves = math.ceil(tiles / num_cores)
  useful = (rows / _TILE) * (columns / _TILE)
  return useful / (waves * num_cores)


def _exposed(
  sent: Sequence[CollectiveTraffic],
  kernels: float,
  sizes: MeshSizes,
  gpu: GpuTarget,
  assumed: Assumptions,
) -> list[CollectiveTime]:
  """Returns the collectives with the exposed part of their time.

  Args:
    sent: the collectives.
    kernels: seconds of matrix kernels; at most `busy_share` of them can hide collectives.
  """
  rows: list[tuple[CollectiveTraffic, Link, float, float, Optional[float]]] = []
  for s in sent:
    link = link_of(s.kind, s.axes, sizes, gpu, assumed)
    share = assumed.hidden_share(s.axes) if s.hidden_share is None else s.hidden_share
    rows.append((s, link, link_seconds(s, link, assumed), share, s.hidden_share))
  hidden = math.fsum(duration * share for _, _, duration, share, _ in rows)
  fits = min(1.0, assumed.busy_share * kernels / hidden) if hidden else 1.0
  return [
    CollectiveTime(
      kind=s.kind,
      axes=s.axes,
      link=link.name,
      num_bytes=s.num_bytes,
      calls=s.calls,
      seconds=duration,
      hidden_share=share,
      from_schedule=known is not None,
      exposed_seconds=duration * (1 - share * fits),
    )
    for s, link, duration, share, known in rows
  ]


def _merged(parts: Sequence[PartTime]) -> list[PartTime]:
  """Returns one entry per part and kind."""
  groups: dict[tuple[str, str], list[PartTime]] = {}
  for part in parts:
    groups.setdefault((part.part, part.kind), []).append(part)
  return [
    PartTime(
      *key,
      seconds=math.fsum(p.seconds for p in members),
      flops=math.fsum(p.flops for p in members),
      num_bytes=math.fsum(p.num_bytes for p in members),
      recomputed_seconds=math.fsum(p.recomputed_seconds for p in members),
      bound=max(members, key=lambda p: p.seconds).bound,
      launch_seconds=math.fsum(p.launch_seconds for p in members),
    )
    for key, members in groups.items()
  ]
