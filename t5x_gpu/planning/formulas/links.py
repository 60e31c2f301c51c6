"""Duration of a collective on NVLink or the network: bandwidth, latency, ring or tree.

Source: the model by which NCCL chooses its algorithms, src/graph/tuning.cc; bytes of a ring as in
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

import dataclasses
import math
from collections.abc import Sequence

from t5x_gpu.partitioning.mesh.mesh_sizes import MeshSizes
from t5x_gpu.planning.assumptions import Assumptions
from t5x_gpu.planning.formulas.traffic import CollectiveTraffic
from t5x_gpu.runtime.xla.gpu_targets import GpuTarget

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
  all-to-all of gradients, which the devices of a host add first (manual_collectives.py). In a
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


def seconds(sent: CollectiveTraffic, link: Link, assumed: Assumptions) -> float:
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
