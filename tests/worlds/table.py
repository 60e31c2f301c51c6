"""The worlds: where strangers' runs happen. A new bug adds a world here, not a test file.

A world changes a `Place`. In it every flow gives the numbers of the plain world, or the error that
the world's `refused` names ends training before step 1. There is no third outcome.

Worlds are tried together, one of each kind in a session, and each session has the flows that the
world's code can reach (sessions.py, `combined`):

| kind | can break | flows of test-all |
|---|---|---|
| path | each command's reading and writing of its files | each, some as parts of others |
| environment | the start, the output and the end of each process | the same |
| data | opening the texts, first and again | the same; they cost no further command |
| tokenizer | the ids, the written text, the exported tokenizer | infer, convert_there_and_back |

`launch_two` hands paths and variables on to two other processes: a few worlds of each kind.

A tokenizer changes the numbers: in its world a resumed run equals an unbroken run, and a converted
model writes the same text.
tests/data/test_token_ids.py compares streamed and prepared batches with each tokenizer's own
library, id by id.
"""

import codecs
import csv
import dataclasses
import errno
import gzip
import io
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Optional

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from tests import helpers_tokenizers
from tests.worlds.flows import Place

# Some have the name of a special token, or a word that some tokenizers do not know.
ODD = ('more', '<pad>', '</s>', '[SEP]', 'new!')
TEXTS = [f'text {i} says {i * 7 % 11} and {ODD[i % 5]}' for i in range(60)]
IN_VALIDATION = (4, 29, 56)  # by the hash that assigns texts to splits
KINDS = ('path', 'environment', 'data')
# Prepared rows are the same in every format, and shuffled by the name of their task.
OTHER_ORDER = ('prepare_and_train',)


@dataclasses.dataclass(frozen=True)
class World:
  """A kind of place.

  Attributes:
    name: name of the world, unique.
    kind: worlds of different kinds can be combined.
    change: changes a plain Place.
    changes: names of the flows whose numbers depend on this world, by design.
    refused: how the error begins that ends training before its first step, as a regular expression;
      None if everything works. With `Place.between`, training is refused after that.
  """

  name: str
  kind: str
  change: Callable[[Place], None]
  changes: Sequence[str] = ()
  refused: Optional[str] = None

  def __str__(self) -> str:
    return self.name


# Paths: the folder that holds the gin file, the texts, and everything that is written.


def _in(name: str, *, first: str = '') -> Callable[[Place], None]:
  """Returns a change that puts everything into the folder `name`; `first` is created before it."""

  def change(place: Place) -> None:
    (place.cwd / first).mkdir(exist_ok=True)
    (place.cwd / name).mkdir(parents=True)
    _move(place, name)

  return change


def _move(place: Place, runs: str) -> None:
  place.runs = runs
  for name in ('world.gin', 'texts.jsonl'):
    place.real(name).write_bytes((place.base / name).read_bytes())
  place.gin_file = place.file('world.gin')
  place.data = f'jsonl:{place.file("texts.jsonl")}'


def _symlink(place: Place) -> None:
  (place.cwd / 'disk' / 'deep').mkdir(parents=True)
  (place.cwd / 'link').symlink_to(place.cwd / 'disk' / 'deep')
  _move(place, 'link')


def _symlink_and_dots(place: Place) -> None:
  _symlink(place)
  (place.cwd / 'disk' / 'runs').mkdir()
  _move(place, 'link/../runs')  # for the kernel disk/runs, by the text alone `runs`


def _absolute(place: Place) -> None:
  _move(place, str(place.cwd))


def _home(place: Place) -> None:
  """A path that no shell has expanded."""
  home = place.base / 'home'
  (home / 'runs').mkdir(parents=True)
  place.environment['HOME'] = str(home)
  _move(place, str(home / 'runs'))
  place.runs, place.data = '~/runs', 'jsonl:~/runs/texts.jsonl'


def _runs(name: str) -> Callable[[Place], None]:
  """Returns a change that names this folder on the command line, and does not make it."""

  def change(place: Place) -> None:
    place.runs = name

  return change


