"""The origin of each value of a run, and the values it overrides.

train.total_steps = 50000   gin_configs/runs/pretrain.gin:12   overrides 10000 (default)
"""

import dataclasses
import inspect
import re
from collections.abc import Collection, Sequence
from typing import Optional

import gin

from t5x_gpu.config import gin_names
from t5x_gpu.config.gin_names import short_name
from t5x_gpu.config.gin_text import REQUIRED, Macro, Symbol, Value, map_symbols
from t5x_gpu.config.reader import MACRO, Binding, Bindings, Call, Scopes

DEFAULT = 'default'
# Origins of computed values, see `gin_loader.load(computed=...)`.
OF_DATA, OF_RUN = 'the training data', 'the start of this run'


@dataclasses.dataclass(frozen=True)
class Setting:
  """One value that the run uses.

  Attributes:
    key: 'TRAIN_STEPS', 'train/DatasetConfig.batch_size'.
    text: the value as written, '%BATCH_SIZE'.
    value: the value with macros resolved, '128'.
    origin: where `text` was written: 'FILE:LINE', '--gin.KEY' or 'default'; or OF_DATA, OF_RUN.
    value_origin: where `value` was written; differs from `origin` if it comes from a macro.
    overrides: (value, origin) of overridden values, most recent first.
  """

  key: str
  text: str
  value: str
  origin: str
  value_origin: str
  overrides: tuple[tuple[str, str], ...] = ()

  @property
  def unscoped(self) -> str:
    """The key without scopes, 'DatasetConfig.batch_size'."""
    return self.key.rsplit('/', 1)[-1]

  @property
  def expression(self) -> str:
    """`key = value`, with the macro that sets it."""
    through = '' if self.text == self.value else f' ({self.text})'
    return f'{self.key} = {self.value}{through}'

  @property
  def overridden(self) -> str:
    """`overrides 10000 (default)`, or ''. Leaves out equal values, which `explain` shows."""
    others = [f'{value} ({origin})' for value, origin in self.overrides if value != self.value]
    return 'overrides ' + ', '.join(others) if others else ''


@dataclasses.dataclass(frozen=True)
class Provenance:
  """All values of a run.

  Attributes:
    settings: values from gin files and the command line, macros first, then by name.
    defaults: parameters that the run uses with their defaults. If a parameter is set in one scope
      only, the key names the other scope: 'train_eval/DatasetConfig.pack'.
    config: gin text that gives the same run when loaded.
  """

  settings: tuple[Setting, ...]
  defaults: tuple[Setting, ...]
  config: str

  def find(self, name: str, *, partial: bool = True) -> list[Setting]:
    """Returns the settings named `name`: a macro, `Class.param`, `scope/Class.param`, or `param`.

    The most exact match wins; `partial` allows any part of a name.
    """
    everything = (*self.settings, *self.defaults)
    readings = [
      lambda s: name in (s.key, s.unscoped),
      lambda s: f'.{s.unscoped}'.endswith(f'.{name}'),
      # A longer spelling of the class, 'train_script.train.total_steps'.
      lambda s: '.' in s.key and f'.{name}'.endswith(f'.{s.unscoped}'),
      lambda s: partial and name.lower() in s.key.lower(),
    ]
    for same in readings:
      found = [s for s in everything if same(s)]
      if found:
        return found
    return []


_current: Optional[Provenance] = None


def current() -> Optional[Provenance]:
  """Returns the provenance of gin's current configuration, or None."""
  return _current


def forget() -> None:
  """Clears the current provenance."""
  global _current
  _current = None


def origin_sentences(name: str) -> list[str]:
  """Returns a sentence per parameter named `name` on where it was set, for errors."""
  result = []
  found = _current.find(name, partial=False) if _current else []
  for setting in found:
    if setting.origin == DEFAULT:
      # If other scopes set the parameter, the default without a scope has the plain name.
      is_set = '/' not in setting.key and any(s.unscoped == setting.key for s in _current.settings)
      reason = 'only a scope sets it' if is_set else 'nothing sets it'
      result.append(f'{setting.key} is {setting.value}, its default; {reason}.')
    elif setting.origin == setting.value_origin:
      result.append(f'{setting.key} is set {_by(setting.origin)}.')
    else:
      result.append(
        f'{setting.key} is set {_by(setting.value_origin)}, through {setting.text} at '
        f'{setting.origin}.'
      )
  return result


