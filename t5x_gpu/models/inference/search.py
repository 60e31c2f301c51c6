"""The decoding loop, greedy search and sampling.

A search chooses the next tokens and decides when to stop; the loop calls the model. `beam_search`
has the beam search.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Optional, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.models.inference.incremental import DecodingState
from t5x_gpu.partitioning.axis_rules import shard

# (tokens [rows], state) -> (logits [rows, vocab] of the next token, next state).
DecodeStep = Callable[[jax.Array, DecodingState], tuple[jax.Array, DecodingState]]


@flax.struct.dataclass
class Continuations:
  """Continuations of a batch of prompts, best first.

  Attributes:
    tokens: [batch, decodes, max_decode_length], padded with 0 after the stop token.
    lengths: [batch, decodes] number of tokens, including the stop token.
    scores: [batch, decodes] log-probability; in a beam search, after the length penalty.
  """

  tokens: jax.Array
  lengths: jax.Array
  scores: jax.Array


class Search(Protocol):
  """How to choose tokens; each search has its own type of `carry`.

  Attributes:
    num_rows_per_prompt: rows of the batch per prompt.
    max_decode_length: maximum number of tokens to add.
  """

  num_rows_per_prompt: int
  max_decode_length: int

  def start(self, rows: int) -> Any:
    """Returns the first carry."""

  def choose(
    self, number: Any, logits: jax.Array, carry: Any
  ) -> tuple[Any, jax.Array, Optional[jax.Array]]:
    """Returns (carry, tokens [rows], beams [batch, beams] that they continue).

    `beams` is None if every row continues itself.

    Args:
      number: index of the token in its text.
      logits: [rows, vocab] float32.
      carry: from `start` or the previous call.
    """

  def goes_on(self, carry: Any) -> jax.Array:
    """Returns whether another token could change the result."""

  def result(self, carry: Any) -> Continuations:
    """Returns the continuations, best first."""


def run(
  search: Search, *, logits: jax.Array, state: DecodingState, decode_step: DecodeStep
) -> Continuations:
  """Returns the result of `search`; the loop ends as soon as no row needs another token.

  Args:
    search: chooses tokens.
    logits: [batch, vocab] of the token after each prompt.
    state: state after the prompts.
    decode_step: method of the model.
  """
  if search.num_rows_per_prompt > 1:
    logits = jnp.repeat(logits, search.num_rows_per_prompt, axis=0)
    state = state.repeat(search.num_rows_per_prompt)

  def choose(number: Any, logits: jax.Array, carry: Any, state: DecodingState) -> Any:
    logits = shard(logits, 'batch', None)  # not split over vocab: choosing needs all tokens
    carry, tokens, beams = search.choose(number, logits, carry)
    return tokens, carry, state if beams is None else state.beams(beams)

  def goes_on(loop: Any) -> jax.Array:
    number, _, carry, _ = loop
    return (number < search.max_decode_length) & search.goes_on(carry)

  def another(loop: Any) -> Any:
    number, tokens, carry, state = loop
    logits, state = decode_step(tokens, state)
    return number + 1, *choose(number, logits, carry, state)

  first = choose(0, logits, search.start(logits.shape[0]), state)
  carry = jax.lax.while_loop(goes_on, another, (jnp.int32(1), *first))[2]
  return search.result(carry)


def without_padding(scores: jax.Array, *, zero_is_padding: bool) -> jax.Array:
  """Returns `scores` [..., vocab] with -inf for padding (id 0), unless id 0 is a word."""
  if not zero_is_padding:
    return scores
  return jnp.where(jnp.arange(scores.shape[-1]) == 0, -jnp.inf, scores)


def is_stop(tokens: jax.Array, stop_tokens: tuple[int, ...]) -> jax.Array:
  """Returns where `tokens` is one of `stop_tokens`."""
  return (tokens[..., None] == jnp.asarray(stop_tokens, jnp.int32)).any(-1)


def most_probable(logits: jax.Array, *, top_k: int, top_p: float) -> jax.Array:
  """Returns logits [rows, vocab] with all but the most probable tokens at -inf; keeps at least one.

  Args:
    logits: [rows, vocab], divided by the temperature.
    top_k: number of tokens to keep, plus ties with the last of them; 0 for all.
    top_p: total probability of the tokens to keep, among the top_k.
  """
  if 0 < top_k < logits.shape[-1]:
    logits = jnp.where(logits >= jax.lax.top_k(logits, top_k)[0][:, -1:], logits, -jnp.inf)
  if top_p < 1.0:
    ordered = jnp.sort(logits, axis=-1, descending=True)
    before = jnp.cumsum(jax.nn.softmax(ordered), axis=-1) - jax.nn.softmax(ordered)
    least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
    logits = jnp.where(logits >= least, logits, -jnp.inf)
  return logits


@flax.struct.dataclass
class Texts:
  """The texts so far.

  Attributes:
    tokens: [rows, max_decode_length], 0 where no token has been written.
    lengths: [rows] number of tokens.
    log_probabilities: [rows], of all tokens under the model.
    finished: [rows], whether a stop token ended the text.
  """

  tokens: jax.Array
  lengths: jax.Array
  log_probabilities: jax.Array
  finished: jax.Array


@dataclasses.dataclass(frozen=True)
class Sampling:
  """Greedy decoding (temperature 0) or sampling.

  Attributes:
    numbers: [batch], number of each prompt; determines a sample, together with the seed and the
      number of the decode. Negative for rows without a prompt, which only fill the batch.
    num_rows_per_prompt: number of decodes per prompt.
    max_decode_length, temperature, top_k, top_p, stop_tokens, zero_is_padding, seed: as in
      DecodingConfig.
  """

  numbers: jax.Array
  num_rows_per_prompt: int
  max_decode_length: int
  temperature: float
  top_k: int
  top_p: float
  stop_tokens: tuple[int, ...]
  seed: int
  zero_is_padding: bool = True

  def start(self, rows: int) -> Texts:
    tokens = shard(jnp.zeros((rows, self.max_decode_length), jnp.int32), 'batch', None)
    return Texts(
      tokens,
      jnp.zeros(rows, jnp.int32),
      jnp.zeros(rows),
      jnp.repeat(self.numbers < 0, self.num_rows_per_prompt),
    )

  def choose(self, number: Any, logits: jax.Array, carry: Texts) -> tuple[Texts, jax.Array, None]:
    allowed = without_padding(logits, zero_is_padding=self.zero_is_padding)
    if self.temperature > 0:
      allowed = most_probable(allowed / self.temperature, top_k=self.top_k, top_p=self.top_p)
      chosen = jax.vmap(jax.random.categorical)(self._keys(number), allowed)
    else:
      chosen = jnp.argmax(allowed, axis=-1)
    chosen = jnp.where(carry.finished, 0, chosen.astype(jnp.int32))
    log_probability = jnp.take_along_axis(jax.nn.log_softmax(logits), chosen[:, None], -1)[:, 0]
    gained = jnp.where(carry.finished, 0.0, log_probability)
    tokens = shard(carry.tokens.at[:, number].set(chosen), 'batch', None)
    return (
      Texts(
        tokens,
        carry.lengths + ~carry.finished,
        carry.log_probabilities + gained,
        carry.finished | is_stop(chosen, self.stop_tokens),
      ),
      chosen,
      None,
    )

  def _keys(self, number: Any) -> jax.Array:
    """Returns a key per row for token `number`."""

    def key(prompt: jax.Array, decode: jax.Array) -> jax.Array:
      of_row = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), prompt), decode)
      return jax.random.fold_in(of_row, number)

    prompts = jnp.repeat(self.numbers, self.num_rows_per_prompt)
    decodes = jnp.arange(prompts.shape[0]) % self.num_rows_per_prompt
    return jax.vmap(key)(prompts, decodes)

  def goes_on(self, carry: Texts) -> jax.Array:
    return ~carry.finished.all()

  def result(self, carry: Texts) -> Continuations:
    def by_prompt(x: jax.Array) -> jax.Array:
      return x.reshape(-1, self.num_rows_per_prompt, *x.shape[1:])

    return Continuations(*map(by_prompt, (carry.tokens, carry.lengths, carry.log_probabilities)))
