"""Starts a run without a checkpoint from another run's or a converted checkpoint.

`RestoreConfig` sets it in gin. Names and shapes are compared here, before anything compiles.
"""

import dataclasses
import functools
import logging
import math
import re
import textwrap
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Optional

import flax.traverse_util
import jax

from t5x_gpu.checkpoint.arrays.params_files import PARAMS_ONLY, ParamsReader, tree_problems
from t5x_gpu.checkpoint.manifest import WITHOUT_DATA, differences
from t5x_gpu.checkpoint.saved_checkpoint import Saved
from t5x_gpu.checkpoint.start import Start
from t5x_gpu.checkpoint.storage.paths import as_path
from t5x_gpu.errors import AccessError, CheckpointError, ConfigError, did_you_mean, listed
from t5x_gpu.models.model import Model, OptionalMembers
from t5x_gpu.terminal.text_table import table
from t5x_gpu.training.program import Program
from t5x_gpu.training.train_state import TrainState

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


def plan_start(
  config: Optional[RestoreConfig], program: Program, model: Model, *, saved: Optional[Saved]
) -> Start:
  """Returns what the run starts from, after comparing names and shapes. Reads no array.

  Args:
    config: None to start from the seed.
    program: program of the run.
    model: model of the run. The checkpoint may lack its adapters, and may store parameters at the
      paths that `source_of` returns.
    saved: the latest checkpoint of this run, which takes precedence.
  Raises:
    CheckpointError: the checkpoint does not exist, or lacks parameters or state that the run needs.
  """
  if config is None:
    if saved is None:
      _warn_of_frozen(program, ())
    return Start()
  if saved is not None:
    return Start(
      text=f'Ignoring RestoreConfig.path = {config.path!r}: resuming from checkpoint_{saved.step} '
      'of MODEL_DIR.'
    )
  reader = _open(config)
  if config.mode in _WHOLE:
    text = f'Starting from {reader.path}: {MODES[config.mode]}.'
    return Start(
      reader,
      origin=_origin(config, reader),
      text=text,
      saved=_whole(config, reader, program.abstract_saved),
      takes_data=config.mode == 'resume',
    )
  want = {
    name: tuple(a.shape)
    for name, a in flax.traverse_util.flatten_dict(program.abstract_saved.params, sep='/').items()
  }
  may_lack, source_of = OptionalMembers(model).is_adapter, OptionalMembers(model).source_of
  taken = _assigned(config, want, source_of)
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
  """Warns about parameters that would keep their random initialization for the whole run."""
  _, frozen = program.trained.split(program.abstract_saved.params)
  random = [n for n in flax.traverse_util.flatten_dict(frozen, sep='/') if n not in taken]
  if random and jax.process_index() == 0:
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
        f'  python -m t5x_gpu.convert --from={path} --to=NEW_FOLDER'
      )
      if other
      else e.fix,
      parameters=('RestoreConfig.path', 'RestoreConfig.step'),
    ) from e


def _whole(config: RestoreConfig, reader: ParamsReader, target: TrainState) -> Saved:
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
  return reader.saved


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


def _matches_nothing(
  parameter: str, pattern: str, names: Sequence[str] | Mapping[str, Any]
) -> CheckpointError:
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
