"""What a run without a checkpoint of its own is to start from: another run's, or a converted one.

`RestoreConfig` says it in gin. Names and shapes are compared here, before anything compiles.

The first state of a run: its own checkpoint, another run's, or parameters of either kind.

Each process reads the parts of the parameters that its devices hold, whatever mesh wrote them.
"""

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Optional

import flax.traverse_util
import jax
import numpy as np

from t5x_gpu.checkpoint.arrays.params_files import (
  PARAMS_ONLY,
  ParamsReader,
  check_params,
  tree_problems,
)
from t5x_gpu.checkpoint.checkpointer import Restored, restore_from
from t5x_gpu.checkpoint.local.local_tier import LocalTier, NoLocalTier
from t5x_gpu.checkpoint.local.promotion import promote_newer
from t5x_gpu.checkpoint.manifest import STARTED_FROM, differences
from t5x_gpu.checkpoint.model_dir import Saved, read_saved
from t5x_gpu.checkpoint.remote_checkpointer import AnyCheckpointer
from t5x_gpu.checkpoint.storage.paths import AnyPath, as_path
from t5x_gpu.data.batches import BatchIterator, batch_hash
from t5x_gpu.data.same_data import check_next_batch
from t5x_gpu.data.sources.source_files import NAME, NOT_COMPARED, SourceFiles
from t5x_gpu.errors import CheckpointError, ConfigError, did_you_mean
from t5x_gpu.runtime.distributed import is_main_process
from t5x_gpu.training.program import Program
from t5x_gpu.training.train_state import TrainState

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Start:
  """What a run starts from; without a `reader`, nothing but its seed, or its own checkpoint.

  Attributes:
    reader: of the checkpoint.
    taken: path of a parameter -> its path in the checkpoint.
    saved: to 'resume', what the checkpoint says of itself.
    origin: for the manifests of the run: where its first state comes from; JSON-ready.
    text: a table for the log.
  """

  reader: Optional[ParamsReader] = None
  taken: Mapping[str, str] = dataclasses.field(default_factory=dict)
  saved: Optional[Saved] = None
  origin: Optional[Mapping[str, Any]] = None
  text: str = ''

  @property
  def path(self) -> str:
    """Folder of the checkpoint; empty without one."""
    return '' if self.reader is None else str(self.reader.path)

  def origin_of(self, restored: Optional[Restored]) -> Optional[Mapping[str, Any]]:
    """Returns where the run's first state came from, if its own checkpoint was `restored`."""
    return self.origin or (restored and restored.manifest.get(STARTED_FROM))

  def first_state(
    self,
    checkpointer: AnyCheckpointer,
    program: Program,
    fresh: Optional[TrainState],
    local: LocalTier | NoLocalTier = NoLocalTier(),
  ) -> tuple[TrainState, Optional[Restored]]:
    """Returns (the state of the next step, the checkpoint that holds all of it if there is one).

    Args:
      checkpointer: of the run, whose own latest checkpoint comes first.
      program: of the run.
      fresh: its initial state, used up; None to compute it if need be.
      local: of the run, whose steps stand in for a checkpoint that proves damaged.
    Raises:
      CheckpointError: nothing can be read.
    """
    restored = checkpointer.restore_latest(
      program.abstract_state,
      promote=functools.partial(promote_newer, local, target=program.abstract_state),
    )
    if restored is None and self.saved is not None:
      restored = restore_from(self.reader.path, self.saved, program.abstract_state)
    if restored is not None:
      return program.in_run_order(restored.state), restored
    return self._filled(fresh or program.init(), program), None

  def _filled(self, state: TrainState, program: Program) -> TrainState:
    """Returns a fresh state with the parameters of the checkpoint; `state` is used up."""
    if not self.taken:
      return state
    state = program.in_model_order(state)
    flat = flax.traverse_util.flatten_dict(state.params, sep='/')
    for name, source in self.taken.items():
      flat[name].delete()  # so that no more than one parameter is there twice
      flat[name] = self._read(source, flat[name])
    check_params(self.reader, {source: flat[name] for name, source in self.taken.items()})
    params = flax.traverse_util.unflatten_dict(flat, sep='/')
    return program.in_run_order(state.replace(params=params))

  def _read(self, source: str, like: jax.Array) -> jax.Array:
    parts: dict[str, np.ndarray] = {}

    def part(place: tuple[slice, ...]) -> np.ndarray:
      if str(place) not in parts:  # several devices may hold the same
        parts[str(place)] = self.reader.read_at(source, place).astype(like.dtype, copy=False)
      return parts[str(place)]

    try:
      return jax.make_array_from_callback(like.shape, like.sharding, part)
    except (ValueError, OSError) as e:
      raise CheckpointError(
        f'{source} of {self.reader.path} cannot be read: {str(e).splitlines()[0][:300]}',
        fix='Copy the checkpoint again, or name another: RestoreConfig.step.',
        parameters=('RestoreConfig.path', 'RestoreConfig.step'),
      ) from e


