"""Low-rank adapters (LoRA): a frozen model, and two small factors next to each chosen kernel.

The effective kernel is W + (alpha / rank) a b; only a and b are trained. The product a b is never
formed: x a b is two small matmuls, the gradient of W is not computed, and updates that are too
small for W's dtype still count. b starts at 0, so the adapted model starts equal to the original.
Source: Hu et al. 2021 (LoRA), section 4.1.
"""

import dataclasses
import functools
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Optional, TypeVar

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.data.batches import BatchSpec
from t5x_gpu.errors import ModelError, did_you_mean
from t5x_gpu.layers.dense import FACTORS
from t5x_gpu.models.model import Model, ModelWrapper, Params, check_model
from t5x_gpu.partitioning.axis_rules import NamedParam

_Factor = TypeVar('_Factor')
_Array = TypeVar('_Array', np.ndarray, jax.Array)
STACKS = ('layers',)  # leading axes whose entries are separate kernels
_KERNEL = '/kernel'
# Kernels in a decoder that multiply the encoder's tokens.
_OF_ENCODER = re.compile('/cross_attention/(key|value)/')
_error = functools.partial(ModelError, docs='finetune.md#lora')


@dataclasses.dataclass(frozen=True)
class LoraModel(ModelWrapper):
  """A model with adapters; a custom model must use the linear maps of layers/dense.py.

  It has all members of the wrapped model. Parameters keep their paths, so a run can start from a
  checkpoint of the wrapped model; next to each adapted `kernel` are `lora_a` [inputs, rank] and
  `lora_b` [rank, features].

  Attributes:
    model: the model to adapt.
    rank: rank of the factors.
    alpha: the product of the factors is multiplied by alpha / rank.
    pattern: regular expression that matches the whole path of each kernel to adapt.
    also_train: regular expression for parameters to train without adapters, r'classifier/.*'; None
      to train only adapters.
  """

  model: Model
  rank: int = 8
  alpha: float = 16.0
  pattern: str = r'.*/(query|value)/kernel'
  also_train: Optional[str] = None

  def __post_init__(self) -> None:
    check_model(self.model)
    if self.rank < 1:
      raise _error(
        f'LoraModel.rank = {self.rank} must be at least 1.',
        fix='Set LoraModel.rank = 8.',
        parameters=('LoraModel.rank',),
      )
    for name in ('pattern', 'also_train'):
      try:
        re.compile(getattr(self, name) or '')
      except re.error as e:
        raise ModelError(
          f'LoraModel.{name} = {getattr(self, name)!r} is not a regular expression: {e}.',
          fix='See docs.python.org/3/library/re.html.',
          parameters=(f'LoraModel.{name}',),
        ) from e

  @property
  def scale(self) -> float:
    """Multiplier of the product of the factors."""
    return self.alpha / self.rank

  def is_adapter(self, path: str) -> bool:
    """Returns whether a parameter is a factor, which a checkpoint of the wrapped model lacks."""
    return path.rpartition('/')[2] in FACTORS

  def is_trained(self, path: str) -> bool:
    """Returns whether a parameter is trained."""
    return self.is_adapter(path) or bool(
      self.also_train is not None and re.fullmatch(self.also_train, path)
    )

  def init(self, rng: jax.Array, spec: Optional[BatchSpec]) -> Params:
    """Returns new parameters of the wrapped model, and the factors, as `NamedParam`."""
    flat = flax.traverse_util.flatten_dict(self.model.init(rng, spec), sep='/')
    self._check(flat)
    for path in self._adapted(flat):
      # The key depends on the path, so another adapter does not change this adapter's key.
      key = jax.random.fold_in(rng, zlib.crc32(path.encode()))
      prefix = path.removesuffix('kernel')
      for name, factor in zip(FACTORS, self._new_factors(key, flat[path])):
        flat[prefix + name] = factor
    return flax.traverse_util.unflatten_dict(flat, sep='/')

  def _adapted(self, paths: Iterable[str]) -> list[str]:
    return [p for p in paths if p.endswith(_KERNEL) and re.fullmatch(self.pattern, p)]

  def _new_factors(self, key: jax.Array, kernel: NamedParam) -> tuple[NamedParam, NamedParam]:
    sides = _sides(kernel)
    stack, inputs, features = ([kernel.value.shape[i] for i in dims] for dims in sides)
    of_stack, of_inputs, of_features = ([kernel.names[i] for i in dims] for dims in sides)
    # As in Hu et al.'s code: uniform, with a third of the norm-preserving variance.
    limit = 1.0 / math.sqrt(math.prod(inputs))
    a = jax.random.uniform(key, (*stack, *inputs, self.rank), jnp.float32, -limit, limit)
    b = jnp.zeros((*stack, self.rank, *features), jnp.float32)
    return (
      NamedParam(a, (*of_stack, *of_inputs, None)),
      NamedParam(b, (*of_stack, None, *of_features)),
    )

  def _check(self, flat: Mapping[str, NamedParam]) -> None:
    """Raises ModelError for patterns that match nothing, or kernels that cannot be adapted."""
    kernels = [path for path, p in flat.items() if path.endswith(_KERNEL) and _sides(p)]
    adapted = self._adapted(flat)
    if not adapted:
      raise _error(
        f'LoraModel.pattern = {self.pattern!r} matches no kernel.'
        + did_you_mean(re.sub(r'\\.|[^\w/]', '', self.pattern), kernels),
        fix='It must match a whole path. The kernels are:\n  ' + '\n  '.join(kernels),
        parameters=('LoraModel.pattern',),
      )
    wrong = [path for path in adapted if path not in kernels]
    if wrong:
      raise _error(
        f'LoraModel.pattern = {self.pattern!r} matches kernels that cannot be adapted: '
        + ', '.join(f'{path} {tuple(flat[path].names)}' for path in wrong)
        + '.',
        fix='Kernels of experts and their routers cannot have adapters. These kernels can:\n  '
        + '\n  '.join(kernels),
        parameters=('LoraModel.pattern',),
      )
    if self.also_train is not None and not any(re.fullmatch(self.also_train, p) for p in flat):
      raise _error(
        f'LoraModel.also_train = {self.also_train!r} matches no parameter.'
        + did_you_mean(re.sub(r'\\.|[^\w/]', '', self.also_train), flat),
        fix='It must match whole paths. The parameters are:\n  ' + '\n  '.join(flat),
        parameters=('LoraModel.also_train',),
      )

  def params_of_model(self, params: Params) -> Params:
    """Returns `params` with `lora_b` multiplied by the scale, so that layers need not apply it."""
    if isinstance(params, tuple):  # one entry per layer
      return tuple(map(self.params_of_model, params))
    return {
      name: (
        self.params_of_model(value)
        if isinstance(value, (Mapping, tuple))
        else value * self.scale
        if name == FACTORS[1]
        else value
      )
      for name, value in params.items()
    }

  def flops_per_token(self, length: int) -> float:
    """Returns model FLOPs of one training step per position of a row of `length` tokens."""
    stacks = self.model.stacks
    return self.flops_per_row(dict.fromkeys(stacks, length)) / length

  def flops_per_row(self, lengths: Mapping[str, int]) -> float:
    """Returns model FLOPs of one training step per row; `lengths` is stack -> number of tokens.

    Frozen kernels have no weight gradient: 4 FLOPs per weight instead of 6. Of the parameters in
    `also_train`, only kernels of layers count.
    """
    flops = self.model.flops_per_row(lengths)
    flops -= self._frozen_flops_per_row(lengths) / 3
    shapes = flax.traverse_util.flatten_dict(
      jax.eval_shape(lambda: self.init(jax.random.key(0), None)), sep='/'
    )
    *_, last = lengths.values()
    for path, p in shapes.items():
      stack = 'encoder' if _OF_ENCODER.search(path) else path.split('/')[0]
      tokens = lengths.get(stack, last)
      if self.is_adapter(path):
        flops += 6.0 * p.value.size * tokens
      elif self.is_trained(path) and path.endswith(_KERNEL) and p.names[0] in STACKS:
        flops += 2.0 * p.value.size * tokens
    return flops

  def _frozen_flops_per_row(self, lengths: Mapping[str, int]) -> float:
    """Returns FLOPs of the wrapped model's kernels on a row, all trained, without attention."""
    whole = self.model.flops_per_row
    # Attention grows with the square of the lengths up to any window, so the difference below keeps
    # only terms linear in the lengths. Rows scaled to one token are not longer than any window.
    one = 1 / max(lengths.values())
    long, short = (whole({s: n * scale for s, n in lengths.items()}) for scale in (one, one / 2))
    return (4 * short - long) / one

  def merged(self, params: Params) -> Params:
    """Returns parameters of the wrapped model with the adapters added to their kernels."""
    flat = flax.traverse_util.flatten_dict(params, sep='/')
    return flax.traverse_util.unflatten_dict(
      {
        path: merged_kernel(value, *factors_of(path, flat.get), scale=self.scale)
        for path, value in flat.items()
        if not self.is_adapter(path)
      },
      sep='/',
    )


