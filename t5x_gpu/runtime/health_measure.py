"""Measures what this machine reaches: matmuls, all-reduces, clocks under load, a folder's disk.

Runs as a child process of the doctor, so that a hanging driver or file system hangs only the child:

    python -m t5x_gpu.runtime.health_measure jax
    python -m t5x_gpu.runtime.health_measure disk FOLDER

prints one JSON object per line and measurement, each as soon as it is there. jax is imported where
it is used: the disk is measured without it.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Optional

MIB = 2**20
# Large enough to be bound by the tensor cores, small enough for a laptop's CPU.
GPU_MATMUL_SIZE, CPU_MATMUL_SIZE = 8192, 1024
ALL_REDUCE_BYTES = 256 * MIB
DISK_BYTES = 256 * MIB
LOAD_SECONDS = 1.5
CLOCK_FIELDS = 'clocks.sm,clocks.max.sm,clocks_throttle_reasons.active'


def describe_devices() -> dict[str, Any]:
  """Returns platform, count and kinds of jax's devices, and the CUDA libraries it loaded."""
  import jax
  devices = jax.devices()
  found = {'platform': devices[0].platform, 'count': len(devices), 'jax': jax.__version__,
           'kinds': sorted({device.device_kind for device in devices})}
  for plugin in ('jax_cuda13_plugin', 'jax_cuda12_plugin'):
    try:
      versions = importlib.import_module(f'{plugin}._versions')
      found |= {'cudnn': versions.cudnn_get_version(),
                'cudnn_built': versions.cudnn_build_version()}
    except (ImportError, AttributeError, RuntimeError):
      continue  # This plugin is not there, or its libraries are not.
  return found


def measure_matmul(devices: Sequence[Any], *, size: int, dtype: str, repeats: int = 20
                   ) -> list[float]:
  """Returns the FLOP/s of a `[size, size]` matmul on each device, one after the other.

  Args:
    devices: local ones.
    size: of the square matrices.
    dtype: of operands and result.
    repeats: matmuls per call; the best of three calls counts.
  """
  import jax
  import jax.numpy as jnp

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


def measure_all_reduce(devices: Sequence[Any], *, num_hosts: int = 1,
                       num_bytes: int = ALL_REDUCE_BYTES) -> dict[str, float]:
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
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
  grid = np.asarray(devices).reshape(num_hosts, -1)
  mesh = Mesh(grid, ('host', 'device'), axis_types=(AxisType.Auto,) * 2)
  spec = PartitionSpec(('host', 'device'))
  sharding = NamedSharding(mesh, spec)
  ones = jax.jit(lambda: jnp.ones((grid.size, num_bytes // 2), jnp.bfloat16),
                 out_shardings=sharding)()
  rates = {}
  for tier, axis, n in (('in_host', 'device', grid.shape[1]), ('across_hosts', 'host', num_hosts)):
    if n < 2:
      continue
    reduce = jax.jit(jax.shard_map(lambda x, axis=axis: jax.lax.psum(x, axis) / 2, mesh=mesh,
                                   in_specs=spec, out_specs=spec, check_vma=False))
    reduce(ones).block_until_ready()
    seconds = []
    for _ in range(5):
      begin = time.monotonic()
      reduce(ones).block_until_ready()
      seconds.append(time.monotonic() - begin)
    rates[tier] = 2 * (n - 1) / n * num_bytes / sorted(seconds)[2]
  return rates


def clocks_under_load(devices: Sequence[Any], flops: float) -> Optional[str]:
  """Returns nvidia-smi's answer to `CLOCK_FIELDS` while all devices multiply; None without it.

  Args:
    devices: local GPUs.
    flops: FLOP/s of one, from `measure_matmul`: how much work lasts `LOAD_SECONDS`.
  """
  import jax
  import jax.numpy as jnp
  size = GPU_MATMUL_SIZE
  repeats = max(1, int(LOAD_SECONDS * flops / (2 * size**3)))
  chain = jax.jit(lambda x: jax.lax.fori_loop(0, repeats, lambda _, y: y @ x, x))
  arrays = [jax.device_put(jnp.full((size, size), 1 / size, jnp.bfloat16), d) for d in devices]
  jax.block_until_ready([chain(x) for x in arrays])  # Compiles for each.
  busy = [chain(x) for x in arrays]
  try:
    time.sleep(LOAD_SECONDS / 3)  # Clocks follow the load within some 100 ms.
    return subprocess.run(
        ['nvidia-smi', f'--query-gpu={CLOCK_FIELDS}', '--format=csv,noheader,nounits'],
        capture_output=True, text=True, timeout=10, check=True).stdout
  except (OSError, subprocess.SubprocessError):
    return None
  finally:
    jax.block_until_ready(busy)


def measure_disk(folder: str, *, num_bytes: int = DISK_BYTES) -> dict[str, float]:
  """Returns write and read bytes/s, seconds per small fsync, and free bytes of a folder's disk.

  Args:
    folder: where it is not there yet, the disk of the closest folder above it is measured.
    num_bytes: to write and read; a file of this size is there meanwhile.
  Raises:
    OSError: the folder cannot be written to.
  """
  folder = os.path.abspath(folder)
  while not os.path.isdir(folder) and folder != os.path.dirname(folder):
    folder = os.path.dirname(folder)
  block = os.urandom(8 * MIB)
  stat = os.statvfs(folder)
  free = stat.f_bavail * stat.f_frsize
  num_blocks = max(1, min(num_bytes, free // 4) // len(block))
  with tempfile.NamedTemporaryFile(dir=folder, prefix='.t5x_gpu_doctor_') as file:
    begin = time.monotonic()
    for _ in range(num_blocks):
      file.write(block)
    file.flush()
    os.fsync(file.fileno())
    write_seconds = time.monotonic() - begin
    # Read from the disk, not from the kernel's memory, as far as the file system allows it.
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    begin = time.monotonic()
    while file.read(len(block)):
      pass
    read_seconds = time.monotonic() - begin
    begin = time.monotonic()
    for _ in range(5):
      file.write(b'x' * 4096)
      file.flush()
      os.fsync(file.fileno())
    sync_seconds = (time.monotonic() - begin) / 5
  written = num_blocks * len(block)
  return {'write': written / write_seconds, 'read': written / read_seconds,
          'sync_seconds': sync_seconds, 'free': free}


def _say(name: str, value: Any) -> None:
  print(json.dumps({name: value}), flush=True)


def _measure_jax() -> None:
  import jax
  _say('devices', describe_devices())
  local = jax.local_devices()
  if local[0].platform == 'cpu':
    _say('matmul', measure_matmul(local[:1], size=CPU_MATMUL_SIZE, dtype='float32', repeats=5))
    return
  rates = measure_matmul(local, size=GPU_MATMUL_SIZE, dtype='bfloat16')
  _say('matmul', rates)
  if len(local) > 1:
    _say('all_reduce', measure_all_reduce(local))
  _say('clocks', clocks_under_load(local, min(rates)))


def main() -> None:
  """Measures what the first argument of the command says, see the top of this file."""
  if sys.argv[1] == 'disk':
    _say('disk', measure_disk(sys.argv[2]))
  else:
    _measure_jax()


if __name__ == '__main__':
  main()
