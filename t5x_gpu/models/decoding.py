"""Configuration of text generation: how tokens are chosen, and their number."""

import dataclasses
from typing import Optional

from t5x_gpu.errors import ConfigError, Problem, bad_setting, did_you_mean
from t5x_gpu.models.model import DECODING, Model, writes_text

BEAM_RULES = ('t5x', 'huggingface')


@dataclasses.dataclass(frozen=True)
class DecodingConfig:
  """How a model continues prompts: greedily, by sampling, or with a beam search.

  The text depends only on its prompt and the parameters; a sample also depends on `seed`, the
  number of the prompt and the number of the decode. It never depends on the batch or the devices.

  Attributes:
    max_decode_length: maximum number of tokens to add to a prompt, including the stop token. None:
      the length of 'targets' in the data, or of the longest target if the data has no lengths.
    num_decodes: number of continuations of each prompt: samples, or the best beams.
    temperature: 0 picks the most probable token, 1 samples from the model's distribution; a higher
      value flattens it.
    top_k: sample among the k most probable tokens; 0 for all.
    top_p: sample among the most probable tokens whose probabilities add up to this (after top_k).
    num_beams: number of beams of a beam search; 1 for no search.
    beam_search: search even with one beam, as T5X's encoder-decoders do by default. A text ends at
      its best end, which may be the second best token, and not at the first end that is the best.
    length_penalty: exponent that favors longer texts; 0 ranks by probability alone.
    beam_rule: 't5x' divides log-probabilities by ((5 + length) / 6) ** length_penalty and stops
      when no open beam can overtake a finished beam; open beams at max_decode_length rank behind,
      by their undivided log-probabilities. 'huggingface' divides by length **
      length_penalty, lets only the first num_beams candidates finish, counts open beams as finished
      at max_decode_length, and stops as `transformers` does with early_stopping=False.
    rescale_log_probs: score samples by the distribution that they are drawn from, after
      temperature, top_k and top_p, as T5X does by default; False for the model's own distribution.
    stop_tokens: ids that end a text, in addition to the vocabulary's end of sequence.
    start_token: decoder input before the first token: 0 for models trained here, whose inputs are
      shifted by one; None for a decoder with unshifted inputs (Llama, GPT-2), whose prompt needs at
      least one token.
    zero_is_padding: never write id 0. Commands set False for decoder-only models whose tokenizer
      has a word with id 0 (GPT-2, Llama 3, Qwen: '!').
    seed: seed of samples.
    batch_size: number of prompts at a time, rounded up to a size that the mesh divides.
  Source: Fan et al. 2018 (top-k); Holtzman et al. 2020 (top-p); Wu et al. 2016, eq. 14 (penalty).
  """

  max_decode_length: Optional[int] = 128
  num_decodes: int = 1
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  num_beams: int = 1
  length_penalty: float = 0.6
  beam_rule: str = 't5x'
  stop_tokens: tuple[int, ...] = ()
  start_token: Optional[int] = 0
  zero_is_padding: bool = True
  seed: int = 0
  batch_size: int = 32
  rescale_log_probs: bool = False
  beam_search: bool = False

  @property
  def has_beams(self) -> bool:
    """Whether a beam search chooses the tokens."""
    return self.beam_search or self.num_beams > 1

  @property
  def facts(self) -> dict[str, object]:
    """The settings that texts depend on; None for a later one that is off, as if not saved."""
    facts = dataclasses.asdict(self)
    del facts['batch_size']
    return facts | {name: facts[name] or None for name in ('beam_search', 'rescale_log_probs')}

  def __post_init__(self) -> None:
    object.__setattr__(self, 'stop_tokens', tuple(self.stop_tokens))
    problems: list[Problem] = []

    def refuse(parameter: str, text: str) -> None:
      problems.append(bad_setting(self, parameter, text))

    for parameter in ('max_decode_length', 'num_decodes', 'num_beams', 'batch_size'):
      if (number := getattr(self, parameter)) is not None and number < 1:
        refuse(parameter, 'must be at least 1.')
    if self.temperature < 0:
      refuse('temperature', 'must be at least 0.')
    if self.top_k < 0:
      refuse('top_k', 'must be at least 1, or 0 for all tokens.')
    if not 0.0 < self.top_p <= 1.0:
      refuse('top_p', 'must be above 0 and at most 1.')
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in self.stop_tokens):
      refuse('stop_tokens', 'must be token ids.')
    if self.start_token is not None and self.start_token < 0:
      refuse('start_token', 'must be a token id, or None for none.')
    if self.beam_rule not in BEAM_RULES:
      refuse(
        'beam_rule',
        f'is not one of {", ".join(map(repr, BEAM_RULES))}.'
        + did_you_mean(str(self.beam_rule), BEAM_RULES),
      )
    if self.has_beams:
      if self.temperature or self.top_k or self.top_p < 1.0:
        refuse(
          'beam_search' if self.beam_search else 'num_beams',
          'cannot be combined with sampling: leave out temperature, top_k, top_p.',
        )
      if self.num_decodes > self.num_beams:
        refuse('num_decodes', f'must be at most num_beams = {self.num_beams}.')
    elif self.temperature == 0:
      if self.num_decodes > 1:
        refuse('num_decodes', 'would all be the same: set temperature above 0, or num_beams.')
      if self.top_k or self.top_p < 1.0:
        refuse(
          'temperature',
          'picks the most probable token, so top_k and top_p have no effect: set it above 0.',
        )
    if problems:
      raise ConfigError(
        'Text cannot be decoded',
        problems=problems,
        fix='Set them in gin or with --gin.DecodingConfig.NAME=VALUE.',
      )


@dataclasses.dataclass(frozen=True)
class SampleConfig:
  """A prompt that the model continues at the end of the run, to show the quality of its texts.

  Attributes:
    prompt: the text to continue.
    num_tokens: number of tokens to add; prompt and continuation must fit the training length.
    temperature: 0 picks the most probable token, 1 samples from the model's distribution.
  """

  prompt: str
  num_tokens: int = 128
  temperature: float = 0.7


def check_sample(prompt_length: int, *, num_tokens: int, length: int) -> None:
  """Raises ConfigError unless prompt and new tokens, at least one of each, fit `length` tokens."""
  room = length - prompt_length
  if prompt_length >= 1 and 1 <= num_tokens <= room:
    return
  raise ConfigError(
    f'The sample has {prompt_length} prompt tokens and {num_tokens} new tokens; both '
    f'must be at least 1, and together at most {length}.',
    fix=f'Set SampleConfig.prompt to a text of 1 to {length - 1} tokens.'
    if prompt_length < 1 or room < 1
    else f'Set SampleConfig.num_tokens to 1 to {room}.',
    parameters=('SampleConfig.num_tokens', 'SampleConfig.prompt', 'TASK_FEATURE_LENGTHS'),
  )


def reads_inputs(model: Model) -> bool:
  """Returns whether prompts go to an encoder (T5) instead of the decoder."""
  return model.feature_converter({'inputs': 1, 'targets': 1}) == 'encoder_decoder'


def check_writes_text(model: Model) -> None:
  """Raises ConfigError for a model that cannot continue a text, such as an encoder."""
  if not writes_text(model):
    raise ConfigError(
      f'A {type(model).__name__} does not write text: it lacks '
      f'{", ".join(model.missing(*DECODING))}.',
      fix='Use a DecoderOnlyModel or an EncoderDecoderModel, or add these methods to your model '
      '(Model in models/model.py). Without a text to write, remove train.sample_cfg.',
      parameters=('train.model', 'train.sample_cfg'),
    )
