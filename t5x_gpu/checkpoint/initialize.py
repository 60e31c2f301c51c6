"""Builds the first state of a run from its own checkpoint, another checkpoint, or the seed.

`RestoreConfig` sets the other checkpoint in gin: another run's, or a converted model.
`choose_origin` compares names and shapes before anything compiles. On each process, `restore_from`
then reads the parts that its devices hold; any mesh may have written them.
"""

import dataclasses
import functools
import logging
import math
import re
import shlex
import textwrap
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Optional

import flax.traverse_util
import jax
import jax.numpy as jnp

from t5x_gpu.checkpoint.checkpointer import RestoredState, read_checkpoint
from t5x_gpu.checkpoint.local.tier import LocalTier, NoLocalTier
from t5x_gpu.checkpoint.manifest import STARTED_FROM, WITHOUT_DATA, differences
from t5x_gpu.checkpoint.model_dir import CheckpointMetadata
from t5x_gpu.checkpoint.params_files import PARAMS_ONLY, ParamsReader, check_params, tree_problems
from t5x_gpu.checkpoint.remote_checkpointer import AnyCheckpointer
from t5x_gpu.checkpoint.store import CheckpointAddress, read_array
from t5x_gpu.errors import (
  AccessError,
  CheckpointError,
  ConfigError,
  did_you_mean,
  first_line,
  listed,
)
from t5x_gpu.runtime import distributed
from t5x_gpu.storage.json_schema import Json
from t5x_gpu.storage.paths import as_path
from t5x_gpu.terminal.console import table
from t5x_gpu.training.program import Program
from t5x_gpu.training.state import TrainState

_log = logging.getLogger(__name__)


MODES = {
  'resume': 'the whole state: parameters, optimizer, step, and position in the data',
  'new_data': 'parameters, optimizer and step; the data starts from scratch',
  'warm_start': 'all parameters; the optimizer, the step and the data start from scratch',
  'partial': 'the parameters that `pattern` matches; everything else starts from scratch',
}
_WHOLE = ('resume', 'new_data')  # modes that take the optimizer state
_NAMED = 8  # parameters that an error lists
_error = functools.partial(CheckpointError, docs='finetune.md#what-a-run-starts-from')


