"""XLA's flags while tests run, here and in the processes that tests start; imports no jax."""

import importlib.metadata
import os

_DEVICES = '--xla_force_host_platform_device_count'

# Programs of tests run for milliseconds and compile for seconds: a fifth of that without the passes
# of LLVM that make them fast, and with XLA's older emitters, which jaxlib 0.10 still has. One LLVM
# module in place of 32 takes a fifth less again: each core already has a worker of tests.
QUICK_COMPILES = [
  '--xla_backend_optimization_level=0',
  '--xla_llvm_disable_expensive_passes=true',
  '--xla_cpu_parallel_codegen_split_count=1',
]
if importlib.metadata.version('jaxlib').startswith('0.10.'):
  QUICK_COMPILES.append('--xla_cpu_use_fusion_emitters=false')


def set_default_flags() -> None:
  """Sets eight fake devices, and quick compiles unless the environment has flags."""
  os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '1')  # frames; each costs tracing time
  flags = os.environ.get('XLA_FLAGS', '').split() or QUICK_COMPILES
  if not any(flag.startswith(_DEVICES) for flag in flags):
    flags = [f'{_DEVICES}=8', *flags]
  os.environ['XLA_FLAGS'] = ' '.join(flags)


def xla_flags(num_devices: int = 1) -> str:
  """Returns the flags of this session for a process with `num_devices` fake devices."""
  same = [flag for flag in os.environ['XLA_FLAGS'].split() if not flag.startswith(_DEVICES)]
  return ' '.join([f'{_DEVICES}={num_devices}', *same])
