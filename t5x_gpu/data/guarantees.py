"""What the log says of the data of a run: what is guaranteed of its order, and what that costs."""

from collections.abc import Mapping
from typing import Any

STREAMING = ('streaming: the global batch at step t depends on (data, seed, t) alone; every '
             'process reads the whole stream')


def data_line(described: Mapping[str, Any], *, process_count: int) -> str:
  """Returns a line for the log, and a warning where each process reads what all others read.

  Args:
    described: `BatchIterator.describe()`; a user's own may say nothing of a guarantee.
    process_count: of the run.
  """
  guarantee = described.get('guarantee')
  if not guarantee:
    return ''
  lines = [f'data: {guarantee}']
  if guarantee == STREAMING and process_count > 1:
    files = [source['files'] for name, source in described.items()
             if name.startswith('source of ') and 'files' in source]
    few = f', in {min(files)} file(s) for {process_count} processes' if (
        files and min(files) < process_count) else ''
    lines.append(
        f'WARNING: each of the {process_count} processes reads and tokenises all of the text{few}. '
        'Where input_wait_fraction shows, prepare it once, whatever the number of files: '
        'python -m t5x_gpu.prepare, then MIXTURE_OR_TASK_NAME = "prepared:DIR" (docs/data.md).')
  return '\n'.join(lines)
