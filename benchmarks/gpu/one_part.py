"""Runs one part of the benchmark in this process and writes its rows as they come.

python -m benchmarks.gpu.one_part ceilings --rows ROWS.json [--results RESULTS.json] \
  [--tuned FOLDER] [--small]
"""

import argparse
import importlib
import json
import os
import pathlib
import sys
import traceback

import jax

from benchmarks.gpu.parts import PARTS, Missing, Row, Skipped
from t5x_gpu.errors import first_line
from t5x_gpu.runtime.xla import flags, programs
from t5x_gpu.storage.files import atomic_write

DONE, MISSING, SKIPPED, NO_GPU = 0, 3, 4, 5  # exit codes; any other is a failure


def main() -> int:
  """Measures; the last line that it prints is the error."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('part', choices=[part.name for part in PARTS])
  parser.add_argument('--rows', required=True, type=pathlib.Path, help='file to write the rows to')
  parser.add_argument('--results', type=pathlib.Path, help='file with the results of other parts')
  parser.add_argument('--tuned', type=pathlib.Path, help='folder of tuned block sizes')
  parser.add_argument('--small', action='store_true', help='sizes for a CPU')
  args = parser.parse_args()
  (part,) = (part for part in PARTS if part.name == args.part)
  rows: list[Row] = []
  if not args.small:  # --small does not cache compiled programs
    # The folder is the runner's, in the environment; this counts what is read from it.
    programs.start_cache('gpu', num_devices=part.num_gpus, environ=os.environ)
  try:
    options = dict(part.options, small=args.small)
    if part.is_our_step:
      options['xla'] = flags.prepare_environment('default', num_gpus=part.num_gpus)
      options['results'] = args.results
    module, function = part.function.split(':')
    if not args.small and not module.startswith('torch') and (reason := no_gpu()):
      print(reason, file=sys.stderr, flush=True)
      return NO_GPU
    if part.tokamax and args.tuned:
      # Imported here: jax must not start before the environment is set.
      print(importlib.import_module('benchmarks.gpu.tuning').load(args.tuned), flush=True)
      if part.tokamax == 'tunes':
        options['folder'] = args.tuned
    measure = getattr(importlib.import_module(f'benchmarks.gpu.{module}'), function)
    for row in measure(**options):
      rows.append(row)
      _write(args.rows, rows)
      print(json.dumps(row), flush=True)
    _write(args.rows, rows)  # a part may add to a row that it has yielded
  except (Missing, Skipped) as e:
    print(e, file=sys.stderr, flush=True)
    return MISSING if isinstance(e, Missing) else SKIPPED
  except Exception as e:
    traceback.print_exc()
    print(f'{type(e).__name__}: {first_line(e)}', file=sys.stderr, flush=True)
    return 1
  print(programs.cache_line(), flush=True)
  return DONE


def no_gpu() -> str:
  """Returns why jax cannot use a GPU here, '' if it can; starts jax."""
  try:
    jax.devices()
    return ''
  except Exception as e:  # without the plugin, jax 0.10 to 0.12 fail an assertion
    reason = f'jax {jax.__version__} finds no GPU ({first_line(e)})'
  return f"{reason}. pip install 'jax[cuda13]', or --small to try the code on the CPU."


def _write(path: pathlib.Path, rows: list[Row]) -> None:
  with atomic_write(path) as file:
    file.write_text(json.dumps(rows), encoding='utf-8')


if __name__ == '__main__':
  sys.exit(main())
