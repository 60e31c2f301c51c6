"""Measures this process's devices, and the links between the devices of all processes.

    python -m t5x_gpu.tools.doctor.measure devices      matmuls
    python -m t5x_gpu.tools.doctor.measure all_reduce   with the other processes, if any

Runs as a child process of the doctor, so that a hung driver or network hangs only the child.
Prints one line of JSON per measurement, as soon as it is done.

No tool of NVIDIA replaces these two numbers: nvidia-smi measures no speed, and `dcgmi diag` needs
DCGM's service, takes minutes and ends at the host. Neither shows the speed of this jax with its
libraries and settings.
"""

import argparse
import dataclasses
import importlib
import json
import time
import traceback
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from t5x_gpu.errors import UserError
from t5x_gpu.runtime import distributed, process_exit
from t5x_gpu.runtime.cluster import cluster as cluster_lib
from t5x_gpu.runtime.cluster.cluster import ClusterInfo
from t5x_gpu.runtime.distributed import DistributedConfig
from t5x_gpu.runtime.topology import discover
from t5x_gpu.storage.json_schema import JsonObject, JsonValue
from t5x_gpu.terminal.flag_types import MIB

# Large enough to be bound by tensor cores; small enough for a laptop's CPU.
GPU_MATMUL_SIZE, CPU_MATMUL_SIZE = 8192, 1024
GPU_ALL_REDUCE_BYTES, CPU_ALL_REDUCE_BYTES = 256 * MIB, 4 * MIB


def describe_devices() -> JsonObject:
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
      continue  # This plugin or its libraries are not installed.
  return found


def measure_matmul(
  devices: Sequence[jax.Device], *, size: int, dtype: str, repeats: int = 20
) -> list[float]:
  """Returns the FLOP/s of a `[size, size]` matmul on each device, one after the other.

  Args:
    devices: local devices.
    size: side of the square matrices.
    dtype: dtype of operands and result.
    repeats: matmuls per call; the fastest of three calls counts.
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
  devices: Sequence[jax.Device], *, num_hosts: int = 1, num_bytes: int = GPU_ALL_REDUCE_BYTES
) -> dict[str, float]:
  """Returns bytes/s of an all-reduce per tier of links: 'in_host', and 'across_hosts' if several.

  This is the bus bandwidth of NCCL's tests, 2 (n - 1) / n times size over time: the data that each
  GPU sends, comparable to the speed of one link for any n. Across hosts, every GPU reduces with the
  GPUs of the same rank on the other hosts, all at once; a host's sum is the speed of its network.

  Args:
    devices: all devices of the run, host by host.
    num_hosts: equal parts of `devices`.
    num_bytes: size of each GPU's array.
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


def _print_json(name: str, value: JsonValue) -> None:
  print(json.dumps({name: value}), flush=True)


def _measure_devices(cluster: ClusterInfo, preset: str) -> None:
  """Measures the devices of this process, independently of the others."""
  alone = dataclasses.replace(cluster, process_count=1)
  distributed.start(alone, DistributedConfig(), xla_preset=preset)
  _print_json('devices', describe_devices())
  local = jax.local_devices()
  if local[0].platform == 'cpu':
    _print_json(
      'matmul', measure_matmul(local[:1], size=CPU_MATMUL_SIZE, dtype='float32', repeats=5)
    )
    return
  _print_json('matmul', measure_matmul(local, size=GPU_MATMUL_SIZE, dtype='bfloat16'))


def _measure_links(cluster: ClusterInfo, preset: str, *, join_seconds: int) -> None:
  """Measures all-reduces over the devices of all processes."""
  try:
    config = DistributedConfig(initialization_timeout_seconds=join_seconds)
    distributed.start(cluster, config, xla_preset=preset)
    topology, devices = discover()
  except UserError as e:
    _print_json('problem', {'what': e.what, 'fix': e.fix})
    return
  _print_json('together', {'topology': str(topology), 'kind': devices[0].device_kind})
  num_bytes = CPU_ALL_REDUCE_BYTES if devices[0].platform == 'cpu' else GPU_ALL_REDUCE_BYTES
  _print_json(
    'all_reduce', measure_all_reduce(devices, num_hosts=topology.num_hosts, num_bytes=num_bytes)
  )


def main() -> None:
  """Runs the measurement that the command names; see the top of this file."""
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
    process_exit.leave(1, failed=True)  # skips JAX's exit handler, which waits for the others


if __name__ == '__main__':
  main()
