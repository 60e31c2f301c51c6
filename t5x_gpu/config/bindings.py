"""The bindings of gin files and the command line, in order, and the subset that a run uses.

gin passes parameters to functions and classes called through references (`@scope/Class()`), so the
bindings that a run uses can be followed from its entry point without running any code.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Optional

from gin import config as gin_config

from t5x_gpu.config import statements

MACRO = 'gin.macro'
CONSTANT = 'gin.constant'
COMMAND_LINE = '--gin.'

Scopes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
  """One statement `scope/selector.arg = value`; a macro X is `X/gin.macro.value`.

  Attributes:
    scope: 'train', 'a/b' or ''.
    selector: gin's complete name of the configurable.
    arg: parameter name.
    value: gin's value, which may contain gin's reference objects.
    text: the value as written.
    origin: 'FILE:LINE', or '--gin.KEY' for the command line.
    stack: the including files, outermost first; () for the command line.
    typed: the text of the value on the command line; '' in a file.
  """

  scope: str
  selector: str
  arg: str
  value: Any
  text: str
  origin: str
  stack: tuple[str, ...] = ()
  typed: str = ''

  @property
  def is_macro(self) -> bool:
    return self.selector == MACRO

  @property
  def from_command_line(self) -> bool:
    return self.origin.startswith(COMMAND_LINE)

  @property
  def key(self) -> str:
    """The key as a user types it: 'TRAIN_STEPS', 'train/DatasetConfig.batch_size'."""
    if self.is_macro:
      return self.scope
    prefix = f'{self.scope}/' if self.scope else ''
    return f'{prefix}{short_name(self.selector)}.{self.arg}'


def short_name(selector: str) -> str:
  """Returns the shortest unique name of a configurable, 'DatasetConfig'."""
  return gin_config._REGISTRY.minimal_selector(selector)


def references(value: Any) -> Iterator[gin_config.ConfigurableReference]:
  """Yields gin's references, macros and constants anywhere inside `value`."""
  return statements.instances(value, gin_config.ConfigurableReference)


def is_macro(reference: gin_config.ConfigurableReference) -> bool:
  return reference.configurable.selector == MACRO and reference.evaluate


def is_constant(reference: gin_config.ConfigurableReference) -> bool:
  return reference.configurable.selector == CONSTANT and reference.evaluate


def is_required(value: Any) -> bool:
  """Returns whether `value` is %gin.REQUIRED."""
  return (
    isinstance(value, gin_config.ConfigurableReference)
    and is_constant(value)
    and gin_config._CONSTANTS.get('/'.join(value.scopes)) is gin_config.REQUIRED
  )


@dataclasses.dataclass(frozen=True)
class Call:
  """A configurable that the run calls or passes on, with the scopes active at that point.

  Attributes:
    selector: gin's complete name.
    scopes: active scopes, outermost first.
    evaluated: whether gin calls it without arguments (`@x()`).
    binding: the binding whose value contains the reference; None for an entry point.
  """

  selector: str
  scopes: Scopes
  evaluated: bool
  binding: Optional[Binding] = dataclasses.field(default=None, compare=False)


class Bindings:
  """All bindings in order, and queries on them."""

  def __init__(self, ordered: Iterable[Binding]):
    self.ordered = list(ordered)
    self._history: dict[tuple[str, str], dict[str, list[Binding]]] = {}
    for b in self.ordered:
      self._history.setdefault((b.scope, b.selector), {}).setdefault(b.arg, []).append(b)

  def final(self) -> list[Binding]:
    """Returns the last binding of each key."""
    return [history[-1] for args in self._history.values() for history in args.values()]

  def history(self, binding: Binding) -> list[Binding]:
    """Returns all bindings of the same key, in order."""
    return self._history[binding.scope, binding.selector][binding.arg]

  def applied(self, selector: str, scopes: Scopes) -> dict[str, list[Binding]]:
    """Returns arg -> bindings that apply in `scopes`; the last one overrides the others."""
    result: dict[str, list[Binding]] = {}
    for depth in range(len(scopes) + 1):
      for arg, history in self._history.get(('/'.join(scopes[:depth]), selector), {}).items():
        result.setdefault(arg, []).extend(history)
    return result

  def effective(self, selector: str, scopes: Scopes) -> dict[str, Binding]:
    """Returns arg -> the binding that gin uses in `scopes`."""
    return {arg: found[-1] for arg, found in self.applied(selector, scopes).items()}

  def macro(self, reference: gin_config.ConfigurableReference) -> Optional[Binding]:
    """Returns the binding that sets a macro, or None."""
    return self.effective(MACRO, tuple(reference.scopes)).get('value')

  def follow(self, binding: Binding) -> Binding:
    """Returns the binding at the end of a chain of macros, which holds the value."""
    seen = set()
    while (
      isinstance(binding.value, gin_config.ConfigurableReference)
      and is_macro(binding.value)
      and binding not in seen
    ):
      seen.add(binding)
      binding = self.macro(binding.value) or binding
    return binding

  def calls(self, roots: Iterable[Call], *, overridden: bool = False) -> list[Call]:
    """Returns every call that is reached from the `roots`, starting with the roots.

    Args:
      roots: entry points.
      overridden: follow the values of overridden bindings as well.
    """
    queue, seen = list(roots), dict.fromkeys(())
    while queue:
      call = queue.pop(0)
      if call in seen:
        continue
      seen[call] = None
      for found in self.applied(call.selector, call.scopes).values():
        for binding in found if overridden else found[-1:]:
          queue += calls_in(binding.value, scopes=call.scopes, binding=binding)
    return list(seen)


def calls_in(value: Any, *, scopes: Scopes, binding: Optional[Binding] = None) -> list[Call]:
  """Returns the calls in `value`. Scopes of a reference replace the active scopes."""
  return [
    Call(r.configurable.selector, tuple(r.scopes) or scopes, r.evaluate, binding)
    for r in references(value)
  ]
