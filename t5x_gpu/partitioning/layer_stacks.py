"""Where a model keeps the parameters of its layers: in one stack, or in several that run in turn.

The layers of most models are `params['layers']`. A model with several stacks names them in the
order in which they run, as in `stacks = ('encoder', 'decoder')`, and keeps the layers of each stack
in `params[name]['layers']`. The activation between its layers is a tuple with a member per stack,
all returned by `embed`. `run_layers` gets the name of a stack, changes the stack's member, and may
read the members of earlier stacks. The head reads the last member.

A model that is compared with a frozen copy of itself keeps the copy in `params[REFERENCE]`.
"""

import contextvars
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Protocol

import jax
from jax.extend.core import get_opaque_trace_state

from t5x_gpu.errors import ModelError
from t5x_gpu.partitioning.trees import Batch, Tree

Params = Mapping[str, Any]
# Name of the stack of a model with one stack, whose layers are `params['layers']`.
ONLY = ''
# Subtree with the frozen copy of a model; below this name, paths are the model's paths.
REFERENCE = 'reference_model'


def is_reference(path: str) -> bool:
  """Returns whether a parameter belongs to the frozen copy, which only its own run needs."""
  return path.startswith(f'{REFERENCE}/')


class RunsLayers(Protocol):
  """The part of a model that runs layers."""

  def run_layers(self, params: Params, x: Tree, batch: Batch, **options: Any) -> Tree:
    """Returns `x` after the layers in `params`, or after the layers of `stack` if given."""


def layers_of(params: Params, stack: str) -> Tree:
  """Returns the parameters of the layers of a stack."""
  return (params if stack == ONLY else params[stack])['layers']


def has_layers(params: Params, stack: str) -> bool:
  """Returns whether `params`, maybe a part of a model's parameters, has layers of a stack."""
  return 'layers' in (params if stack == ONLY else params.get(stack, {}))


def num_layers(params: Params, stack: str) -> int:
  """Returns the number of layers of a stack in `params`."""
  return jax.tree.leaves(layers_of(params, stack))[0].shape[0]


def with_layers(params: Params, stack: str, layers: Tree) -> dict[str, Any]:
  """Returns `params` with `layers` as the layers of a stack."""
  if stack == ONLY:
    return {**params, 'layers': layers}
  return {**params, stack: {**params[stack], 'layers': layers}}


def without_layers(params: Params, stacks: Sequence[str]) -> dict[str, Any]:
  """Returns `params` without the layers of `stacks`."""

  def others(group: Params) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != 'layers'}

  if tuple(stacks) == (ONLY,):
    return others(params)
  return {name: others(value) if name in stacks else value for name, value in params.items()}


def member_of(x: Tree, stacks: Sequence[str], stack: str) -> Tree:
  """Returns the member of `x`, the activation between layers, that belongs to a stack."""
  return x if tuple(stacks) == (ONLY,) else x[tuple(stacks).index(stack)]


def with_member(x: Tree, stacks: Sequence[str], stack: str, member: Tree) -> Tree:
  """Returns `x`, the activation between layers, with `member` as the member of a stack."""
  if tuple(stacks) == (ONLY,):
    return member
  return tuple(member if name == stack else old for name, old in zip(stacks, x, strict=True))


def prefix_of(stack: str) -> str:
  """Returns the path prefix of a stack's layers: 'layers', or 'encoder/layers'."""
  return 'layers' if stack == ONLY else f'{stack}/layers'


def run_layers(
  model: RunsLayers, params: Params, x: Tree, batch: Batch, *, stack: str, **options: Any
) -> Tree:
  """Returns `model.run_layers(...)`; passes `stack` only to a model with several stacks.

  Args:
    model: the model.
    params: parameters of the model, with the layers to run.
    x: output of `embed` or of earlier layers.
    batch: batch for the model.
    stack: name of the stack.
    **options: other arguments of the model.
  """
  which = {} if stack == ONLY else {'stack': stack}
  token = _have_run.set(_Runs(get_opaque_trace_state()))
  try:
    return model.run_layers(params, x, batch, **which, **options)
  finally:
    _have_run.reset(token)


@dataclasses.dataclass
class _Runs:
  """The loops over layers that the present call of `run_layers` has run.

  Attributes:
    trace: what JAX traced when `run_layers` was called.
    arrays: an array of each loop's layers.
  """

  trace: object
  arrays: list[object] = dataclasses.field(default_factory=list)


_have_run: contextvars.ContextVar[Optional[_Runs]] = contextvars.ContextVar(
  'have_run', default=None
)


def check_runs_once(array: object) -> None:
  """Raises ModelError if the present `run_layers` may run the layers of this array several times.

  Such a model is another one in a pipeline, where `run_layers` gets a part of the layers, and with
  microbatches its gradients would contain the gradients of earlier microbatches several times.
  Inside a transformation, such as a loop, which may run them several times, it is refused, too.
  """
  runs = _have_run.get()
  if runs is None:
    return
  if runs.trace != get_opaque_trace_state():
    raise _error('inside a loop, a branch, or another transformation of JAX.')
  if any(x is array for x in runs.arrays):
    raise _error('several times.')
  runs.arrays.append(array)


def _error(how: str) -> ModelError:
  return ModelError(
    f'run_layers of the model runs its layers {how} Pipelines and accumulation by layer call it '
    'with a part of the layers, and microbatches add up its gradients.',
    fix='Do so in `loss` instead: embed, run_layers as often as needed, head.',
    docs='add_a_model.md#when-the-layer-is-not-enough',
  )
