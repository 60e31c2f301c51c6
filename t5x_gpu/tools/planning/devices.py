"""The number of GPUs of a plan, and simulated CPU devices that stand in for them."""

import os
import re
from typing import Optional

import jax

from t5x_gpu.errors import ConfigError
from t5x_gpu.runtime.topology import Device, Topology

GPUS_PER_HOST = 8
# JAX creates 4,096 simulated devices and their layout in 9 s; for 16,384 ten minutes do not
# suffice.
MOST_GPUS = 4096
_COUNT_FLAG = '--xla_force_host_platform_device_count'


def topology_of(
  *,
  gpus: Optional[int] = None,
  gpus_per_host: Optional[int] = None,
  devices: Optional[int] = None,
  hosts: Optional[int] = None,
) -> Topology:
  """Returns the topology that the flags describe; by default one host with 8 GPUs.

  Args:
    gpus, devices: total number of GPUs; give one of them.
    gpus_per_host, hosts: GPUs of a host (8, or all if fewer), or number of hosts that share all
      GPUs equally; give one of them.
  Raises:
    ConfigError: both of a pair are given, or hosts would differ in their GPUs.
  """
  given = {
    '--gpus': gpus, '--devices': devices, '--gpus_per_host': gpus_per_host, '--hosts': hosts
  }  # fmt: skip
  for pair in (('--gpus', '--devices'), ('--gpus_per_host', '--hosts')):
    if None not in (values := [given[flag] for flag in pair]):
      words = ' '.join(f'{flag}={value}' for flag, value in zip(pair, values))
      raise ConfigError(
        f'The GPUs are given twice: {words}.',
        fix='--gpus=64 --gpus_per_host=8 and --devices=64 --hosts=8 mean the same: write one.',
        docs='plan.md#flags',
      )
  flag = '--gpus' if devices is None else '--devices'
  total = next((n for n in (gpus, devices) if n is not None), GPUS_PER_HOST)
  if hosts is not None:
    return _by_hosts(flag, total, hosts)
  each = min(GPUS_PER_HOST, max(total, 1)) if gpus_per_host is None else gpus_per_host
  if total < 1 or each < 1 or total % each:
    raise ConfigError(
      f'{flag}={total} cannot be divided into hosts of --gpus_per_host={each}.',
      fix=f'Give --gpus_per_host a number that divides {total}.'
      if total > 0
      else f'Give {flag} of at least 1.',
      docs='plan.md#flags',
    )
  return Topology(total // each, each, reason=f'{flag}={total} --gpus_per_host={each}')


def _by_hosts(flag: str, num_devices: int, num_hosts: int) -> Topology:
  if num_devices < 1 or num_hosts < 1 or num_devices % num_hosts:
    raise ConfigError(
      f'{flag}={num_devices} cannot be divided among --hosts={num_hosts}.',
      fix=f'{flag} is the number of all GPUs; give --hosts a number that divides it.'
      if num_devices > 0
      else f'Give {flag} of at least 1.',
      docs='plan.md#flags',
    )
  reason = f'{flag}={num_devices} --hosts={num_hosts}'
  return Topology(num_hosts, num_devices // num_hosts, reason=reason)


def simulated_devices(number: int) -> list[Device]:
  """Returns simulated CPU devices; call it before JAX starts a backend.

  Until the backend has started, XLA_FLAGS has their number.

  Raises:
    ConfigError: more than MOST_GPUS, or more devices than JAX has already started with.
  """
  if number > MOST_GPUS:
    raise ConfigError(
      f'A plan of {number:,} GPUs is too large: it simulates each of them, at most {MOST_GPUS:,}.',
      fix=f'Give a number of at most {MOST_GPUS} to --gpus.',
      docs='plan.md#flags',
    )
  before = os.environ.get('XLA_FLAGS')
  flags = re.sub(rf'{_COUNT_FLAG}=\S*', '', before or '')
  asked = re.findall(rf'{_COUNT_FLAG}=(\d+)', before or '')
  count = max(number, *map(int, asked)) if asked else number
  os.environ['XLA_FLAGS'] = f'{flags} {_COUNT_FLAG}={count}'.strip()
  jax.config.update('jax_platforms', 'cpu')
  try:
    devices = jax.devices()
  finally:
    if before is None:
      del os.environ['XLA_FLAGS']
    else:
      os.environ['XLA_FLAGS'] = before
  if len(devices) < number:
    raise ConfigError(
      f'{number} GPUs: JAX has already started with {len(devices)} devices.',
      fix=f'Start the process with XLA_FLAGS={_COUNT_FLAG}={number}.',
      docs='plan.md#flags',
    )
  return devices[:number]