def _other_folder(place: Place) -> None:
  """The commands run in another folder than the files."""
  place.cwd = place.base / 'elsewhere'
  place.cwd.mkdir()
  _move(place, '..')


# Root may write everywhere; without these capabilities the modes of folders hold for root, too.
NO_PRIVILEGES = """
import ctypes, os
if os.geteuid() == 0:  # capset(2); drops CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, bits 1 and 2
  libc = ctypes.CDLL(None, use_errno=True)
  header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
  assert libc.capget(header, data) == 0, ctypes.get_errno()
  data[0], data[1] = data[0] & ~6, data[1] & ~6
  assert libc.capset(header, data) == 0, ctypes.get_errno()
"""


def _read_only_parent(place: Place) -> None:
  """Nothing but the folder of runs can be written, HOME included."""
  (place.cwd / 'mine').mkdir()
  _move(place, 'mine')
  home = place.base / 'home'
  home.mkdir(mode=0o555)
  place.environment['HOME'] = str(home)
  place.cwd.chmod(0o555)
  place.before += NO_PRIVILEGES


def _file_in_the_way(place: Place) -> None:
  (place.cwd / 'runs').mkdir()
  place.real('a').write_text('no folder')


def _mode(mode: int) -> Callable[[Place], None]:
  """Returns a change that gives the folder of runs this mode."""

  def change(place: Place) -> None:
    (place.cwd / 'runs').mkdir(mode=mode)
    place.before += NO_PRIVILEGES

  return change


PATHS = [
  World('dots', 'path', _in('x/../runs', first='x')),
  World('parent', 'path', _other_folder),
  World('relative', 'path', _in('./a/b')),
  World('absolute', 'path', _absolute),
  World('symlink', 'path', _symlink),
  World('symlink and dots', 'path', _symlink_and_dots),
  World('spaces', 'path', _in('my  runs')),
  World('brackets', 'path', _in('set[1]')),
  World('asterisk', 'path', _in('a*b?c')),
  World('backslash', 'path', _in('a\\b'), refused='ConfigError'),
  World('lock suffix', 'path', _in('run.__lock'), refused='ConfigError'),
  World('unknown user', 'path', _runs('~no_such_user/runs'), refused='ConfigError'),
  World('percent', 'path', _in('a%20b%(x)s')),
  World('unicode', 'path', _in('größe-模型')),
  World('quotes', 'path', _in('it\'s "new"')),
  World('new line', 'path', _in('two\nlines')),
  World('dash', 'path', _in('-runs')),
  World('punctuation', 'path', _in('a=1,b#c@d;e&f$HOME{0}')),
  World('tilde', 'path', _in('run~1')),
  World('home', 'path', _home),
  World('200 characters', 'path', _in('n' * 200)),
  World('300 characters', 'path', _runs('n' * 300), refused='ConfigError: The path .* too long'),
  World('a file in the way', 'path', _file_in_the_way, refused='(Config|Checkpoint)Error'),
  World('no right to write', 'path', _mode(0o500), refused='(Config|Access|Checkpoint)Error'),
  World('no right to enter', 'path', _mode(0o600), refused='(Config|Access|Checkpoint)Error'),
  World('trailing slash', 'path', _in('runs/')),
  World('read-only parent', 'path', _read_only_parent),
]

# The environment of the processes.


def _variables(**values: Optional[str]) -> Callable[[Place], None]:
  def change(place: Place) -> None:
    place.environment |= values

  return change


def _before(code: str) -> Callable[[Place], None]:
  def change(place: Place) -> None:
    place.before += code + '\n'

  return change


def _c_locale(place: Place) -> None:
  variables = ('LC_ALL', 'C'), ('PYTHONUTF8', '0'), ('PYTHONIOENCODING', 'ascii')
  place.environment.update(variables)
  place.before += ASCII


def _limit(name: str, value: int) -> Callable[[Place], None]:
  return _before(f'import resource; resource.setrlimit(resource.RLIMIT_{name}, ({value},) * 2)')


def _local_checkpoints(place: Place) -> None:
  folder = place.base / 'local'
  folder.mkdir(mode=0o700)
  place.macros['CheckpointConfig.local_checkpoint_dir'] = folder
  place.macros['CheckpointConfig.local_period'] = 1


