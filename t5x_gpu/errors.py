"""Errors that a user can fix, as values: what happened, what is allowed, the fix, the page.

Raise them before anything compiles. Use `assert` for our own invariants. Commands print a
`UserError` without a traceback and exit with code 1 (`t5x_gpu.cli`). Nothing parses these texts:
code that decides something reads the fields of `Problem`.
"""

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Problem:
  """One thing that is wrong. A check returns a list of them.

  Attributes:
    what: what happened and what is allowed, with the values and the computed numbers, as full
      sentences.
    fix: what to do about it, with real parameter names and values that would work.
    parameters: gin parameters involved (`'Partitioner.num_partitions'`); commands append where each
      was set (`config.provenance`).
  """

  what: str
  fix: str = ''
  parameters: tuple[str, ...] = ()

  def text(self, indent: str = '  ') -> str:
    """Returns `what`, and the lines of `fix` below it with `indent`."""
    return '\n'.join([self.what, *(indent + line for line in self.fix.splitlines())])


class UserError(Exception):
  """An error with a fix: one `Problem`, or several under a title.

  Args:
    what: `Problem.what`; the title of `problems` if there are several.
    fix: `Problem.fix`; if there are `problems`, one fix for all of them.
    parameters: `Problem.parameters`; if there are `problems`, more parameters than they name.
    docs: page and anchor under docs/, `'mesh.md#sizes'`.
    problems: at least one; by default the problem that the other arguments describe.
  """

  def __init__(
    self,
    what: str,
    *,
    fix: str = '',
    parameters: Iterable[str] = (),
    docs: str = '',
    problems: Sequence[Problem] = (),
  ):
    if len(problems) == 1:
      what, fix = problems[0].what, '\n'.join(filter(None, (problems[0].fix, fix)))
    named = [*(name for problem in problems for name in problem.parameters), *parameters]
    self.parameters = tuple(dict.fromkeys(named))
    self.problems = tuple(problems)
    if len(problems) < 2:
      self.problems = (Problem(what, fix, self.parameters),)
    else:
      numbered = (f'  {i}. {problem.text(" " * 5)}' for i, problem in enumerate(problems, 1))
      what = '\n'.join([f'{what}: {len(problems)} problems.', *numbered])
    self.what, self.fix, self.docs = what, fix, docs
    super().__init__(what)

  def __str__(self) -> str:
    page = f'\n  See docs/{self.docs}' if self.docs else ''
    return Problem(self.what, self.fix).text() + page


class ConfigError(UserError):
  """A gin file, binding or flag with an invalid value."""


class ClusterError(UserError):
  """Processes of a run that cannot join each other."""


class MeshError(UserError):
  """Devices, mesh and model whose sizes do not fit each other."""


class ShapeError(UserError):
  """Arrays or feature lengths of the wrong rank, size or name."""


class ModelError(UserError):
  """Model hyper-parameters that contradict each other or the data."""


class DataError(UserError):
  """A task, file or vocabulary that cannot give the requested batches."""


# About the task that this parameter names.
task_error = functools.partial(DataError, parameters=('DatasetConfig.mixture_or_task_name',))


class NoExamplesError(DataError):
  """A split that does not exist or is empty."""


class CheckpointError(UserError):
  """A checkpoint that cannot be written or read, or does not fit the run."""


class AccessError(CheckpointError):
  """A file that this process cannot read now, or has no right to; its bytes may be intact."""


class OutOfMemoryError(UserError):
  """A run that needs more memory than its devices or hosts have."""


class TrainingError(UserError):
  """A run that must stop: the loss is not finite, or a step failed."""


def bad_setting(settings: object, name: str, reason: str) -> Problem:
  """Returns the problem `name = value reason` of a dataclass that gin configures by its name."""
  return Problem(
    f'{name} = {getattr(settings, name)!r} {reason}',
    parameters=(f'{type(settings).__name__}.{name}',),
  )


_OPERATION_NAMES = re.compile(r'^\{\{function_node [^}]*\}\}| \[Op:\w+\]( name:.*)?$')


def first_line(e: BaseException) -> str:
  """Returns the first line of an error's message, or its type if the message is empty.

  TensorFlow's names of operations are left out.
  """
  line = next(iter(str(e).strip().splitlines()), '')
  return _OPERATION_NAMES.sub('', line).strip() or type(e).__name__


def array_text(x: object) -> str:
  """Returns 'float32[8, 32]' for an array, and its type, such as 'a list', for anything else."""
  if hasattr(x, 'shape') and hasattr(x, 'dtype'):
    return f'{x.dtype}{list(x.shape)}'
  return 'None' if x is None else f'a {type(x).__name__}'


def did_you_mean(name: object, candidates: Iterable[str], *, limit: int = 3) -> str:
  """Returns ` Did you mean 'a' or 'b'?` for the closest candidates, or an empty string."""
  by_lower = {str(candidate).lower(): str(candidate) for candidate in candidates}
  spelled = str(getattr(name, '__name__', name)).lower()
  close = difflib.get_close_matches(spelled, list(by_lower), n=limit, cutoff=0.6)
  if not close:
    return ''
  return ' Did you mean ' + ' or '.join(repr(by_lower[match]) for match in close) + '?'


def number_ranges(numbers: Iterable[int], *, separator: str = ',') -> str:
  """Returns '1,4-7,9' for [1, 4, 5, 6, 7, 9]."""
  spans: list[list[int]] = []
  for number in numbers:
    if spans and number == spans[-1][1] + 1:
      spans[-1][1] = number
    else:
      spans.append([number, number])
  return separator.join(str(a) if a == b else f'{a}-{b}' for a, b in spans)


def listed(items: Sequence[str], most: int) -> list[str]:
  """Returns the first `most` items, and 'and 3 more' if there are others."""
  return [*items[:most], *([f'and {len(items) - most} more'] if len(items) > most else [])]