def open_sources(data: BatchIterator, folder: AnyPath, *, resumed: bool) -> SourceFiles:
  """Returns the files that `data` reads; on process 0 alone, and none for data without files.

  Args:
    data: of the run.
    folder: MODEL_DIR, or the checkpoint of another run that this one goes on from.
    resumed: compare the files with the record in `folder`.
  Raises:
    DataError: a file has changed since that record was written, or cannot be read.
  """
  if not hasattr(data, 'source_files') or not is_main_process():
    return SourceFiles({})
  files = data.source_files()
  if resumed and files.files:
    path = (folder.parent if (folder / 'manifest').is_dir() else folder) / NAME
    try:
      files.check(path.read_bytes(), where=str(path))
    except FileNotFoundError:
      _log.warning('%s does not exist. %s This run writes a new one.', path, NOT_COMPARED)
    except OSError as e:
      _log.warning('%s cannot be read: %s. %s', path, e.strerror, NOT_COMPARED)
  return files


def resume_data(data: BatchIterator, *, data_state: bytes, manifest: Mapping[str, Any]) -> None:
  """Puts the data where a checkpoint left it; raises DataError if it is not the same data."""
  data.set_state(data_state)
  check_next_batch(
    saved_hash=manifest['next_batch_hash'],
    hash_now=batch_hash(data.peek()),
    saved=manifest['data'],
    now=data.describe(),
  )


MODES = {
  'resume': 'the whole state: parameters, optimizer, step, and where the data stands',
  'warm_start': 'all parameters; the optimizer, the step and the data start anew',
  'partial': 'the parameters that `pattern` names; everything else starts anew',
}
_NAMED = 8  # parameters that an error lists


@dataclasses.dataclass(frozen=True)
class RestoreConfig:
  """What a run starts from while its MODEL_DIR has no checkpoint.

  Attributes:
    path: MODEL_DIR of another run, one of its checkpoints, or what t5x_gpu.convert wrote.
    mode: a key of `MODES`.
    pattern: for 'partial', a regular expression that matches the whole path of each parameter to
      take: r'(token_embedder|layers)/.*'.
    assignment_map: pairs (regular expression, replacement) for parameters that have another path in
      the checkpoint: (r'layers/(.*)', r'encoder/layers/\\1'). The first that matches counts.
    step: which checkpoint; None for the latest.
  """

  path: str
  mode: str = 'warm_start'
  pattern: Optional[str] = None
  assignment_map: Sequence[tuple[str, str]] = ()
  step: Optional[int] = None

  def __post_init__(self) -> None:
    if self.mode not in MODES:
      raise ConfigError(
        f'RestoreConfig.mode = {self.mode!r}.{did_you_mean(self.mode, MODES)}',
        fix='Choose one of\n' + '\n'.join(f'  {mode!r}: {what}' for mode, what in MODES.items()),
        parameters=('RestoreConfig.mode',),
        docs='finetune.md#what-a-run-starts-from',
      )
    if (self.pattern is not None) != (self.mode == 'partial'):
      raise ConfigError(
        f'RestoreConfig.mode = {self.mode!r} with pattern = {self.pattern!r}.',
        fix="Give a pattern together with mode = 'partial', and only then.",
        parameters=('RestoreConfig.mode', 'RestoreConfig.pattern'),
        docs='finetune.md#what-a-run-starts-from',
      )
    if self.mode == 'resume' and self.assignment_map:
      raise ConfigError(
        "RestoreConfig.mode = 'resume' takes the state of the same model: there is "
        'nothing to assign.',
        fix='Leave RestoreConfig.assignment_map out.',
        parameters=('RestoreConfig.assignment_map',),
        docs='finetune.md#what-a-run-starts-from',
      )
    for name, pattern in (
      ('pattern', self.pattern or ''),
      *(('assignment_map', pair[0]) for pair in self.assignment_map),
    ):
      try:
        re.compile(pattern)
      except re.error as e:
        raise ConfigError(
          f'RestoreConfig.{name}: {pattern!r} is no regular expression: {e}.',
          fix='See docs.python.org/3/library/re.html.',
          parameters=(f'RestoreConfig.{name}',),
        ) from e


