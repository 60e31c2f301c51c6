"""The worlds: where strangers' runs happen. A new bug adds a world here, not a test file.

A world changes a `Place`. In it every flow gives the numbers of the plain world, or one of our
errors refuses the world before step 1. There is no third outcome.

Worlds are tried together: a row has one or more worlds of each kind (rows.py). A tokenizer changes
the numbers, as does a world with `contents`: the plain world of a row has these, and no others.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Optional

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests import helpers_tokenizers
from tests.worlds.flows import Place

# Some have the name of a special token, or a word that some tokenizers do not know.
ODD = ('more', '<pad>', '</s>', '[SEP]', 'new!')
TEXTS = [f'text {i} says {i * 7 % 11} and {ODD[i % 5]}' for i in range(60)]
UNICODE = [f'{text} größe 模型 🙂' for text in TEXTS]
IN_VALIDATION = (4, 29, 56)  # by the hash that assigns texts to splits
# Prepared rows are the same in every form, and shuffled by the name of their task.
OTHER_ORDER = ('train_on_prepared',)
EVALUATED = ('evaluate',)  # texts for validation alone
# What oddities of a text file change; forms other than a single text file exclude them.
BYTES = ('begin', 'ends', 'blank', 'last', 'packed')
ONE_FILE = ('file',)


@dataclasses.dataclass(frozen=True)
class World:
  """A kind of place.

  Attributes:
    name: name of the world, unique.
    kind: path, environment, data or tokenizer.
    change: changes a Place that earlier worlds of the table may have changed.
    sets: what of the place it sets; two worlds that set the same are never together.
    changes: names of the flows whose numbers depend on this world, by design.
    contents: whether the world has other texts, or rows of them, on which all numbers depend.
    refuses: flow -> how the error begins that ends the flow, as a regular expression.
    refused: the same for training, which ends before its first step; None if everything works. With
      `Place.between` or `Place.during`, training is refused after that.
  """

  name: str
  kind: str
  change: Callable[[Place], None]
  sets: tuple[str, ...] = ()
  _: dataclasses.KW_ONLY
  changes: Sequence[str] = ()
  contents: bool = False
  refuses: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
  refused: Optional[str] = None

  def __str__(self) -> str:
    return self.name


# Paths: the folder that holds the gin file, the texts, and everything that is written.


def _base(name: str, *, first: str = '') -> Callable[[Place], None]:
  """Returns a change that puts everything into the folder `name`; `first` is created before it."""

  def change(place: Place) -> None:
    (place.cwd / first).mkdir(exist_ok=True)
    _move(place, name)

  return change


def _inside(name: str) -> Callable[[Place], None]:
  """Returns a change that puts everything into a folder `name`, inside the present folder."""
  return lambda place: _move(place, place.file(name))


def _move(place: Place, runs: str) -> None:
  place.real(runs).mkdir(parents=True, exist_ok=True)
  for name in ('world.gin', 'texts.jsonl'):
    place.real(f'{runs}/{name}').write_bytes((place.base / name).read_bytes())
  place.runs = place.inputs = runs


def _symlink(place: Place) -> None:
  (place.cwd / 'disk' / 'deep').mkdir(parents=True)
  (place.cwd / 'link').symlink_to(place.cwd / 'disk' / 'deep')
  _move(place, 'link')


def _symlink_and_dots(place: Place) -> None:
  _symlink(place)
  _move(place, 'link/../runs')  # for the kernel disk/runs, by the text alone `runs`


def _absolute(place: Place) -> None:
  _move(place, str(place.cwd))


def _home(place: Place) -> None:
  """A path that no shell has expanded."""
  place.environment['HOME'] = str(place.base / 'home')
  _move(place, '~/runs')


def _runs(name: str) -> Callable[[Place], None]:
  """Returns a change that names this folder on the command line, and does not make it."""

  def change(place: Place) -> None:
    place.runs = name

  return change


def _slash(place: Place) -> None:
  _move(place, place.runs + '/')


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
  _move(place, 'mine')
  home = place.base / 'home'
  home.mkdir(mode=0o555)
  place.environment['HOME'] = str(home)
  place.cwd.chmod(0o555)
  place.before += NO_PRIVILEGES


def _file_in_the_way(place: Place) -> None:
  (place.cwd / 'runs').mkdir()
  (place.cwd / 'runs' / 'a').write_text('no folder')


def _mode(mode: int) -> Callable[[Place], None]:
  """Returns a change that gives the folder of runs this mode."""

  def change(place: Place) -> None:
    (place.cwd / 'runs').mkdir(mode=mode)
    place.before += NO_PRIVILEGES

  return change


FOLDER = ('folder',)
HOME = ('HOME',)
PATHS = [
  World('dots', 'path', _base('x/../runs', first='x'), FOLDER),
  World('parent', 'path', _other_folder, FOLDER),
  World('relative', 'path', _base('./a/b'), FOLDER),
  World('absolute', 'path', _absolute, FOLDER),
  World('symlink', 'path', _symlink, FOLDER),
  World('symlink and dots', 'path', _symlink_and_dots, FOLDER),
  World('dash', 'path', _base('-runs'), FOLDER),
  World('home', 'path', _home, FOLDER + HOME),
  World('read-only parent', 'path', _read_only_parent, FOLDER + HOME),
  World('spaces', 'path', _inside('my  runs')),
  World('brackets', 'path', _inside('set[1]')),
  World('asterisk', 'path', _inside('a*b?c')),
  World('percent', 'path', _inside('a%20b%(x)s')),
  World('unicode', 'path', _inside('größe-模型')),
  World('quotes', 'path', _inside('it\'s "new"')),
  World('new line', 'path', _inside('two\nlines')),
  World('punctuation', 'path', _inside('a=1,b#c@d;e&f$HOME{0}')),
  World('tilde', 'path', _inside('run~1')),
  World('200 characters', 'path', _inside('n' * 200)),
  World('trailing slash', 'path', _slash),
  World('backslash', 'path', _inside('a\\b'), refused='ConfigError'),
  World('lock suffix', 'path', _inside('run.__lock'), refused='ConfigError'),
  World('unknown user', 'path', _runs('~no_such_user/runs'), refused='ConfigError'),
  World('300 characters', 'path', _runs('n' * 300), refused='ConfigError: The path .* too long'),
  World('a file in the way', 'path', _file_in_the_way, refused='(Config|Checkpoint)Error'),
  World('no right to write', 'path', _mode(0o500), refused='(Config|Access|Checkpoint)Error'),
  World('no right to enter', 'path', _mode(0o600), refused='(Config|Access|Checkpoint)Error'),
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
  place.environment |= {'LC_ALL': 'C', 'PYTHONIOENCODING': 'ascii'}
  place.before += ASCII


def _names_in_ascii(place: Place) -> None:
  """A Python that reads UTF-8 in the names of files as ASCII."""
  _inside('größe-模型')(place)
  place.environment |= {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}
  place.is_forked = False


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
# Python reads the variables only when it starts, which forked processes have done.
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

STDOUT = ('stdout',)
ENVIRONMENT = [
  World('no HOME', 'environment', _variables(HOME=None), HOME),
  World('HOME missing', 'environment', _variables(HOME='/nonexistent/home'), HOME),
  World('TMPDIR missing', 'environment', _variables(TMPDIR='/nonexistent/tmp')),
  World('C locale', 'environment', _c_locale),
  World('names in ASCII', 'environment', _names_in_ascii, refused='ConfigError: .* as ascii'),
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
  World('stdout full', 'environment', _stdout('/dev/full'), STDOUT),
  World('stdout closed', 'environment', _before('import os; os.close(1)'), STDOUT),
  World('stdout without a reader', 'environment', _before(BROKEN_PIPE), STDOUT),
  World('stderr closed', 'environment', _before('import os; os.close(2)'), ('stderr',)),
  World('all streams closed', 'environment', _before(CLOSED), (*STDOUT, 'stderr')),
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


def _form(
  form: str, content: Callable[[Sequence[str]], bytes], columns: str = ''
) -> Callable[[Place], None]:
  """Returns a change that writes the texts as one file of this form."""

  def change(place: Place) -> None:
    place.form, place.texts, place.columns = form, f'odd.{form}', columns
    place.real(place.input(place.texts)).write_bytes(content(place.contents))

  return change


def _bytes(change_bytes: Callable[[bytes], bytes], suffix: str = '') -> Callable[[Place], None]:
  """Returns a change of the file of the texts, which gets another suffix."""

  def change(place: Place) -> None:
    content = place.real(place.input(place.texts)).read_bytes()
    place.texts += suffix
    place.real(place.input(place.texts)).write_bytes(change_bytes(content))

  return change


def _lines(texts: Sequence[str]) -> bytes:
  return ''.join(json.dumps({'text': t}, ensure_ascii=False) + '\n' for t in texts).encode()


def _separated(delimiter: str, column: str = 'text') -> Callable[[Sequence[str]], bytes]:
  def content(texts: Sequence[str]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, lineterminator='\n')
    writer.writerows([['id', column], *([i, t] for i, t in enumerate(texts))])
    return out.getvalue().encode()

  return content


def _parquet(
  type: pa.DataType = pa.string(), **columns: Callable[[int], pa.Array]
) -> Callable[[Sequence[str]], bytes]:
  def content(texts: Sequence[str]) -> bytes:
    out = io.BytesIO()
    more = {name: column(len(texts)) for name, column in columns.items()}
    pyarrow.parquet.write_table(pa.table({'text': pa.array(texts).cast(type), **more}), out)
    return out.getvalue()

  return content


def _arrow(texts: Sequence[str]) -> bytes:
  table, out = pa.table({'text': texts}), io.BytesIO()
  with pa.ipc.new_stream(out, table.schema) as writer:
    writer.write_table(table)
  return out.getvalue()


def _contents(texts: Sequence[str]) -> Callable[[Place], None]:
  def change(place: Place) -> None:
    place.contents = texts
    place.real(place.input(place.texts)).write_bytes(_lines(texts))

  return change


def _named_folder(place: Place, name: str) -> pathlib.Path:
  folder = place.real(place.input(name))
  folder.mkdir()
  return folder


def _text_files(place: Place) -> None:
  folder = _named_folder(place, 'files')
  for i, text in enumerate(place.contents):
    (folder / f'{i:02}.txt').write_text(text)
  place.contents = [f'{text}\n' for text in place.contents]  # the last line gets its end
  place.form, place.texts = 'text_files', 'files/*.txt'


def _split_names(place: Place) -> None:
  folder = _named_folder(place, 'named')
  validation = [TEXTS[i] for i in IN_VALIDATION]
  for name, texts in (
    ('train', [text for text in TEXTS if text not in validation]),
    ('validation', validation),
    ('test', ['not for training'] * 60),
  ):
    (folder / f'{name}.jsonl').write_bytes(_lines(texts))
  place.texts = 'named/*.jsonl'


def _arrow_folder(place: Place) -> None:
  """A folder of data files, as a repository on a hub has."""
  folder = _named_folder(place, 'arrow')
  (folder / 'train.arrow').write_bytes(_arrow(place.contents))
  place.form, place.texts = 'hf_dataset', 'arrow'


def _saved_twice(place: Place) -> None:
  """As two `Dataset.save_to_disk` into one folder, the first of more files."""
  folder = _named_folder(place, 'saved')
  for texts, number in (([f'stale {i}' for i in range(90)], 3), (TEXTS, 1)):
    names = [f'data-{i:05}-of-{number:05}.arrow' for i in range(number)]
    for name in names:
      (folder / name).write_bytes(_arrow(texts))
    state = {'_data_files': [{'filename': name} for name in names], '_split': None}
    (folder / 'state.json').write_text(json.dumps(state))
    (folder / 'dataset_info.json').write_text('{}')
  place.form, place.texts = 'hf_dataset', 'saved'


def _exchanged(place: Place, change: Callable[[bytes], bytes] = bytes, *, times: bool) -> None:
  """Replaces the file of the texts by another one, which may have its times."""
  path = place.real(place.input(place.texts))
  new = path.with_name('new')
  new.write_bytes(change(path.read_bytes()))
  if times:
    shutil.copystat(path, new)
  os.replace(new, path)


def _copied_between(place: Place) -> None:
  place.between = lambda: _exchanged(place, times=False)


def _copied_during(place: Place) -> None:
  place.during = lambda: _exchanged(place, times=True)


def _says(content: bytes) -> bytes:
  return content.replace(b'says', b'said')


def _replaced_between(place: Place) -> None:
  place.between = lambda: _exchanged(place, _says, times=False)


def _replaced_during(place: Place) -> None:
  place.during = lambda: _exchanged(place, _says, times=False)


def _unreadable(place: Place) -> None:
  place.real(place.input(place.texts)).chmod(0)
  place.before += NO_PRIVILEGES


def _failing_disk(place: Place) -> None:
  if not shutil.which('cc'):
    pytest.skip('no C compiler')
  place.environment |= {'REFUSED_PATH': 'texts.jsonl', 'REFUSED_ERRNO': str(errno.EIO)}


def _no_file(place: Place) -> None:
  place.texts = 'missing.jsonl'


def _long_line(place: Place) -> None:
  """A line of 300 MB, in a sparse file."""
  with open(place.real(place.input(place.texts)), 'wb') as f:
    f.truncate(300 << 20)


def _long_line_compressed(content: bytes) -> bytes:
  return gzip.compress(b'{"text": "') + 300 * gzip.compress(b'a' * (1 << 20))


def _two_gzip_members(content: bytes) -> bytes:
  half = len(content) // 2
  return gzip.compress(content[:half]) + gzip.compress(content[half:])


def _oddity(
  name: str, *content: bytes | Sequence[Optional[str]], error: str, changes: Sequence[str] = ()
) -> Iterator[World]:
  """Yields a world per form whose texts are one of `content`: bytes of jsonl, or a column."""
  for each in content:
    if isinstance(each, bytes):
      change = _bytes(lambda _, each=each: each)
      yield World(name, 'data', change, refused=error, changes=changes)
    else:
      for form, write in (('csv', _separated(',')), ('parquet', _parquet())):
        change = _form(form, lambda _, each=each, write=write: write(each))
        yield World(f'{name} ({form})', 'data', change, refused=error, changes=changes)


FORM, CONTENTS = ('form',), ('contents',)
TEXT_FORMS = {
  'csv': _form('csv', _separated(',')),
  'tsv': _form('tsv', _separated('\t')),
  'text_lines': _form('text_lines', lambda texts: '\n'.join([*texts, '']).encode()),
  'a column with a comma': _form('csv', _separated(',', 'the, text'), '#text=the, text'),
}
OTHER_FORMS = {
  'parquet': _form('parquet', _parquet()),
  'parquet, large strings, a null column': _form(
    'parquet', _parquet(pa.large_string(), note=pa.nulls)
  ),
  'parquet, string views': _form('parquet', _parquet(pa.string_view())),
  'parquet, dictionary': _form('parquet', _parquet(pa.dictionary(pa.int32(), pa.string()))),
}
OTHER_FOLDERS = {
  'arrow': _arrow_folder,
  'jsonl with names of splits': _split_names,
  'save_to_disk twice': _saved_twice,
}
DATA = [
  World('unicode', 'data', _contents(UNICODE), CONTENTS, contents=True),
  World('text_files', 'data', _text_files, FORM + BYTES + ONE_FILE + CONTENTS, contents=True),
  World(
    'one row',
    'data',
    _contents(TEXTS[:1]),
    CONTENTS + FORM,
    contents=True,
    refuses={'evaluate': 'NoExamplesError'},
  ),
  *(World(n, 'data', c, FORM, changes=OTHER_ORDER) for n, c in TEXT_FORMS.items()),
  *(World(n, 'data', c, FORM + BYTES, changes=OTHER_ORDER) for n, c in OTHER_FORMS.items()),
  *(
    World(n, 'data', c, FORM + BYTES + ONE_FILE + CONTENTS, changes=OTHER_ORDER)
    for n, c in OTHER_FOLDERS.items()
  ),
  World('byte order mark', 'data', _bytes(lambda b: codecs.BOM_UTF8 + b), ('begin',)),
  World('blank lines', 'data', _bytes(lambda b: b.replace(b'\n', b'\n\n')), ('blank',)),
  World('CRLF', 'data', _bytes(lambda b: b.replace(b'\n', b'\r\n')), ('ends',)),
  World('no last newline', 'data', _bytes(bytes.rstrip), ('last',)),
  World('gz', 'data', _bytes(gzip.compress, '.gz'), ('packed',)),
  World('gz of two members', 'data', _bytes(_two_gzip_members, '.GZ'), ('packed',)),
  World('copied between two starts', 'data', _copied_between, ONE_FILE),
  World('copied while a run trains', 'data', _copied_during, ONE_FILE),
  World(
    'replaced between two starts',
    'data',
    _replaced_between,
    refused='DataError: The training text has changed since',
  ),
  World(
    'replaced while a run trains',
    'data',
    _replaced_during,
    refused='DataError: The training text has changed during the run',
  ),
  World('input/output error', 'data', _failing_disk, refused=r'DataError: .*\(EIO\)'),
  World('no right to read', 'data', _unreadable, refused='DataError: .*Permission denied'),
  World('a line of 300 MB', 'data', _long_line, refused='DataError: .*longer than 256 MiB'),
  World(
    'a compressed line of 300 MB',
    'data',
    _bytes(_long_line_compressed, '.gz'),
    refused='DataError: .*longer than 256 MiB',
  ),
  World('no file', 'data', _no_file, refused='DataError: No file matches'),
  *_oddity('empty', b'', [], error='(Data|NoExamples)Error'),
  *_oddity(
    'one row, for validation',
    _lines(TEXTS[4:5]),
    TEXTS[4:5],
    error='NoExamplesError',
    changes=EVALUATED,
  ),
  *_oddity('nulls', b'{"text": null}\n' * 60, [None] * 60, error='(Data|NoExamples)Error'),
  *_oddity(
    'NUL',
    b'{"text": "a\0b"}\n' * 60,
    ['a\0b'] * 60,
    error='(Data|NoExamples)Error',
    changes=EVALUATED,
  ),
  *_oddity('missing column', b'{"body": "a"}\n' * 60, error='DataError'),
  *_oddity('half a surrogate pair', b'{"text": "\\ud800"}\n' * 60, error='DataError'),
  *_oddity('UTF-16', _lines(TEXTS).decode().encode('utf-16'), error='DataError'),
  *_oddity(
    'deep JSON',
    b'{"text": "a", "tools": ' + b'[' * 10**5 + b']' * 10**5 + b'}\n',
    error='DataError',
  ),
  World('missing column (csv)', 'data', _form('csv', _separated(',', 'body')), refused='DataError'),
  World(
    'two columns of one name',
    'data',
    _form('csv', lambda _: b'text,text\na,b\n' * 60),
    refused='DataError',
  ),
]

# The tokenizers.


def _tokenizer(kind: str) -> Callable[[Place], None]:
  def change(place: Place) -> None:
    folder = place.real(place.file('tokenizer'))
    folder.mkdir(parents=True)
    place.tokenizer = helpers_tokenizers.write_tokenizer(folder, kind)

  return change


def _changed(file: str, change: Callable[[dict], None]) -> Callable[[Place], None]:
  """Returns a change to a tokenizer with a file that `change` changed."""

  def write(place: Place) -> None:
    _tokenizer('unigram_t5')(place)
    path = place.real(place.file('tokenizer')) / file
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))

  return write


def _no_unknown(content: dict) -> None:
  content['model']['unk_id'] = None


TOKENIZERS = [
  *(World(k, 'tokenizer', _tokenizer(k), ('tokenizer',)) for k in helpers_tokenizers.KINDS),
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