def _local_checkpoints_of_all(place: Place) -> None:
  _local_checkpoints(place)
  (place.base / 'local').chmod(0o777)


def _stdout(path: str) -> Callable[[Place], None]:
  def change(place: Place) -> None:
    place.stdout = pathlib.Path(path)

  return change


NO_SHARED_MEMORY = """
import ctypes, subprocess
assert ctypes.CDLL(None, use_errno=True).unshare(0x00020000) == 0  # CLONE_NEWNS
subprocess.run(['mount', '--make-rprivate', '/'], check=True)
subprocess.run(['umount', '-l', '/dev/shm'], check=True)
"""
CLOSED = """
import os
for descriptor in (0, 1, 2):
  os.close(descriptor)
"""
# nohup and some CI runners ignore these signals.
IGNORED_SIGNALS = """
import signal
for number in (signal.SIGINT, signal.SIGHUP):
  signal.signal(number, signal.SIG_IGN)
"""
# Python reads the variables only when it starts, which these processes have done.
ASCII = """
import locale, sys
locale.setlocale(locale.LC_ALL, 'C')
for stream in (sys.stdout, sys.stderr):
  stream.reconfigure(encoding='ascii')
"""
BROKEN_PIPE = """
import os
r, w = os.pipe()
os.dup2(w, 1)
os.close(r)
os.close(w)
"""

ENVIRONMENT = [
  World('no HOME', 'environment', _variables(HOME=None)),
  World('HOME missing', 'environment', _variables(HOME='/nonexistent/home')),
  World('TMPDIR missing', 'environment', _variables(TMPDIR='/nonexistent/tmp')),
  World('C locale', 'environment', _c_locale),
  World('time zone', 'environment', _variables(TZ='Asia/Kathmandu')),
  World('no USER', 'environment', _variables(USER=None, LOGNAME=None)),
  World('narrow terminal', 'environment', _variables(COLUMNS='10', TERM='dumb')),
  World('umask', 'environment', _before('import os; os.umask(0o077)')),
  World('signals ignored', 'environment', _before(IGNORED_SIGNALS)),
  World(
    'SIGPIPE default',
    'environment',
    _before('import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL)'),
  ),
  World('stdout full', 'environment', _stdout('/dev/full')),
  World('stdout closed', 'environment', _before('import os; os.close(1)')),
  World('stdout without a reader', 'environment', _before(BROKEN_PIPE)),
  World('stderr closed', 'environment', _before('import os; os.close(2)')),
  World('all streams closed', 'environment', _before(CLOSED)),
  World('64 file handles', 'environment', _limit('NOFILE', 64)),
  World('3 GiB of memory', 'environment', _limit('DATA', 3 << 30)),
  World('no /dev/shm', 'environment', _before(NO_SHARED_MEMORY)),
  World('end of an earlier job', 'environment', _variables(SLURM_JOB_END_TIME='1000')),
  World('local checkpoints', 'environment', _local_checkpoints),
  World(
    'local checkpoints of all users',
    'environment',
    _local_checkpoints_of_all,
    refused='CheckpointError: .* can be written to by other users',
  ),
]

# The texts, in other files and with oddities that change no text.


def _source(prefix: str, name: str, content: Callable[[], bytes]) -> Callable[[Place], None]:
  def change(place: Place) -> None:
    (place.base / name).write_bytes(content())
    place.data = f'{prefix}:{place.base / name}'

  return change


def _lines(*, end: str = '\n', blank: str = '') -> bytes:
  return ''.join(json.dumps({'text': t}) + end + blank for t in TEXTS).encode()


def _separated(delimiter: str, column: str = 'text') -> bytes:
  out = io.StringIO()
  writer = csv.writer(out, delimiter=delimiter)
  writer.writerows([['id', column], *([i, t] for i, t in enumerate(TEXTS))])
  return out.getvalue().encode()


def _table(type: pa.DataType = pa.string(), **columns: pa.Array) -> pa.Table:
  return pa.table({'text': pa.array(TEXTS).cast(type), **columns})


def _parquet(table: pa.Table) -> bytes:
  out = io.BytesIO()
  pyarrow.parquet.write_table(table, out)
  return out.getvalue()


