"""Run a trained model: `python -m t5x_gpu.infer --checkpoint=runs/demo --prompts=FILE`.

Reads prompts from a file, standard input or a SeqIO task. Writes continuations, or probabilities of
given continuations, as JSON lines in the same order. Started again after a kill, it continues.
"""

import argparse
import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Optional

import jax

from t5x_gpu import cli
from t5x_gpu.conversion.to_ours import converted_once
from t5x_gpu.data.batches import optional_method
from t5x_gpu.data.data_module import RECORDS, Prompt, PromptText
from t5x_gpu.data.prompts import parse_prompts, read_prompts
from t5x_gpu.data.sources.rows import limited_lines
from t5x_gpu.errors import ConfigError, DataError, task_error
from t5x_gpu.evaluation.generated_text import InferJob, say, write_results
from t5x_gpu.evaluation.infer_jobs import open_job
from t5x_gpu.evaluation.infer_request import InferSetup, gin_file_of, read_request
from t5x_gpu.runtime import distributed, main_log
from t5x_gpu.runtime.cluster import cluster as cluster_lib
from t5x_gpu.runtime.process_exit import interrupts_noted
from t5x_gpu.storage.paths import as_path
from t5x_gpu.terminal import logging_setup
from t5x_gpu.terminal.flag_types import positive_int
from t5x_gpu.terminal.printable import printable

EXAMPLES = """examples:
  {prog} --checkpoint=runs/demo --prompts=prompts.txt --output=answers.jsonl
  {prog} --checkpoint=runs/llama --prompts=- --gin.DecodingConfig.num_beams=4
  {prog} --gin_file=my.gin --split=test --output=answers.jsonl
  {prog} --checkpoint=runs/demo --prompts=pairs.jsonl --score
  {prog} --checkpoint=runs/chat --interactive --chat
  {prog} --checkpoint=runs/demo --interactive --temperature=0.8

--checkpoint takes a MODEL_DIR or a model that t5x_gpu.convert wrote. Its own gin file describes the
model, unless --gin_file is given. It is read as data; nothing in it runs without --trust_gin.
How tokens are chosen: --gin.DecodingConfig.X=VALUE (docs/infer.md).
"""


def prompts_of(
  args: argparse.Namespace, path: Optional[str], text: PromptText, *, score: bool
) -> list[Prompt]:
  """Returns the prompts in the file `path`, or of the task; the same on every process."""
  if path is None:
    prompts = text.examples() if score else _with_inputs(text.examples())
    return list(itertools.islice(prompts, args.examples))
  records = None
  if distributed.is_main_process():
    try:
      if path == '-':
        lines = list(limited_lines(sys.stdin.buffer, 'standard input'))
        found = parse_prompts(lines, name='standard input', is_json=None, chat=args.chat)
      elif path.startswith(RECORDS):
        records_in = optional_method(text, 'records')
        if records_in is None:
          raise DataError(
            f'--prompts={path}: prompts of this model are not read from tf.train.Examples.',
            fix='Give a .jsonl, .csv, .tsv, .parquet or .txt file.',
            docs='infer.md',
          )
        found = list(records_in(path))
      else:
        found = read_prompts(path, chat=args.chat)
      records = [dataclasses.asdict(prompt) for prompt in found]
    except DataError as e:
      if distributed.process_count() == 1:
        raise
      records = {'what': e.what, 'fix': e.fix}
  records = distributed.broadcast_json(records)
  if isinstance(records, dict):  # process 0 failed: raise its error on every process
    raise DataError(records['what'], fix=records['fix'])
  return [Prompt(**record) for record in records][: args.examples]


def shard(prompts: Sequence[Prompt], setup: InferSetup) -> list[Prompt]:
  """Returns the prompts of a shard, which keep their numbers."""
  if setup.num_shards == 1:
    return list(prompts)
  return [
    dataclasses.replace(prompt, number=number if prompt.number is None else prompt.number)
    for number, prompt in enumerate(prompts)
    if number % setup.num_shards == setup.shard_id
  ]


def _with_inputs(prompts: Iterator[Prompt]) -> Iterator[Prompt]:
  for prompt in prompts:
    if not prompt.tokens:
      raise task_error(
        f"{prompt.where} has no 'inputs' to continue: the task has only targets.",
        fix='Give prompts (--prompts=FILE), or add --score.',
      )
    yield prompt


