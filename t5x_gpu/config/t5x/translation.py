"""From T5X's gin files to ours: the text that `rules.RULES` writes, and what became of each value.

A parameter without a rule is refused by name, so nothing is dropped in silence.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from t5x_gpu.config import gin_text
from t5x_gpu.config.gin_text import Macro
from t5x_gpu.config.t5x import records
from t5x_gpu.config.t5x.records import Record, Unset
from t5x_gpu.config.t5x.rules import RULES
from t5x_gpu.config.t5x.translator import (
  MODULES,
  NAMES,
  OURS,
  Translator,
  ValueOutcome,
  canonical,
  spelled,
  unknown,
)
from t5x_gpu.errors import ConfigError, Problem


@dataclasses.dataclass(frozen=True)
class Translation:
  """Our configuration, and what became of each of T5X's values.

  Attributes:
    text: the gin file; each line ends with the origin of its value.
    outcomes: one per value that the run uses.
    origins: line of `text` -> origin of the value on it.
    unused: the bindings that nothing uses, with their origins.
    ours: bindings of the command line ('KEY=VALUE') that name nothing of T5X's files.
  """

  text: str
  outcomes: tuple[ValueOutcome, ...]
  origins: Mapping[int, str]
  unused: tuple[tuple[str, str], ...]
  ours: tuple[str, ...]

  @property
  def problems(self) -> list[Problem]:
    """The values that are refused."""
    return [
      Problem(f'{o.origin}: {_short(o.name)} = {o.value}: {o.note}')
      for o in self.outcomes
      if o.status == 'refused'
    ]

  @property
  def notes(self) -> list[str]:
    """What a user should know before the first step."""
    count = {s: sum(o.status == s for o in self.outcomes) for s in ('same', 'mapped', 'no effect')}
    notes = [
      f"T5X's gin files are translated: {count['same']} values kept, {count['mapped']} mapped, "
      f'{count["no effect"]} without effect here. `python -m t5x_gpu.config from_t5x` lists them.'
    ]
    notes += [
      f"numbers differ from T5X's: {o.numbers}. {_short(o.name)} = {o.value} ({o.origin}): {o.note}"
      for o in self.outcomes
      if o.numbers
    ]
    if self.unused:
      names = ', '.join(f'{_short(key)} ({origin})' for key, origin in self.unused[:_MOST_NAMES])
      rest = len(self.unused) - _MOST_NAMES
      notes.append(f'nothing uses {names}{f" and {rest} more" if rest > 0 else ""}')
    return notes


_MOST_NAMES = 10  # unused names in a note


def _short(name: str) -> str:
  """Returns T5X's parameter with its class, 'DatasetConfig.seed'; a macro as it is."""
  scope, slash, name = name.rpartition('/')
  return f'{scope}{slash}{".".join(name.split(".")[-2:])}'


def translate(
  gin_files: Sequence[str], *, bindings: Sequence[str] = (), search_paths: Sequence[str] = ()
) -> Translation:
  """Returns the configuration of `train` that T5X's `gin_files` and `bindings` describe.

  Raises:
    ConfigError: a file cannot be read; the files do not configure `train`.
  """
  files = records.read(
    gin_files, bindings=bindings, search_paths=search_paths, known=known_names(), parameters=RULES
  )
  t = Translator(files, RULES)
  run = files.call('__main__.train')
  if not run.arguments:
    other = next((name for name in _OTHERS if files.call(f'__main__.{name}').arguments), '')
    raise ConfigError(
      f"{', '.join(gin_files)}: T5X's train is not configured"
      + (f', but its {other} is.' if other else '.'),
      fix=_OTHERS[other]
      if other
      else 'Add the gin file of a run: --gin_file=pretrain.gin --gin_file=model.gin',
      docs='from_t5x.md',
    )
  t.apply(run)
  _finish(t, run)
  _refuse_forgotten(t)
  unused = tuple((b.key, b.origin) for b in files.final() if b.key not in files.used)
  text, origins = _render(t, gin_files)
  return Translation(text, tuple(t.outcomes), origins, unused, files.ours)


