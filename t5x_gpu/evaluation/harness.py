"""Measures our models on the tasks of lm-evaluation-harness, through its own interface `LM`.

    python -m t5x_gpu.evaluation.harness --model t5x_gpu --model_args checkpoint=DIR --tasks TASK

The command is lm_eval's own, with `t5x_gpu` among its models. From Python, pass a `HarnessModel` to
`lm_eval.simple_evaluate`. See docs/eval.md#lm-evaluation-harness.
"""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Optional

from t5x_gpu.errors import ConfigError, did_you_mean
from t5x_gpu.evaluation.generated_text import InferJob
from t5x_gpu.evaluation.infer_jobs import has_inputs, open_job
from t5x_gpu.evaluation.infer_request import read_request
from t5x_gpu.models.decoding import DecodingConfig, check_writes_text, reads_inputs
from t5x_gpu.models.inference.generation import ScoredTarget
from t5x_gpu.models.model import config_of
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster import cluster as cluster_lib
from t5x_gpu.storage.json_schema import Json
from t5x_gpu.terminal import logging_setup
from t5x_gpu.terminal.progress import bar

try:
  from lm_eval.__main__ import cli_evaluate
  from lm_eval.api.instance import Instance
  from lm_eval.api.model import LM
  from lm_eval.api.registry import register_model
except ImportError:
  raise ImportError("lm_eval is not installed: pip install 't5x_gpu[harness]'") from None

_error = functools.partial(ConfigError, docs='eval.md#lm-evaluation-harness')
_MESSAGES = 'The messages of lm_eval'  # where they are from, for errors
_DEFAULT_LENGTH = 2048  # of models without a limit, as in lm_eval
_FLAGS = argparse.Namespace(
  **dict.fromkeys(('coordinator_address', 'process_count', 'process_index', 'split')),
  **dict.fromkeys(('interactive', 'chat'), False),
  prompts='-',  # the harness has its own: with a vocabulary, the task of the run is not needed
)