def without_factors(params: Params) -> Params:
  """Returns the parameters of the wrapped model, without the adapters' factors."""
  if isinstance(params, tuple):  # one entry per layer
    return tuple(map(without_factors, params))
  return {
    name: without_factors(value) if isinstance(value, (Mapping, tuple)) else value
    for name, value in params.items()
    if name not in FACTORS
  }


def without_adapters(model: Model) -> Model:
  """Returns the model that a LoraModel wraps; any other model unchanged."""
  return model.model if isinstance(model, LoraModel) else model


def factors_of(
  path: str, get: Callable[[str], Optional[_Factor]]
) -> tuple[Optional[_Factor], Optional[_Factor]]:
  """Returns the two factors next to the kernel at `path`; (None, None) for other parameters.

  Args:
    path: '/'-joined path of any parameter.
    get: path -> the factor, or None if it does not exist.
  """
  if not path.endswith(_KERNEL):
    return None, None
  first, second = (get(path.removesuffix('kernel') + name) for name in FACTORS)
  return first, second


def merged_kernel(
  kernel: _Array, a: Optional[_Array], b: Optional[_Array], *, scale: float
) -> _Array:
  """Returns kernel + scale a b, in numpy for numpy arrays; `kernel` if the factors are None.

  Args:
    kernel: [stack..., inputs..., features...].
    a: [stack..., inputs..., rank].
    b: [stack..., rank, features...].
    scale: alpha / rank.
  """
  if a is None:
    return kernel
  stack = kernel.shape[: a.ndim + b.ndim - 2 - kernel.ndim]
  rank = a.shape[-1]
  product = (np if isinstance(kernel, np.ndarray) else jnp).matmul(
    a.reshape(*stack, -1, rank), b.reshape(*stack, rank, -1)
  )
  return kernel + scale * product.reshape(kernel.shape)


def _sides(kernel: NamedParam) -> Optional[tuple[list[int], list[int], list[int]]]:
  """Returns the dimensions of stack, inputs and features of a kernel; None if it cannot be adapted.

  One side is the residual stream, `embed`; the other side has the remaining dimensions.
  """
  names = kernel.names
  stack = [i for i, name in enumerate(names) if name in STACKS]
  own = [i for i in range(len(names)) if i not in stack]
  if 'experts' in names or len(own) < 2:
    return None
  if names[own[0]] == 'embed':
    return stack, own[:1], own[1:]
  return (stack, own[:-1], own[-1:]) if names[own[-1]] == 'embed' else None