def plan_start(
  config: Optional[RestoreConfig], program: Program, model: Any, *, saved: Optional[Saved]
) -> Start:
  """Returns what the run starts from, after comparing names and shapes; no array is read.

  Args:
    config: None to start from the seed.
    program: of the run.
    model: if it has `is_adapter(path)`, a checkpoint may lack the parameters for which it is true.
    saved: the run's own checkpoint, which wins.
  Raises:
    CheckpointError: there is no such checkpoint, or it does not have what is asked of it.
  """
  if config is None:
    if saved is None:
      _warn_of_frozen(program, ())
    return Start()
  if saved is not None:
    return Start(
      text=f'RestoreConfig.path = {config.path!r} plays no part any more: MODEL_DIR has '
      f'checkpoint_{saved.step}.'
    )
  reader = _open(config)
  if config.mode == 'resume':
    text = f'Starting from {reader.path}: {MODES["resume"]}.'
    return Start(
      reader,
      origin=_origin(config, reader),
      text=text,
      saved=_whole(reader, program.abstract_state),
    )
  want = {
    name: tuple(a.shape)
    for name, a in flax.traverse_util.flatten_dict(program.abstract_state.params, sep='/').items()
  }
  may_lack = getattr(model, 'is_adapter', lambda path: False)
  taken = _assigned(config, want)
  taken = {
    name: source for name, source in taken.items() if source in reader.shapes or not may_lack(name)
  }
  _check(config, reader, want, taken, may_lack)
  _warn_of_frozen(program, taken)
  return Start(
    reader, taken, origin=_origin(config, reader), text=_table(config, reader, want, taken)
  )


def _origin(config: RestoreConfig, reader: ParamsReader) -> dict[str, Any]:
  return {
    'checkpoint': str(reader.path),
    'step': reader.step,
    'mode': config.mode,
    'pattern': config.pattern,
    'assignment_map': [list(pair) for pair in config.assignment_map],
  }


def _warn_of_frozen(program: Program, taken: Container[str]) -> None:
  """Says which parameters would stay for ever what chance has made of them."""
  _, frozen = program.trained.split(program.abstract_state.params)
  random = [n for n in flax.traverse_util.flatten_dict(frozen, sep='/') if n not in taken]
  if random and jax.process_index() == 0:
    _log.warning(
      '%d parameters are not trained, and start from no checkpoint: %s%s. Set '
      'train.initialize_from (docs/finetune.md).',
      len(random),
      ', '.join(random[:_NAMED]),
      ', ...' if len(random) > _NAMED else '',
    )


def _open(config: RestoreConfig) -> ParamsReader:
  path = as_path(config.path, parameter='RestoreConfig.path')
  try:
    return ParamsReader(path, step=config.step)
  except CheckpointError as e:
    other = any((path / name).exists() for name in ('config.json', 'checkpoint', 'state/target'))
    raise CheckpointError(
      f'RestoreConfig.path: {e.what}',
      fix=(
        f'It looks like a checkpoint of another program. Convert it first:\n'
        f'  python -m t5x_gpu.convert --from={path} --to=NEW_FOLDER'
      )
      if other
      else e.fix.replace('--step names one', 'set RestoreConfig.step'),
      parameters=('RestoreConfig.path', 'RestoreConfig.step'),
      docs='finetune.md#what-a-run-starts-from',
    ) from e


def _whole(reader: ParamsReader, target: TrainState) -> Saved:
  """Returns what the checkpoint says of itself, if it holds all of `target`."""
  what = f"RestoreConfig.mode = 'resume', and {reader.path} holds "
  fix = "RestoreConfig.mode = 'warm_start' takes the parameters alone."
  if reader.manifest.get(PARAMS_ONLY):
    raise CheckpointError(
      f'{what}parameters only: no optimizer, no data.',
      fix=fix,
      parameters=('RestoreConfig.mode',),
      docs='finetune.md#what-a-run-starts-from',
    )
  different = differences(reader.manifest, target)
  if different:
    raise CheckpointError(
      f'{what}another model or optimizer:\n  ' + '\n  '.join(different),
      fix=fix,
      parameters=('RestoreConfig.path', 'RestoreConfig.mode'),
      docs='finetune.md#what-a-run-starts-from',
    )
  return read_saved(reader.path.parent, reader.step)


