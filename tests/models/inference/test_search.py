"""Searches on a model that is a table: what they find is what an enumeration of all texts finds."""

import dataclasses
import functools
import itertools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.data.same_data import differences
from t5x_gpu.errors import ConfigError
from t5x_gpu.models.decoding import DecodingConfig
from t5x_gpu.models.inference.search import BeamSearch, Sampling, most_probable, run
from tests.messages import raises

VOCAB, STOP, LENGTH = 4, 1, 4
# Logits after every text of up to LENGTH tokens, for two prompts.
TABLE = jnp.asarray(np.random.default_rng(3).normal(0, 1.5, (2, VOCAB**LENGTH, VOCAB)), jnp.float32)


@flax.struct.dataclass
class TableState:
  """The text of each row as a number, which shows whether rows were put in the right order."""

  prompt: jax.Array
  text: jax.Array

  def repeat(self, count):
    return jax.tree.map(lambda x: jnp.repeat(x, count), self)

  def beams(self, index):
    text = jnp.take_along_axis(self.text.reshape(index.shape), index, axis=1).reshape(-1)
    return self.replace(text=text)


def table_step(tokens, state, table=TABLE):
  state = state.replace(text=state.text * VOCAB + tokens)
  return table[state.prompt, state.text], state


def find(search: Any, table=TABLE):
  @jax.jit
  def found():
    numbers = jnp.arange(len(table))
    state = TableState(numbers, jnp.zeros_like(numbers))
    step = functools.partial(table_step, table=table)
    return run(search(numbers=numbers), logits=table[:, 0], state=state, decode_step=step)

  return jax.device_get(found())


def beam_search(**options):
  return functools.partial(
    BeamSearch,
    **{
      **dict(
        num_rows_per_prompt=16,
        max_decode_length=LENGTH,
        length_penalty=0.6,
        stop_tokens=(STOP,),
        is_huggingface=False,
      ),
      **options,
    },
  )


def sampling(**options):
  return functools.partial(
    Sampling,
    **{
      **dict(
        num_rows_per_prompt=1,
        max_decode_length=LENGTH,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        stop_tokens=(STOP,),
        seed=0,
      ),
      **options,
    },
  )


@functools.cache
def log_probability(prompt: int, text: tuple[int, ...]) -> float:
  total, number = 0.0, 0
  for token in text:
    total += float(jax.nn.log_softmax(TABLE[prompt, number])[token])
    number = number * VOCAB + token
  return total


@functools.cache
def all_texts() -> tuple[tuple[int, ...], ...]:
  """Returns all texts that end in the stop token; padding is never among them."""
  return tuple(
    (*text, STOP) for n in range(LENGTH) for text in itertools.product(range(2, VOCAB), repeat=n)
  )


def texts(found, prompt):
  return [
    tuple(tokens[:length].tolist())
    for tokens, length, score in zip(
      found.tokens[prompt], found.lengths[prompt], found.scores[prompt]
    )
    if score > -np.inf
  ]


@pytest.mark.parametrize('alpha', [0.0, 0.6, 2.0])
def test_a_wide_beam_finds_what_an_enumeration_of_all_texts_finds(alpha):
  found = find(beam_search(length_penalty=alpha))
  for prompt in range(2):
    scores = {t: log_probability(prompt, t) / ((5 + len(t)) / 6) ** alpha for t in all_texts()}
    best = sorted(scores, key=scores.get, reverse=True)
    assert texts(found, prompt)[: len(best)] == best
    np.testing.assert_allclose(
      found.scores[prompt][: len(best)], [scores[t] for t in best], rtol=1e-5
    )
    assert found.scores[prompt][len(best)] < 0  # the rest are open ones, which did not stop


