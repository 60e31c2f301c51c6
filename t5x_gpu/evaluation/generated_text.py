"""Runs a model on prompts and writes one JSON line per prompt, in their order.

A run that was killed continues after its last complete line.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

from t5x_gpu.config.json_schema import parse_json, read_json
from t5x_gpu.data.prompts import Prompt
from t5x_gpu.data.same_data import differences
from t5x_gpu.errors import ConfigError, DataError
from t5x_gpu.models.inference.classify import Classifier
from t5x_gpu.models.inference.generation import Generated, Generator
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.main_log import log
from t5x_gpu.terminal.bars import bar

NUMBER = 'number'  # of the prompt, in every line
FACTS = '.facts.json'


class ResultLines:
  """Appends one line per prompt to a file; `FILE.facts.json` lists what the lines depend on.

  Lines reach the disk before the next batch is computed. If a kill leaves an incomplete last line,
  opening the file removes it.

  Args:
    path: of the file; its folder is created.
    facts: JSON-ready, what the results depend on.
    numbers: of the prompts, in order.
    overwrite: replace the file.
  Attributes:
    num_done: prompts that the file already had.
  Raises:
    ConfigError: the file holds other results, or cannot be written.
    DataError: a line in the middle is not a result.
  """

  def __init__(
    self, path: str, *, facts: Mapping[str, Any], numbers: Sequence[int], overwrite: bool = False
  ):
    self.path = pathlib.Path(path).expanduser()
    self._facts_path = self.path.with_name(self.path.name + FACTS)
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      if overwrite:
        self.path.unlink(missing_ok=True)
        self._facts_path.unlink(missing_ok=True)
      self.num_done = self._num_done(facts, numbers)
      self._facts_path.write_text(json.dumps(facts, indent=1) + '\n', 'utf-8')
      self._file = open(self.path, 'ab')
    except OSError as e:
      raise ConfigError(
        f'--output={path} cannot be written: {e.strerror}.',
        fix='Give a file in a folder that you may write to.',
      ) from e

  def _num_done(self, facts: Mapping[str, Any], numbers: Sequence[int]) -> int:
    """Returns the number of results in the file, after removing an incomplete last line."""
    if not self.path.exists() or not self.path.stat().st_size:
      return 0
    self._check_facts(facts)
    num_done, whole_bytes = 0, 0
    with open(self.path, 'rb+') as f:
      for line in f:
        if not line.endswith(b'\n'):
          break
        expected = numbers[num_done] if num_done < len(numbers) else 'none'
        if _number(line) != expected:
          raise DataError(
            f'{self.path}:{num_done + 1} is not the result of prompt {expected}: the line begins '
            f'{line[:60]!r}.',
            fix='Repair or remove the file, or start over with --overwrite.',
          )
        num_done, whole_bytes = num_done + 1, whole_bytes + len(line)
      f.truncate(whole_bytes)
    return num_done

  def _check_facts(self, facts: Mapping[str, Any]) -> None:
    try:
      before = read_json(self._facts_path)
    except (OSError, ValueError):
      before = None
    fix = 'Give another --output, or start over with --overwrite.'
    if not isinstance(before, dict):
      raise ConfigError(
        f'{self.path} exists without {self._facts_path.name}, which lists what its results depend '
        'on.',
        fix=fix,
      )
    if different := differences(before, json.loads(json.dumps(facts)), before='then'):
      raise ConfigError(
        f'{self.path} has results of another job:\n  ' + '\n  '.join(different), fix=fix
      )

  def write(self, records: list[dict[str, Any]]) -> None:
    """Appends results in the order of their numbers."""
    self._file.write(''.join(to_line(record) for record in records).encode('utf-8'))
    self._file.flush()
    os.fsync(self._file.fileno())

  def close(self) -> None:
    self._file.close()


def to_line(record: Mapping[str, Any]) -> str:
  """Returns a line of JSON; text is not escaped to ASCII."""
  return json.dumps(record, ensure_ascii=False) + '\n'


def _number(line: bytes) -> Optional[int]:
  try:
    record = parse_json(line)
  except ValueError:
    return None
  number = record.get(NUMBER) if isinstance(record, dict) else None
  return number if isinstance(number, int) else None


# Fields of a result in addition to those of its prompt.
_SCORED = (NUMBER, 'score', 'num_tokens')
_WRITTEN = (*_SCORED, 'prediction', 'is_complete', 'predictions', 'scores')
_CLASSIFIED = (NUMBER, 'label', 'probability', 'probabilities')


@dataclasses.dataclass(frozen=True)
class InferJob:
  """A model with its vocabulary.

  Attributes:
    generator: of the model.
    text: text <-> ids.
    checkpoint: folder of the parameters.
    train_length: tokens of a row in training; None if unknown.
    class_names: of a Classifier; None for a Generator.
  """

  generator: Union[Generator, Classifier]
  text: Any  # a PromptText, or a ClassText of a Classifier
  checkpoint: str
  train_length: Optional[int] = None
  class_names: Optional[Sequence[str]] = None

  def tokens(self, prompt: Prompt) -> list[int]:
    if self.class_names is not None and prompt.tokens is None:
      return self.text.encode(prompt)
    if prompt.messages is not None:
      return self.text.encode_chat(prompt.messages, tools=prompt.tools, where=prompt.where)
    return list(self.text.encode_inputs(prompt.inputs) if prompt.tokens is None else prompt.tokens)

  def target_tokens(self, prompt: Prompt) -> list[int]:
    if prompt.target_tokens is not None:
      return list(prompt.target_tokens)
    if prompt.targets is None:
      raise DataError(
        f"{prompt.where} has no text under key 'targets', which --score needs.",
        fix='Give every line {"inputs": ..., "targets": ...}, or leave --score out.',
      )
    return self.text.encode_targets(prompt.targets)

  def decoded(self, generated: Union[Generated, Sequence[float]]) -> str:
    if self.class_names is not None:
      best = max(range(len(generated)), key=generated.__getitem__)
      return f'{self.class_names[best]} ({generated[best]:.4f})'
    ids = generated.tokens[:-1] if generated.is_complete else generated.tokens
    return self.text.decode(ids)


@dataclasses.dataclass(frozen=True)
class _EncodedPrompts:
  """Prompts as ids; all of them fit the model.

  Attributes:
    job, prompts: as given.
    numbers: of the prompts, in their order.
    tokens: ids of each prompt.
    targets: ids of the continuation of each prompt to score; None to write text.
  """

  job: InferJob
  prompts: Sequence[Prompt]
  numbers: Sequence[int]
  tokens: Sequence[Sequence[int]]
  targets: Optional[Sequence[Sequence[int]]]

  @classmethod
  def of(cls, job: InferJob, prompts: Sequence[Prompt], *, score: bool) -> '_EncodedPrompts':
    """Returns the ids of `prompts`; raises DataError for a prompt that does not fit."""
    numbers = [i if prompt.number is None else prompt.number for i, prompt in enumerate(prompts)]
    tokens = [job.tokens(prompt) for prompt in prompts]
    targets = [job.target_tokens(prompt) for prompt in prompts] if score else None
    for i, prompt in enumerate(prompts):
      job.generator.check_prompt(
        len(tokens[i]), where=prompt.where, targets=len(targets[i]) if score else 0
      )
    longer = sum(len(ids) > (job.train_length or len(ids)) for ids in tokens)
    if longer:
      say(
        f'note: {longer} of {len(tokens)} prompts are longer than the {job.train_length} tokens of '
        'a row in training.'
      )
    return cls(job, prompts, numbers, tokens, targets)

  def results(self, part: slice) -> list[dict[str, Any]]:
    """Returns the records of some prompts. All processes must call it."""
    return [
      {NUMBER: number, **prompt.extra, 'inputs': prompt.inputs, **result}
      for number, prompt, result in zip(
        self.numbers[part], self.prompts[part], self._outputs(part), strict=True
      )
    ]

  def _outputs(self, part: slice) -> list[dict[str, Any]]:
    job, prompts, tokens = self.job, self.prompts[part], self.tokens[part]
    if self.targets is None:
      found = job.generator.generate(tokens, numbers=self.numbers[part])
      return [_result(job, prompt, outputs) for prompt, outputs in zip(prompts, found, strict=True)]
    targets = self.targets[part]
    scores = job.generator.score(tokens, targets)
    return [
      {'targets': prompt.targets, 'score': score, 'num_tokens': len(ids)}
      for prompt, score, ids in zip(prompts, scores, targets, strict=True)
    ]

  def facts(self) -> dict[str, Any]:
    """Returns what results depend on; the prompts as a hash."""
    content = json.dumps([[p.inputs, p.targets, dict(p.extra)] for p in self.prompts])
    digest = hashlib.sha256((content + json.dumps([self.tokens, self.targets])).encode())
    facts = {
      'prompts': f'{len(self.prompts)}, {digest.hexdigest()[:16]}',
      'checkpoint': self.job.checkpoint,
      'vocabulary': self.job.text.name,
      'score': self.targets is not None,
    }
    decoding = dataclasses.asdict(self.job.generator.config)
    used = ['start_token'] if self.targets is not None else decoding.keys() - {'batch_size'}
    return facts | {f'DecodingConfig.{name}': decoding[name] for name in sorted(used)}


def write_results(
  job: InferJob,
  prompts: Sequence[Prompt],
  *,
  output: Optional[str],
  score: bool = False,
  overwrite: bool = False,
  dry_run: bool = False,
) -> int:
  """Writes the results of `prompts` in their order; returns how many are new.

  Every device of every process computes its share of each batch; process 0 writes.

  Args:
    job: model and text.
    prompts: all of them, including those that `output` already has.
    output: file, continued if it has results of the same job; None for standard output.
    score: compute the probabilities of given targets instead of new text.
    overwrite: replace the file.
    dry_run: check everything and return 0.
  Raises:
    DataError: a prompt does not fit, or has a field that results have.
  """
  taken = _CLASSIFIED if job.class_names is not None else _SCORED if score else _WRITTEN
  _check_fields(prompts, taken)
  encoded = _EncodedPrompts.of(job, prompts, score=score)
  if dry_run:
    say(f'Dry run: {len(prompts)} prompts would be run.')
    return 0
  is_main, lines = distributed.is_main_process(), None
  if output is not None and is_main:
    lines = ResultLines(output, facts=encoded.facts(), numbers=encoded.numbers, overwrite=overwrite)
  done = distributed.broadcast_json(lines.num_done if lines else 0)
  if done:
    say(f'{output} has {done} of {len(prompts)} results already.')
  batch_size = job.generator.batch_size
  try:
    with bar('prompts', len(prompts), done=done, stream=sys.stderr, enabled=is_main) as advance:
      for start in range(done, len(prompts), batch_size):
        records = encoded.results(slice(start, start + batch_size))
        if lines is not None:
          lines.write(records)
        elif is_main:
          print(*map(to_line, records), sep='', end='', flush=True)
        advance(len(records))
  except KeyboardInterrupt:
    if lines is not None:
      say(f'All results so far are in {output}; the same command continues.')
    raise
  finally:
    if lines is not None:
      lines.close()
  return len(prompts) - done


def _check_fields(prompts: Sequence[Prompt], fields: Sequence[str]) -> None:
  """Raises DataError if a field of a prompt has the name of a field of results."""
  taken = {
    field: prompt.where for prompt in reversed(prompts) for field in prompt.extra if field in fields
  }
  if taken:
    names = [field for field in fields if field in taken]
    raise DataError(
      f'{taken[names[0]]} has {", ".join(map(repr, names))}, which results have as well.',
      fix='Rename these fields of the prompts; other fields are copied to results. Results have '
      + ', '.join(fields)
      + '.',
      docs='infer.md#results',
    )


def _result(job: InferJob, prompt: Prompt, found: Sequence[Any]) -> dict[str, Any]:
  """Returns the fields of a result: continuations or classes, best first."""
  if job.class_names is not None:
    result = dict(sorted(zip(job.class_names, found), key=lambda pair: -pair[1]))
    label, probability = next(iter(result.items()))
    return {
      **({} if prompt.targets is None else {'targets': prompt.targets}),
      'label': label,
      'probability': probability,
      'probabilities': result,
    }
  best = found[0]
  result = {
    'prediction': job.decoded(best),
    'score': best.score,
    'num_tokens': len(best.tokens),
    'is_complete': best.is_complete,
  }
  if prompt.targets is not None:
    result = {'targets': prompt.targets, **result}
  if job.generator.config.num_decodes > 1:
    result['predictions'] = [job.decoded(one) for one in found]
    result['scores'] = [one.score for one in found]
  return result


def say(text: str) -> None:
  """Prints to standard error: results may go to standard output."""
  log(text, stream=sys.stderr)