def talk(job: InferJob, *, chat: bool = False) -> None:
  """Continues each line of standard input until it ends; with `chat`, as one conversation."""
  if distributed.process_count() > 1:
    raise ConfigError(
      '--interactive reads from one terminal; this run has '
      f'{distributed.process_count()} processes.',
      fix='Start one process, or give --prompts=FILE.',
    )
  if chat:
    ends = 'Ctrl-C ends an answer' if _is_streamed(job) else 'Ctrl-C ends the program'
    say(f'Type a message and press Enter. /reset starts over, /quit or Ctrl-D ends, {ends}.')
  else:
    say('Type a prompt and press Enter; Ctrl-D ends.')
  said: list[dict[str, str]] = []  # the conversation so far
  for number in itertools.count():
    try:
      line = input('> ' if sys.stdin.isatty() else '')
    except EOFError:
      return
    if chat and line.strip() == '/quit':
      return
    if chat and line.strip() == '/reset':
      said = []
      say('The conversation starts over.')
    elif line.strip():
      try:
        asked = [*said, {'role': 'user', 'content': line}]
        messages = asked if chat else None
        answer = _answer(job, Prompt('This prompt', line, messages=messages), number)
      except DataError as e:  # the next prompt may fit
        say(f'{e}' + ('\n  /reset starts over.' if said else ''))
        continue
      if chat:
        said = [*asked, {'role': 'assistant', 'content': answer}]


def _is_streamed(job: InferJob) -> bool:
  """Returns whether a text appears while the model writes it."""
  config = job.generator.config
  return job.outcome is None and config.num_decodes == 1 and not config.has_beams


def _answer(job: InferJob, prompt: Prompt, number: int) -> str:
  """Prints a text while the model writes it, until Ctrl-C; returns the text, the best of several.

  Args:
    job: the model and its text.
    prompt: the prompt.
    number: its number, on which samples depend.
  """
  tokens = job.tokens(prompt)
  job.generator.check_prompt(len(tokens), where=prompt.where)
  if not _is_streamed(job):
    [found] = job.generator.generate([tokens], numbers=[number])
    texts = [job.decoded(one) for one in (found if job.outcome is None else [found])]
    for text in texts:
      print(printable(text), flush=True)
    return texts[0]
  shown = text = ''
  with interrupts_noted() as interrupted:
    for found in job.generator.stream(tokens, number=number):
      text = job.decoded(found)
      if text.startswith(shown) and not text.endswith(_HALF):  # the next token may change its end
        print(printable(text[len(shown) :]), end='', flush=True)
        shown = text
      if interrupted():
        break
  print(printable(text[len(shown) :] if text.startswith(shown) else ''))
  return text


_HALF = '\ufffd'  # the first bytes of a character


# Flag -> parameter of DecodingConfig.
_DECODING = {
  'temperature': 'temperature',
  'top_k': 'top_k',
  'top_p': 'top_p',
  'max_tokens': 'max_decode_length',
}


def _decoding_bindings(flags: argparse.Namespace) -> list[str]:
  """Returns the gin bindings of the flags in `_DECODING`."""
  given = {parameter: getattr(flags, name) for name, parameter in _DECODING.items()}
  return [f'DecodingConfig.{name}={value}' for name, value in given.items() if value is not None]