def reference_search(prompt, *, beams, alpha):
  """Returns [(score, text)] as T5X's rules have it, best first; written with lists and loops."""

  def penalty(length):
    return ((5 + length) / 6) ** alpha

  live, done = [(0.0, ())], []
  for length in range(1, LENGTH + 1):
    candidates = sorted(
      (
        (log_probability(prompt, (*text, token)), (*text, token))
        for _, text in live
        for token in range(1, VOCAB)
      ),
      reverse=True,
    )[: 2 * beams]
    done += [(score / penalty(length), text) for score, text in candidates if text[-1] == STOP]
    done = sorted(done, reverse=True)[:beams]
    live = [(score, text) for score, text in candidates if text[-1] != STOP][:beams]
    if not live or (len(done) == beams and done[-1][0] >= live[0][0] / penalty(LENGTH)):
      break
  return done


@pytest.mark.parametrize('alpha', [0.0, 0.6, 3.0])
@pytest.mark.parametrize('beams', [1, 2, 3])
def test_a_narrow_beam_follows_t5x_rules(beams, alpha):
  found = find(beam_search(num_rows_per_prompt=beams, length_penalty=alpha))
  for prompt in range(2):
    wanted = reference_search(prompt, beams=beams, alpha=alpha)
    assert texts(found, prompt)[: len(wanted)] == [text for _, text in wanted]
    np.testing.assert_allclose(
      found.scores[prompt][: len(wanted)], [s for s, _ in wanted], rtol=1e-5
    )


@pytest.mark.parametrize('options', [dict(), dict(is_huggingface=True, length_penalty=1.0)])
@pytest.mark.parametrize('beams', [2, 3])
def test_scores_of_a_narrow_beam_are_those_of_its_texts(beams, options):
  search = beam_search(num_rows_per_prompt=beams, **options)
  found = find(search)
  penalty = search(numbers=None)._penalty
  for prompt in range(2):
    assert len(texts(found, prompt)) == beams
    for text, score in zip(texts(found, prompt), found.scores[prompt]):
      # T5X divides only the scores of texts that ended.
      divisor = penalty(len(text)) if text[-1] == STOP or 'is_huggingface' in options else 1.0
      np.testing.assert_allclose(score, log_probability(prompt, text) / divisor, rtol=1e-5)


def t5x_search_of_one_beam(table, alpha):
  """Returns [(text, score)] per prompt by T5X's rule: one loop for all rows, two candidates each.

  The better of the candidates that do not stop continues, first or second. A candidate that stops
  is compared by its penalized score. The loop ends once no row can improve, or at LENGTH.
  """
  log_probs = np.asarray(jax.nn.log_softmax(table), np.float64)
  log_probs[:, :, 0] = -np.inf  # padding
  rows = range(len(table))
  live, best = [((), 0.0)] * len(table), [((), -np.inf)] * len(table)
  for length in range(1, LENGTH + 1):
    penalty, least_penalty = ((5 + np.array([length, LENGTH + 1])) / 6) ** alpha
    for row in rows:
      text, score = live[row]
      number = functools.reduce(lambda n, token: n * VOCAB + token, text, 0)
      gains = log_probs[row, number]
      candidates = [int(token) for token in np.argsort(-gains)[:2]]
      live[row] = next(((*text, t), score + gains[t]) for t in candidates if t != STOP)
      if STOP in candidates and (score + gains[STOP]) / penalty > best[row][1]:
        best[row] = ((*text, STOP), (score + gains[STOP]) / penalty)
    if all(best[row][1] > live[row][1] / least_penalty for row in rows):
      break
  return [best[row] if best[row][0] else live[row] for row in rows]


