"""Where checkpoints are: folders of this machine, or object storage (`s3://`, `gs://`).

Only this module knows the difference. `as_path` reads a user's text; a `RemotePath` has the methods
of `pathlib.Path` that readers of checkpoints call, but is not an os.PathLike, so that functions for
files refuse it. `access_errors` turns failures of disks and storage into errors with a fix, without
secrets. TensorStore talks to the storage, for arrays and small objects alike, and reads secrets
from the environment or from files; t5x_gpu never handles them.
Source: https://google.github.io/tensorstore/kvstore/s3/index.html and .../gcs/index.html
"""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional, Union

import tensorstore as ts

from t5x_gpu.errors import AccessError, CheckpointError, ConfigError, UserError
from t5x_gpu.storage.files import access_error, is_missing
from t5x_gpu.storage.user_paths import user_path

S3, GS = 's3', 'gs'


class StorageError(AccessError):
  """Storage refused a request or did not answer; the stored data may be intact."""


def system_error(e: Optional[BaseException]) -> Optional[OSError]:
  """Returns the system error that caused `e`, unless it is about the bytes of a file.

  Looks through Orbax's errors, which name neither file nor reason.
  """
  while e is not None:
    number = re.search(r"os_error_code='(\d+)'", str(e))
    if number:
      files = re.findall(r'"(/[^"\n]*)"', str(e))  # the last one is innermost
      e = OSError(int(number[1]), os.strerror(int(number[1])), files[-1] if files else None)
    if isinstance(e, OSError):
      return None if is_missing(e) else e
    e = e.__cause__
  return None


# TensorStore reads these variables itself, except endpoint and region, which t5x_gpu passes on.
VARIABLES = {
  S3: (
    'AWS_ACCESS_KEY_ID',
    'AWS_SECRET_ACCESS_KEY',
    'AWS_SESSION_TOKEN',
    'AWS_PROFILE',
    'AWS_REGION',
    'AWS_ENDPOINT_URL_S3',
    'AWS_ENDPOINT_URL',
  ),
  GS: ('GOOGLE_APPLICATION_CREDENTIALS', 'TENSORSTORE_GCS_HTTP_URL'),
}
_SECRET = (
  'AWS_ACCESS_KEY_ID',
  'AWS_SECRET_ACCESS_KEY',
  'AWS_SESSION_TOKEN',
  'GOOGLE_AUTH_TOKEN_FOR_TESTING',
)


def without_secrets(text: str) -> str:
  """Returns `text` without keys of the environment, and without user:password@ in addresses."""
  text = re.sub(r'(\w[\w+.-]*://)[^/\s\'"]*@', r'\1***@', text)
  for value in filter(None, map(os.environ.get, _SECRET)):
    text = text.replace(value, '***')
  return text


def reason_of(error: Exception) -> str:
  """Returns TensorStore's reason: the first line, without the server's whole answer."""
  text = str(error).split('\n')[0]
  return without_secrets(re.split(r' ?\[\w[\w-]*=', text)[0])[:300]


def is_outage(error: Exception) -> bool:
  """Returns whether storage refused or did not answer, so that nothing is known about the data."""
  if isinstance(error, CheckpointError):
    return False
  return bool(
    re.match(
      'UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|ABORTED|'
      'INTERNAL|CANCELLED|RESOURCE_EXHAUSTED',
      str(error),
    )
  )


