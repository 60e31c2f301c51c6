"""Measures what this process's devices reach, and the links between the devices of all processes.

    python -m t5x_gpu.runtime.health.measure devices      matmuls, and clocks under load
    python -m t5x_gpu.runtime.health.measure all_reduce   with the other processes, if there are any

Runs as a child process of the doctor, so that a hanging driver or network hangs only the child.
Prints one JSON object per line and measurement, each as soon as it is there.
"""

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import time
import traceback
from collections.abc import Collection, Sequence
from typing import Any, Optional

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from t5x_gpu.errors import UserError
from t5x_gpu.runtime import distributed, process_exit
from t5x_gpu.runtime import gpus as nvml
from t5x_gpu.runtime.cluster import cluster as cluster_lib
from t5x_gpu.runtime.cluster import topology as topology_lib
from t5x_gpu.runtime.cluster.cluster import ClusterInfo
from t5x_gpu.runtime.distributed import DistributedConfig

MIB = 2**20
# Large enough to be bound by the tensor cores, small enough for a laptop's CPU.
GPU_MATMUL_SIZE, CPU_MATMUL_SIZE = 8192, 1024
GPU_ALL_REDUCE_BYTES, CPU_ALL_REDUCE_BYTES = 256 * MIB, 4 * MIB
LOAD_SECONDS = 1.5
CLOCK_FIELDS = 'uuid,clocks.sm,clocks.max.sm,clocks_throttle_reasons.active'


def describe_devices() -> dict[str, Any]:
  """Returns platform, count and kinds of jax's devices, and the CUDA libraries it loaded."""
  devices = jax.devices()
  found = {
    'platform': devices[0].platform,
    'count': len(devices),
    'jax': jax.__version__,
    'kinds': sorted({device.device_kind for device in devices}),
  }
  for plugin in ('jax_cuda13_plugin', 'jax_cuda12_plugin'):
    try:
      versions = importlib.import_module(f'{plugin}._versions')
      found |= {
        'cudnn': versions.cudnn_get_version(),
        'cudnn_built': versions.cudnn_build_version(),
      }
    except (ImportError, AttributeError, RuntimeError):
      continue  # This plugin is not there, or its libraries are not.
  return found


def measure_matmul(
  devices: Sequence[Any], *, size: int, dtype: str, repeats: int = 20
) -> list[float]:
  """Returns the FLOP/s of a `[size, size]` matmul on each device, one after the other.

  Args:
    devices: local ones.
    size: of the square matrices.
    dtype: of operands and result.
    repeats: matmuls per call; the best of three calls counts.
  """

  @jax.jit
  def chain(x, w):
    return jax.lax.fori_loop(0, repeats, lambda _, y: y @ w, x)

  rates = []
  for device in devices:
    # Entries of 1/size keep the values finite through the chain.
    x = jax.device_put(jnp.full((size, size), 1 / size, dtype), device)
    chain(x, x).block_until_ready()
    seconds = []
    for _ in range(3):
      begin = time.monotonic()
      chain(x, x).block_until_ready()
      seconds.append(time.monotonic() - begin)
    rates.append(2 * size**3 * repeats / min(seconds))
  return rates


