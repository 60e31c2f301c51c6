"""Turns failures of disks and object storage into errors with a fix, without secrets.

TensorStore raises ValueError for every reason: only its text distinguishes whether the system
refused a file, storage did not answer, or the bytes are damaged.
"""

import os
import re
from typing import Optional

from t5x_gpu.config.set_aside import is_missing
from t5x_gpu.errors import AccessError, CheckpointError, UserError

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