# T5X's other scripts -> what to do here.
_OTHERS = {
  'evaluate': 'Evaluate a run by its own configuration: '
  'python -m t5x_gpu.eval --gin_file=MODEL_DIR/config.gin --split=SPLIT',
  'infer': 'Write predictions of a run or a converted checkpoint: '
  'python -m t5x_gpu.infer --checkpoint=FOLDER --prompts=FILE',
  'precompile': 'Compile with the gin file of the run: python -m t5x_gpu.train --precompile',
}
_GROUPS = {
  'same': 'kept',
  'mapped': 'mapped',
  'no effect': 'without effect here',
  'refused': 'refused',
}


def table(outcomes: Sequence[ValueOutcome]) -> list[str]:
  """Returns lines that list the outcomes, grouped by status."""
  lines = []
  for status, heading in _GROUPS.items():
    found = [o for o in outcomes if o.status == status]
    lines += [f'{heading}: {len(found)}'] if found else []
    for o in found:
      here = f' -> {o.here}' if o.here else ''
      lines.append(f'  {_short(o.name)} = {o.value}{here}  ({o.origin})')
      lines += [f'    {text}' for text in (o.note,) if text and status != 'same']
      lines += [f"    numbers differ from T5X's: {o.numbers}"] if o.numbers else []
  return lines


def of_t5x(gin_files: Sequence[str], *, search_paths: Sequence[str] = ()) -> list[str]:
  """Returns the files that T5X reads: all but ours, if one of them or an include imports T5X."""
  modules = {name: set(records.imports([name], search_paths=search_paths)) for name in gin_files}
  if not any(records.names_t5x(module) for found in modules.values() for module in found):
    return []
  return [
    name
    for name, found in modules.items()
    if not any(module.partition('.')[0] == 't5x_gpu' for module in found)
  ]


def known_names() -> set[str]:
  """Returns the full names of T5X's functions and classes that have rules."""
  return {name.rpartition('.')[0] for name in RULES}


def _finish(t: Translator, run: Record) -> None:
  """Writes what follows from several of T5X's values."""
  train = t.blocks.setdefault(NAMES['train'], {})
  if NAMES['Adafactor'] in t.blocks and t.layers:
    t.write('Adafactor.layers', t.layers, 'T5X')
  model = run.arguments.get('model')
  if isinstance(model and model.value, Record):
    t.apply(t.files.call(f'{model.value.name}.predict_batch_with_aux'))
  if NAMES['DecodingConfig'] in t.blocks:
    t.write('train.decoding_cfg', t.reference('DecodingConfig'), 'T5X')
    _limit_decoding(t, run)
  _write_mesh(t)
  if t.eval_period == 0:  # T5X then never evaluates
    for parameter in ('train_eval_dataset_cfg', 'infer_eval_dataset_cfg'):
      t.write(f'train.{parameter}', None, 'T5X')
  _compare_microbatches(t)
  if train.get('infer_eval_dataset_cfg', (None, ''))[0] is not None and t.eval_period:
    t.write('train.infer_eval_period', t.eval_period, 'T5X')
  # Settings that T5X does not have, by name, so that a command can set them.
  for parameter, name in (
    ('logging_cfg', 'LoggingConfig'),
    ('profile_cfg', 'ProfileConfig'),
    ('spike_cfg', 'SpikeConfig'),
  ):
    t.write(f'train.{parameter}', t.reference(name), OURS)
  if 'log_period' not in train:
    periods = [
      value
      for value in (
        train.get('eval_period', (None, ''))[0],
        t.blocks.get(NAMES['CheckpointConfig'], {}).get('period', (None, ''))[0],
      )
      if isinstance(value, int)
    ]
    t.write('train.log_period', min([100, *periods]), 'T5X')
  modules = [m for m in t.files.modules if m.split('.')[0] not in ('seqio', 'optax', 'gin')]
  for block, parameters in t.blocks.items():
    if block.endswith(NAMES['DatasetConfig']) and len(modules) == 1:
      value, _ = parameters.get('mixture_or_task_module', (None, ''))
      unset = value is None or isinstance(value, Macro) and t.macros[value.name][0] is None
      if unset:
        parameters['mixture_or_task_module'] = (modules[0], t.files.modules[modules[0]])


