"""Whether the log lines of all libraries are wanted."""

import os


def is_verbose() -> bool:
  """Returns whether T5X_GPU_VERBOSE asks for the log lines of all libraries."""
  return os.environ.get('T5X_GPU_VERBOSE', '') not in ('', '0')