def storage_error(error: Exception, what: str, scheme: str) -> CheckpointError:
  """Returns the error for a request that storage refused or did not answer.

  Args:
    error: error of TensorStore.
    what: the failure: 's3://bucket/run cannot be written'.
    scheme: scheme of the address.
  """
  if isinstance(error, UserError):
    return error
  text = str(error)
  names = VARIABLES[scheme]
  have = [name for name in names if os.environ.get(name)]
  read = (
    f'Read from the environment: {", ".join(names)} (set: {", ".join(have) or "none"}); '
    'then from the files and the machine that the command line of this storage uses.'
  )
  if 'NoSuchBucket' in text or ('NOT_FOUND' in text and 'bucket' in text):
    fix = (
      'Create the bucket or correct its name. The endpoint may also point to another server.\n'
      + read
    )
  elif re.search(r'PERMISSION_DENIED|UNAUTHENTICATED|redential|AccessDenied|\'40[13]\'', text):
    fix = 'Set keys that may list, read, write and delete there.\n' + read
  else:
    fix = (
      'Several requests got no answer. Check the network, and the endpoint if one is set.\n' + read
    )
  return StorageError(
    f'{without_secrets(what)}: {reason_of(error)}.',
    fix=fix,
    parameters=('MODEL_DIR',),
    docs='checkpoints.md#object-storage',
  )


# 0.5 + 1 + 2 + 4 + 8 + 16 + 16 + 16 s: an outage of a minute passes unnoticed. TensorStore's
# default would hang for a quarter of an hour before it reports that the storage does not answer.
RETRIES = {'max_retries': 8, 'initial_delay': '500ms', 'max_delay': '16s'}
# For this long after an outage, requests are not retried: a run must not take minutes to exit.
_SOON_SECONDS = 60.0
INDEX_CACHE_BYTES = 64 << 20  # cache for the index, in which every array is looked up
_error = functools.partial(ConfigError, docs='checkpoints.md#object-storage')


@dataclasses.dataclass(frozen=True)
class RemotePath:
  """A path in object storage, with an interface like `pathlib.Path`.

  Object storage has no folders, only objects whose names have slashes: mkdir does nothing, and a
  folder exists if it has an object. Any failure except a missing object raises CheckpointError with
  a fix.

  Attributes:
    scheme: 's3' or 'gs'.
    bucket: name of the bucket.
    key: path in the bucket, without slashes at the ends.
  """

  scheme: str
  bucket: str
  key: str

  def __str__(self) -> str:
    return f'{self.scheme}://{self.bucket}/{self.key}'

  def __truediv__(self, name: Union[str, os.PathLike]) -> 'RemotePath':
    return self.joinpath(name)

  def joinpath(self, *names: Union[str, os.PathLike]) -> 'RemotePath':
    return dataclasses.replace(self, key='/'.join([self.key, *map(os.fspath, names)]).strip('/'))

  @property
  def name(self) -> str:
    return self.key.rpartition('/')[2]

  @property
  def parent(self) -> 'RemotePath':
    return dataclasses.replace(self, key=self.key.rpartition('/')[0])

  def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
    """Does nothing: object storage has no folders."""

  def is_file(self) -> bool:
    return self._ask('read', lambda: self._above.read(self.name)).state == 'value'

  def is_dir(self) -> bool:
    return bool(self.files())

  def exists(self) -> bool:
    return self.is_file() or self.is_dir()

  def files(self, *, first: str = '', stop: str = '') -> list[str]:
    """Returns the sorted names of all objects in this folder, from `first` to before `stop`."""
    keys = self._ask('listed', lambda: kvstore(self).list(ts.KvStore.KeyRange(first, stop)))
    return sorted(key.decode() for key in keys)

  def read_bytes(self) -> bytes:
    found = self._ask('read', lambda: self._above.read(self.name))
    if found.state != 'value':
      raise FileNotFoundError(2, 'No such object', str(self))
    return found.value

  def read_text(self, encoding: str = 'utf-8') -> str:
    return self.read_bytes().decode(encoding)

  def write_bytes(self, data: bytes) -> int:
    """Writes an object atomically."""
    self._ask('written', lambda: self._above.write(self.name, data))
    return len(data)

  def write_text(self, text: str, encoding: str = 'utf-8') -> int:
    return self.write_bytes(text.encode(encoding))

  def swap(self, before: str, after: str) -> bool:
    """Replaces `before` by `after` atomically; returns whether the object was `before`."""
    found = self._ask('read', lambda: self._above.read(self.name))
    if found.value != before.encode():
      return False
    written = self._ask(
      'written', lambda: self._above.write(self.name, after, if_equal=found.stamp.generation)
    )
    return bool(written.generation)

  def unlink(self, missing_ok: bool = False) -> None:
    if not missing_ok and not self.is_file():
      raise FileNotFoundError(2, 'No such object', str(self))
    self._ask('removed', lambda: self._above.write(self.name, None))

  def remove_tree(self, *, last: Sequence[str] = ()) -> None:
    """Removes all objects in this folder, the objects in `last` after the others."""
    for names in ([n for n in self.files() if n not in last], last):
      store = kvstore(self)
      for future in [store.write(name, None) for name in names]:
        self._ask('removed', lambda future=future: future)

  @property
  def _above(self) -> ts.KvStore:
    return kvstore(self.parent)

  def _ask(self, what: str, request: Callable[[], ts.Future]) -> Any:
    global _outage_seen
    try:
      return request().result()
    except Exception as e:  # TensorStore raises ValueError for every reason
      if is_outage(e):
        _outage_seen = time.monotonic()
      raise storage_error(e, f'{self} cannot be {what}', self.scheme) from None