def _write_mesh(t: Translator) -> None:
  """Writes the mesh shapes, which replace the sizes, if both are set."""
  partitioner = t.blocks.get(NAMES['Partitioner'], {})
  if len(t.mesh_shapes) == 2:
    splits_parameters = 'fsdp' in partitioner
    for name in ('num_partitions', 'data', 'fsdp'):
      partitioner.pop(name, None)
    for side, (replica, data, model) in t.mesh_shapes.items():
      sizes = {'data': replica, 'fsdp': data} if splits_parameters else {'data': replica * data}
      t.write(f'Partitioner.{side}_mesh_shape', {**sizes, 'model': model}, 'T5X')


def _compare_microbatches(t: Translator) -> None:
  train = t.blocks[NAMES['train']]
  number, origin = train.get('num_microbatches', (1, ''))
  per_token = train.get('loss_normalizing_factor', (1.0, ''))[0] is None
  if per_token and isinstance(number, int) and number > 1:
    note = 'T5X divides each microbatch by its own tokens and adds them up'
    name = 't5x.trainer.Trainer.num_microbatches'
    t.outcomes.append(
      ValueOutcome(name, str(number), origin, 'mapped', note='the whole batch', numbers=note)
    )


def _limit_decoding(t: Translator, run: Record) -> None:
  """Decodes up to the length of the targets, as T5X; of the training targets if it is computed."""
  for parameter in ('infer_eval_dataset_cfg', 'train_dataset_cfg'):
    dataset = run.arguments.get(parameter)
    if dataset is None or not isinstance(dataset.value, Record):
      continue
    lengths = dataset.value.arguments.get('task_feature_lengths')
    if lengths is not None and isinstance(lengths.value, Mapping) and 'targets' in lengths.value:
      t.write('DecodingConfig.max_decode_length', lengths.value['targets'], lengths.origin)
      if parameter == 'train_dataset_cfg':
        name = 'infer_eval/t5x.utils.DatasetConfig.task_feature_lengths'
        numbers = f'texts end after {lengths.value["targets"]} tokens (T5X: the longest target)'
        t.outcomes.append(
          ValueOutcome(name, 'None', dataset.origin, 'mapped', numbers=numbers, note='with beams')
        )
      return


def _refuse_forgotten(t: Translator) -> None:
  """Refuses the bindings that the run uses and that no rule has looked at."""
  seen = {outcome.name.rpartition('/')[2] for outcome in t.outcomes} | t.refused
  for b in t.files.final():
    name = f'{canonical(b.selector)}.{b.argument}'
    if b.argument and b.key in t.files.used and name not in seen:
      t.outcomes.append(
        ValueOutcome(name, repr(b.value), b.origin, 'refused', note=unknown(name, b.value))
      )


def _render(t: Translator, gin_files: Sequence[str]) -> tuple[str, dict[int, str]]:
  """Returns the text, and line -> origin."""
  lines = [
    f"# Written from T5X's {', '.join(gin_files)}.",
    '# Each line names the origin of its value. T5X: its default, or what follows from several.',
    'from __gin__ import dynamic_registration',
  ]
  origins: dict[int, str] = {}

  def add(text: str, origin: str) -> None:
    lines.append(f'{text}  # {origin}')
    origins[len(lines)] = origin

  names = [block.rpartition('/')[2] for block in t.blocks]
  for alias in sorted({name.partition('.')[0] for name in names}):
    if alias in MODULES:
      package, _, module = MODULES[alias].rpartition('.')
      renamed = f' as {alias}' if module != alias else ''
      lines.append(f'from {package} import {module}{renamed}')
    else:
      lines.append(f'import {alias}')
  lines.append('')
  values = [value for parameters in t.blocks.values() for value, _ in parameters.values()]
  used = {macro.name for macro in gin_text.instances(values, Macro)}
  for name in sorted(used & t.macros.keys()):
    value, origin = t.macros[name]
    add(f'{name} = {Unset() if isinstance(value, Unset) else spelled(value)}', origin)
  for block, parameters in t.blocks.items():
    if parameters:
      lines += ['', f'{block}:']
      for parameter, (value, origin) in parameters.items():
        add(f'  {parameter} = {spelled(value)}', origin)
  return '\n'.join(lines) + '\n', origins
