"""Runs a model on prompts and writes one JSON line per prompt, in the order of the prompts.

After a kill, `ResultLines` continues after the last complete line.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Optional, Protocol, Union

import numpy as np

from t5x_gpu.data.data_module import EncodedRow, EncoderText, Prompt, PromptText
from t5x_gpu.data.same_data import differences
from t5x_gpu.errors import ConfigError, DataError
from t5x_gpu.models.inference.classify import Classifier
from t5x_gpu.models.inference.generation import Generated, Generator
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.main_log import log
from t5x_gpu.storage.files import check_not_refused
from t5x_gpu.storage.json_schema import Json, JsonObject, parse_json, read_json
from t5x_gpu.storage.user_paths import expanded_path
from t5x_gpu.terminal.progress import bar

NUMBER = 'number'  # number of the prompt, in every line
FACTS = '.facts.json'
# Control characters that JSON does not escape, and surrogates, which UTF-8 cannot encode.
_UNESCAPED = re.compile(r'[\x7f-\x9f\ud800-\udfff]')


class ResultLines:
  """Appends one line per prompt to a file; `FILE.facts.json` has facts that the lines depend on.

  Lines reach the disk before the next batch is computed. If a kill leaves an incomplete last line,
  opening the file removes it.

  Args:
    path: path of the file; its folder is created.
    facts: JSON-ready facts that the results depend on.
    numbers: numbers of the prompts, in order.
    overwrite: replace the file.
  Attributes:
    num_done: number of results that the file already had.
  Raises:
    ConfigError: the file holds other results, or cannot be written.
    DataError: a line in the middle is not a result.
  """

  def __init__(self, path: str, *, facts: Json, numbers: Sequence[int], overwrite: bool = False):
    self.path = expanded_path(path)
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
      raise _cannot_write(path, e) from e

  def _num_done(self, facts: Json, numbers: Sequence[int]) -> int:
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

  def _check_facts(self, facts: Json) -> None:
    try:
      before = read_json(self._facts_path)
    except (OSError, ValueError) as e:
      check_not_refused(e, self._facts_path)
      before = None
    fix = 'Give another --output, or start over with --overwrite.'
    if not isinstance(before, dict):
      raise ConfigError(
        f'{self.path} exists without {self._facts_path.name}, which lists the facts that its '
        'results depend on.',
        fix=fix,
      )
    if different := differences(before, json.loads(json.dumps(facts)), before='then'):
      raise ConfigError(
        f'{self.path} has results of another job:\n  ' + '\n  '.join(different), fix=fix
      )

  def write(self, records: list[JsonObject]) -> None:
    """Appends results in the order of their numbers."""
    self._file.write(''.join(to_line(record) for record in records).encode('utf-8'))
    self._file.flush()
    os.fsync(self._file.fileno())

  def close(self) -> None:
    self._file.close()


def _cannot_write(path: str, e: OSError) -> ConfigError:
  return ConfigError(
    f'--output={path} cannot be written: {e.strerror}.',
    fix='Give a file in a folder that you may write to, with free space.',
  )


class VectorFile:
  """Writes the vectors of results to a .npy file [results, embed], which appears when complete.

  The file is `PATH.partial` until then. The first vectors reserve its whole space, so that a disk
  that is too small is an error at the start.

  Args:
    path: path of the file; its folder is created.
    num_rows: number of results.
    overwrite: replace the file.
  Attributes:
    num_done: always 0, because an interrupted run starts over.
  Raises:
    ConfigError: the file exists, or cannot be written.
  """

  num_done = 0

  def __init__(self, path: str, *, num_rows: int, overwrite: bool):
    self.path = expanded_path(path)
    self._partial = self.path.with_name(self.path.name + '.partial')
    self._num_rows, self._num_written = num_rows, 0
    if self.path.is_dir():
      raise ConfigError(f'--output={path} is a folder.', fix='Give a file in it.')
    if self.path.exists() and not overwrite:
      raise ConfigError(
        f'--output={path} exists.', fix='Give another --output, or add --overwrite.'
      )
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      self._file = open(self._partial, 'wb')
      if not num_rows:
        np.save(self._file, np.empty(0, np.float32))
    except OSError as e:
      raise _cannot_write(path, e) from e

  def write(self, records: list[JsonObject]) -> None:
    """Appends the vectors of results in the order of their numbers."""
    rows = np.asarray([record['vector'] for record in records], np.float32)
    if not self._num_written:
      shape = (self._num_rows, rows.shape[1])
      header = {'descr': '<f4', 'fortran_order': False, 'shape': shape}
      np.lib.format.write_array_header_1_0(self._file, header)
      self._file.flush()
      try:
        os.posix_fallocate(self._file.fileno(), 0, self._file.tell() + 4 * math.prod(shape))
      except OSError as e:
        raise _cannot_write(str(self.path), e) from e
    self._file.write(rows.astype('<f4').tobytes())
    self._num_written += len(rows)

  def close(self) -> None:
    """Makes the file appear if it has all results, else removes it."""
    try:
      self._file.close()
      if self._num_written == self._num_rows:
        self._partial.replace(self.path)
    finally:
      self._partial.unlink(missing_ok=True)


def to_line(record: Json) -> str:
  """Returns a line of JSON; does not escape text to ASCII, but escapes control characters."""
  line = json.dumps(record, ensure_ascii=False)
  return _UNESCAPED.sub(lambda match: f'\\u{ord(match[0]):04x}', line) + '\n'


def _number(line: bytes) -> Optional[int]:
  try:
    record = parse_json(line)
  except ValueError:
    return None
  number = record.get(NUMBER) if isinstance(record, dict) else None
  return number if isinstance(number, int) else None


# Fields of a result, in addition to the fields of its prompt.
_SCORED = (NUMBER, 'score', 'num_tokens')
_WRITTEN = (*_SCORED, 'prediction', 'is_complete', 'predictions', 'scores')


# The outputs for one text: numbers, or a row of numbers for every word (None without a token).
Scores = Sequence[float | Sequence[float] | None]


class Outcome(Protocol):
  """The form of an encoder's predictions.

  Attributes:
    fields: fields of a result, in addition to the fields of its prompt.
  """

  fields: Sequence[str]

  def shown(self, found: Scores) -> str:
    """Returns a line for the terminal."""

  def result(self, prompt: Prompt, found: Scores) -> JsonObject:
    """Returns the fields of a result."""


@dataclasses.dataclass(frozen=True)
class InferJob:
  """A model with its vocabulary.

  Attributes:
    generator: runs the model.
    text: text <-> ids.
    checkpoint: folder of the parameters.
    train_length: length of a row in training, in tokens; None if unknown.
    outcome: form of an encoder's predictions; None for a Generator.
  """

  generator: Union[Generator, Classifier]
  text: Union[PromptText, EncoderText]
  checkpoint: str
  train_length: Optional[int] = None
  outcome: Optional[Outcome] = None

  def tokens(self, prompt: Prompt) -> Union[list[int], EncodedRow]:
    if self.outcome is not None:
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

  def decoded(self, generated: Scores | Generated) -> str:
    if self.outcome is not None:
      return self.outcome.shown(generated)
    ids = generated.tokens[:-1] if generated.is_complete else generated.tokens
    return self.text.decode(ids)


@dataclasses.dataclass(frozen=True)
class _EncodedPrompts:
  """Prompts as ids, checked to fit the model.

  Attributes:
    job, prompts: as given.
    numbers: numbers of the prompts, in order.
    tokens: ids of each prompt.
    targets: ids of the continuation of each prompt to score; None to generate text.
  """

  job: InferJob
  prompts: Sequence[Prompt]
  numbers: Sequence[int]
  tokens: Sequence[Union[Sequence[int], EncodedRow]]
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

  def results(self, part: slice) -> list[JsonObject]:
    """Returns the records of some prompts. All processes must call it."""
    return [
      {NUMBER: number, **prompt.extra, 'inputs': prompt.inputs, **result}
      for number, prompt, result in zip(
        self.numbers[part], self.prompts[part], self._outputs(part), strict=True
      )
    ]

  def _outputs(self, part: slice) -> list[JsonObject]:
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

  def facts(self) -> JsonObject:
    """Returns the facts that results depend on, with a hash of the prompts."""
    content = json.dumps([[p.inputs, p.targets, dict(p.extra)] for p in self.prompts])
    digest = hashlib.sha256(
      (content + json.dumps([[list(t) for t in self.tokens], self.targets])).encode()
    )
    facts = {
      'prompts': f'{len(self.prompts)}, {digest.hexdigest()[:16]}',
      'checkpoint': self.job.checkpoint,
      'vocabulary': self.job.text.name,
      'score': self.targets is not None,
    }
    decoding = self.job.generator.config.facts
    used = decoding.keys() if self.targets is None else ['start_token']
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
  """Writes the results of `prompts` in order; returns the number of new results.

  Every device of every process computes its share of each batch; process 0 writes.

  Args:
    job: model and text.
    prompts: all prompts, including prompts whose results `output` already has.
    output: file, continued if it has results of the same job; None for standard output.
    score: compute the probabilities of given targets instead of generating text.
    overwrite: replace the file.
    dry_run: check everything and return 0.
  Raises:
    DataError: a prompt does not fit, or has a field with the name of a result's field.
  """
  taken = job.outcome.fields if job.outcome is not None else _SCORED if score else _WRITTEN
  _check_fields(prompts, taken)
  as_array = output is not None and output.endswith('.npy')
  if as_array and (job.outcome is None or 'vector' not in job.outcome.fields):
    raise ConfigError(
      f'--output={output}: only embeddings can be written as an array.',
      fix='Give a file that ends in .jsonl.',
    )
  encoded = _EncodedPrompts.of(job, prompts, score=score)
  if dry_run:
    say(f'Dry run: {len(prompts)} prompts would be run.')
    return 0
  is_main, lines = distributed.is_main_process(), None
  if as_array and is_main:
    lines = VectorFile(output, num_rows=len(prompts), overwrite=overwrite)
  elif output is not None and is_main:
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
    if lines is not None and not as_array:
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


def _result(job: InferJob, prompt: Prompt, found: Scores | Sequence[Generated]) -> JsonObject:
  """Returns the fields of a result: continuations or classes, best first."""
  if job.outcome is not None:
    return job.outcome.result(prompt, found)
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
  """Prints to standard error, because results may go to standard output."""
  log(text, stream=sys.stderr)