AnyPath = Union[pathlib.Path, RemotePath]


def as_path(text: Union[str, os.PathLike, RemotePath], *, parameter: str = '') -> AnyPath:
  """Returns a user's folder or address as a path; absolute and without `..`.

  Args:
    text: a folder, `s3://BUCKET/FOLDER` or `gs://BUCKET/FOLDER`.
    parameter: the gin parameter, for errors.
  Raises:
    ConfigError: the scheme is not supported, the address has no folder, or TensorStore cannot use
      the folder.
  """
  if isinstance(text, RemotePath):
    return text
  text = os.fspath(text)
  match = re.fullmatch(r'(\w[\w+.-]*):/(/?)(.*)', text)
  if not match:
    return _usable(user_path(text), parameter=parameter)
  scheme, slash, rest = match.groups()
  shown = without_secrets(text)
  parameters = (parameter,) if parameter else ()
  if not slash and scheme not in (S3, GS):
    return _usable(user_path(text), parameter=parameter)  # a folder whose name ends in a colon
  if scheme not in (S3, GS):
    raise _error(
      f'{shown!r} is an address of {scheme}://, which is not supported.',
      fix='Give a folder of a file system, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER.',
      parameters=parameters,
    )
  bucket, _, key = rest.partition('/')
  key = _without_dots(key.strip('/'))
  if (
    not slash
    or not re.fullmatch(r'[\w.-]+', bucket)
    or not key
    or ({'', '.', '..'} & set(key.split('/')) or set('?#') & set(key))
  ):
    raise _error(
      f'{shown!r} does not name a folder in a bucket.',
      fix=f'Write {scheme}://BUCKET/FOLDER: two slashes, the name of the bucket '
      'alone (no user or password), a folder in it.',
      parameters=parameters,
    )
  return RemotePath(scheme, bucket, key)


def _without_dots(key: str) -> str:
  """Returns the name of an object with `.` and `..` resolved; `..` that leave the bucket stay."""
  parts: list[str] = []
  for part in key.split('/'):
    if part == '..' and parts and parts[-1] != '..':
      parts.pop()
    elif part != '.':
      parts.append(part)
  return '/'.join(parts)


def _usable(path: pathlib.Path, *, parameter: str) -> pathlib.Path:
  """Returns `path`; raises ConfigError if TensorStore refuses it, or would use another path."""
  given = kvstore_spec(path)['path']
  try:
    if ts.KvStore.Spec({'driver': 'file', 'path': given}).path == given:
      return path
  except (ValueError, RuntimeError):  # a name that is not UTF-8 is a RuntimeError
    pass
  raise _error(
    f'{str(path)!r} is not a folder that TensorStore, which reads and writes arrays, can use.',
    fix='A path must be UTF-8 text without backslashes, and no folder in it may end in .__lock. '
    'Rename the folder, or name another.',
    parameters=(parameter,) if parameter else (),
  )


