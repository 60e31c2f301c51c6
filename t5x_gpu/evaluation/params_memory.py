"""Checks that a model fits into memory for evaluation or inference, before reading or compiling.

Computes lower bounds from shapes: the parameters, their copy if a run stores them in a different
form from checkpoints, and keys and values of the prompts in a batch. For training see
training/memory.py.
"""

from typing import Any, Optional

from t5x_gpu.errors import OutOfMemoryError
from t5x_gpu.models.inference.generation import Generator
from t5x_gpu.partitioning.layout import Layout
from t5x_gpu.runtime.memory import run_limits, show
from t5x_gpu.training.program import Program
from t5x_gpu.training.summary import bytes_per_device


def check_evaluation_memory(program: Program) -> None:
  """Raises OutOfMemoryError unless the parameters fit; all processes must call it."""
  stored, saved = program.abstract_state.params, program.abstract_saved.params
  is_copied = program.is_padded or program.layout.reorders_layers
  _check(program.layout, saved, copy=bytes_per_device(stored) if is_copied else 0)


def check_inference_memory(
  params: Any, layout: Layout, *, generator: Optional[Generator] = None
) -> None:
  """Raises OutOfMemoryError unless parameters and prompts fit; all processes must call it.

  Args:
    params: shapes and shardings of the parameters.
    layout: mesh and rules.
    generator: continues prompts; None if no text is generated.
  """
  if generator is None:
    _check(layout, params)
  else:
    prompts = generator.batch_size // layout.batch_parts
    _check(layout, params, prompts=prompts, prompt_bytes=generator.prompt_bytes)


def _check(
  layout: Layout, params: Any, *, copy: int = 0, prompts: int = 0, prompt_bytes: int = 0
) -> None:
  """Raises OutOfMemoryError unless a device has room.

  Args:
    layout: mesh and rules.
    params: shapes and shardings of the parameters.
    copy: bytes of a second copy of `params` on a device.
    prompts, prompt_bytes: number of prompts on a device at a time, and bytes per prompt.
  """
  limits = run_limits(layout.mesh.local_devices, num_devices=layout.topology.num_devices)
  size, limit, more = bytes_per_device(params) + copy, limits.device, prompts * prompt_bytes
  if limit is None or size + more <= limit.bytes:
    return
  devices = layout.topology.count(layout.mesh.size)
  cache = f', keys and values of {prompts:,} prompts at least {show(more)}' if more else ''
  raise OutOfMemoryError(
    f'The parameters take {show(size)} on each of {devices}{cache}. Each has {limit}.',
    fix=_fix(layout, limit.bytes - size, prompt_bytes),
    parameters=('Partitioner.fsdp', *(('DecodingConfig.batch_size',) if more else ())),
    docs='parallelism.md#memory',
  )


def _fix(layout: Layout, room: int, prompt_bytes: int) -> str:
  """Returns what makes room: fewer prompts at one time, or parameters split further.

  Args:
    layout: mesh and rules.
    room: bytes that the parameters leave on a device.
    prompt_bytes: keys and values of one prompt.
  """
  if room < 0 or not prompt_bytes:
    return (
      'Split the parameters over more devices: Partitioner.fsdp above '
      f'{layout.mesh.shape["fsdp"]}, with zero_stage = 3.'
    )
  if room < prompt_bytes:
    return 'Set DecodingConfig.max_decode_length lower: not even one prompt fits.'
  return f'Set DecodingConfig.batch_size = {room // prompt_bytes * layout.batch_parts} or less.'
