"""The parameters of a checkpoint, read and written in slices.

The files are in Orbax's format (zarr arrays in one OCDBT store). A converter writes parameters and
step, and optimizer state if the other format has it. Code that reads the checkpoints of runs also
reads converted ones.
"""

import contextlib
import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Optional

import jax
import numpy as np

from t5x_gpu.checkpoint.arrays import HostSums, check_restored, checksums_entry
from t5x_gpu.checkpoint.manifest import WITHOUT_DATA, describe_arrays, make_manifest
from t5x_gpu.checkpoint.store import (
  BLOSC,
  Place,
  Source,
  StateReader,
  StateWriter,
  empty_leaves,
  read_array,
)
from t5x_gpu.errors import CheckpointError, did_you_mean, listed
from t5x_gpu.partitioning.layer_stacks import is_reference
from t5x_gpu.partitioning.trees import Tree, as_tree, by_name
from t5x_gpu.storage.json_schema import Json
from t5x_gpu.storage.paths import AnyPath

PARAMS_ONLY = 'params_only'


class ParamsReader(StateReader):
  """The parameters of a checkpoint; see `name_table.Tensors` for the attributes.

  Args:
    source, step, step_setting: see `StateReader`.
  Raises:
    CheckpointError: no checkpoint exists, or it cannot be read.
  """

  def __init__(self, source: Source, *, step: Optional[int] = None, step_setting: str = ''):
    super().__init__(source, step=step, prefix='params/', step_setting=step_setting)

  def read(self, path: str, start: int = 0, stop: Optional[int] = None) -> np.ndarray:
    """Returns rows `start` to `stop` of a parameter."""
    return self.read_at(path, (slice(start, self.shapes[path][0] if stop is None else stop),))


def read_params(source: Source, abstract_params: Tree, *, step: Optional[int] = None) -> Tree:
  """Returns the parameters of a checkpoint on the devices of `abstract_params`.

  Each process reads the parts that its devices hold. Converted checkpoints, which have only
  parameters, can be read too.

  Args:
    source: a checkpoint, MODEL_DIR, or the folder of one checkpoint.
    abstract_params: tree of ShapeDtypeStructs with shardings (`Program.abstract_saved.params`);
      layers in the order of the model (`Program.in_run_form` comes after).
    step: step of the checkpoint; None for the latest.
  Raises:
    CheckpointError: no such checkpoint, or its parameters differ; lists all differences.
  """
  reader = ParamsReader(source, step=step)
  want = by_name(abstract_params)
  problems = tree_problems(
    {name: a.shape for name, a in want.items()},
    reader.shapes,
    wanted_by='the model',
    had_by='the checkpoint',
  )
  if problems:
    raise CheckpointError(
      f'{reader.path} does not match the parameters of this model:\n  ' + '\n  '.join(problems),
      fix='Use the gin file that the checkpoint was trained with.',
      parameters=('MODEL_DIR',),
    )

  params = {name: read_array(reader, name, a) for name, a in want.items()}
  check_params(reader, params)
  return as_tree(params)


def check_params(reader: ParamsReader, params: Mapping[str, jax.Array]) -> None:
  """Raises CheckpointError if parameters differ from the saved ones; see `check_restored`.

  Args:
    reader: reader of the checkpoint that the parameters come from.
    params: '/'-joined path in the checkpoint -> parameter, on any mesh.
  """
  try:
    check_restored(dict(params), reader.manifest, step=reader.step, prefix='params/')
  except ValueError as e:
    raise CheckpointError(
      f'{reader.path} is damaged: {e}.',
      fix='Use another checkpoint, or copy this one again. All of its arrays '
      f'are checked by\npython -m t5x_gpu.checkpoint verify {shlex.quote(str(reader.path))}',
      parameters=('MODEL_DIR',),
      docs='checkpoints.md#checksums',
    ) from e


