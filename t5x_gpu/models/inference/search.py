"""The decoding loop (`run`), with greedy search, sampling and beam search.

A search chooses the next tokens and decides when to stop; the loop calls the model.
"""

import dataclasses
from collections.abc import Callable
from typing import Optional, Protocol, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from t5x_gpu.models.incremental import DecodingState
from t5x_gpu.partitioning.axis_rules import shard

# (tokens [rows], state) -> (logits [rows, vocab] of the next token, next state).
DecodeStep = Callable[[jax.Array, DecodingState], tuple[jax.Array, DecodingState]]
Carry = TypeVar('Carry')  # state of a search between tokens, such as Texts
# (index of the next token, tokens [rows], carry, state).
Loop = tuple[ArrayLike, jax.Array, Carry, DecodingState]


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


class Search(Protocol[Carry]):
  """How to choose tokens; each search has its own type of `carry`.

  Attributes:
    num_rows_per_prompt: rows of the batch per prompt.
    max_decode_length: maximum number of tokens to add.
  """

  num_rows_per_prompt: int
  max_decode_length: int

  def start(self, rows: int) -> Carry:
    """Returns the first carry."""

  def choose(
    self, number: ArrayLike, logits: jax.Array, carry: Carry
  ) -> tuple[Carry, jax.Array, Optional[jax.Array]]:
    """Returns (carry, tokens [rows], beams [batch, beams] that they continue).

    `beams` is None if every row continues itself.

    Args:
      number: index of the token in its text.
      logits: [rows, vocab] float32.
      carry: from `start` or the previous call.
    """

  def goes_on(self, carry: Carry) -> jax.Array:
    """Returns whether another token could change the result."""

  def result(self, carry: Carry) -> Continuations:
    """Returns the continuations, best first."""


def run(
  search: Search[Carry], *, logits: jax.Array, state: DecodingState, decode_step: DecodeStep
) -> Continuations:
  """Returns the result of `search`; the loop ends as soon as no row needs another token.

  Args:
    search: chooses tokens.
    logits: [batch, vocab] of the token after each prompt.
    state: state after the prompts.
    decode_step: method of the model.
  """
  loop = start_loop(search, logits=logits, state=state)
  return search.result(continue_loop(search, loop, decode_step=decode_step)[2])


def start_loop(search: Search[Carry], *, logits: jax.Array, state: DecodingState) -> Loop[Carry]:
  """Returns the loop with the first token of each text; arguments as for `run`."""
  if search.num_rows_per_prompt > 1:
    logits = jnp.repeat(logits, search.num_rows_per_prompt, axis=0)
    state = state.repeat(search.num_rows_per_prompt)
  return jnp.int32(1), *_choose(search, 0, logits, search.start(logits.shape[0]), state)


def continue_loop(
  search: Search[Carry],
  loop: Loop[Carry],
  *,
  decode_step: DecodeStep,
  most: Optional[ArrayLike] = None,
) -> Loop[Carry]:
  """Returns the loop with further tokens, until texts have `most`; None for max_decode_length."""
  limit = search.max_decode_length if most is None else most

  def goes_on(loop: Loop[Carry]) -> jax.Array:
    number, _, carry, _ = loop
    return (number < limit) & search.goes_on(carry)

  def another(loop: Loop[Carry]) -> Loop[Carry]:
    number, tokens, carry, state = loop
    logits, state = decode_step(tokens, state)
    return number + 1, *_choose(search, number, logits, carry, state)

  return jax.lax.while_loop(goes_on, another, loop)


def _choose(
  search: Search[Carry], number: ArrayLike, logits: jax.Array, carry: Carry, state: DecodingState
) -> tuple[jax.Array, Carry, DecodingState]:
  logits = shard(logits, 'batch', None)  # not split over vocab: choosing needs all tokens
  carry, tokens, beams = search.choose(number, logits, carry)
  return tokens, carry, state if beams is None else state.beams(beams)


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
    max_decode_length, temperature, top_k, top_p, stop_tokens, zero_is_padding, seed,
      rescale_log_probs: as in DecodingConfig.
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
  rescale_log_probs: bool = False

  def start(self, rows: int) -> Texts:
    tokens = shard(jnp.zeros((rows, self.max_decode_length), jnp.int32), 'batch', None)
    return Texts(
      tokens,
      jnp.zeros(rows, jnp.int32),
      jnp.zeros(rows),
      jnp.repeat(self.numbers < 0, self.num_rows_per_prompt),
    )

  def choose(
    self, number: ArrayLike, logits: jax.Array, carry: Texts
  ) -> tuple[Texts, jax.Array, None]:
    allowed = without_padding(logits, zero_is_padding=self.zero_is_padding)
    if self.temperature > 0:
      allowed = most_probable(allowed / self.temperature, top_k=self.top_k, top_p=self.top_p)
      chosen = jax.vmap(jax.random.categorical)(self._keys(number), allowed)
    else:
      chosen = jnp.argmax(allowed, axis=-1)
    chosen = jnp.where(carry.finished, 0, chosen.astype(jnp.int32))
    scored = allowed if self.rescale_log_probs else logits
    log_probability = jnp.take_along_axis(jax.nn.log_softmax(scored), chosen[:, None], -1)[:, 0]
    is_certain = self.rescale_log_probs and self.temperature == 0
    gained = jnp.where(carry.finished | is_certain, 0.0, log_probability)
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

  def _keys(self, number: ArrayLike) -> jax.Array:
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

    drawn = Continuations(*map(by_prompt, (carry.tokens, carry.lengths, carry.log_probabilities)))
    return _best(self.num_rows_per_prompt, drawn)


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


# Below this log-probability, no text of T5X's rules ends: users forbid a token by a logit of -1e10.
_IMPOSSIBLE = -1e7


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
    self, number: ArrayLike, logits: jax.Array, carry: Beams
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
    else:
      ends = ends & (log_probs > _IMPOSSIBLE)
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

  def _penalty(self, length: ArrayLike) -> jax.Array:
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
        # T5X does not divide these: a penalty compares texts that ended.
        carry.log_probabilities / (self._penalty(carry.length) if self.is_huggingface else 1.0),
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