@pytest.mark.parametrize('alpha', [0.6, 3.0])
def test_one_beam_follows_t5x_and_differs_from_greedy_in_where_a_text_ends(alpha):
  table = jnp.asarray(np.random.default_rng(5).normal(0, 3.0, (64, VOCAB**LENGTH, VOCAB)))
  found = find(beam_search(num_rows_per_prompt=1, length_penalty=alpha), table)
  greedy = find(sampling(), table)
  changes = set()
  for prompt, (text, score) in enumerate(t5x_search_of_one_beam(table, alpha)):
    assert texts(found, prompt) == [text]
    np.testing.assert_allclose(found.scores[prompt, 0], score, rtol=1e-5, atol=1e-6)
    changes.add(np.sign(len(text) - len(texts(greedy, prompt)[0])))
  # It ends at a token that is the second best, or after an end that was the best.
  assert changes == ({-1, 0} if alpha < 1 else {-1, 0, 1})


def test_stop_token_that_is_forbidden_ends_no_text_and_open_texts_are_sorted_without_penalty():
  forbidden = TABLE.at[:, :, STOP].set(-1e10)  # as T5X's users forbid a token
  found = find(beam_search(length_penalty=2.0), table=forbidden)
  for prompt in range(2):
    scores = {}
    for text in itertools.product(range(2, VOCAB), repeat=LENGTH):
      number, scores[text] = 0, 0.0
      for token in text:
        scores[text] += float(jax.nn.log_softmax(forbidden[prompt, number])[token])
        number = number * VOCAB + token
    best = sorted(scores, key=scores.get, reverse=True)
    assert texts(found, prompt) == best  # 16 beams hold all of them
    np.testing.assert_allclose(found.scores[prompt], [scores[t] for t in best], rtol=1e-5)


def test_a_beam_of_one_without_penalty_is_greedy():
  # Any penalty could prefer a text that stops early over the most_probable token each time.
  found = find(beam_search(num_rows_per_prompt=1, is_huggingface=True, length_penalty=0.0))
  greedy = find(sampling())
  np.testing.assert_array_equal(found.tokens, greedy.tokens)
  np.testing.assert_allclose(found.scores, greedy.scores, rtol=1e-6)


def test_several_stop_tokens_leave_enough_candidates_to_go_on():
  found = find(beam_search(stop_tokens=(1, 2), num_rows_per_prompt=3))
  for prompt in range(2):
    assert len(texts(found, prompt)) == 3
    assert all(
      t[-1] in (1, 2) and not {1, 2} & set(t[:-1]) or len(t) == LENGTH for t in texts(found, prompt)
    )


def test_without_a_stop_token_a_beam_returns_its_open_texts():
  found = find(beam_search(stop_tokens=(), num_rows_per_prompt=27, length_penalty=0.0))
  for prompt in range(2):
    every = {
      t: log_probability(prompt, t) for t in itertools.product(range(1, VOCAB), repeat=LENGTH)
    }
    assert texts(found, prompt)[0] == max(every, key=every.get)


def test_rows_that_only_fill_the_batch_cost_no_steps():
  steps = []

  def counted(tokens, state):
    jax.debug.callback(lambda: steps.append(1))
    return table_step(tokens, state)

  for search in (beam_search(num_rows_per_prompt=2), sampling()):
    for numbers, expected in (([-1, -1], 0), ([0, -1], LENGTH - 1)):
      found = jax.jit(
        lambda: run(
          dataclasses.replace(search(numbers=jnp.array(numbers)), stop_tokens=()),
          logits=TABLE[:, 0],
          state=TableState(jnp.arange(2), jnp.zeros(2, jnp.int32)),
          decode_step=counted,
        )
      )
      jax.block_until_ready(found())
      jax.effects_barrier()
      assert len(steps) == expected
      steps.clear()


def test_top_k_and_top_p_keep_the_most_probable_tokens():
  logits = jnp.log(jnp.array([[0.1, 0.4, 0.3, 0.2]]))
  kept = lambda **options: np.isfinite(most_probable(logits, **options))[0].tolist()
  assert kept(top_k=2, top_p=1.0) == [False, True, True, False]
  assert kept(top_k=0, top_p=0.65) == [False, True, True, False]
  assert kept(top_k=0, top_p=0.71) == [False, True, True, True]
  assert kept(top_k=0, top_p=1e-6) == [False, True, False, False]  # never none
  assert kept(top_k=2, top_p=0.5) == [False, True, False, False]  # 0.4 / 0.7 of what top_k left
  assert kept(top_k=9, top_p=1.0) == [True] * 4


