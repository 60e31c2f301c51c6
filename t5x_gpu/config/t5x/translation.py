"""From T5X's gin files to ours: the text that `rules.RULES` writes, and the outcome of each value.

A parameter without a rule is refused by name, so nothing is dropped in silence.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Optional

from t5x_gpu.config import gin_text
from t5x_gpu.config.gin_text import Macro
from t5x_gpu.config.t5x import records
from t5x_gpu.config.t5x.records import Unset
from t5x_gpu.config.t5x.rules import RULES
from t5x_gpu.config.t5x.translator import (
  MODULES,
  NAMES,
  OURS,
  Translator,
  ValueOutcome,
  canonical,
  spelled,
)
from t5x_gpu.errors import ConfigError, Problem, did_you_mean


@dataclasses.dataclass(frozen=True)
class Translation:
  """Our configuration, and the outcome of each of T5X's values.

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
      f"numbers differ from T5X's: {o.numbers}. {_short(o.name)} = {o.value} ({o.origin})"
      + (f': {o.note}' if o.status != 'same' else '')
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


# T5X's functions that gin files configure -> our function or class, and the command that runs it.
_SCRIPTS = {
  'train': ('train', 't5x_gpu.train.train', 'python -m t5x_gpu.train'),
  'evaluate': ('EvalSetup', 't5x_gpu.eval.EvalSetup', 'python -m t5x_gpu.eval'),
  'infer': ('InferSetup', 't5x_gpu.evaluation.infer_request.InferSetup', 'python -m t5x_gpu.infer'),
}
# T5X's functions without a counterpart -> what to do here.
_OTHERS = {
  '__main__.precompile': 'Compile with the gin file of the run: '
  'python -m t5x_gpu.train --precompile',
  't5x.export_lib.save': 'There is no SavedModel here. Write predictions with '
  'python -m t5x_gpu.infer, or a Hugging Face model with python -m t5x_gpu.convert.',
}


def script_of(entries: Sequence[str]) -> str:
  """Returns T5X's function for the first of our entry points that has one; 'train' if none has."""
  found = {entry: script for script, (_, entry, _) in _SCRIPTS.items()}
  return next((found[entry] for entry in entries if entry in found), 'train')


def configured_script(gin_files: Sequence[str], *, search_paths: Sequence[str] = ()) -> str:
  """Returns 'train', 'evaluate' or 'infer' if T5X's `gin_files` configure it, else ''."""
  theirs = of_t5x(gin_files, search_paths=search_paths)
  if not theirs:
    return ''
  files = records.read(theirs, search_paths=search_paths, known=known_names(), parameters=RULES)
  return next((name for name in _SCRIPTS if files.call(f'__main__.{name}').arguments), '')


def translate(
  gin_files: Sequence[str],
  *,
  bindings: Sequence[str] = (),
  search_paths: Sequence[str] = (),
  script: str = 'train',
) -> Translation:
  """Returns the configuration that T5X's `gin_files` and `bindings` describe.

  Args:
    script: T5X's function, 'train', 'evaluate' or 'infer'.
  Raises:
    ConfigError: a file cannot be read; the files do not configure `script`.
  """
  files = records.read(
    gin_files,
    bindings=bindings,
    search_paths=search_paths,
    known=known_names(),
    parameters=RULES,
    native=NAMES.values(),
  )
  entry = _SCRIPTS[script][0]
  t = Translator(files, RULES, entry=entry)
  run = files.call(f'__main__.{script}')
  if not run.arguments:
    raise _not_configured(files, gin_files, script)
  t.apply(run)
  if script == 'train':
    _add_our_settings(t)
  _refuse_forgotten(t)
  unused = [b for b in files.final() if b.key not in files.used]
  t.outcomes += filter(None, map(_misspelled, unused))
  text, origins = _render(t, gin_files)
  not_used = tuple((b.key, b.origin) for b in unused)
  return Translation(text, tuple(t.outcomes), origins, not_used, files.ours)


def _not_configured(files: records.Files, gin_files: Sequence[str], script: str) -> ConfigError:
  names = ' '.join(f'--gin_file={name}' for name in gin_files)
  fixes = {f'__main__.{name}': f'Run {run} {names}' for name, (_, _, run) in _SCRIPTS.items()}
  fixes |= _OTHERS
  other = next((name for name in fixes if files.call(name).arguments), '')
  shown = other.rpartition('.')[2]
  return ConfigError(
    f"{', '.join(gin_files)}: T5X's {script} is not configured"
    + (f', but its {shown} is.' if other else '.'),
    fix=fixes[other]
    if other
    else 'Add the gin file of a run: --gin_file=pretrain.gin --gin_file=model.gin',
    docs='from_t5x.md',
  )


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


def _add_our_settings(t: Translator) -> None:
  """Adds settings that T5X does not have, by name, so that a command can set them."""
  for parameter, name in (
    ('logging_cfg', 'LoggingConfig'),
    ('profile_cfg', 'ProfileConfig'),
    ('spike_cfg', 'SpikeConfig'),
  ):
    t.write(f'train.{parameter}', t.reference(name), OURS)
  if t.written('train.log_period') is None:
    periods = t.written('train.eval_period'), t.written('CheckpointConfig.period')
    t.write('train.log_period', min([100, *(p for p in periods if isinstance(p, int))]), 'T5X')


def _refuse_forgotten(t: Translator) -> None:
  """Refuses the bindings that the run uses and that no rule has looked at."""
  seen = {outcome.name.rpartition('/')[2] for outcome in t.outcomes} | t.refused
  for b in t.files.final():
    name = f'{canonical(b.selector)}.{b.argument}'
    if b.argument and b.key in t.files.used and name not in seen:
      note = t.unknown(name)
      t.outcomes.append(ValueOutcome(name, repr(b.value), b.origin, 'refused', note=note))


def _misspelled(unused: records.T5XBinding) -> Optional[ValueOutcome]:
  """Returns the refusal of a class or function that is a known one with a letter or two changed."""
  module, _, name = canonical(unused.selector).rpartition('.')
  legal = [n.rpartition('.')[2] for n in known_names() if n.rpartition('.')[0] == module]
  near = [n for n in legal if abs(len(n) - len(name)) < 3]
  hint = did_you_mean(name, near, limit=1)
  if not unused.argument or name in legal or not hint or not records.names_t5x(module):
    return None
  text = f'Nothing here corresponds to {module}.{name}.{hint}'
  return ValueOutcome(unused.key, repr(unused.value), unused.origin, 'refused', note=text)


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
