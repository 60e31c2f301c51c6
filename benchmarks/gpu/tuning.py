"""Tunes block sizes of Tokamax's kernels for the calls of the other parts, once, and keeps them.

Tokamax times its candidates on the card. The fastest are kept in OUT/tuned, in one file per card
and version of Tokamax, which the parts that use these kernels read.
"""

import dataclasses
import importlib.metadata
import importlib.util
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import backend

from benchmarks.gpu import attention, step
from benchmarks.gpu.parts import ATTENTION, Missing, Row
from benchmarks.gpu.shapes import SHAPES
from t5x_gpu.errors import OutOfMemoryError, first_line
from t5x_gpu.layers.backends.choose import hardware
from t5x_gpu.layers.backends.tokamax_internals import library, listed_untuned
from t5x_gpu.storage.files import atomic_write
from t5x_gpu.training.memory import check_memory

OPERANDS = ('q', 'k', 'lhs', 'rhs')


def load(folder: pathlib.Path) -> str:
  """Makes Tokamax use the block sizes kept in `folder`, and returns a line for the log."""
  if importlib.util.find_spec('tokamax') is None:
    return 'Tokamax is not installed: no kernel to tune'
  kept = _kept(folder)
  for call, times in kept:
    _use(call, times)
  return f'{len(kept)} kernels have block sizes that were tuned before'


def measure_steps(
  names: Sequence[str], *, folder: pathlib.Path, small: bool = False
) -> Iterator[Row]:
  """Tunes the kernels of training steps, and yields a row for each.

  The batch is the largest one that a lower bound of its memory admits.

  Args:
    names: of SHAPES.
    folder: for the tuned block sizes.
    small: sizes for a CPU.
  Raises:
    Missing: there are no kernels to tune.
  """
  _check()
  for name in names:
    shape = SHAPES[name].small() if small else SHAPES[name]
    model = step.model_of(shape, 'bfloat16')
    for rows in shape.rows:
      run = step.run_of(model, shape, rows)
      program = step.program_of(run)
      try:
        check_memory(program)
      except OutOfMemoryError:
        continue
      with listed_untuned() as calls:
        program.train_step.trace(program.abstract_state, program.abstract_batch)
      for call in calls:
        yield {'for': name, **tune(call, folder)}
      break


def measure_attention(*, folder: pathlib.Path, small: bool = False) -> Iterator[Row]:
  """Tunes the kernels of attention alone; see `measure_steps`."""
  _check()
  for length in ATTENTION:
    shape = attention.shape_of(length, small=small)
    segments = attention.segments_of(shape[1], packed=False)
    for name, make in attention.backends().items():
      try:
        with listed_untuned() as calls:
          for call in attention.calls(make, shape, segments):
            jax.jit(call.function).trace(*call.arguments)
      except Exception as e:  # a kernel that does not serve this size has nothing to tune
        print(f'{name}, rows of {length}: {type(e).__name__}: {first_line(e)}', flush=True)
        continue
      for call in calls:
        yield {'for': f'attention_{length}', **tune(call, folder)}


def _check() -> None:
  if importlib.util.find_spec('tokamax') is None:
    raise Missing('tokamax is not installed')
  if hardware().platform != 'gpu':
    raise Missing("Tokamax's kernels run on GPUs")


def tune(call: Any, folder: pathlib.Path) -> Row:
  """Times the block sizes of one `tokamax.BoundArguments`, keeps the fastest, and returns a row."""
  shapes = [
    f'{name} {list(call.arguments[name].shape)}' for name in OPERANDS if name in call.arguments
  ]
  row: Row = {'kernel': type(call.op).__name__, 'arguments': ', '.join(shapes)}
  try:
    # Tokamax would also keep the results of a call that fails with all sizes, and stop at it.
    results = _with_values(call).autotune(cache_results=False)
  except Exception as e:  # costs its own row only
    return row | {'error': f'{type(e).__name__}: {first_line(e)}'[:200]}
  milliseconds = {
    config: time.median_evaluation_time_ms
    for config, time in results.items()
    if isinstance(time, library().BenchmarkData)
  }
  row |= {'tried': len(results), 'failed': len(results) - len(milliseconds)}
  if not milliseconds:
    reason = first_line(next(iter(results.values())))
    return row | {'error': f'all block sizes fail, e.g. {reason}'[:200]}
  _keep(call, results.prune(), folder)
  best, default = results.fastest_config, milliseconds.get(call.heuristics_config)
  return row | {
    'default_seconds': default and default / 1e3,
    'seconds': milliseconds[best] / 1e3,
    'config': str(best),
  }


def _with_values(call: Any) -> Any:
  """Returns `call` with values of the integers that decide how much a kernel computes.

  Tokamax draws random ones. Here every query sees all keys but later ones, and groups are equal.
  """
  arguments = dict(call.arguments)
  if (mask := arguments.get('mask')) is not None:
    ends = {'k_start': 0, 'k_end': arguments['k'].shape[-3]}
    shapes = {name: getattr(mask, name) for name in ends}
    arrays = {
      name: jnp.full(of.shape, ends[name], of.dtype)
      for name, of in shapes.items()
      if of is not None
    }
    arguments['mask'] = dataclasses.replace(mask, **arrays)
  if isinstance(sizes := arguments.get('group_sizes'), jax.ShapeDtypeStruct):
    (groups,), rows = sizes.shape, arguments['lhs'].shape[0]
    arguments['group_sizes'] = jnp.full(groups, rows // groups, sizes.dtype)
  return call.replace(arguments=arguments)


def _keep(call: Any, times: Any, folder: pathlib.Path) -> None:
  """Uses and writes the times of a call by its block sizes."""
  kept = (*_kept(folder), (call, times))
  _use(call, times)
  folder.mkdir(parents=True, exist_ok=True)
  with atomic_write(_file(folder)) as path:
    path.write_text(library().AutotuningResult(_card(), kept).dumps(), encoding='utf-8')


def _kept(folder: pathlib.Path) -> Sequence[tuple[Any, Any]]:
  """Returns the calls of the kept file, with their times by block sizes."""
  path = _file(folder)
  if not path.exists():
    return ()
  return library().AutotuningResult.loads(path.read_text(encoding='utf-8')).data


def _use(call: Any, times: Any) -> None:
  # An AutotuningResult as a context does not find operations without a vjp, such as our forward
  # pass (Tokamax 0.0.12 to 0.0.17).
  call.op.get_autotuning_cache(_card())[call.autotuning_cache_key] = times


def _file(folder: pathlib.Path) -> pathlib.Path:
  return (
    folder / f'{_card().replace(" ", "_")}-tokamax-{importlib.metadata.version("tokamax")}.json'
  )


def _card() -> str:
  return backend.get_default_device().device_kind
