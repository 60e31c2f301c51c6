"""Beam search: keeps a few unfinished texts per prompt and returns the most probable ones."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.models.inference.search import Continuations, is_stop, without_padding


@flax.struct.dataclass
class Beams:
  """Open and finished texts of every prompt, best first.

  Attributes:
    tokens: [batch, beams, max_decode_length] of open texts.
    log_probabilities: [batch, beams] of open texts; -inf in unused beams.
    length: number of tokens of every open text.
    done: finished texts; score -inf in unused slots.
    open: [batch], whether another token could change `done`.
  """

  tokens: jax.Array
  log_probabilities: jax.Array
  length: jax.Array
  done: Continuations
  open: jax.Array


@dataclasses.dataclass(frozen=True)
class BeamSearch:
  """A search that keeps `num_rows_per_prompt` open texts, and the same number of finished texts.

  Each step takes the best candidates among all next tokens of all open texts: enough candidates
  that open texts remain even if all stop tokens rank first.

  Attributes:
    numbers: [batch], number of each prompt; negative for rows without a prompt.
    num_rows_per_prompt: number of beams.
    max_decode_length, length_penalty, stop_tokens, zero_is_padding: as in DecodingConfig.
    is_huggingface: DecodingConfig.beam_rule is 'huggingface', not 't5x'.
  Source: Wu et al. 2016, section 7; T5X's and transformers' rules where the paper leaves a choice.
  """

  numbers: jax.Array
  num_rows_per_prompt: int
  max_decode_length: int
  length_penalty: float
  stop_tokens: tuple[int, ...]
  is_huggingface: bool
  zero_is_padding: bool = True

  def start(self, rows: int) -> Beams:
    batch, beams = rows // self.num_rows_per_prompt, self.num_rows_per_prompt
    none = jnp.full((batch, beams), -jnp.inf)
    tokens = jnp.zeros((batch, beams, self.max_decode_length), jnp.int32)
    return Beams(
      tokens,
      none.at[:, 0].set(0.0),  # all beams start equal, so one beam is enough
      jnp.int32(0),
      Continuations(tokens, jnp.zeros((batch, beams), jnp.int32), none),
      self.numbers >= 0,
    )

  def choose(
    self, number: Any, logits: jax.Array, carry: Beams
  ) -> tuple[Beams, jax.Array, jax.Array]:
    beams, length = self.num_rows_per_prompt, carry.length + 1
    gains = without_padding(jax.nn.log_softmax(logits), zero_is_padding=self.zero_is_padding)
    vocab = gains.shape[-1]
    scores = carry.log_probabilities[:, :, None] + gains.reshape(-1, beams, vocab)
    count = min(max(2, 1 + len(self.stop_tokens)) * beams, beams * vocab)
    log_probs, best = jax.lax.top_k(scores.reshape(-1, beams * vocab), count)
    origin, chosen = best // vocab, (best % vocab).astype(jnp.int32)
    tokens = jnp.take_along_axis(carry.tokens, origin[:, :, None], axis=1)
    tokens = tokens.at[:, :, number].set(chosen)
    stops = is_stop(chosen, self.stop_tokens)

    ends = stops
    if self.is_huggingface:
      ends = (ends | (length == self.max_decode_length)) & (jnp.arange(count) < beams)
    ended = jnp.where(ends & carry.open[:, None], log_probs / self._penalty(length), -jnp.inf)
    done = _best(
      beams,
      Continuations(
        jnp.concatenate([carry.done.tokens, tokens], axis=1),
        jnp.concatenate([carry.done.lengths, jnp.full(best.shape, length)], axis=1),
        jnp.concatenate([carry.done.scores, ended], axis=1),
      ),
    )

    log_probs, kept = jax.lax.top_k(jnp.where(stops, -jnp.inf, log_probs), beams)

    def of_kept(x: jax.Array) -> jax.Array:
      return jnp.take_along_axis(x, kept, axis=1)

    tokens = jnp.take_along_axis(tokens, kept[:, :, None], axis=1)
    still_open = carry.open & self._may_improve(log_probs[:, 0], done, length)
    # The token of an unused beam (-inf) does not matter.
    return (
      Beams(tokens, log_probs, length, done, still_open),
      of_kept(chosen).reshape(-1),
      of_kept(origin),
    )

  def _penalty(self, length: Any) -> jax.Array:
    length = jnp.asarray(length, jnp.float32)
    return (length if self.is_huggingface else (5.0 + length) / 6.0) ** self.length_penalty

  def _may_improve(self, best_open: jax.Array, done: Continuations, length: jax.Array) -> jax.Array:
    """Returns [batch], whether an open text may still get a better score than a finished text."""
    penalty = self._penalty(length)
    if not self.is_huggingface:  # uses the penalty at the most favorable length
      penalty = jnp.maximum(penalty, self._penalty(self.max_decode_length))
    return (best_open > -jnp.inf) & (best_open / penalty > done.scores.min(-1))

  def goes_on(self, carry: Beams) -> jax.Array:
    return carry.open.any()

  def result(self, carry: Beams) -> Continuations:
    """Returns finished texts, followed by open texts if a prompt has too few."""
    done = carry.done
    num_done = jnp.sum(done.scores > -jnp.inf, axis=-1, keepdims=True)
    place = jnp.arange(self.num_rows_per_prompt)
    is_done = place < num_done

    def either(of_done: jax.Array, of_open: jax.Array) -> jax.Array:
      extra = (1,) * (of_done.ndim - 2)
      open_place = jnp.maximum(place - num_done, 0).reshape(*is_done.shape, *extra)
      return jnp.where(
        is_done.reshape(*is_done.shape, *extra),
        of_done,
        jnp.take_along_axis(of_open, open_place, axis=1),
      )

    return jax.tree.map(
      either,
      done,
      Continuations(
        carry.tokens,
        jnp.full(done.lengths.shape, carry.length),
        carry.log_probabilities / self._penalty(carry.length),
      ),
    )


def _best(count: int, texts: Continuations) -> Continuations:
  """Returns the `count` texts of each prompt with the highest scores."""
  scores, best = jax.lax.top_k(texts.scores, count)
  return Continuations(
    jnp.take_along_axis(texts.tokens, best[:, :, None], axis=1),
    jnp.take_along_axis(texts.lengths, best, axis=1),
    scores,
  )