def test_samples_follow_the_distribution_at_the_temperature():
  found = find(sampling(num_rows_per_prompt=4000, temperature=2.0, max_decode_length=1))
  for prompt in range(2):
    wanted = jax.nn.softmax(TABLE[prompt, 0].at[0].set(-jnp.inf) / 2.0)
    share = np.bincount(found.tokens[prompt].ravel(), minlength=VOCAB) / 4000
    np.testing.assert_allclose(share, wanted, atol=0.03)


@pytest.mark.parametrize(
  'options, kept', [({'temperature': 1.4, 'top_k': 2}, 2), ({'temperature': 0.0}, 1)]
)
def test_rescaled_scores_are_those_of_the_distribution_that_is_drawn_from(options, kept):
  found = find(sampling(**options, rescale_log_probs=True, stop_tokens=()))
  for prompt in range(2):
    number, want = 0, 0.0
    for token in found.tokens[prompt, 0].tolist():
      logits = np.asarray(TABLE[prompt, number], np.float64)[1:]  # padding is not drawn
      logits = np.sort(logits / (options['temperature'] or 1.0))[-kept:]
      scaled = float(TABLE[prompt, number, token]) / (options['temperature'] or 1.0)
      want += scaled - np.log(np.exp(logits).sum())
      number = number * VOCAB + token
    np.testing.assert_allclose(found.scores[prompt, 0], want, rtol=1e-5, atol=1e-6)


def test_best_of_several_samples_comes_first():
  found = find(sampling(num_rows_per_prompt=8, temperature=1.0))
  assert (np.diff(found.scores, axis=1) <= 0).all() and np.ptp(found.scores) > 0
  for prompt in range(2):
    for tokens, length, score in zip(
      found.tokens[prompt], found.lengths[prompt], found.scores[prompt]
    ):
      text = tuple(tokens[:length].tolist())
      np.testing.assert_allclose(score, log_probability(prompt, text), rtol=1e-5)


def test_padding_is_never_written_and_nothing_follows_a_stop_token():
  found = find(sampling(num_rows_per_prompt=200, temperature=3.0))
  for prompt in range(2):
    for tokens, length in zip(found.tokens[prompt], found.lengths[prompt]):
      assert (tokens[:length] > 0).all() and (tokens[length:] == 0).all()
      assert STOP not in tokens[: length - 1] and (length == LENGTH or tokens[length - 1] == STOP)


@pytest.mark.parametrize(
  'options',
  [
    dict(num_beams=2, temperature=1.0),
    dict(num_beams=2, num_decodes=3),
    dict(beam_search=True, temperature=1.0),
    dict(num_decodes=2),
    dict(top_k=5),
    dict(temperature=1.0, top_p=0.0),
    dict(stop_tokens=(-1,)),
    dict(beam_rule='t5'),
    dict(max_decode_length=0, batch_size=0),
  ],
)
def test_contradictory_choices_are_refused(options):
  with raises(ConfigError):
    DecodingConfig(**options)


def test_the_config_is_a_constant_of_the_program():
  assert hash(DecodingConfig(stop_tokens=[1, 2])) == hash(DecodingConfig(stop_tokens=(1, 2)))
  assert dataclasses.replace(DecodingConfig(), num_beams=4).length_penalty == 0.6


def test_results_of_versions_without_a_setting_continue_where_it_is_off():
  later = ('beam_search', 'rescale_log_probs')
  saved = {name: value for name, value in DecodingConfig().facts.items() if name not in later}
  assert not differences(saved, DecodingConfig().facts)
  for name in later:
    [line] = differences(saved, DecodingConfig(**{name: True}).facts)
    assert line.startswith(name)
