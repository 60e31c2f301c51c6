"""The worlds: where strangers' runs happen. A new bug adds a world here, not a test file.

A world changes a `Place`. In it every flow gives the numbers of the plain world, or the error that
the world's `refused` names ends training before step 1. There is no third outcome.
"""

import codecs
import csv
import dataclasses
import gzip
import io
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Optional

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet

from tests.worlds.flows import FLOWS, Place

TEXTS = [f'text {i} says {i * 7 % 11} and more' for i in range(60)]
KINDS = ('path', 'environment', 'data')
# Prepared rows are the same in every format, and shuffled by the name of their task.
OTHER_ORDER = ('prepare_and_train',)
TRAINS = ('train_and_resume', 'prepare_and_train')


@dataclasses.dataclass(frozen=True)
class World:
  """A kind of place.

  Attributes:
    name: name of the world, unique.
    kind: worlds of different kinds can be combined.
    change: changes a plain Place.
    flows: names of the flows that this world can reach.
    changes: names of the flows whose numbers depend on this world, by design.
    refused: how the error begins that ends training before its first step, as a regular expression;
      None if everything works.
  """

  name: str
  kind: str
  change: Callable[[Place], None]
  flows: Sequence[str] = tuple(FLOWS)
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


def _unknown_user(place: Place) -> None:
  place.runs = '~no_such_user/runs'


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
  World('unknown user', 'path', _unknown_user, refused='ConfigError'),
  World('percent', 'path', _in('a%20b%(x)s')),
  World('unicode', 'path', _in('größe-模型')),
  World('quotes', 'path', _in('it\'s "new"')),
  World('punctuation', 'path', _in('a=1,b#c@d;e&f$HOME{0}')),
  World('tilde', 'path', _in('run~1')),
  World('home', 'path', _home),
  World('200 characters', 'path', _in('n' * 200)),
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
  World('C locale', 'environment', _variables(LC_ALL='C', LANG='C', PYTHONUTF8='0')),
  World('time zone', 'environment', _variables(TZ='Asia/Kathmandu')),
  World('no USER', 'environment', _variables(USER=None, LOGNAME=None)),
  World('narrow terminal', 'environment', _variables(COLUMNS='10', TERM='dumb')),
  World('umask', 'environment', _before('import os; os.umask(0o077)')),
  World(
    'SIGINT ignored',
    'environment',
    _before('import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)'),
  ),
  World(
    'SIGPIPE default',
    'environment',
    _before('import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL)'),
  ),
  World('stdout full', 'environment', _stdout('/dev/full')),
  World('stdout closed', 'environment', _before('import os; os.close(1)')),
  World('stdout without a reader', 'environment', _before(BROKEN_PIPE)),
  World('stderr closed', 'environment', _before('import os; os.close(2)')),
  World('stdin closed', 'environment', _before('import os; os.close(0)')),
  World(
    '64 file handles',
    'environment',
    _before('import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))'),
  ),
  World('no /dev/shm', 'environment', _before(NO_SHARED_MEMORY)),
]

# The texts, in other files and with oddities that change no text.


def _source(prefix: str, name: str, content: Callable[[], bytes]) -> Callable[[Place], None]:
  def change(place: Place) -> None:
    (place.base / name).write_bytes(content())
    place.data = f'{prefix}:{place.base / name}'

  return change


def _lines(*, end: str = '\n', blank: str = '') -> bytes:
  return ''.join(json.dumps({'text': t}) + end + blank for t in TEXTS).encode()


def _separated(delimiter: str) -> bytes:
  out = io.StringIO()
  writer = csv.writer(out, delimiter=delimiter)
  writer.writerows([['id', 'text'], *([i, t] for i, t in enumerate(TEXTS))])
  return out.getvalue().encode()


def _table(type: pa.DataType = pa.string(), **columns: pa.Array) -> pa.Table:
  return pa.table({'text': pa.array(TEXTS).cast(type), **columns})


def _parquet(table: pa.Table) -> bytes:
  out = io.BytesIO()
  pyarrow.parquet.write_table(table, out)
  return out.getvalue()


def _no_file(place: Place) -> None:
  place.data = f'jsonl:{place.base / "missing.jsonl"}'


_JSONL = 'odd.jsonl'


def _refused(name: str, error: str, content: bytes) -> World:
  """Returns a world whose texts are `content`, as jsonl, which `error` refuses."""
  return World(name, 'data', _source('jsonl', _JSONL, lambda: content), TRAINS, refused=error)


DATA = [
  World(
    'byte order mark', 'data', _source('jsonl', _JSONL, lambda: codecs.BOM_UTF8 + _lines()), TRAINS
  ),
  World('CRLF', 'data', _source('jsonl', _JSONL, lambda: _lines(end='\r\n')), TRAINS),
  World('blank lines', 'data', _source('jsonl', _JSONL, lambda: _lines(blank=' \n\n')), TRAINS),
  World('no last newline', 'data', _source('jsonl', _JSONL, lambda: _lines()[:-1]), TRAINS),
  World('gz', 'data', _source('jsonl', 'odd.jsonl.gz', lambda: gzip.compress(_lines())), TRAINS),
  World(
    'gz of two members',
    'data',
    _source(
      'jsonl',
      'odd.JSONL.GZ',
      lambda: gzip.compress(_lines()[:1000]) + gzip.compress(_lines()[1000:]),
    ),
    TRAINS,
  ),
  World('csv', 'data', _source('csv', 'odd.csv', lambda: _separated(',')), TRAINS, OTHER_ORDER),
  World('tsv', 'data', _source('tsv', 'odd.tsv', lambda: _separated('\t')), TRAINS, OTHER_ORDER),
  World(
    'parquet',
    'data',
    _source('parquet', 'odd.parquet', lambda: _parquet(_table())),
    TRAINS,
    OTHER_ORDER,
  ),
  World(
    'parquet, large strings, a null column',
    'data',
    _source(
      'parquet',
      'odd.parquet',
      lambda: _parquet(_table(pa.large_string(), note=pa.nulls(len(TEXTS)))),
    ),
    TRAINS,
    OTHER_ORDER,
  ),
  World(
    'parquet, string views',
    'data',
    _source('parquet', 'odd.parquet', lambda: _parquet(_table(pa.string_view()))),
    TRAINS,
    OTHER_ORDER,
  ),
  World(
    'parquet, dictionary',
    'data',
    _source(
      'parquet', 'odd.parquet', lambda: _parquet(_table(pa.dictionary(pa.int32(), pa.string())))
    ),
    TRAINS,
    OTHER_ORDER,
  ),
  World('no file', 'data', _no_file, TRAINS, refused='DataError: No file matches'),
  _refused('empty', 'DataError: All 1 files', b''),
  _refused('missing column', 'DataError', b'{"body": "a"}\n' * 60),
  _refused('nulls', 'DataError: .* has no text', b'{"text": null}\n' * 60),
  _refused('NUL', 'DataError', b'{"text": "a\0b"}\n' * 60),
  _refused('UTF-16', 'DataError', _lines().decode().encode('utf-16')),
  _refused(
    'deep JSON', 'DataError', b'{"text": "a", "tools": ' + b'[' * 10**5 + b']' * 10**5 + b'}\n'
  ),
  World(
    'two columns of one name',
    'data',
    _source('csv', 'odd.csv', lambda: b'text,text\na,b\n' * 60),
    TRAINS,
    refused='DataError',
  ),
]

WORLDS = [*PATHS, *ENVIRONMENT, *DATA]