def _assigned(config: RestoreConfig, want: Mapping[str, Sequence[int]]) -> dict[str, str]:
  """Returns the parameters that are asked of the checkpoint -> their paths there."""
  names = [n for n in want if config.pattern is None or re.fullmatch(config.pattern, n)]
  if not names:
    raise _matches_nothing('pattern', config.pattern, want)
  used, taken = set(), {}
  for name in names:
    taken[name] = name
    for pattern, replacement in config.assignment_map:
      match = re.fullmatch(pattern, name)
      if match:
        used.add(pattern)
        taken[name] = match.expand(replacement)
        break
  for pattern, _ in config.assignment_map:
    if pattern not in used:
      raise _matches_nothing('assignment_map', pattern, names)
  return taken


def _matches_nothing(
  parameter: str, pattern: str, names: Sequence[str] | Mapping[str, Any]
) -> CheckpointError:
  names = list(names)
  plain = re.sub(r'\\.|[^\w/]', '', pattern)
  listed = ', '.join(names[:_NAMED]) + (
    f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''
  )
  return CheckpointError(
    f'RestoreConfig.{parameter}: {pattern!r} matches none of {len(names)} parameters.'
    + did_you_mean(plain, names),
    fix=f"It must match a whole path, as r'layers/.*' does. The paths are {listed}.",
    parameters=(f'RestoreConfig.{parameter}',),
    docs='finetune.md#what-a-run-starts-from',
  )


def _check(
  config: RestoreConfig,
  reader: ParamsReader,
  want: Mapping[str, Sequence[int]],
  taken: Mapping[str, str],
  may_lack: Callable[[str], bool],
) -> None:
  """Raises CheckpointError unless the checkpoint has what is asked of it."""
  sources = set(taken.values())
  have = {
    name: shape
    for name, shape in reader.shapes.items()
    if config.mode == 'warm_start' or name in sources
  }
  asked = {source: want[name] for name, source in taken.items()}
  problems = tree_problems(asked, have, wanted_by='this model', had_by='the checkpoint')
  if config.mode == 'partial':  # the closest names may be of parameters that are not asked for
    problems = [
      p
      + (
        did_you_mean(p.split()[1], reader.shapes.keys() - sources, limit=2)
        if p.startswith('missing: ')
        else ''
      )
      for p in problems
    ]
  if not problems:
    if not taken:
      raise CheckpointError(
        f'{reader.path} has none of the parameters that are asked of it.',
        fix='Set another RestoreConfig.path.',
        parameters=('RestoreConfig.path',),
        docs='finetune.md#what-a-run-starts-from',
      )
    return
  fits = {name for name, source in taken.items() if want[name] == reader.shapes.get(source)}
  whole = sorted(
    part
    for part in {name.split('/')[0] for name in want}
    if all(name in fits or may_lack(name) for name in want if name.split('/')[0] == part)
  )
  fix = 'Take the model file that belongs to the checkpoint, or name another RestoreConfig.path.'
  if whole and config.mode == 'warm_start':
    fix += (
      "\nTo take what fits and start the rest anew: RestoreConfig.mode = 'partial' and\n"
      f"RestoreConfig.pattern = r'({'|'.join(whole)})/.*'"
    )
  raise CheckpointError(
    f'{reader.path} does not have the parameters that this run is to start from:\n  '
    + '\n  '.join(problems),
    fix=fix,
    parameters=('RestoreConfig.path', 'RestoreConfig.mode', 'RestoreConfig.pattern'),
    docs='finetune.md#what-a-run-starts-from',
  )


def _table(
  config: RestoreConfig,
  reader: ParamsReader,
  want: Mapping[str, Sequence[int]],
  taken: Mapping[str, str],
) -> str:
  """Returns what comes from where, a line per parameter, what is new at the end."""
  rows = [
    (
      name,
      ' x '.join(map(str, want[name])),
      'new' if name not in taken else 'checkpoint' if taken[name] == name else taken[name],
    )
    for name in [*taken, *(n for n in want if n not in taken)]
  ]
  widths = [max(len(row[i]) for row in rows) for i in range(2)]
  count = sum(math.prod(want[name]) for name in taken)
  total = sum(map(math.prod, want.values()))
  unused = [name for name in reader.shapes if name not in set(taken.values())]
  return '\n'.join(
    [
      f'Starting from {reader.path} ({config.mode}): {len(taken)} of {len(want)} parameters, '
      f'{count:,} of {total:,} numbers; step 0, a new optimizer.',
      *(
        f'  {name.ljust(widths[0])}  {shape.ljust(widths[1])}  {source}'
        for name, shape, source in rows
      ),
      *(
        [
          f'  left in the checkpoint: {", ".join(unused[:_NAMED])}'
          + (f' and {len(unused) - _NAMED} more' if len(unused) > _NAMED else '')
        ]
        if unused
        else []
      ),
    ]
  )
