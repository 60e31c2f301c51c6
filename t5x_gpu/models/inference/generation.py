"""Continues prompts of any length, or scores continuations, on any mesh.

`Generator` compiles each length and batch size once. So `PromptBatches` pads prompts to powers of
two, and all batches have the same size. `sample` continues one prompt during training.
"""

import copy
import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Optional

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from t5x_gpu.errors import ConfigError, DataError
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.decoding import DecodingConfig, check_sample, check_writes_text, reads_inputs
from t5x_gpu.models.dpo import policy_of
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.incremental import DecodingState
from t5x_gpu.models.inference.search import (
  BeamSearch,
  Continuations,
  Loop,
  Sampling,
  Search,
  Texts,
  continue_loop,
  run,
  start_loop,
  without_padding,
)
from t5x_gpu.models.lora import without_adapters
from t5x_gpu.models.model import DeviceBatch, Model, Params, config_of
from t5x_gpu.partitioning.layout import Layout

SHORTEST = 16  # tokens; shorter rows are padded to this length


def padded_length(length: int) -> int:
  """Returns the length that rows of `length` tokens are padded to: a power of two."""
  return max(SHORTEST, 1 << (length - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class PromptBatches:
  """Makes batches of `batch_size` rows; rows without a prompt fill the last batch.

  Attributes:
    model: the model. If it has an encoder, the encoder reads the prompts.
    config: how to decode.
    batch_size: number of rows.
  """

  model: Model
  config: DecodingConfig
  batch_size: int

  @property
  def _has_encoder(self) -> bool:
    return reads_inputs(self.model)

  @property
  def _start(self) -> tuple[int, ...]:
    start = self.config.start_token
    return () if start is None else (start,)

  def check(self, prompt: Sequence[int], *, where: str, target: Sequence[int] = ()) -> None:
    """Raises DataError for a prompt and target that are too long or have unknown ids."""
    self.check_length(len(prompt), where=where, targets=len(target))
    ids, vocab_size = (*prompt, *target), self.model.num_outcomes
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
      raise DataError(
        f'{where} has ids from {min(ids)} to {max(ids)}; the model has {vocab_size} ids.',
        fix='Use the vocabulary that the model was trained with.',
        parameters=('DatasetConfig.vocabulary', 'TransformerConfig.vocab_size'),
      )

  def check_length(self, length: int, *, where: str, targets: int = 0) -> None:
    """Raises DataError unless the model has positions for a prompt and the tokens after it.

    Args:
      length: number of tokens of the prompt.
      where: origin of the prompt, for the error.
      targets: number of tokens after the prompt; 0 for max_decode_length.
    """
    c = self.config
    if length < 1 and (self._has_encoder or c.start_token is None):
      raise DataError(
        f'{where}: the prompt is empty.',
        fix='Give every prompt at least one token'
        + (
          '.'
          if self._has_encoder
          else ', or set DecodingConfig.start_token to the id that precedes a text in training.'
        ),
        parameters=('DecodingConfig.start_token',),
      )
    model, new = config_of(self.model), targets or c.max_decode_length
    limit = None if model is None else model.length_limit
    before = 0 if self._has_encoder else length
    if targets and c.start_token is None:
      before -= 1  # the model does not read the last target
    if limit is None or max(before + new, length) <= limit:
      return
    follow = 'target' if targets else 'new'
    room = limit - before
    fix = (
      'Shorten the prompt'
      if targets or room < 1 or length > limit
      else f'Set DecodingConfig.max_decode_length to at most {room}, or shorten the prompt'
    )
    learned = model.num_positions > 0
    parameter = f'TransformerConfig.{"num_positions" if learned else "max_length"}'
    raise DataError(
      f'{where}: the prompt has {length} tokens and {new} {follow} ones may follow; the model '
      + ('has learned vectors for' if learned else 'was made for')
      + f' {limit} positions.',
      fix=f'{fix}: {parameter} is the number of positions.'
      if learned
      else f'{fix}. If the model was trained on longer texts, set {parameter}, or 0 for no limit.',
      parameters=('DecodingConfig.max_decode_length', parameter),
      docs='infer.md#refused',
    )

  def to_continue(
    self, prompts: Sequence[Sequence[int]], numbers: Sequence[int]
  ) -> dict[str, np.ndarray]:
    """Returns a batch to generate from.

    The features are 'prompts' [batch, length], decoder inputs padded on the left; 'lengths'
    [batch], the number of their tokens; 'numbers' [batch], -1 for a row without a prompt; and, with
    an encoder, 'encoder_tokens' and 'encoder_segments' [batch, inputs_length], padded on the right.

    Args:
      prompts: ids of each prompt; at most `batch_size` prompts.
      numbers: numbers of the prompts; samples depend on them.
    """
    begins = [self._start if self._has_encoder else (*self._start, *prompt) for prompt in prompts]
    width = 1 if self._has_encoder else padded_length(max(map(len, begins)))
    batch = {
      'prompts': np.zeros((self.batch_size, width), np.int32),
      'lengths': np.ones(self.batch_size, np.int32),
      'numbers': np.full(self.batch_size, -1, np.int32),
    }
    for row, begin in enumerate(begins):
      batch['prompts'][row, width - len(begin) :] = begin
      batch['lengths'][row] = len(begin)
    batch['numbers'][: len(prompts)] = numbers
    if self._has_encoder:
      batch['encoder_tokens'], batch['encoder_segments'] = self._encoder_rows(prompts)
    return batch

  def to_score(
    self, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
  ) -> dict[str, np.ndarray]:
    """Returns a batch as in training: prompt and target in a row, loss weight 1 on the target."""
    before = [() if self._has_encoder else tuple(prompt) for prompt in prompts]
    rows = [(*self._start, *prompt, *target) for prompt, target in zip(before, targets)]
    length = padded_length(max(map(len, rows)) - 1)
    batch = {
      name: np.zeros((self.batch_size, length), np.int32)
      for name in (
        'decoder_input_tokens',
        'decoder_target_tokens',
        'decoder_loss_weights',
        'decoder_causal_attention',
        'decoder_segment_ids',
      )
    }
    for i, (row, target) in enumerate(zip(rows, targets)):
      end, first = len(row) - 1, len(row) - 1 - len(target)
      batch['decoder_input_tokens'][i, :end] = row[:-1]
      batch['decoder_target_tokens'][i, :end] = row[1:]
      batch['decoder_segment_ids'][i, :end] = 1
      batch['decoder_loss_weights'][i, first:end] = 1
      batch['decoder_causal_attention'][i, : first + 1] = 1
    if self._has_encoder:
      inputs = self._encoder_rows(prompts)
      batch['encoder_input_tokens'], batch['encoder_segment_ids'] = inputs
      del batch['decoder_causal_attention']
    return batch

  def _encoder_rows(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns tokens and segment ids, [2, batch, length]."""
    rows = np.zeros((2, self.batch_size, padded_length(max(map(len, prompts)))), np.int32)
    rows[:, :, 0] = 1  # rows without a prompt need a token to attend to
    for row, prompt in enumerate(prompts):
      rows[0, row, : len(prompt)] = prompt
      rows[1, row, : len(prompt)] = 1
    return rows


@dataclasses.dataclass(frozen=True)
class Generated:
  """One continuation of a prompt.

  Attributes:
    tokens: ids of the continuation, including the stop token.
    score: its log-probability; in a beam search, after the length penalty.
    is_complete: whether it ends with a stop token, not at max_decode_length.
  """

  tokens: tuple[int, ...]
  score: float
  is_complete: bool


@dataclasses.dataclass(frozen=True)
class ScoredTarget:
  """A given continuation of a prompt.

  Attributes:
    log_probability: the sum over its tokens.
    is_greedy: whether greedy decoding would write it.
  """

  log_probability: float
  is_greedy: bool


def by_layer(model: Model, params: Params, *, layout: Layout) -> Params:
  """Returns `params` with each stack of layers as a tuple of layers, for faster decoding.

  Decoding a token reads all weights once; a loop over a stack would copy each layer first. In
  exchange, compiling takes longer. Each stacked array is deleted once its layers exist, so only one
  array is in memory twice. Parameters of pipeline stages and of custom models are unchanged.

  Args:
    model: the model.
    params: parameters on `layout`; do not use them afterwards.
    layout: mesh and rules.
  """
  if layout.mesh.shape['stage'] > 1 or not isinstance(
    without_adapters(model), (DecoderOnlyModel, EncoderDecoderModel)
  ):
    return params

  def layers_of(stack: jax.Array) -> tuple[jax.Array, ...]:
    spec = PartitionSpec(*stack.sharding.spec[1:])
    split = layout.jit(tuple, out_shardings=NamedSharding(layout.mesh, spec))
    layers = split(stack)
    jax.block_until_ready(layers)
    stack.delete()
    return layers

  def walk(tree: Params) -> Params:
    if not isinstance(tree, Mapping):
      return tree
    if 'layers' not in tree:
      return {name: walk(value) for name, value in tree.items()}
    stacks, treedef = jax.tree.flatten(tree['layers'])
    layers = zip(*map(layers_of, stacks))
    return {**tree, 'layers': tuple(jax.tree.unflatten(treedef, layer) for layer in layers)}

  return walk(params)


class Generator:
  """Continues prompts, and computes log-probabilities of given continuations.

  Args:
    model: the model.
    params: parameters on `layout`, layers in model order; stacked, or the result of `by_layer`.
    layout: mesh and rules of training.
    config: how to choose tokens.
    compiler_options: XLA option -> value.
  Attributes:
    model, config: as given.
    batch_size: number of prompts at a time: `config.batch_size`, rounded up for the mesh.
  Raises:
    ConfigError: the model does not generate text, or a start or stop token is invalid.
  """

  def __init__(
    self,
    model: Model,
    params: Params,
    *,
    layout: Layout,
    config: DecodingConfig,
    compiler_options: Optional[Mapping[str, object]] = None,
  ):
    check_writes_text(model)
    _check_tokens(model, config)
    self.model, self.config = model, config
    self._params, self._layout = params, layout.for_decoding
    parts = self._layout.batch_parts
    self.batch_size = -(-config.batch_size // parts) * parts
    self._prompts = PromptBatches(model, config, self.batch_size)
    options = dict(out_shardings=self._layout.replicated, compiler_options=compiler_options)
    model = _without_dropping(model)
    self._generate = self._layout.jit(functools.partial(_generate, model, config), **options)
    # For `stream`: the first token, and one more.
    self._begin = self._layout.jit(functools.partial(_begin, model, config))
    self._go_on = self._layout.jit(functools.partial(_go_on, model, config), donate_argnums=1)
    self._score = self._layout.jit(functools.partial(_score, model, config), **options)

  def with_config(self, config: DecodingConfig) -> 'Generator':
    """Returns a generator of the same model and parameters that chooses tokens by `config`."""
    return Generator(self.model, self._params, layout=self._layout, config=config)

  def with_params(self, params: Params) -> 'Generator':
    """Returns a generator for other parameters of the same model, without compiling again."""
    other = copy.copy(self)
    other._params = params
    return other

  @property
  def prompt_bytes(self) -> int:
    """Minimum bytes of keys and values per prompt on a device; 0 without a TransformerConfig."""
    config, c = self.config, config_of(without_adapters(self._prompts.model))
    if c is None:
      return 0
    ways = math.prod(
      self._layout.mesh.shape[axis] for axis in self._layout.rules.activations['kv_heads']
    )
    head = 2 * config.max_decode_length * c.head_dim * jnp.dtype(c.compute_dtype).itemsize
    texts = max(config.num_beams, config.num_decodes)
    return texts * c.num_layers * max(c.kv_heads // ways, 1) * head

  def check_prompt(self, length: int, *, where: str, targets: int = 0) -> None:
    """Raises DataError as `PromptBatches.check_length`."""
    self._prompts.check_length(length, where=where, targets=targets)

  def generate(
    self,
    prompts: Sequence[Sequence[int]],
    *,
    numbers: Optional[Sequence[int]] = None,
    advance: Callable[[int], None] = lambda number: None,
  ) -> list[list[Generated]]:
    """Returns `num_decodes` continuations of each prompt, best first.

    A beam search returns fewer if fewer texts are possible.

    Args:
      prompts: ids of each prompt; the encoder reads them if the model has one.
      numbers: number of each prompt, on which its samples depend; 0, 1, 2, ... by default.
      advance: called after each batch with the number of prompts in it.
    """
    numbers = range(len(prompts)) if numbers is None else numbers
    for number, prompt in zip(numbers, prompts):
      self._prompts.check(prompt, where=f'Prompt {number}')
    results: list[list[Generated]] = []
    for start in range(0, len(prompts), self.batch_size):
      part = slice(start, start + self.batch_size)
      batch = self._layout.put(self._prompts.to_continue(prompts[part], numbers[part]))
      found = self._generate(self._params, batch)
      results += self._texts(jax.device_get(found))[: len(prompts[part])]
      advance(len(prompts[part]))
    return results

  def stream(self, prompt: Sequence[int], *, number: int = 0) -> Iterator[Generated]:
    """Yields the continuation of one prompt after each token, by the same tokens as `generate`.

    For greedy decoding and sampling with one decode; a beam may change its first tokens.

    Args:
      prompt: its ids.
      number: number of the prompt, on which its sample depends.
    """
    self._prompts.check(prompt, where=f'Prompt {number}')
    batch = self._layout.put(self._prompts.to_continue([prompt], [number]))
    loop = self._begin(self._params, batch)
    while True:
      texts: Texts = jax.device_get(loop[2])
      length = int(texts.lengths[0])
      tokens, ended = tuple(texts.tokens[0, :length].tolist()), bool(texts.finished[0])
      yield Generated(tokens, float(texts.log_probabilities[0]), ended)
      if ended or length == self.config.max_decode_length:
        return
      loop = self._go_on(self._params, loop, batch['numbers'])

  def _texts(self, found: Continuations) -> list[list[Generated]]:
    return [
      [
        Generated(
          tuple(tokens[:length].tolist()),
          float(score),
          int(tokens[length - 1]) in self.config.stop_tokens,
        )
        for tokens, length, score in zip(*row)
        if score > -np.inf
      ][: self.config.num_decodes]
      for row in zip(found.tokens, found.lengths, found.scores)
    ]

  def score(
    self,
    prompts: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    advance: Callable[[int], None] = lambda number: None,
  ) -> list[float]:
    """Returns the log-probability of each target after its prompt; arguments as `score_targets`."""
    scored = self.score_targets(prompts, targets, advance=advance)
    return [target.log_probability for target in scored]

  def score_targets(
    self,
    prompts: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    advance: Callable[[int], None] = lambda number: None,
  ) -> list[ScoredTarget]:
    """Returns the log-probability of each target, and whether it is greedy.

    Args:
      prompts, targets: ids of each prompt and target; targets include the end of sequence.
      advance: called after each batch with the number of targets in it.
    Raises:
      DataError: a prompt does not fit, or a target is empty.
      ConfigError: the model has no `logits`.
    """
    if self._prompts.model.missing('logits'):
      raise ConfigError(
        f'{type(self._prompts.model).__name__} has no method `logits`, which scores targets.',
        fix='Add it (Model in models/model.py), or score without this model.',
        parameters=('train.model',),
      )
    results: list[ScoredTarget] = []
    for number, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
      self._prompts.check(prompt, where=f'Prompt {number}', target=target)
      if not target:
        raise DataError(
          f'Prompt {number} has no targets to score.', fix='Give each target at least one token.'
        )
    for start in range(0, len(prompts), self.batch_size):
      part = slice(start, start + self.batch_size)
      batch = self._layout.put(self._prompts.to_score(prompts[part], targets[part]))
      sums, greedy = map(np.asarray, self._score(self._params, batch))
      found = map(ScoredTarget, sums.tolist(), greedy.tolist())
      results += itertools.islice(found, len(prompts[part]))
      advance(len(prompts[part]))
    return results


def _check_tokens(model: Model, config: DecodingConfig) -> None:
  """Raises ConfigError for start and stop tokens that the model cannot read or write."""
  if reads_inputs(model) and config.start_token is None:
    raise ConfigError(
      'DecodingConfig.start_token = None, but the decoder of an encoder-decoder gets no prompt and '
      'needs a first token.',
      fix='Set DecodingConfig.start_token = 0.',
      parameters=('DecodingConfig.start_token',),
    )
  if config.zero_is_padding and 0 in config.stop_tokens:
    raise ConfigError(
      'DecodingConfig.stop_tokens has id 0, which is padding here and is never written.',
      fix='Use ids of at least 1.',
      parameters=('DecodingConfig.stop_tokens',),
    )
  named = {
    'stop_tokens': config.stop_tokens,
    'start_token': () if config.start_token is None else (config.start_token,),
  }
  for name, ids in named.items():
    if max(ids, default=0) >= model.num_outcomes:
      raise ConfigError(
        f'DecodingConfig.{name} has id {max(ids)}; the model has {model.num_outcomes} ids.',
        fix=f'Use ids below {model.num_outcomes}.',
        parameters=(f'DecodingConfig.{name}',),
      )


def _without_dropping(model: Model) -> Model:
  """Returns `model` with capacity for every token in every expert.

  Tokens generated one at a time never compete for capacity, so prompt tokens must not either.
  """
  inner = policy_of(model)
  inner = without_adapters(model) if inner is model else inner
  if inner is not model:
    return dataclasses.replace(model, model=_without_dropping(inner))
  config = config_of(model)
  if config is None or not config.num_experts:
    return model
  return dataclasses.replace(model, config=dataclasses.replace(config, expert_capacity_factor=None))


def _search(config: DecodingConfig, numbers: jax.Array) -> Search:
  options = dict(
    numbers=numbers,
    max_decode_length=config.max_decode_length,
    stop_tokens=config.stop_tokens,
    zero_is_padding=config.zero_is_padding,
  )
  if config.has_beams:
    return BeamSearch(
      num_rows_per_prompt=config.num_beams,
      length_penalty=config.length_penalty,
      is_huggingface=config.beam_rule == 'huggingface',
      **options,
    )
  return Sampling(
    num_rows_per_prompt=config.num_decodes,
    temperature=config.temperature,
    top_k=config.top_k,
    top_p=config.top_p,
    seed=config.seed,
    rescale_log_probs=config.rescale_log_probs,
    **options,
  )


def _generate(
  model: Model, config: DecodingConfig, params: Params, batch: DeviceBatch
) -> Continuations:
  search = _search(config, batch['numbers'])
  logits, state = _after_prompts(model, config, params, batch)
  return run(
    search, logits=logits, state=state, decode_step=functools.partial(model.decode_step, params)
  )


def _after_prompts(
  model: Model, config: DecodingConfig, params: Params, batch: DeviceBatch
) -> tuple[jax.Array, DecodingState]:
  """Returns logits [batch, vocab] of the token after each prompt, and the state."""
  prompts, more = batch['prompts'], {}
  if 'encoder_tokens' in batch:
    more['encoder_tokens'] = batch['encoder_tokens']
    taken = inspect.signature(without_adapters(model).start_decoding).parameters
    # Models written for 0.2 do not take segments.
    if 'encoder_segments' in taken or any(p.kind is p.VAR_KEYWORD for p in taken.values()):
      more['encoder_segments'] = batch['encoder_segments']
  slots = prompts.shape[1] + config.max_decode_length - 1  # the last token is never read again
  return model.start_decoding(params, prompts, batch['lengths'], slots=slots, **more)


def _begin(model: Model, config: DecodingConfig, params: Params, batch: DeviceBatch) -> Loop[Texts]:
  logits, state = _after_prompts(model, config, params, batch)
  return start_loop(_search(config, batch['numbers']), logits=logits, state=state)


def _go_on(
  model: Model, config: DecodingConfig, params: Params, loop: Loop[Texts], numbers: jax.Array
) -> Loop[Texts]:
  step = functools.partial(model.decode_step, params)
  return continue_loop(_search(config, numbers), loop, decode_step=step, most=loop[0] + 1)


def _score(
  model: Model, config: DecodingConfig, params: Params, batch: DeviceBatch
) -> tuple[jax.Array, jax.Array]:
  """Returns the targets' log-probability, float32 [batch], and whether they are greedy, [batch]."""
  targets, weights = batch['decoder_target_tokens'], batch['decoder_loss_weights']
  logits = model.logits(params, batch)
  log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, :, None], axis=-1)
  best = without_padding(logits, zero_is_padding=config.zero_is_padding).argmax(-1)
  greedy = ((best == targets) | (weights == 0)).all(axis=1)
  return jnp.sum(log_probs[:, :, 0] * weights, axis=1), greedy


def sample(
  model: Model,
  params: Params,
  prompt: np.ndarray,
  *,
  layout: Layout,
  length: int,
  num_tokens: int,
  temperature: float,
  zero_is_padding: bool = True,
  seed: int = 0,
) -> np.ndarray:
  """Returns ids [prompt_length + num_tokens]: `prompt` and its continuation.

  An encoder-decoder does not repeat the prompt: its answer is [num_tokens].

  Args:
    model, params, layout: as in Generator.
    prompt: [prompt_length] ids, at least one.
    length: training length in tokens; limits prompt and continuation together.
    num_tokens, temperature: as in SampleConfig.
    zero_is_padding, seed: as in DecodingConfig.
  Raises:
    ConfigError: as `check_sample` and Generator.
  """
  check_sample(len(prompt), num_tokens=num_tokens, length=length)
  config = DecodingConfig(
    max_decode_length=num_tokens,
    temperature=temperature,
    seed=seed,
    zero_is_padding=zero_is_padding,
    batch_size=1,
  )
  generator = Generator(model, params, layout=layout, config=config)
  [[text]] = generator.generate([prompt.tolist()])
  return np.asarray((() if reads_inputs(model) else tuple(prompt.tolist())) + text.tokens)