def _no_file(place: Place) -> None:
  place.data = f'jsonl:{place.base / "missing.jsonl"}'


def _column_with_a_comma(place: Place) -> None:
  _source('csv', 'odd.csv', lambda: _separated(',', 'the, text'))(place)
  place.data += '#text=the, text'


def _split_names(place: Place) -> None:
  folder = place.base / 'named'
  folder.mkdir()
  validation = [TEXTS[i] for i in IN_VALIDATION]
  for name, texts in (
    ('train', [text for text in TEXTS if text not in validation]),
    ('validation', validation),
    ('test', ['not for training'] * 60),
  ):
    (folder / f'{name}.jsonl').write_text(''.join(json.dumps({'text': t}) + '\n' for t in texts))
  place.data = f'jsonl:{folder}/*.jsonl'


def _saved_twice(place: Place) -> None:
  """As two `Dataset.save_to_disk` into one folder, the first of more files."""
  folder = place.base / 'saved'
  folder.mkdir()
  for texts, number in (([f'stale {i}' for i in range(90)], 3), (TEXTS, 1)):
    names = [f'data-{i:05}-of-{number:05}.arrow' for i in range(number)]
    for name in names:
      table = pa.table({'text': texts})
      with pa.OSFile(str(folder / name), 'wb') as f, pa.ipc.new_stream(f, table.schema) as out:
        out.write_table(table)
    state = {'_data_files': [{'filename': name} for name in names], '_split': None}
    (folder / 'state.json').write_text(json.dumps(state))
    (folder / 'dataset_info.json').write_text('{}')
  place.data = f'hf_dataset:{folder}'


def _copied_between(place: Place) -> None:
  """The same bytes under another inode, with other times."""
  path = place.base / 'texts.jsonl'

  def copy() -> None:
    shutil.copyfile(path, place.base / 'new')
    os.replace(place.base / 'new', path)

  place.between = copy


def _replaced_between(place: Place) -> None:
  path = place.base / 'texts.jsonl'
  place.between = lambda: path.write_bytes(path.read_bytes().replace(b'says', b'said'))


def _unreadable(place: Place) -> None:
  (place.base / 'texts.jsonl').chmod(0)
  place.before += NO_PRIVILEGES


def _failing_disk(place: Place) -> None:
  if not shutil.which('cc'):
    pytest.skip('no C compiler')
  place.environment |= {'REFUSED_PATH': 'texts.jsonl', 'REFUSED_ERRNO': str(errno.EIO)}


def _long_line(place: Place) -> None:
  """A line of 300 MB, in a sparse file."""
  with open(place.base / _JSONL, 'wb') as f:
    f.truncate(300 << 20)
  place.data = f'jsonl:{place.base / _JSONL}'


def _long_line_compressed() -> bytes:
  return gzip.compress(b'{"text": "') + 300 * gzip.compress(bytes(1 << 20).replace(b'\0', b'a'))


_JSONL = 'odd.jsonl'


def _refused(name: str, error: str, content: bytes) -> World:
  """Returns a world whose texts are `content`, as jsonl, which `error` refuses."""
  return World(name, 'data', _source('jsonl', _JSONL, lambda: content), refused=error)


