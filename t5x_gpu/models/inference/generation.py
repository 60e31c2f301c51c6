"""Prompts of any lengths in, continuations or their probabilities out, on any mesh.

Prompts are padded to a few lengths, and batches to one size, so that few programs are compiled.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from t5x_gpu.errors import ConfigError, DataError
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.decoding import DecodingConfig, check_sample, check_writes_text, reads_inputs
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.inference.beam_search import BeamSearch
from t5x_gpu.models.inference.search import Found, Sampling, Search, run
from t5x_gpu.models.lora import without_adapters
from t5x_gpu.models.model import DeviceBatch, Model, Params, TextModel, config_of
from t5x_gpu.partitioning.layout import Layout

SHORTEST = 16  # tokens that prompts are padded to, at least


@dataclasses.dataclass(frozen=True)
class Generated:
  """One continuation of a prompt.

  Attributes:
    tokens: its ids, the one that stops it included.
    score: its log-probability; of a beam search, after the length penalty.
    is_complete: a stop token ends it, not max_decode_length.
  """

  tokens: tuple[int, ...]
  score: float
  is_complete: bool


def padded_length(length: int) -> int:
  """Returns the length that rows of `length` tokens are padded to: a power of two."""
  return max(SHORTEST, 1 << (length - 1).bit_length())


def by_layer(model: Model, params: Params, *, layout: Layout) -> Params:
  """Returns `params` for a Generator to decode faster: stacks of layers as tuples of layers.

  Each token reads all weights once; out of a stack, a loop over layers copies them first. It takes
  longer to compile. The stacked arrays are deleted, each as soon as its layers are there, so that
  no more than one is there twice. Pipeline stages, and models of other files than models/, keep
  theirs.

  Args:
    model: that they are of.
    params: on `layout`; used up.
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

  def walk(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
      return tree
    if 'layers' not in tree:
      return {name: walk(value) for name, value in tree.items()}
    stacks, treedef = jax.tree.flatten(tree['layers'])
    layers = zip(*map(layers_of, stacks))
    return {**tree, 'layers': tuple(jax.tree.unflatten(treedef, layer) for layer in layers)}

  return walk(params)


class Generator:
  """Continues prompts, and tells how likely given continuations are.

  Args:
    model: of models/, or yours with `start_decoding`, `decode_step` and, to score, `logits`.
    params: on `layout`, layers in the order of the model; as they are, or `by_layer`.
    layout: mesh and rules of training.
    config: how to choose tokens.
    compiler_options: of XLA, by name.
  Attributes:
    batch_size: prompts at a time: those of `config`, and what evens them out over the mesh.
  Raises:
    ConfigError: the model does not write text, or not without a start token.
  """

  def __init__(
    self,
    model: TextModel,
    params: Params,
    *,
    layout: Layout,
    config: DecodingConfig,
    compiler_options: Optional[Mapping[str, Any]] = None,
  ):
    check_writes_text(model)
    self._has_encoder = reads_inputs(model)
    if self._has_encoder and config.start_token is None:
      raise ConfigError(
        'DecodingConfig.start_token = None: the decoder of an encoder-decoder has no prompt, and '
        'must begin with something.',
        fix='Set DecodingConfig.start_token = 0.',
        parameters=('DecodingConfig.start_token',),
      )
    self._model, self._params, self.config = _without_dropping(model), params, config
    self._vocab_size = model.num_outcomes
    if config.zero_is_padding and 0 in config.stop_tokens:
      raise ConfigError(
        'DecodingConfig.stop_tokens has id 0, which is padding here and is never written.',
        fix='Take ids of at least 1.',
        parameters=('DecodingConfig.stop_tokens',),
      )
    named = {
      'stop_tokens': config.stop_tokens,
      'start_token': () if config.start_token is None else (config.start_token,),
    }
    for name, ids in named.items():
      if max(ids, default=0) >= self._vocab_size:
        raise ConfigError(
          f'DecodingConfig.{name} has id {max(ids)}; the model tells {self._vocab_size} apart.',
          fix=f'Take ids below {self._vocab_size}.',
          parameters=(f'DecodingConfig.{name}',),
        )
    self._layout = layout.for_decoding
    parts = self._layout.batch_parts
    self.batch_size = -(-config.batch_size // parts) * parts
    options = dict(out_shardings=self._layout.replicated, compiler_options=compiler_options)
    self._generate = self._layout.jit(functools.partial(_generate, self._model, config), **options)
    self._score = self._layout.jit(functools.partial(_log_likelihood, self._model), **options)

  def with_params(self, params: Params) -> 'Generator':
    """Returns a generator for other parameters of the same model, without compiling anew."""
    other = copy.copy(self)
    other._params = params
    return other

  def check_prompt(self, length: int, *, where: str, targets: int = 0) -> None:
    """Raises DataError unless a prompt fits the model's positions together with what follows.

    Args:
      length: tokens of the prompt.
      where: it comes from, for the error.
      targets: tokens that are to follow; 0 for max_decode_length.
    """
    c = self.config
    if length < 1 and (self._has_encoder or c.start_token is None):
      raise DataError(
        f'{where}: the prompt is empty.',
        parameters=('DecodingConfig.start_token',),
        fix='Give every prompt a token at least'
        + (
          '.'
          if self._has_encoder
          else ', or set DecodingConfig.start_token to the id that '
          'stands before a text in training.'
        ),
      )
    model, new = config_of(self._model), targets or c.max_decode_length
    limit = model and model.length_limit
    before = 0 if self._has_encoder else length
    if limit is None or max(before + new, length) <= limit:
      return
    follow = 'target' if targets else 'new'
    room = limit - before
    fix = (
      'Shorten the prompt'
      if targets or room < 1 or length > limit
      else (f'Set DecodingConfig.max_decode_length to at most {room}, or shorten the prompt')
    )
    learned = model.num_positions > 0
    parameter = f'TransformerConfig.{"num_positions" if learned else "max_length"}'
    raise DataError(
      f'{where}: the prompt has {length} tokens and {new} {follow} ones may follow; the model '
      + ('has a learned vector for' if learned else 'was made for')
      + f' {limit} positions.',
      fix=f'{fix}: the positions are {parameter}.'
      if learned
      else f'{fix}. A model that has seen longer texts: set {parameter}, or 0 for no limit.',
      parameters=('DecodingConfig.max_decode_length', parameter),
      docs='infer.md#refused',
    )

  def _check_ids(self, ids: Sequence[int], where: str) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
      raise DataError(
        f'{where} has ids from {min(ids)} to {max(ids)}; the model tells {self._vocab_size} apart.',
        fix='Take the vocabulary that the model was trained with.',
        parameters=('DatasetConfig.vocabulary', 'TransformerConfig.vocab_size'),
      )

  def generate(
    self,
    prompts: Sequence[Sequence[int]],
    *,
    numbers: Optional[Sequence[int]] = None,
    advance: Callable[[int], None] = lambda number: None,
  ) -> list[list[Generated]]:
    """Returns `num_decodes` continuations of each prompt, best first.

    A beam search that has found fewer (there are not as many texts) returns those.

    Args:
      prompts: ids of each; they go to the encoder if the model has one.
      numbers: of the prompts, on which samples depend; 0, 1, 2, ... by default.
      advance: called with the number of prompts that are done, after each batch.
    """
    numbers = range(len(prompts)) if numbers is None else numbers
    for number, prompt in zip(numbers, prompts):
      self.check_prompt(len(prompt), where=f'Prompt {number}')
      self._check_ids(prompt, f'Prompt {number}')
    results: list[list[Generated]] = []
    for start in range(0, len(prompts), self.batch_size):
      part = slice(start, start + self.batch_size)
      found = self._generate(self._params, self._prompt_batch(prompts[part], numbers[part]))
      results += self._texts(jax.device_get(found))[: len(prompts[part])]
      advance(len(prompts[part]))
    return results

  def _prompt_batch(
    self, prompts: Sequence[Sequence[int]], numbers: Sequence[int]
  ) -> dict[str, jax.Array]:
    """Returns what `_generate` takes, with rows to fill the batch whose number is -1."""
    start = () if self.config.start_token is None else (self.config.start_token,)
    begins = [start if self._has_encoder else (*start, *prompt) for prompt in prompts]
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
      batch['encoder_tokens'] = self._inputs(prompts)
    return self._layout.put(batch)

  def _inputs(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns [batch, length] of the encoder, padded on the right."""
    tokens = np.zeros((self.batch_size, padded_length(max(map(len, prompts)))), np.int32)
    tokens[:, 0] = 1  # rows that only fill the batch have something to attend to
    for row, prompt in enumerate(prompts):
      tokens[row, : len(prompt)] = prompt
    return tokens

  def _texts(self, found: Found) -> list[list[Generated]]:
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
    """Returns the log-probability of each of `targets` (ids, their end included) after its prompt.

    Args:
      prompts, targets: ids of each.
      advance: called with the number of targets that are done, after each batch.
    Raises:
      DataError: a prompt does not fit, or a target is empty.
    """
    results: list[float] = []
    for number, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
      self.check_prompt(len(prompt), where=f'Prompt {number}', targets=len(target))
      self._check_ids((*prompt, *target), f'Prompt {number}')
      if not target:
        raise DataError(
          f'Prompt {number} has no targets to score.', fix='Give a target of one token at least.'
        )
    for start in range(0, len(prompts), self.batch_size):
      part = slice(start, start + self.batch_size)
      batch = self._layout.put(self._target_batch(prompts[part], targets[part]))
      sums = self._score(self._params, batch)
      results += np.asarray(sums)[: len(prompts[part])].tolist()
      advance(len(prompts[part]))
    return results

  def _target_batch(
    self, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
  ) -> dict[str, np.ndarray]:
    """Returns rows as in training: prompt and target, and weight 1 where a target stands."""
    start = () if self.config.start_token is None else (self.config.start_token,)
    before = [() if self._has_encoder else tuple(prompt) for prompt in prompts]
    rows = [(*start, *prompt, *target) for prompt, target in zip(before, targets)]
    length = padded_length(max(map(len, rows)) - 1)
    shape = (self.batch_size, length)
    batch = {
      name: np.zeros(shape, np.int32)
      for name in (
        'decoder_input_tokens',
        'decoder_target_tokens',
        'decoder_loss_weights',
        'decoder_causal_attention',
      )
    }
    for i, (row, target) in enumerate(zip(rows, targets)):
      end, first = len(row) - 1, len(row) - 1 - len(target)
      batch['decoder_input_tokens'][i, :end] = row[:-1]
      batch['decoder_target_tokens'][i, :end] = row[1:]
      batch['decoder_loss_weights'][i, first:end] = 1
      batch['decoder_causal_attention'][i, : first + 1] = 1
    if self._has_encoder:
      batch['encoder_input_tokens'] = self._inputs(prompts)
      del batch['decoder_causal_attention']
    return batch


def _without_dropping(model: Model) -> Model:
  """Returns `model` with room for every token in every expert.

  While one token is written at a time, none competes for room; so none may in the prompt.
  """
  inner = without_adapters(model)
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
  if config.num_beams > 1:
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
    **options,
  )


def _generate(
  model: TextModel, config: DecodingConfig, params: Params, batch: DeviceBatch
) -> Found:
  prompts, more = batch['prompts'], {}
  if 'encoder_tokens' in batch:
    more['encoder_tokens'] = batch['encoder_tokens']
  slots = prompts.shape[1] + config.max_decode_length - 1  # the last token is never read again
  logits, state = model.start_decoding(params, prompts, batch['lengths'], slots=slots, **more)
  return run(
    _search(config, batch['numbers']),
    logits=logits,
    state=state,
    decode_step=functools.partial(model.decode_step, params),
  )


def _log_likelihood(model: TextModel, params: Params, batch: DeviceBatch) -> jax.Array:
  """Returns [batch] sums of log-probabilities of the targets."""
  targets, weights = batch['decoder_target_tokens'], batch['decoder_loss_weights']
  log_probs = jnp.take_along_axis(
    jax.nn.log_softmax(model.logits(params, batch)), targets[:, :, None], axis=-1
  )
  return jnp.sum(log_probs[:, :, 0] * weights, axis=1)


def sample(
  model: TextModel,
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
  """Returns token ids [prompt + num_tokens]: `prompt` and its continuation.

  Of an encoder-decoder, which reads the prompt and writes something else, only that [num_tokens].

  Args:
    model: as Generator takes it.
    params: on `layout`, layers in the order of the model.
    prompt: [prompt_length] ids, at least one.
    layout: mesh and rules.
    length: the training length, which prompt and continuation must fit.
    num_tokens, temperature: as in SampleConfig.
    zero_is_padding: as in DecodingConfig.
    seed: of the draws.
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
