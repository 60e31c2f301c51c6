"""Have all processes lowered the same step? XLA compiles it on each, and trusts that they have.

This sees what digests of code cannot: an environment variable, other GPUs, a module that reads a
file of its host.
"""

import re

import jax

from t5x_gpu.runtime import distributed

# Differs between processes that compute the same: addresses, numbers of Python callbacks ...
_ADDRESSES = re.compile(r'0x[0-9a-f]{6,16}\b|(?<=index = )\d+(?= : ui64)|(?<=")\d{8,}(?=")')
# ... and compiled kernels (binary strings), which carry the paths of their sources.
_STRINGS = re.compile(r'"[^"\n]*"')


def comparable_text(lowered: jax.stages.Lowered) -> str:
  """Returns the lowered step as text, without what may differ between processes."""
  text = _ADDRESSES.sub('_', lowered.as_text())
  return _STRINGS.sub(lambda string: '"_"' if r'\00' in string[0] else string[0], text)


def check_same_step(lowered: jax.stages.Lowered) -> None:
  """Raises ConfigError, on all processes, with the first difference, unless all lowered the same.

  Only digests travel. It takes 0.04 s per megabyte of text, of which a model with its layers in a
  scan has less than one.
  """
  if distributed.process_count() > 1:
    distributed.assert_equal_across_hosts(
      comparable_text(lowered),
      'The lowered training step',
      fix='Compare the environment of the hosts (env | sort), their GPUs (nvidia-smi -L) and '
      'what your own modules read: the code and the versions are the same.',
    )
