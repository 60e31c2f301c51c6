"""`python -m t5x_gpu.data preview | stats | bench | check | words`: looks at a run's data."""

import argparse
import collections
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import pathlib
import statistics
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any, Optional

import numpy as np
import rich.console
import rich.text

from t5x_gpu import cli
from t5x_gpu.data import data_module, features
from t5x_gpu.data.batches import PREPARED, Batch, BatchIterator, BatchSpec, DatasetConfig
from t5x_gpu.data.prepared import shard_writer
from t5x_gpu.data.prepared.index import Index, check_shards, counted_features, read_index
from t5x_gpu.errors import ConfigError, DataError
from t5x_gpu.metrics.writers import read_json_lines
from t5x_gpu.reporting.charts import Axis, Series, line_chart
from t5x_gpu.reporting.page import Section, page
from t5x_gpu.storage.files import write_atomically
from t5x_gpu.storage.user_paths import expanded_path
from t5x_gpu.terminal import logging_setup
from t5x_gpu.terminal.flag_types import positive_int
from t5x_gpu.terminal.printable import printable


@dataclasses.dataclass(frozen=True)
class Speed:
  """Tokens per second of wall time and of CPU time, without padding; number of timed batches."""

  tokens_per_second: float
  tokens_per_core_second: float
  batches: int


def measure(batches: BatchIterator, *, seconds: float) -> Speed:
  """Returns the speed of reading whole batches; the first batch is not timed."""

  def read(batch: Batch) -> int:
    return sum(int(features.is_token(batch, name).sum()) for name in counted_features(batch))

  read(next(batches))
  start, cpu, number, tokens = time.perf_counter(), time.process_time(), 0, 0
  while number == 0 or time.perf_counter() - start < seconds:
    tokens += read(next(batches))
    number += 1
  return Speed(
    tokens / (time.perf_counter() - start), tokens / max(time.process_time() - cpu, 1e-9), number
  )


PROG = 'python -m t5x_gpu.data'
EXAMPLES = """examples:
  {prog} preview --gin_file=my.gin             rows as training gets them, examples in colors
  {prog} preview prepared:/data/rows --split=validation
  {prog} stats prepared:/data/rows --picture=lengths.html
  {prog} bench --gin_file=my.gin               tokens/s of the data; fast enough for the model?
  {prog} check prepared:/data/rows             every byte against its checksum
  {prog} words --gin_file=my.gin               a tokenizer of the words in the training data
"""
_COLORS = ('cyan', 'yellow', 'green', 'magenta', 'blue', 'red')
TRAIN = 'train'
_BENCH_ROWS = 64  # rows of a batch, without a gin file


@dataclasses.dataclass(frozen=True)
class _Data:
  """The data to look at.

  Attributes:
    config, spec, feature_converter: the data, and the shape of its batches.
    trains: whether a run trains on this split; it evaluates each row of another split once.
    model_dir: MODEL_DIR of a run.
  """

  config: DatasetConfig
  spec: BatchSpec
  feature_converter: str
  trains: bool
  model_dir: Optional[str] = None

  @property
  def index(self) -> Optional[Index]:
    """The index of prepared rows; None for other data."""
    name = self.config.mixture_or_task_name
    if not name.startswith(PREPARED):
      return None
    return read_index(name.removeprefix(PREPARED), split=self.config.split)

  def batches(self, *, repeat: bool) -> contextlib.AbstractContextManager[BatchIterator]:
    return data_module.batches_to_close(
      self.config, spec=self.spec, feature_converter=self.feature_converter, repeat=repeat
    )