def tree_problems(
  want: Mapping[str, Sequence[int]],
  have: Mapping[str, Sequence[int]],
  *,
  wanted_by: str,
  had_by: str,
  unused: Collection[str] = (),
) -> list[str]:
  """Returns a line per tensor that is missing (with the closest names), left over or has another
  shape, at most 8 lines of each kind; [] if nothing differs.

  A reference model (models/dpo.py) may be left over.

  Args:
    want, have: name -> shape.
    wanted_by, had_by: who wants and has them, for the text.
    unused: further names that may be meant by a missing one.
  """
  over = sorted(n for n in have.keys() - want.keys() if not is_reference(n))
  meant = [*over, *unused]
  missing = [
    f'missing: {n} {list(want[n])}.{did_you_mean(n, meant, limit=2)}'
    for n in sorted(want.keys() - have.keys())
  ]
  left_over = [f'left over: {n} {list(have[n])}.' for n in over]
  changed = [
    f'{n}: {list(have[n])} in {had_by}, {list(want[n])} in {wanted_by}.'
    for n in sorted(want.keys() & have.keys())
    if tuple(want[n]) != tuple(have[n])
  ]
  return [line for kind in (changed, missing, left_over) for line in listed(kind, 8)]


class ParamsWriter(contextlib.AbstractContextManager):
  """Writes `folder`/checkpoint_<step> without a position in the data; complete after `close`.

  Args:
    folder: the checkpoint's parent; exists.
    step: updates done.
    shapes: '/'-joined path -> shape, all float32.
    chunks: '/'-joined path -> shape of a chunk, which `write` should fill.
    about: JSON-ready, for the manifest: where the parameters come from.
    compress: pays off if values were narrower than float32, so that half of the bytes are zero.
    opt_state: tree of ShapeDtypeStructs of the optimizer state; None for parameters only.
    opt_chunks: '/'-joined path in `opt_state` -> shape of a chunk.
  """

  def __init__(
    self,
    folder: AnyPath,
    *,
    step: int,
    shapes: Mapping[str, tuple[int, ...]],
    chunks: Mapping[str, tuple[int, ...]],
    about: Json,
    compress: bool,
    opt_state: Tree = None,
    opt_chunks: Mapping[str, tuple[int, ...]] = {},
  ):
    self._about = dict(about)
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    self._tree = {
      'step': jax.ShapeDtypeStruct((), np.int32),
      'params': as_tree(params),
      **({} if opt_state is None else {'opt_state': opt_state}),
    }
    arrays = {
      name: (tuple(shape), np.dtype(dtype))
      for name, (shape, dtype) in describe_arrays(self._tree).items()
    }
    self._writer = StateWriter(
      folder,
      step=step,
      arrays=arrays,
      compressor=BLOSC if compress else None,
      chunks={
        'step': (),
        **{f'params/{name}': chunk for name, chunk in chunks.items()},
        **{f'opt_state/{name}': chunk for name, chunk in opt_chunks.items()},
      },
    )
    self._sums = {name: HostSums(shape) for name, (shape, _) in arrays.items()}
    self._write('step', (), np.asarray(step, np.int32))

  def write(self, path: str, place: Place, value: np.ndarray) -> None:
    """Writes a part of a parameter; write each element once."""
    self._write(f'params/{path}', place, np.asarray(value, np.float32))

  def write_moment(self, path: str, place: Place, value: np.ndarray) -> None:
    """Writes a part of an array of the optimizer state; write each element once."""
    self._write(f'opt_state/{path}', place, np.asarray(value, np.float32))

  def _write(self, name: str, place: Place, value: np.ndarray) -> None:
    self._writer.write(name, place, value)
    self._sums[name].add_at(place, value)

  def close(self) -> None:
    """Writes pending data and the metadata."""
    self._writer.close(
      manifest={
        **make_manifest(self._tree, mesh_shape={}, data={}, next_batch_hash=''),
        **checksums_entry({name: str(sums) for name, sums in self._sums.items()}),
        (WITHOUT_DATA if 'opt_state' in self._tree else PARAMS_ONLY): True,
        'converted_from': self._about,
      },
      data={'iterator': ''},
      empty=empty_leaves(self._tree),
    )

  def __exit__(self, *error: object) -> None:
    if error[0] is None:
      self.close()


def num_bytes(shapes: Mapping[str, Sequence[int]]) -> int:
  """Returns the bytes of float32 arrays of these shapes."""
  return sum(4 * math.prod(shape) for shape in shapes.values())