@dataclasses.dataclass(frozen=True)
class RestoreConfig:
  """What a run starts from while its MODEL_DIR has no checkpoint.

  Attributes:
    path: MODEL_DIR of another run, one of its checkpoints, or a folder that t5x_gpu.convert wrote.
    mode: a key of `MODES`.
    pattern: for 'partial', a regular expression that matches the whole path of each parameter to
      take: r'(token_embedder|layers)/.*'.
    assignment_map: pairs (regular expression, replacement) for parameters whose path in the
      checkpoint differs: (r'layers/(.*)', r'encoder/layers/\\1'). The first match counts.
    step: step of the checkpoint; None for the latest.
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
        fix="Set a pattern if mode = 'partial', and only then.",
        parameters=('RestoreConfig.mode', 'RestoreConfig.pattern'),
        docs='finetune.md#what-a-run-starts-from',
      )
    if self.mode in _WHOLE and self.assignment_map:
      raise ConfigError(
        f'RestoreConfig.mode = {self.mode!r} takes the state of the same model: there is '
        'nothing to assign.',
        fix='Remove RestoreConfig.assignment_map.',
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
          f'RestoreConfig.{name}: {pattern!r} is not a regular expression: {e}.',
          fix='See docs.python.org/3/library/re.html.',
          parameters=(f'RestoreConfig.{name}',),
        ) from e


@dataclasses.dataclass(frozen=True)
class Origin:
  """What a run starts from. `Origin()`: the run's latest checkpoint, or the seed if it has none.

  Attributes:
    reader: reader of another run's checkpoint, for the first start of a run from it.
    taken: path of a parameter -> its path in the other checkpoint.
    saved: for 'resume' and 'new_data', the metadata of the other checkpoint.
    record: where the run's first state comes from, for its manifests.
    text: a table for the log.
    takes_data: whether the data continue from their position in `saved`.
  """

  reader: Optional[ParamsReader] = None
  taken: Mapping[str, str] = dataclasses.field(default_factory=dict)
  saved: Optional[CheckpointMetadata] = None
  record: Optional[Json] = None
  text: str = ''
  takes_data: bool = True

  @property
  def path(self) -> str:
    """Folder of the other checkpoint; '' without a checkpoint."""
    return '' if self.reader is None else str(self.reader.path)

  def record_of(self, restored: Optional[RestoredState]) -> Optional[Json]:
    """Returns `record`; of a run that was `restored`, the record in its manifest."""
    return self.record or (restored and restored.manifest.get(STARTED_FROM))

  def first_state(
    self,
    checkpointer: AnyCheckpointer,
    program: Program,
    fresh: Optional[TrainState],
    local: LocalTier | NoLocalTier = NoLocalTier(),
  ) -> tuple[TrainState, Optional[RestoredState]]:
    """Returns the state of the next step, and the checkpoint that holds the whole state, or None.

    Args:
      checkpointer: checkpointer of the run; the run's latest checkpoint takes precedence.
      program: program of the run.
      fresh: the initial state, which is donated; None to compute it if needed.
      local: local checkpoints of the run; they replace a checkpoint that turns out to be damaged.
    Raises:
      CheckpointError: no checkpoint can be read.
    """
    restored = checkpointer.restore_latest(program.abstract_saved, local=local)
    if restored is None and self.saved is not None:
      restored = restore_from(self.reader.checkpoint, program.abstract_saved)
    if restored is not None:
      return program.in_run_form(_with_history(restored.state, program)), restored
    return self._filled(fresh or program.init(), program), None

  def _filled(self, state: TrainState, program: Program) -> TrainState:
    """Returns a fresh state with the parameters of the checkpoint; `state` is donated."""
    if not self.taken:
      return state
    state = program.in_saved_form(state)
    flat = flax.traverse_util.flatten_dict(state.params, sep='/')
    with distributed.errors_together():
      for name, source in self.taken.items():
        flat[name].delete()  # so that at most one parameter is in memory twice
        flat[name] = self._read(source, flat[name])
    left = dict(self.taken)
    while left:  # several parameters can have one source: a DPO run's reference begins as a copy
      name_of = {source: name for name, source in left.items()}
      check_params(self.reader, {source: flat[name] for source, name in name_of.items()})
      left = {name: source for name, source in left.items() if name_of[source] != name}
    params = flax.traverse_util.unflatten_dict(flat, sep='/')
    return program.in_run_form(state.replace(params=params))

  def _read(self, source: str, like: jax.Array) -> jax.Array:
    try:
      return read_array(self.reader, source, like)
    except (ValueError, OSError) as e:
      raise CheckpointError(
        f'{source} of {self.reader.path} cannot be read: {first_line(e)[:300]}',
        fix='Copy the checkpoint again, or name another: RestoreConfig.step.',
        parameters=('RestoreConfig.path', 'RestoreConfig.step'),
      ) from e


def _with_history(state: TrainState, program: Program) -> TrainState:
  """Returns `state`, with a new FP8 history if the run needs one and the checkpoint lacks it."""
  if bool(state.fp8_history) == bool(program.abstract_saved.fp8_history):
    return state
  _log.info('The checkpoint has no FP8 history of this length: the first step uses default scales.')
  zeros = jax.tree.map(
    lambda a: jax.jit(functools.partial(jnp.zeros, a.shape, a.dtype), out_shardings=a.sharding)(),
    program.abstract_saved.fp8_history,
  )
  return state.replace(fp8_history=zeros)


def restore_from(checkpoint: CheckpointAddress, target: TrainState) -> RestoredState:
  """Reads a checkpoint of another run onto the mesh of `target`; never writes to the other run.

  Args:
    checkpoint: the checkpoint; its manifest has been compared with `target`.
    target: shapes, dtypes and shardings of this run.
  Raises:
    CheckpointError: the checkpoint cannot be read; raised on all processes.
  """
  restored, reasons = read_checkpoint(checkpoint, target)
  if restored is None:
    raise CheckpointError(
      f'{checkpoint.path} cannot be read: {next(filter(None, reasons))}',
      fix='Copy the checkpoint again, or name another: RestoreConfig.step.',
      parameters=('RestoreConfig.path', 'RestoreConfig.step'),
    )
  return restored


def choose_origin(
  config: Optional[RestoreConfig], program: Program, *, saved: Optional[CheckpointMetadata]
) -> Origin:
  """Returns what the run starts from, after comparing names and shapes. Reads no array.

  Args:
    config: None to start from the seed.
    program: program of the run. The checkpoint may lack adapters of its model, and may store
      parameters at the paths that `source_of` returns.
    saved: the latest checkpoint of this run, which takes precedence.
  Raises:
    CheckpointError: the checkpoint does not exist, or lacks parameters or state that the run needs.
  """
  if config is None:
    if saved is None:
      _warn_of_frozen(program, ())
    return Origin()
  if saved is not None:
    return Origin(
      text=f'Ignoring RestoreConfig.path = {config.path!r}: resuming from checkpoint_{saved.step} '
      'of MODEL_DIR.'
    )
  reader = _open(config)
  if config.mode in _WHOLE:
    text = f'Starting from {reader.path}: {MODES[config.mode]}.'
    return Origin(
      reader,
      record=_record(config, reader),
      text=text,
      saved=_whole(config, reader, program.abstract_saved),
      takes_data=config.mode == 'resume',
    )
  want = {
    name: tuple(a.shape)
    for name, a in flax.traverse_util.flatten_dict(program.abstract_saved.params, sep='/').items()
  }
  may_lack, source_of = program.config.model.is_adapter, program.config.model.source_of
  taken = _assigned(config, want, source_of)
  taken = {
    name: source for name, source in taken.items() if source in reader.shapes or not may_lack(name)
  }
  _check(config, reader, want, taken, may_lack)
  _warn_of_frozen(program, taken)
  return Origin(
    reader, taken, record=_record(config, reader), text=_table(config, reader, want, taken)
  )


def _record(config: RestoreConfig, reader: ParamsReader) -> Json:
  return {
    'checkpoint': str(reader.path),
    'step': reader.step,
    'mode': config.mode,
    'pattern': config.pattern,
    'assignment_map': [list(pair) for pair in config.assignment_map],
  }


def _warn_of_frozen(program: Program, taken: Container[str]) -> None:
  """Warns about parameters that would keep their random initialization for the whole run."""
  _, frozen = program.trained.split(program.abstract_saved.params)
  random = [n for n in flax.traverse_util.flatten_dict(frozen, sep='/') if n not in taken]
  if random and distributed.is_main_process():
    _log.warning(
      '%d parameters are frozen, but come from no checkpoint: %s. Set '
      'train.initialize_from (docs/finetune.md).',
      len(random),
      ', '.join(listed(random, _NAMED)),
    )


def _open(config: RestoreConfig) -> ParamsReader:
  path = as_path(config.path, parameter='RestoreConfig.path')
  try:
    return ParamsReader(path, step=config.step, step_setting='RestoreConfig.step')
  except AccessError:
    raise
  except CheckpointError as e:
    other = any((path / name).exists() for name in ('config.json', 'checkpoint', 'state/target'))
    raise _error(
      f'RestoreConfig.path: {e.what}',
      fix=(
        'It looks like a checkpoint of another program. Convert it first:\n'
        f'  python -m t5x_gpu.convert --from={shlex.quote(str(path))} --to=NEW_FOLDER'
      )
      if other
      else e.fix
      if path.exists()
      else 'Correct the path of the MODEL_DIR, checkpoint, or checkpoint of T5X.',
      parameters=('RestoreConfig.path', 'RestoreConfig.step'),
    ) from e


def _whole(config: RestoreConfig, reader: ParamsReader, target: TrainState) -> CheckpointMetadata:
  """Returns the metadata of the checkpoint, if it holds all of `target`."""
  what = f'RestoreConfig.mode = {config.mode!r}, and {reader.path} holds '
  fix = "RestoreConfig.mode = 'warm_start' takes the parameters alone."
  if reader.manifest.get(PARAMS_ONLY):
    raise _error(
      f'{what}parameters only: no optimizer, no data.', fix=fix, parameters=('RestoreConfig.mode',)
    )
  if reader.manifest.get(WITHOUT_DATA) and config.mode == 'resume':
    raise _error(
      f'{what}no position in the data: another program wrote it.',
      fix=f"RestoreConfig.mode = 'new_data' takes {MODES['new_data']}.",
      parameters=('RestoreConfig.mode',),
    )
  different = differences(reader.manifest, target)
  if different:
    raise _error(
      f'{what}another model or optimizer:\n  ' + '\n  '.join(different),
      fix=fix,
      parameters=('RestoreConfig.path', 'RestoreConfig.mode'),
    )
  return reader.metadata


def _assigned(
  config: RestoreConfig, want: Mapping[str, Sequence[int]], source_of: Callable[[str], str]
) -> dict[str, str]:
  """Returns path of each parameter to take -> its path in the checkpoint."""
  names = [n for n in want if config.pattern is None or re.fullmatch(config.pattern, source_of(n))]
  if not names:
    raise _matches_nothing('pattern', config.pattern, want)
  used, taken = set(), {}
  for name in names:
    taken[name] = source_of(name)
    for pattern, replacement in config.assignment_map:
      match = re.fullmatch(pattern, source_of(name))
      if match:
        used.add(pattern)
        taken[name] = match.expand(replacement)
        break
  for pattern, _ in config.assignment_map:
    if pattern not in used:
      raise _matches_nothing('assignment_map', pattern, names)
  return taken


def _matches_nothing(parameter: str, pattern: str, names: Collection[str]) -> CheckpointError:
  names = list(names)
  plain = re.sub(r'\\.|[^\w/]', '', pattern)
  return _error(
    f'RestoreConfig.{parameter}: {pattern!r} matches none of {len(names)} parameters.'
    + did_you_mean(plain, names),
    fix="It must match a whole path, as r'layers/.*' does. The paths are "
    f'{", ".join(listed(names, _NAMED))}.',
    parameters=(f'RestoreConfig.{parameter}',),
  )


def _check(
  config: RestoreConfig,
  reader: ParamsReader,
  want: Mapping[str, Sequence[int]],
  taken: Mapping[str, str],
  may_lack: Callable[[str], bool],
) -> None:
  """Raises CheckpointError unless the checkpoint has the parameters to take."""
  sources = set(taken.values())
  have = {
    name: shape
    for name, shape in reader.shapes.items()
    if config.mode == 'warm_start' or name in sources
  }
  asked = {source: want[name] for name, source in taken.items()}
  for name, source in taken.items():  # several may have one source: keep a wrong shape
    if tuple(want[name]) != tuple(reader.shapes.get(source, ())):
      asked[source] = want[name]
  unused = sorted(reader.shapes.keys() - sources) if config.mode == 'partial' else ()
  problems = tree_problems(
    asked, have, wanted_by='this model', had_by='the checkpoint', unused=unused
  )
  if not problems:
    if not taken:
      raise _error(
        f'{reader.path} has none of the requested parameters.',
        fix='Set another RestoreConfig.path.',
        parameters=('RestoreConfig.path',),
      )
    return
  fits = {name for name, source in taken.items() if want[name] == reader.shapes.get(source)}
  whole = sorted(
    part
    for part in {name.split('/')[0] for name in want}
    if all(name in fits or may_lack(name) for name in want if name.split('/')[0] == part)
  )
  fix = 'Use the gin file that the checkpoint was trained with, or name another RestoreConfig.path.'
  if whole and config.mode == 'warm_start':
    fix += (
      "\nTo take what fits and start the rest from scratch: RestoreConfig.mode = 'partial' and\n"
      f"RestoreConfig.pattern = r'({'|'.join(whole)})/.*'"
    )
  raise _error(
    f'{reader.path} does not have the parameters that this run starts from:\n  '
    + '\n  '.join(problems),
    fix=fix,
    parameters=('RestoreConfig.path', 'RestoreConfig.mode', 'RestoreConfig.pattern'),
  )


def _table(
  config: RestoreConfig,
  reader: ParamsReader,
  want: Mapping[str, Sequence[int]],
  taken: Mapping[str, str],
) -> str:
  """Returns a line per parameter with its source, new parameters last."""
  rows = [
    (
      name,
      ' x '.join(map(str, want[name])),
      'new' if name not in taken else 'checkpoint' if taken[name] == name else taken[name],
    )
    for name in [*taken, *(n for n in want if n not in taken)]
  ]
  count = sum(math.prod(want[name]) for name in taken)
  total = sum(map(math.prod, want.values()))
  unused = [name for name in reader.shapes if name not in set(taken.values())]
  return '\n'.join(
    [
      f'Starting from {reader.path} ({config.mode}): {len(taken)} of {len(want)} parameters, '
      f'{count:,} of {total:,} numbers; step 0, a new optimizer.',
      textwrap.indent(table(rows), '  '),
      *([f'  left in the checkpoint: {", ".join(listed(unused, _NAMED))}'] if unused else []),
    ]
  )