def measure_all_reduce(
  devices: Sequence[Any], *, num_hosts: int = 1, num_bytes: int = GPU_ALL_REDUCE_BYTES
) -> dict[str, float]:
  """Returns bytes/s of an all-reduce per tier of links: 'in_host', and 'across_hosts' of several.

  It is the bus bandwidth of NCCL's tests, 2 (n - 1) / n times size over time: what each GPU sends,
  comparable to the speed of one link whatever n is. Across hosts every GPU reduces with those of
  its rank on the other hosts, all at once: the sum over a host is the speed of its network.

  Args:
    devices: all devices of the run, host by host.
    num_hosts: hosts among which they are divided equally.
    num_bytes: of each GPU's array.
  Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
  """
  grid = np.asarray(devices).reshape(num_hosts, -1)
  mesh = Mesh(grid, ('host', 'device'), axis_types=(AxisType.Auto,) * 2)
  spec = PartitionSpec(('host', 'device'))
  sharding = NamedSharding(mesh, spec)
  ones = jax.jit(
    lambda: jnp.ones((grid.size, num_bytes // 2), jnp.bfloat16), out_shardings=sharding
  )()
  rates = {}
  for tier, axis, n in (('in_host', 'device', grid.shape[1]), ('across_hosts', 'host', num_hosts)):
    if n < 2:
      continue
    reduce = jax.jit(
      jax.shard_map(
        lambda x, axis=axis: jax.lax.psum(x, axis) / 2,
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
      )
    )
    reduce(ones).block_until_ready()
    seconds = []
    for _ in range(5):
      begin = time.monotonic()
      reduce(ones).block_until_ready()
      seconds.append(time.monotonic() - begin)
    rates[tier] = 2 * (n - 1) / n * num_bytes / sorted(seconds)[2]
  return rates


def clocks_under_load(
  devices: Sequence[Any], flops: float, *, gpus: Collection[str] = ()
) -> Optional[str]:
  """Returns a line of `CLOCK_FIELDS`, but the uuid, per GPU while all `devices` multiply.

  None without nvidia-smi.

  Args:
    devices: local GPUs.
    flops: FLOP/s of one, from `measure_matmul`: how much work lasts `LOAD_SECONDS`.
    gpus: UUIDs of `devices`; others are left out, as they may be idle. () if unknown.
  """
  size = GPU_MATMUL_SIZE
  repeats = max(1, int(LOAD_SECONDS * flops / (2 * size**3)))
  chain = jax.jit(lambda x: jax.lax.fori_loop(0, repeats, lambda _, y: y @ x, x))
  arrays = [jax.device_put(jnp.full((size, size), 1 / size, jnp.bfloat16), d) for d in devices]
  jax.block_until_ready([chain(x) for x in arrays])  # Compiles for each.
  busy = [chain(x) for x in arrays]
  try:
    time.sleep(LOAD_SECONDS / 3)  # Clocks follow the load within some 100 ms.
    text = subprocess.run(
      ['nvidia-smi', f'--query-gpu={CLOCK_FIELDS}', '--format=csv,noheader,nounits'],
      capture_output=True,
      text=True,
      timeout=10,
      check=True,
    ).stdout
  except (OSError, subprocess.SubprocessError):
    return None
  finally:
    jax.block_until_ready(busy)
  rows = [line.partition(', ') for line in text.splitlines()]
  own = [row for row in rows if row[0] in gpus] or rows
  return '\n'.join(clocks for _, _, clocks in own)


def _say(name: str, value: Any) -> None:
  print(json.dumps({name: value}), flush=True)


def _measure_devices(cluster: ClusterInfo, preset: str) -> None:
  """Measures the devices of this process, whatever the others do."""
  distributed.start(dataclasses.replace(cluster, process_count=1), {'xla_preset': preset})
  _say('devices', describe_devices())
  local = jax.local_devices()
  if local[0].platform == 'cpu':
    _say('matmul', measure_matmul(local[:1], size=CPU_MATMUL_SIZE, dtype='float32', repeats=5))
    return
  rates = measure_matmul(local, size=GPU_MATMUL_SIZE, dtype='bfloat16')
  _say('matmul', rates)
  gpus = nvml.own_gpus(nvml.physical_gpus(), os.environ, cluster.local_device_ids)
  _say('clocks', clocks_under_load(local, min(rates), gpus=gpus))


def _measure_links(cluster: ClusterInfo, preset: str, *, join_seconds: int) -> None:
  """Measures all-reduces over the devices of all processes."""
  try:
    distributed.start(
      cluster,
      {
        'xla_preset': preset,
        'distributed_cfg': DistributedConfig(initialization_timeout_seconds=join_seconds),
      },
    )
    topology, devices = topology_lib.discover()
  except UserError as e:
    _say('problem', {'what': e.what, 'fix': e.fix})
    return
  _say('together', {'topology': str(topology), 'kind': devices[0].device_kind})
  num_bytes = CPU_ALL_REDUCE_BYTES if devices[0].platform == 'cpu' else GPU_ALL_REDUCE_BYTES
  _say('all_reduce', measure_all_reduce(devices, num_hosts=topology.num_hosts, num_bytes=num_bytes))


def main() -> None:
  """Measures what the first argument of the command says, see the top of this file."""
  parser = argparse.ArgumentParser()
  parser.add_argument('what', choices=('devices', 'all_reduce'))
  parser.add_argument('--preset', default='default')
  parser.add_argument('--join_seconds', type=int, default=60)
  cluster_lib.add_flags(parser)
  flags = parser.parse_args()
  cluster = cluster_lib.detect_here(flags)
  try:
    if flags.what == 'devices':
      _measure_devices(cluster, flags.preset)
    else:
      _measure_links(cluster, flags.preset, join_seconds=flags.join_seconds)
  except Exception:
    traceback.print_exc()
    process_exit.leave(1, failed=True)  # not by JAX's exit handler, which waits for the others


if __name__ == '__main__':
  main()
