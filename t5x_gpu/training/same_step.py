"""Checks that all processes lowered the same training step; each process compiles its own.

This finds differences that digests of the code do not show: an environment variable, other GPUs, a
module that reads a file of its host.
"""

import re

import jax

from t5x_gpu.runtime import distributed

# May differ between processes with the same step: addresses, numbers of Python callbacks ...
_ADDRESSES = re.compile(r'0x[0-9a-f]{6,16}\b|(?<=index = )\d+(?= : ui64)|(?<=")\d{8,}(?=")')
# ... and compiled kernels (binary strings), which contain paths of source files.
_STRINGS = re.compile(r'"[^"\n]*"')


def comparable_text(lowered: jax.stages.Lowered) -> str:
  """Returns the lowered step as text, without parts that may differ between processes."""
  text = _ADDRESSES.sub('_', lowered.as_text())
  return _STRINGS.sub(lambda string: '"_"' if r'\00' in string[0] else string[0], text)


def check_same_step(lowered: jax.stages.Lowered) -> None:
  """Raises ConfigError on all processes, with the first difference, if their steps differ.

  Processes exchange digests only. This takes 0.04 s per megabyte of text; a model with its layers
  in a scan has less than one megabyte.
  """
  if distributed.process_count() > 1:
    distributed.assert_equal_across_hosts(
      comparable_text(lowered),
      'The lowered training step',
      fix='Compare the environment of the hosts (env | sort), their GPUs (nvidia-smi -L) and '
      'the files that your modules read. Code and versions are the same.',
    )
