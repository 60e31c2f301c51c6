"""Text from a language model, one token at a time."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.errors import ConfigError
from t5x_gpu.partitioning.axis_rules import shard
from t5x_gpu.partitioning.layout import Layout


@dataclasses.dataclass(frozen=True)
class SampleConfig:
  """A text to continue, to see what a model has learnt.

  Attributes:
    prompt: the beginning.
    num_tokens: tokens to add; prompt and continuation must fit the model's length.
    temperature: 0 takes the likeliest token, 1 samples from the model's distribution.
  """
  prompt: str
  num_tokens: int = 128
  temperature: float = 0.7


def check_sample(prompt_length: int, *, num_tokens: int, length: int) -> None:
  """Raises ConfigError unless a prompt and `num_tokens` more, each at least one, fit `length`."""
  room = length - prompt_length
  if prompt_length >= 1 and 1 <= num_tokens <= room:
    return
  raise ConfigError(
      f'The sample has {prompt_length} prompt tokens and {num_tokens} new ones; the model takes '
      f'{length} in all, and at least one of each.',
      fix=f'Set SampleConfig.prompt to a text of 1 to {length - 1} tokens.'
      if prompt_length < 1 or room < 1 else f'Set SampleConfig.num_tokens to 1 to {room}.',
      parameters=('SampleConfig.num_tokens', 'SampleConfig.prompt', 'TASK_FEATURE_LENGTHS'))


def sample(model: Any, params: Any, prompt: np.ndarray, *, layout: Layout, length: int,
           num_tokens: int, temperature: float, seed: int = 0) -> np.ndarray:
  """Returns token ids [prompt + num_tokens]: `prompt` and its continuation.

  Every token costs a full forward pass of `length` positions: for short samples of small models.

  Args:
    model: has `logits(params, batch)`.
    params: on `layout`.
    prompt: [prompt_length] ids, at least one.
    layout: mesh and rules.
    length: positions of the forward pass, the training length.
    num_tokens, temperature: as in SampleConfig.
    seed: of the draws.
  Raises:
    ConfigError: as `check_sample`.
  """
  check_sample(len(prompt), num_tokens=num_tokens, length=length)
  end = len(prompt) + num_tokens
  # Unwritten positions hold 1: not padding, so that the mask stays causal; nothing reads them.
  # As many rows as the mesh splits a batch into; the first one is returned.
  tokens = np.ones((layout.batch_parts, length), np.int32)
  tokens[:, :len(prompt)] = prompt

  def continue_(params: Any, tokens: jax.Array) -> jax.Array:
    def body(i: jax.Array, tokens: jax.Array) -> jax.Array:
      inputs = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
      logits = model.logits(params, {'decoder_input_tokens': inputs,
                                     'decoder_target_tokens': tokens})[:, i]
      logits = logits.at[:, 0].set(-jnp.inf)  # 0 is padding: what follows would not see it
      if temperature > 0:
        key = jax.random.fold_in(jax.random.key(seed), i)
        chosen = jax.random.categorical(key, logits / temperature)
      else:
        chosen = jnp.argmax(logits, axis=-1)
      return shard(tokens.at[:, i].set(chosen.astype(jnp.int32)), 'batch', 'length')
    return jax.lax.fori_loop(len(prompt), end, body, tokens)

  out = layout.jit(continue_, out_shardings=layout.replicated)(
      params, layout.put({'tokens': tokens})['tokens'])
  return np.asarray(out)[0, :end]