def _add_flags(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('text')
  group.add_argument(
    '--checkpoint',
    metavar='FOLDER',
    help=("MODEL_DIR, one of its checkpoints, or a converted model (default: the gin file's)"),
  )
  group.add_argument('--step', type=int, metavar='N', help='which checkpoint (default: the latest)')
  group.add_argument(
    '--prompts',
    metavar='FILE',
    help=(
      '.txt with a prompt per line, .jsonl with {"inputs": ...}, .csv, .tsv or .parquet (FILE#text='
      'COLUMN), tfrecord:PATTERN#inputs=FEATURE, or - for standard input (default: the '
      "task's examples)"
    ),
  )
  group.add_argument('--split', metavar='SPLIT', help="split of the task (default: the gin file's)")
  group.add_argument('--examples', type=positive_int, metavar='N', help='only the first N prompts')
  group.add_argument(
    '--vocabulary',
    metavar='NAME',
    help=(
      'huggingface:FOLDER, sentencepiece:FILE, byte (default: the vocabulary of the task or model)'
    ),
  )
  group.add_argument(
    '--output',
    metavar='FILE',
    help=('.jsonl; results that it already has are kept (default: standard output)'),
  )
  group.add_argument('--overwrite', action='store_true', help='replace --output')
  group.add_argument(
    '--score',
    action='store_true',
    help="compute log-probabilities of the prompts' targets instead of text",
  )
  group.add_argument(
    '--shard_id', type=int, metavar='I', help='only prompts I, I + num_shards, ... (counted from 0)'
  )
  group.add_argument(
    '--num_shards', type=positive_int, metavar='N', help='number of jobs that share the prompts'
  )
  group.add_argument(
    '--chat',
    action='store_true',
    help=(
      'each prompt is a user message, or {"messages": [...]}, formatted by the tokenizer\'s chat '
      'template'
    ),
  )
  group.add_argument('--interactive', action='store_true', help='read prompts from the terminal')
  group.add_argument(
    '--temperature',
    type=float,
    metavar='X',
    help='0 takes the most probable token (the default), 1 samples: DecodingConfig.temperature',
  )
  group.add_argument('--top_k', type=int, metavar='N', help='sample among the N most probable')
  group.add_argument(
    '--top_p', type=float, metavar='X', help='sample among the tokens with this total probability'
  )
  group.add_argument('--max_tokens', type=positive_int, metavar='N', help='maximum of new tokens')
  cli.add_trust_flag(group)
  cluster_lib.add_flags(parser)


def _check_flags(flags: argparse.Namespace) -> None:
  without = [
    name
    for name in ('prompts', 'output', 'score', 'examples', 'split')
    if flags.interactive and getattr(flags, name)
  ]
  without += ['split'] if flags.prompts is not None and flags.split else []
  if without:
    other = '--interactive' if flags.interactive else '--prompts'
    raise ConfigError(
      f'{other} cannot be combined with ' + ', '.join(f'--{n}' for n in without) + '.',
      fix='Remove one of them.',
    )
  if flags.chat and (flags.score or flags.prompts is None and not flags.interactive):
    raise ConfigError(
      '--chat continues conversations: it cannot be combined with --score, and needs prompts.',
      fix='Give --prompts=FILE or --interactive, without --score.',
    )
  if flags.overwrite and not flags.output:
    raise ConfigError('--overwrite without --output.', fix='Give --output=FILE.')


@main_log.on_stderr()
def main(argv: Optional[Sequence[str]] = None) -> int:
  """Parses flags and gin files, then writes."""
  logging_setup.quiet_environment()
  args = cli.parse_args(
    'python -m t5x_gpu.infer',
    __doc__.splitlines()[0],
    argv,
    extra=_add_flags,
    gin_file_required=False,
    examples=EXAMPLES,
  )
  _check_flags(args.extra)
  cli.check_trust_flag(args)
  cluster = cluster_lib.detect_here(args.extra)
  if args.tfds_data_dir:
    os.environ['TFDS_DATA_DIR'] = args.tfds_data_dir
  flags = args.extra
  if flags.trust_gin:  # not `say`: it uses devices, and it is too early for that
    print(cli.trusted(gin_file_of(flags.checkpoint)), file=sys.stderr, flush=True)
  request = read_request(
    flags,
    args.gin_files,
    bindings=[*args.bindings, *_decoding_bindings(flags)],
    search_paths=args.gin_search_paths,
  )
  distributed.start(cluster, request.distributed_cfg, xla_preset=request.xla_preset)
  logging_setup.setup(process_index=jax.process_index(), process_count=jax.process_count())
  say('\n'.join(f'note: {note}' for note in request.notes))
  setup = request.setup
  output = flags.output or setup.output
  if output:
    folder = as_path(setup.output_dir or os.path.dirname(output) or '.')
    found = converted_once(request.checkpoint, folder, request.model, dry_run=args.dry_run)
    if found is None:
      say(f'Dry run: {request.checkpoint} is a T5X checkpoint, which would be converted first.')
      return 0
    request = dataclasses.replace(request, checkpoint=found)
  job = open_job(request, score=setup.score, one_at_a_time=flags.interactive, dry_run=args.dry_run)
  if flags.interactive:
    if not args.dry_run:
      talk(job, chat=flags.chat)
    return 0
  prompts = shard(prompts_of(flags, setup.prompts, job.text, score=setup.score), setup)
  new = write_results(
    job, prompts, output=output, score=setup.score, overwrite=flags.overwrite, dry_run=args.dry_run
  )
  if output and not args.dry_run:
    say(f'{len(prompts)} results in {output}, {new} of them new.')
  return 0


if __name__ == '__main__':
  # Imported under its own name: gin files import t5x_gpu.infer, and a module must not exist twice.
  from t5x_gpu.infer import main as main_

  cli.run_main(main_)