DATA = [
  # First, as the first flow of `make test` starts twice.
  World('copied between two starts', 'data', _copied_between),
  World('byte order mark', 'data', _source('jsonl', _JSONL, lambda: codecs.BOM_UTF8 + _lines())),
  World('CRLF', 'data', _source('jsonl', _JSONL, lambda: _lines(end='\r\n'))),
  World('blank lines', 'data', _source('jsonl', _JSONL, lambda: _lines(blank=' \n\n'))),
  World('no last newline', 'data', _source('jsonl', _JSONL, lambda: _lines()[:-1])),
  World('gz', 'data', _source('jsonl', 'odd.jsonl.gz', lambda: gzip.compress(_lines()))),
  World(
    'gz of two members',
    'data',
    _source(
      'jsonl',
      'odd.JSONL.GZ',
      lambda: gzip.compress(_lines()[:1000]) + gzip.compress(_lines()[1000:]),
    ),
  ),
  World('csv', 'data', _source('csv', 'odd.csv', lambda: _separated(',')), OTHER_ORDER),
  World('tsv', 'data', _source('tsv', 'odd.tsv', lambda: _separated('\t')), OTHER_ORDER),
  World(
    'parquet', 'data', _source('parquet', 'odd.parquet', lambda: _parquet(_table())), OTHER_ORDER
  ),
  World(
    'parquet, large strings, a null column',
    'data',
    _source(
      'parquet',
      'odd.parquet',
      lambda: _parquet(_table(pa.large_string(), note=pa.nulls(len(TEXTS)))),
    ),
    OTHER_ORDER,
  ),
  World(
    'parquet, string views',
    'data',
    _source('parquet', 'odd.parquet', lambda: _parquet(_table(pa.string_view()))),
    OTHER_ORDER,
  ),
  World(
    'parquet, dictionary',
    'data',
    _source(
      'parquet', 'odd.parquet', lambda: _parquet(_table(pa.dictionary(pa.int32(), pa.string())))
    ),
    OTHER_ORDER,
  ),
  World('a column with a comma', 'data', _column_with_a_comma, OTHER_ORDER),
  World('jsonl with names of splits', 'data', _split_names, OTHER_ORDER),
  World('save_to_disk twice', 'data', _saved_twice, OTHER_ORDER),
  World(
    'replaced between two starts',
    'data',
    _replaced_between,
    refused='DataError: The training text has changed',
  ),
  World('input/output error', 'data', _failing_disk, refused=r'DataError: .*\(EIO\)'),
  World('no right to read', 'data', _unreadable, refused='DataError: .*Permission denied'),
  World('a line of 300 MB', 'data', _long_line, refused='DataError: .*longer than 256 MiB'),
  World(
    'a compressed line of 300 MB',
    'data',
    _source('jsonl', 'odd.jsonl.gz', _long_line_compressed),
    refused='DataError: .*longer than 256 MiB',
  ),
  World('no file', 'data', _no_file, refused='DataError: No file matches'),
  _refused('empty', 'DataError: All 1 files', b''),
  _refused('missing column', 'DataError', b'{"body": "a"}\n' * 60),
  _refused('nulls', 'DataError: .* has no text', b'{"text": null}\n' * 60),
  _refused('NUL', 'DataError', b'{"text": "a\0b"}\n' * 60),
  _refused('half a surrogate pair', 'DataError', b'{"text": "\\ud800"}\n' * 60),
  _refused('UTF-16', 'DataError', _lines().decode().encode('utf-16')),
  _refused(
    'deep JSON', 'DataError', b'{"text": "a", "tools": ' + b'[' * 10**5 + b']' * 10**5 + b'}\n'
  ),
  World(
    'two columns of one name',
    'data',
    _source('csv', 'odd.csv', lambda: b'text,text\na,b\n' * 60),
    refused='DataError',
  ),
]

# The tokenizers.


def _tokenizer(kind: str) -> Callable[[Place], None]:
  def change(place: Place) -> None:
    folder = place.real('tokenizer')
    folder.mkdir(parents=True)
    place.tokenizer = helpers_tokenizers.write_tokenizer(folder, kind)

  return change


def _changed(file: str, change: Callable[[dict], None]) -> Callable[[Place], None]:
  """Returns a change to a tokenizer with a file that `change` changed."""

  def write(place: Place) -> None:
    _tokenizer('unigram_t5')(place)
    path = place.real('tokenizer') / file
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))

  return write


def _no_unknown(content: dict) -> None:
  content['model']['unk_id'] = None


TOKENIZERS = [
  *(World(kind, 'tokenizer', _tokenizer(kind)) for kind in helpers_tokenizers.KINDS),
  World(
    'no end',
    'tokenizer',
    _changed('tokenizer_config.json', lambda names: names.pop('eos_token')),
    refused='DataError: .* no end-of-text id',
  ),
  World(
    'no unknown token',
    'tokenizer',
    _changed('tokenizer.json', _no_unknown),
    refused='DataError: .* has no token for unknown',
  ),
]

WORLDS = [*PATHS, *ENVIRONMENT, *DATA, *TOKENIZERS]