def _by(origin: str) -> str:
  return f'by {origin}' if origin in (OF_DATA, OF_RUN) else f'at {origin}'


def collect(
  bindings: Bindings, roots: Sequence[Call], *, used: Collection[Binding], config: str
) -> tuple[Provenance, list[str]]:
  """Returns the provenance of a configuration, and notes; makes it current.

  Args:
    bindings: all bindings.
    roots: calls of the entry functions.
    used: the bindings that take effect.
    config: `Provenance.config`.
  """
  global _current
  settings: dict[Binding, Setting] = {}
  defaults: dict[tuple[str, Scopes], str] = {}
  for call in bindings.calls(roots):
    signature = gin_names.parameters(call.selector)
    applied = bindings.applied(call)
    for arg, found in applied.items():
      if found[-1] not in settings:
        settings[found[-1]] = _setting(bindings, found, signature.get(arg))
    if call.selector == MACRO:
      continue
    for arg, parameter in signature.items():
      if arg not in applied and parameter.default is not inspect.Parameter.empty:
        key = f'{short_name(call.selector)}.{arg}'
        defaults[key, call.scopes] = _default_text(parameter.default)
  for b in used:  # of functions that Python code calls
    if b not in settings:
      parameter = gin_names.parameters(b.selector).get(b.arg)
      settings[b] = _setting(bindings, bindings.history(b), parameter)
  idle = [b for b in bindings.final() if b not in settings]
  ordered = sorted(settings, key=lambda b: (not b.is_macro, short_name(b.selector), b.scope, b.arg))
  elsewhere = {setting.unscoped for setting in settings.values()}
  unset = {
    '/'.join((*scopes, key)) if key in elsewhere else key: text
    for (key, scopes), text in defaults.items()
  }
  _current = Provenance(
    settings=tuple(settings[b] for b in ordered),
    defaults=tuple(Setting(key, unset[key], unset[key], DEFAULT, DEFAULT) for key in sorted(unset)),
    config=config,
  )
  notes = []
  if idle:
    names = ', '.join(f'{b.key} ({b.origin})' for b in idle)
    notes = [f'Not used, because the bindings that used them are overridden: {names}.']
  return _current, notes


def _setting(
  bindings: Bindings, found: list[Binding], parameter: Optional[inspect.Parameter]
) -> Setting:
  """Returns the setting of the last binding in `found`, which overrides the others."""
  binding = found[-1]
  overrides = [
    (_value_text(bindings, b), b.origin if b.key == binding.key else f'{b.key}, {b.origin}')
    for b in reversed(found[:-1])
  ]
  if parameter is not None and parameter.default is not inspect.Parameter.empty:
    overrides.append((_default_text(parameter.default), DEFAULT))
  return Setting(
    key=binding.key,
    text=binding.text,
    value=_value_text(bindings, binding),
    origin=binding.origin,
    value_origin=bindings.follow(binding).origin,
    overrides=tuple(overrides),
  )


def _value_text(bindings: Bindings, binding: Binding) -> str:
  """Returns the value with macros resolved, also inside lists and mappings."""
  binding = bindings.follow(binding)
  if not isinstance(binding.value, (list, tuple, dict)):
    return binding.text

  def shown(symbol: Symbol) -> Value:
    found = bindings.macro(symbol) if isinstance(symbol, Macro) else None
    return symbol if found is None else _Shown(_value_text(bindings, found))

  return repr(map_symbols(binding.value, shown))


class _Shown(str):
  """Text that is printed without quotes inside a list."""

  __repr__ = str.__str__


def _default_text(default: object) -> str:
  if default is gin.REQUIRED:
    return repr(REQUIRED)
  text = re.sub(r' object at 0x\w+', '', repr(default))  # the same in each start of a run
  return getattr(default, '__name__', text) if '<' in text else text
