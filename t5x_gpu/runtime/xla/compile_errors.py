"""A step that cannot be compiled, as an error for users."""

import contextlib
import textwrap
from collections.abc import Iterator

import jax

from t5x_gpu.errors import ModelError, UserError, first_line


@contextlib.contextmanager
def compile_errors(device_kind: str) -> Iterator[None]:
  """Context that turns errors of lowering or compiling a step into ModelError.

  Args:
    device_kind: kind of the devices to compile for.
  Raises:
    ModelError: a kernel cannot be lowered, or XLA cannot compile the step.
  """
  try:
    yield
  except UserError:
    raise
  except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as e:
    if 'RESOURCE_EXHAUSTED' in str(e):
      raise
    reason = textwrap.shorten(first_line(e), 160, placeholder=' ...')
    raise ModelError(
      f'The training step cannot be compiled for {device_kind}: {reason}',
      fix='If it names tiles, let the tokens of a GPU be a multiple of 128: change the lengths or '
      "the batch. If it names a kernel, set TransformerConfig.attention = 'chunked'.",
      parameters=('TASK_FEATURE_LENGTHS', 'BATCH_SIZE', 'TransformerConfig.attention'),
      docs='plan.md#a-gpu-that-you-do-not-have',
    ) from e