def _flags(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('command', choices=('preview', 'stats', 'bench', 'check', 'words'))
  parser.add_argument(
    'data',
    nargs='?',
    metavar='prepared:DIR',
    help='prepared rows (default: the training data of --gin_file)',
  )
  parser.add_argument(
    '--split', metavar='NAME', help="split to read (default: the run's training split, or train)"
  )
  parser.add_argument(
    '--rows',
    type=positive_int,
    metavar='N',
    help='preview: rows to print (4); stats of text: rows to read (1000)',
  )
  parser.add_argument('--picture', metavar='FILE.html', help='stats: plot the lengths')
  parser.add_argument(
    '--seconds',
    type=float,
    default=10.0,
    metavar='S',
    help='bench: how long (default: %(default)g)',
  )
  parser.add_argument(
    '--eats',
    type=float,
    metavar='TOKENS',
    help='bench: tokens/s that the model trains at (default: from MODEL_DIR/metrics.jsonl)',
  )

  parser.add_argument(
    '--output',
    metavar='FOLDER',
    help="words: folder of the tokenizer (default: the folder in the run's VOCABULARY)",
  )
  parser.add_argument(
    '--max_words',
    type=positive_int,
    metavar='N',
    help='words: keep only the N most frequent words; the others become unknown',
  )


def _opened(args: cli.Args) -> _Data:
  """Returns the data that the command line names."""
  given = args.extra.data
  if bool(given) == bool(args.gin_files):
    raise ConfigError(
      'Name the data either by --gin_file or as prepared:DIR.', fix=f'{PROG} --help has examples.'
    )
  if given:
    folder = given.removeprefix(PREPARED)
    index = read_index(folder, split=args.extra.split or TRAIN)
    config = DatasetConfig(
      f'{PREPARED}{folder}',
      index.task_feature_lengths,
      index.split,
      _BENCH_ROWS if args.extra.command == 'bench' else 4,
      pack=index.pack,
      loss_on_targets_only=index.loss_on_targets_only,
    )
    spec = features.batch_spec(
      index.feature_converter,
      task_feature_lengths=config.task_feature_lengths,
      batch_size=config.batch_size,
      pack=index.pack,
      vocab_size=2**31 - 1,
      num_classes=2**31 - 1,
    )
    return _Data(config, spec, index.feature_converter, index.split == TRAIN)
  loaded = args.load_with_classes()
  names = ('model', 'train_dataset_cfg', 'train_eval_dataset_cfg', 'model_dir')
  run = loaded.arguments(only=names)
  model, config, evaluated, model_dir = (run[name] for name in names)
  trains = args.extra.split in (None, config.split)
  if args.extra.split and evaluated is not None and evaluated.split == args.extra.split:
    config = evaluated
  elif args.extra.split:
    config = dataclasses.replace(config, split=args.extra.split)
  converter = model.feature_converter(config.task_feature_lengths)
  return _Data(config, data_module.spec_for(model, config), converter, trains, model_dir)


def _rows(batches: Iterator[Batch], number: int) -> Iterator[dict[str, np.ndarray]]:
  """Yields the first rows."""
  rows = (shard_writer.row_of(x, i) for x in batches for i in range(len(next(iter(x.values())))))
  return itertools.islice(rows, number)


def _facts(data: _Data, num_rows: int) -> tuple[shard_writer.RowStats, Mapping[str, Any]]:
  """Returns statistics of the first rows, and `describe()` of the batches.

  A mixture is read as in training, because a single pass would end with its smallest task.
  """
  facts = shard_writer.RowStats()
  is_mixture = len(data_module.open_task_names(data.config)) > 1
  with data.batches(repeat=is_mixture) as batches:
    for row in _rows(batches, num_rows):
      facts.add(row)
    return facts, batches.describe()


def preview(data: _Data, *, num_rows: int, console: rich.console.Console) -> None:
  """Prints rows, each example in another color; dim where the loss does not count."""
  vocabulary = data_module.open_vocabulary(data.config, feature_converter=data.feature_converter)
  names = data.spec.class_names or data_module.open_class_names(data.config) or ()
  facts = shard_writer.RowStats()
  with data.batches(repeat=data.trains) as batches:
    rows = list(_rows(batches, num_rows))
  for number, row in enumerate(rows):
    one = shard_writer.RowStats()
    one.add(row)
    if not one.rows:  # fills up the last batch
      continue
    facts.add(row)
    with_loss = shard_writer.num_with_loss(row)
    loss = '' if with_loss in (None, one.tokens) else f', loss on {with_loss}'
    console.print(
      f'row {number}: {sum(one.lengths.values())} examples, {one.tokens} of '
      f'{one.positions} positions, padding {one.padding:.1%}{loss}',
      style='bold',
    )
    if target := shard_writer.target_of(row, names):
      console.print(rich.text.Text(printable(f'  {target}')))
    feature = None
    decode = functools.partial(data_module.decode_all, vocabulary)
    for piece in shard_writer.pieces(row, decode=decode):
      if piece.feature != feature:
        feature = piece.feature
        console.print(f'  {feature}', style='dim')
      mark = f'[{piece.example}] ' if piece.is_first else ''
      style = _COLORS[(piece.example - 1) % len(_COLORS)] + ('' if piece.has_loss else ' dim')
      console.print(rich.text.Text(printable(f'  {mark}{piece.text}'), style))
  console.print(f'{facts.rows} rows: padding {facts.padding:.1%}')


_BAR = 40


def bins(lengths: Mapping[int, int]) -> list[tuple[str, int]]:
  """Returns (range of lengths, number of examples), without gaps.

  Args:
    lengths: exponent e -> examples with 2**(e-1) < length <= 2**e.
  """
  if not lengths:
    return []

  def label(e: int) -> str:
    low, high = (2 ** (e - 1) + 1 if e else 1), 2**e
    return f'{low:,}' if low == high else f'{low:,}-{high:,}'

  return [(label(e), lengths.get(e, 0)) for e in range(min(lengths), max(lengths) + 1)]


def lengths_table(lengths: Mapping[int, int]) -> list[str]:
  """Returns the histogram as lines of text."""
  found = bins(lengths)
  total, most = sum(lengths.values()), max(lengths.values(), default=1)
  width = max((len(name) for name, _ in found), default=0)
  return [
    f'  {name:>{width}}  {number / total:6.1%}  {"#" * round(_BAR * number / most)}'.rstrip()
    for name, number in found
  ]


def lengths_page(lengths: Mapping[str, Mapping[int, int]], *, title: str) -> str:
  """Returns a page with the share of examples by length, one curve per task.

  Args:
    lengths: task -> histogram as in `bins`.
    title: title of the page.
  """
  found = [e for histogram in lengths.values() for e in histogram] or [0]
  curves = []
  for color, (name, histogram) in enumerate(lengths.items()):
    total = sum(histogram.values()) or 1
    points = [
      (2.0**e, 100 * histogram.get(e, 0) / total) for e in range(min(found), max(found) + 1)
    ]
    curves.append(Series(name, points, color, 'dots'))
  examples = sum(sum(histogram.values()) for histogram in lengths.values())
  x = Axis('tokens per example, at most', is_log=True, exact='{:,.0f}'.format)
  y = Axis('% of examples', low=0.0, exact='{:.1f}'.format)
  chart = line_chart(curves, title=f'Lengths of {examples:,} examples', x=x, y=y)
  return page(title, [Section('lengths', 'Lengths', [chart])])


def stats(
  data: _Data, *, num_rows: int, picture: Optional[str], console: rich.console.Console
) -> None:
  """Prints shares of tasks, lengths and padding, for all prepared rows or else `num_rows` rows."""
  index = data.index
  if index is None:
    facts, about = _facts(data, num_rows)
    lengths = {data.config.mixture_or_task_name: facts.lengths}
    console.print(
      f'{facts.rows:,} rows of {data.config.mixture_or_task_name}, split '
      f'{data.config.split}: {facts.tokens:,} tokens, padding {facts.padding:.1%}'
    )
    _print_shares(data, about, num_rows=num_rows, console=console)
  else:
    lengths = {name: member.lengths for name, member in index.members.items()}
    console.print(
      f'{index.rows:,} rows in {data.config.mixture_or_task_name}, split '
      f'{index.split}: {index.tokens:,} tokens, padding {index.padding:.1%}'
    )
    total = sum(member.rate for member in index.members.values())
    console.print('  rate     of rows  of tokens  rows per epoch  task')
    for name, member in index.members.items():
      console.print(
        f'  {member.rate / total:6.1%}   {member.rows / max(1, index.rows):6.1%}   '
        f'{member.tokens / max(1, index.tokens):6.1%}   {member.rows:15,}  {printable(name)}'
      )
  together = sum(lengths.values(), collections.Counter())
  console.print('tokens of an example:', *lengths_table(together), sep='\n')
  if picture:
    title = f'{data.config.mixture_or_task_name}, {data.config.split}'
    write_atomically(picture, lengths_page(lengths, title=title))
    console.print(f'Plotted: {picture}')


def _print_shares(
  data: _Data, about: Mapping[str, Any], *, num_rows: int, console: rich.console.Console
) -> None:
  """Prints each task's share of a mixture's tokens, from the task's rate and some of its rows.

  Args:
    data: prints nothing unless it is a mixture.
    about: `describe()` of the data's batches.
    num_rows: rows to read, of all tasks together.
  """
  rates = {
    name.removesuffix('.with_vocabulary').rpartition('.with_vocabulary.')[2]: rate
    for name, rate in about.get('rates', {}).items()
    if f'source of {name}' in about
  }
  per_example = {}
  for name in rates:
    member = dataclasses.replace(data.config, mixture_or_task_name=name)
    facts, _ = _facts(dataclasses.replace(data, config=member), max(1, num_rows // len(rates)))
    per_example[name] = facts.tokens / max(1, sum(facts.lengths.values()))
  total = sum(rates.values())
  tokens = sum(rates[name] * per_example[name] for name in rates)
  if rates:
    console.print('  rate     of tokens  tokens of an example  task')
  for name, rate in rates.items():
    console.print(
      f'  {rate / total:6.1%}   {rate * per_example[name] / tokens:9.1%}  '
      f'{per_example[name]:20,.1f}  {printable(name)}'
    )


def _model_speed(data: _Data, given: Optional[float]) -> tuple[Optional[float], str]:
  """Returns the model's tokens/s (None if unknown) and where the number comes from."""
  if given is not None:
    return given, '--eats'
  path = expanded_path(data.model_dir or '') / 'metrics.jsonl'
  if data.model_dir is None or not path.is_file():
    return None, ''
  rates = [
    record[key]
    for record in read_json_lines(path)
    for key in record
    if key.rpartition('/')[2] == 'tokens_per_second' and record[key]
  ]
  return (statistics.median(rates), str(path)) if rates else (None, '')


def bench(
  data: _Data, *, seconds: float, eats: Optional[float], console: rich.console.Console
) -> None:
  """Prints tokens/s of the data alone, and how many cores the model needs for it."""
  with data.batches(repeat=True) as batches:
    speed = measure(batches, seconds=seconds)
  console.print(
    f'{data.config.mixture_or_task_name}, batch {data.spec.batch_size}: '
    f'{speed.tokens_per_second:,.0f} tokens/s, {speed.tokens_per_core_second:,.0f} per '
    f'core ({speed.batches} batches)'
  )
  takes, source = _model_speed(data, eats)
  if takes is None:
    console.print(
      'The speed of the model is unknown: train for some steps with this MODEL_DIR, or '
      'give --eats=TOKENS (python -m t5x_gpu.bench measures it).'
    )
    return
  verdict = (
    'enough'
    if speed.tokens_per_second > takes
    else 'too slow; the model would wait' + ('' if data.index else '. Prepare it (docs/data.md)')
  )
  console.print(
    f'The model takes {takes:,.0f} tokens/s ({source}), which keep '
    f'{takes / speed.tokens_per_core_second:.2f} cores busy reading: {verdict}.'
  )


def check(data: _Data, *, console: rich.console.Console) -> None:
  """Checks every byte of prepared rows. Raises DataError naming the shards that changed."""
  index = data.index
  if index is None:
    what = f'{data.config.mixture_or_task_name!r} is not prepared data, so it has no checksums.'
    raise DataError(what, fix=f'{PROG} check prepared:DIR')
  check_shards(data.config.mixture_or_task_name.removeprefix(PREPARED), index, content='all')
  number = sum(1 for member in index.members.values() for shard in member.shards if shard.rows)
  console.print(f'{index.split}: {number} shards, {index.rows:,} rows, every byte unchanged.')


# The first ids: padding, the end of a text, words that the training data do not have.
_SPECIAL = {'pad_token': '[PAD]', 'sep_token': '[SEP]', 'unk_token': '[UNK]'}


def words(args: cli.Args, *, console: rich.console.Console) -> None:
  """Writes a tokenizer of the words, numbers and punctuation marks in the training data.

  It is a Hugging Face tokenizer, `VOCABULARY = 'huggingface:FOLDER'`. Case matters.

  Raises:
    ConfigError: no folder is named, or `tokenizers` is not installed.
    DataError: the data cannot be read, or the folder has another tokenizer.
  """
  extra, config = args.extra, None
  if args.gin_files:
    config = args.load().arguments(only=('train_dataset_cfg',))['train_dataset_cfg']
  kind, _, folder = ((config and config.vocabulary) or '').partition(':')
  folder = extra.output or (folder if kind == 'huggingface' else '')
  if config is None or not folder:
    raise ConfigError(
      'The command words needs a gin file that names the data, and a folder to write to.',
      fix="Set VOCABULARY = 'huggingface:FOLDER' in the gin file, or give --output=FOLDER.",
      parameters=('DatasetConfig.vocabulary',),
      docs='tasks.md#vocabularies',
    )
  config = dataclasses.replace(config, split=extra.split or config.split)
  path = expanded_path(folder)
  library = _tokenizers()
  splitter = library.pre_tokenizers.BertPreTokenizer()
  counts: collections.Counter[str] = collections.Counter()
  for text in data_module.open_texts(config):
    counts.update(word for word, _ in splitter.pre_tokenize_str(text))
  if not counts:
    raise DataError(
      f'{config.mixture_or_task_name!r}, split {config.split!r}, has no words.',
      fix='Name a split with text: --split=NAME.',
      parameters=('DatasetConfig.mixture_or_task_name',),
    )
  # Threads count in any order; sorted, the same data give the same ids on every machine.
  kept = sorted(counts, key=lambda word: (-counts[word], word))[: extra.max_words]
  ids = {word: i for i, word in enumerate([*_SPECIAL.values(), *kept])}
  unknown = _SPECIAL['unk_token']
  tokenizer = library.Tokenizer(library.models.WordLevel(ids, unk_token=unknown))
  tokenizer.pre_tokenizer = splitter
  _write_tokenizer(path, tokenizer.to_str(pretty=True))
  rare = sum(counts.values()) - sum(counts[word] for word in kept)
  console.print(
    f'{path}: {len(kept):,} words of {config.mixture_or_task_name}, split {config.split}'
    + (f' ({rare / counts.total():.1%} of the text is other words)' if rare else '')
    + f"; with padding, end and unknown {len(ids):,} ids: VOCABULARY = 'huggingface:{folder}'"
  )


def _tokenizers() -> types.ModuleType:
  try:
    return importlib.import_module('tokenizers')
  except ModuleNotFoundError as e:
    raise ConfigError(
      'The command words needs the package tokenizers, which is not installed.',
      fix="Run: pip install 't5x_gpu[hf]', or: pip install tokenizers",
    ) from e


def _write_tokenizer(folder: pathlib.Path, content: str) -> None:
  """Writes a tokenizer. Raises DataError if `folder` has another one."""
  path = folder / 'tokenizer.json'
  if path.is_file() and path.read_text('utf-8') != content:
    raise DataError(
      f'{path} has other words than the data: models that were trained with this file need it.',
      fix='Give --output=FOLDER with another folder, or remove the file if no model needs it.',
      parameters=('DatasetConfig.vocabulary',),
      docs='tasks.md#vocabularies',
    )
  folder.mkdir(parents=True, exist_ok=True)
  write_atomically(str(folder / 'tokenizer_config.json'), json.dumps(_SPECIAL, indent=2) + '\n')
  write_atomically(str(path), content)


def main(argv: Optional[list[str]] = None) -> int:
  """Runs one command; prints to standard output."""
  args = cli.parse_args(
    PROG,
    __doc__.partition(': ')[2].capitalize(),
    argv,
    extra=_flags,
    gin_file_required=False,
    examples=EXAMPLES,
  )
  extra = args.extra
  if extra.seconds <= 0:
    raise ConfigError(f'--seconds={extra.seconds:g} must be positive.', fix='Leave it out.')
  if extra.picture and not extra.picture.endswith('.html'):
    raise ConfigError(
      f'--picture={extra.picture} is not a page.', fix='Write --picture=FILE.html.', docs='data.md'
    )
  logging_setup.quiet_environment()
  console = rich.console.Console(markup=False, highlight=False, soft_wrap=True)
  if extra.command == 'words':
    words(args, console=console)
    return 0
  data = _opened(args)
  logging_setup.setup()
  if extra.command == 'preview':
    preview(data, num_rows=extra.rows or 4, console=console)
  elif extra.command == 'stats':
    stats(data, num_rows=extra.rows or 1000, picture=extra.picture, console=console)
  elif extra.command == 'bench':
    bench(data, seconds=extra.seconds, eats=extra.eats, console=console)
  else:
    check(data, console=console)
  return 0