@register_model('t5x_gpu')
class HarnessModel(LM):
  """A checkpoint of t5x_gpu as a model of lm-evaluation-harness.

  One process with all GPUs of a machine, on the mesh that the checkpoint's gin file sets.

  Args:
    checkpoint: MODEL_DIR of a run, one of its checkpoints, or a converted model.
    batch_size: number of texts at a time.
    step: step of the checkpoint; None for the latest.
    vocabulary: as --vocabulary of `infer`; None for the vocabulary of the run.
    trust_gin: as --trust_gin of `infer`.
    max_length: number of tokens that the model reads; longer contexts lose their beginning. None:
      the model's positions, else the length of its training rows, else 2048.
    max_gen_toks: number of tokens to write for tasks that do not set it.
    device, max_batch_size: lm_eval passes them; ignored.
  Raises:
    UserError: the checkpoint cannot be used, does not write text, or there are several processes.
  """

  def __init__(
    self,
    checkpoint: str,
    *,
    batch_size: Optional[int | str] = 8,
    step: Optional[int] = None,
    vocabulary: Optional[str] = None,
    trust_gin: bool = False,
    max_length: Optional[int] = None,
    max_gen_toks: int = 256,
    device: Optional[str] = None,
    max_batch_size: Optional[int] = None,
  ):
    super().__init__()
    del device, max_batch_size
    if batch_size is not None and not str(batch_size).isdecimal():
      raise _error(f'batch_size = {batch_size!r}: a number of texts.', fix='Give --batch_size 8.')
    flags = argparse.Namespace(
      **vars(_FLAGS),
      checkpoint=str(checkpoint),
      step=step,
      vocabulary=vocabulary,
      trust_gin=trust_gin,
    )
    request = read_request(flags, [])
    check_writes_text(request.model)
    cluster = cluster_lib.detect_here(flags)
    distributed.start(cluster, request.distributed_cfg, xla_preset=request.xla_preset)
    if distributed.process_count() > 1:
      raise _error(
        f'The harness runs in one process; this run has {distributed.process_count()}.',
        fix='Start one process, which uses all GPUs of its machine.',
      )
    decoding = dataclasses.replace(request.decoding, batch_size=int(batch_size or 8))
    job = open_job(dataclasses.replace(request, decoding=decoding))
    self._use(job, has_inputs=has_inputs(request), max_length=max_length)
    self._max_gen_toks = max_gen_toks

  def _use(self, job: InferJob, *, has_inputs: bool, max_length: Optional[int]) -> None:
    self._job, self._text, self._has_inputs = job, job.text, has_inputs
    self._is_chat, self._chat_ends = False, ()
    config, model = job.generator.config, job.generator.model
    self._has_encoder = reads_inputs(model)
    start, self._first = config.start_token, []
    if not self._has_encoder:  # the prompts have the start token, but for later parts of a text
      self._first = [] if start is None else [start]
      start = None
    self._generator = job.generator.with_config(dataclasses.replace(config, start_token=start))
    network = config_of(model)
    limit = network.length_limit if network is not None else None
    self._max_length = int(max_length or limit or job.train_length or _DEFAULT_LENGTH)

  def apply_chat_template(
    self, chat_history: Sequence[Json], add_generation_prompt: bool = True
  ) -> str:
    """Returns the context of messages; without a generation prompt, the last one is its end."""
    self._use_chat_template()
    return self._text.chat_text(chat_history, continues=not add_generation_prompt, where=_MESSAGES)

  def chat_template(self, chat_template: bool | str = False) -> str:
    """Returns the template's text of a question, which lm_eval writes to its results."""
    if isinstance(chat_template, str):
      raise _error(
        f'--apply_chat_template {chat_template}: a tokenizer has one template here.',
        fix='Give --apply_chat_template alone.',
      )
    if not chat_template:
      return ''
    return self.apply_chat_template([{'role': 'user', 'content': '...'}])

  @property
  def tokenizer_name(self) -> str:
    """Identifies the chat template in lm_eval's cache; asked for before contexts of messages."""
    self._use_chat_template()
    return self._text.name

  def _use_chat_template(self) -> None:
    """Contexts are the template's from here on: it writes their first token.

    Raises:
      UserError: the model reads inputs apart from its text, or its tokenizer has no template.
    """
    if self._is_chat:
      return
    if self._has_inputs or not hasattr(self._text, 'chat_text'):
      raise _error(
        'A chat template needs a decoder-only model of whole texts, and a Hugging Face tokenizer.',
        fix='Leave out --apply_chat_template.',
      )
    self._chat_ends = tuple(self._text.chat_ends())
    self._is_chat, self._first = True, []

  def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
    """Returns (log-probability of the continuation, whether it is greedy) for each request."""
    scored = self._score([self._pair(*request.args) for request in requests], 'loglikelihood')
    results = [(target.log_probability, target.is_greedy) for target in scored]
    self._cache('loglikelihood', requests, results)
    return results

  def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
    """Returns the log-probability of each whole text, with as much context as the model reads."""
    if self._has_encoder:
      raise _error(
        'An encoder-decoder has no probability of a text without inputs.',
        fix='Leave out tasks of perplexity.',
      )
    windows = [list(self._windows(request.args[0])) for request in requests]
    scored = iter(self._score([pair for part in windows for pair in part], 'rolling'))
    results = [sum(next(scored).log_probability for _ in part) for part in windows]
    self._cache('loglikelihood_rolling', requests, results)
    return results

  def generate_until(self, requests: Sequence[Instance]) -> list[str]:
    """Returns the continuation of each context, cut before the first of the texts that end it."""
    groups: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
      groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
    results = [''] * len(requests)
    with bar('generate_until', len(requests), stream=sys.stderr) as advance:
      for numbers in groups.values():
        ends, config = self._decoding(requests[numbers[0]].args[1])
        generator = self._generator.with_config(config)
        prompts = [self._prompt(requests[number].args[0]) for number in numbers]
        longest = self._max_length - (0 if self._has_encoder else config.max_decode_length)
        if longest < 1:
          raise _error(
            f'The task writes {config.max_decode_length} tokens; the model reads '
            f'{self._max_length} with its context.',
            fix='Lower it: --gen_kwargs max_gen_toks=128',
          )
        found = generator.generate(
          [prompt[-longest:] for prompt in prompts], numbers=numbers, advance=advance
        )
        for number, texts in zip(numbers, found, strict=True):
          results[number] = _before(self._job.decoded(texts[0]), ends)
    self._cache('generate_until', requests, results)
    return results

  def _plain(self, text: str) -> list[int]:
    """Returns the ids of a text that the model writes, without an end mark."""
    ids = self._text.encode_targets(text)
    return ids[:-1] if ids and ids[-1] == self._text.eos_id else ids

  def _prompt(self, context: str) -> list[int]:
    ids = self._text.encode_inputs(context) if self._has_inputs else self._plain(context)
    return [*self._first, *ids] or [self._text.eos_id or 0]

  def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Returns the ids of a context and of its continuation, split as in lm_eval's own models."""
    stripped = context.rstrip()
    continuation, context = context[len(stripped) :] + continuation, stripped
    if self._has_inputs:
      return self._prompt(context), self._plain(continuation)
    before, whole = self._plain(context), self._plain(context + continuation)
    return self._prompt(context), whole[len(before) :]

  def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (context, ids to score); every id is scored once, in windows as long as possible."""
    ids, size = self._plain(text), self._max_length
    yield self._prompt(''), ids[:size]
    for start in range(size, len(ids), size):
      end = min(start + size, len(ids))
      yield ids[end - size - 1 : start], ids[start:end]

  def _score(self, pairs: Sequence[tuple[list[int], list[int]]], title: str) -> list[ScoredTarget]:
    """Returns the score of each pair, 0 without ids; pairs of similar length share a batch."""
    size = self._max_length
    prompts = [
      prompt[-size if self._has_encoder else -max(1, size + 1 - len(target)) :]
      for prompt, target in pairs
    ]
    order = sorted(
      (i for i, (_, target) in enumerate(pairs) if target),
      key=lambda i: -len(prompts[i]) - len(pairs[i][1]),
    )
    with bar(title, len(order), stream=sys.stderr) as advance:
      found = self._generator.score_targets(
        [prompts[i] for i in order], [pairs[i][1] for i in order], advance=advance
      )
    by_place = dict(zip(order, found, strict=True))
    nothing = ScoredTarget(log_probability=0.0, is_greedy=True)
    return [by_place.get(i, nothing) for i in range(len(pairs))]

  def _decoding(self, settings: Json) -> tuple[list[str], DecodingConfig]:
    """Returns the texts that end a continuation, and how to decode it."""
    unknown = sorted(settings.keys() - _SETTINGS)
    if unknown:
      raise _error(
        f'The task sets {unknown[0]!r}, which this model does not know.'
        + did_you_mean(unknown[0], _SETTINGS),
        fix=f'It knows {", ".join(_SETTINGS)}: --gen_kwargs',
      )
    ends = settings.get('until') or []
    ends = [ends] if isinstance(ends, str) else list(ends)
    temperature = settings.get('temperature', 1.0) if settings.get('do_sample') else 0.0
    samples = {'top_k': settings.get('top_k', 0), 'top_p': settings.get('top_p', 1.0)}
    config = dataclasses.replace(
      self._generator.config,
      max_decode_length=int(settings.get('max_gen_toks', self._max_gen_toks)),
      num_decodes=1,
      num_beams=1,
      beam_search=False,
      temperature=temperature,
      **(samples if temperature else {'top_k': 0, 'top_p': 1.0}),
    )
    # A text that ends at one token need not be written to its longest.
    single = [ids[0] for end in ends if len(ids := self._plain(end)) == 1]
    single = [i for i in single if any(end in self._text.decode([i]) for end in ends)]
    stops = tuple(dict.fromkeys([*config.stop_tokens, *self._chat_ends, *single]))
    return ends, dataclasses.replace(config, stop_tokens=stops)

  def _cache(self, name: str, requests: Sequence[Instance], results: Sequence[object]) -> None:
    """Hands results to lm_eval's cache, if the user asked for one (--use_cache)."""
    for request, result in zip(requests, results, strict=True):
      self.cache_hook.add_partial(name, request.args, result)


_SETTINGS = ('until', 'max_gen_toks', 'do_sample', 'temperature', 'top_k', 'top_p')


def _before(text: str, ends: Sequence[str]) -> str:
  """Returns the beginning of `text`, before the first of `ends`."""
  return text[: min((text.find(end) for end in ends if end and end in text), default=len(text))]


def main() -> None:
  """Runs lm_eval's command."""
  logging_setup.quiet_environment()
  cli_evaluate()


if __name__ == '__main__':
  from t5x_gpu import cli

  cli.run_main(main)
