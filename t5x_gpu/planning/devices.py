"""How many GPUs a plan is for, and devices that stand for them: simulated CPUs."""

import os
import re
from collections.abc import MutableMapping
from typing import Optional

import jax

from t5x_gpu.errors import ConfigError
from t5x_gpu.partitioning.mesh.mesh_problems import divisors
from t5x_gpu.runtime.cluster.topology import Device, Topology

GPUS_PER_HOST = 8
_COUNT_FLAG = '--xla_force_host_platform_device_count'


def topology_of(
  *,
  gpus: Optional[int] = None,
  gpus_per_host: Optional[int] = None,
  devices: Optional[int] = None,
  hosts: Optional[int] = None,
) -> Topology:
  """Returns the topology of the flags; by default one host with 8 GPUs.

  Args:
    gpus, gpus_per_host: all GPUs, and those of a host (8, or all if there are fewer).
    devices, hosts: all GPUs, and the hosts that share them equally (1).
  Raises:
    ConfigError: both ways at once, or hosts that differ in their GPUs.
  """
  if (gpus, gpus_per_host) != (None, None) and (devices, hosts) != (None, None):
    raise ConfigError(
      'The GPUs are given twice: by --gpus or --gpus_per_host, and by --devices or --hosts.',
      fix='--gpus=64 --gpus_per_host=8 and --devices=64 --hosts=8 mean the same: write one.',
    )
  if (devices, hosts) != (None, None):
    return _by_hosts(8 if devices is None else devices, 1 if hosts is None else hosts)
  gpus = GPUS_PER_HOST if gpus is None else gpus
  each = min(GPUS_PER_HOST, max(gpus, 1)) if gpus_per_host is None else gpus_per_host
  if gpus < 1 or each < 1 or gpus % each:
    legal = ', '.join(map(str, divisors(gpus))) if gpus > 0 else ''
    near = [n for n in (gpus - gpus % each, gpus + each - gpus % each) if n > 0] if each > 0 else []
    raise ConfigError(
      f'--gpus={gpus} cannot be divided into hosts of --gpus_per_host={each}.',
      fix=f'--gpus_per_host may be {legal}; or ask for {" or ".join(map(str, near)) or 8} GPUs.'
      if gpus > 0
      else 'Give --gpus of at least 1.',
      docs='plan.md#flags',
    )
  reason = f'--gpus={gpus} --gpus_per_host={each}'
  return Topology(gpus // each, each, reason=reason)


def _by_hosts(num_devices: int, num_hosts: int) -> Topology:
  if num_devices < 1 or num_hosts < 1 or num_devices % num_hosts:
    legal = divisors(num_devices) if num_devices > 0 else []
    raise ConfigError(
      f'--devices={num_devices} cannot be divided among --hosts={num_hosts}.',
      fix=f'--devices is the number of all GPUs; --hosts may be {", ".join(map(str, legal))}.'
      if num_devices > 0
      else 'Give --devices of at least 1.',
    )
  reason = f'--devices={num_devices} --hosts={num_hosts}'
  return Topology(num_hosts, num_devices // num_hosts, reason=reason)


def simulated_devices(
  number: int, *, environ: MutableMapping[str, str] = os.environ
) -> list[Device]:
  """Returns simulated CPU devices; call it before JAX starts a backend.

  Args:
    number: how many.
    environ: os.environ; its XLA_FLAGS are changed until the backend has started.
  Raises:
    ConfigError: JAX has started with fewer.
  """
  before = environ.get('XLA_FLAGS')
  flags = re.sub(rf'{_COUNT_FLAG}=\S*', '', before or '')
  asked = re.findall(rf'{_COUNT_FLAG}=(\d+)', before or '')
  count = max(number, *map(int, asked)) if asked else number
  environ['XLA_FLAGS'] = f'{flags} {_COUNT_FLAG}={count}'.strip()
  jax.config.update('jax_platforms', 'cpu')
  try:
    devices = jax.devices()
  finally:
    if before is None:
      del environ['XLA_FLAGS']
    else:
      environ['XLA_FLAGS'] = before
  if len(devices) < number:
    raise ConfigError(
      f'{number} GPUs: JAX has already started with {len(devices)} devices.',
      fix=f'Start the process with XLA_FLAGS={_COUNT_FLAG}={number}.',
    )
  return devices[:number]