def local_path(text: Union[str, os.PathLike, RemotePath], *, what: str) -> pathlib.Path:
  """Returns a folder of this machine, absolute; raises ConfigError for object storage.

  Args:
    text: the user's input.
    what: the setting that accepts only folders: 'average --to'.
  """
  path = as_path(text)
  if isinstance(path, RemotePath):
    raise _error(
      f'{what} takes a folder of this machine, not {path}.',
      fix='Name a folder. Checkpoints are copied from and to object storage by\n'
      'python -m t5x_gpu.reshard --from=... --to=...',
    )
  return path


def is_remote(path: AnyPath) -> bool:
  return isinstance(path, RemotePath)


@contextlib.contextmanager
def access_errors(path: AnyPath) -> Iterator[None]:
  """Context that turns errors unrelated to the bytes in `path` into AccessError.

  All other errors pass: a file is missing, truncated or garbled.
  """
  try:
    yield
  except UserError:
    raise
  except Exception as e:  # Orbax and TensorStore raise many kinds of errors
    if isinstance(path, RemotePath):
      if is_outage(e):
        raise storage_error(e, f'{path} cannot be read', path.scheme) from None
    elif refused := system_error(e):
      raise access_error(refused, path) from e
    raise


def kvstore_spec(folder: AnyPath) -> dict[str, Any]:
  """Returns TensorStore's spec of a folder; it contains no secret."""
  if not isinstance(folder, RemotePath):
    return {'driver': 'file', 'path': os.path.join(folder, '')}
  path = f'{folder.key}/' if folder.key else ''
  if folder.scheme == GS:
    return {'driver': 'gcs', 'bucket': folder.bucket, 'path': path}
  spec = {'driver': 's3', 'bucket': folder.bucket, 'path': path}
  endpoint = os.environ.get('AWS_ENDPOINT_URL_S3') or os.environ.get('AWS_ENDPOINT_URL')
  region = os.environ.get('AWS_REGION') or os.environ.get('AWS_DEFAULT_REGION')
  if endpoint:
    spec['endpoint'] = _checked_endpoint(endpoint)
    region = region or 'us-east-1'  # the default of S3 servers other than Amazon's
  if region:
    spec['aws_region'] = region
  # Otherwise it prints a page of warnings about configuration files that do not exist.
  if os.environ.get('AWS_ACCESS_KEY_ID'):
    spec['aws_credentials'] = {'type': 'environment'}
  return spec


def _checked_endpoint(endpoint: str) -> str:
  parts = urllib.parse.urlsplit(endpoint)
  if parts.scheme not in ('http', 'https') or not parts.hostname or '@' in parts.netloc:
    raise _error(
      f'AWS_ENDPOINT_URL = {without_secrets(endpoint)!r} is not the address of a server.',
      fix='Write http://HOST:PORT or https://HOST. Keys belong in AWS_ACCESS_KEY_ID and '
      'AWS_SECRET_ACCESS_KEY.',
    )
  return endpoint.rstrip('/')


def context(*, cache_bytes: int = 0) -> ts.Context:
  """Returns limits for TensorStore: cache size for chunks, retries if a server does not answer."""
  return ts.Context(
    {
      'cache_pool': {'total_bytes_limit': cache_bytes},
      'cache_pool#ocdbt': {'total_bytes_limit': INDEX_CACHE_BYTES},
      's3_request_retries': RETRIES,
      'gcs_request_retries': RETRIES,
    }
  )


_outage_seen = -math.inf


@functools.cache
def _small_objects(max_retries: int) -> ts.Context:
  return ts.Context(
    {
      name: {**RETRIES, 'max_retries': max_retries}
      for name in ('s3_request_retries', 'gcs_request_retries')
    }
  )


def kvstore(folder: AnyPath) -> ts.KvStore:
  """Returns TensorStore's view of a folder, for small objects."""
  is_soon = time.monotonic() < _outage_seen + _SOON_SECONDS
  tries = 1 if is_soon else RETRIES['max_retries']
  return ts.KvStore.open(kvstore_spec(folder), context=_small_objects(tries)).result()
