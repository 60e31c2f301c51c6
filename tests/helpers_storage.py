"""A real S3-compatible server on this machine (moto's), and buckets in it.

server = StorageServer(tmp_path_factory.mktemp('s3'))
with server:
  address = server.bucket('runs') + '/a'     # s3://runs/a
"""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, Self
from unittest import mock

from t5x_gpu.storage import paths

DEADLINE_SECONDS = 120
# Marked, so that a test can look for them in everything that was written and printed.
KEY_ID, SECRET, TOKEN = 'AKIAMARKEDKEYID00000', 'marked/secret+key/0000', 'marked//session+token=='
IMPATIENT = {'max_retries': 2, 'initial_delay': '50ms', 'max_delay': '100ms'}


class StorageServer:
  """A server in a separate process, which ends with the block.

  Args:
    folder: for its log.
    options: environment of the server.
  """

  def __init__(self, folder: pathlib.Path, **options: str):
    self._log = folder / 'server.txt'
    with socket.socket() as s:
      s.bind(('127.0.0.1', 0))
      self.port = s.getsockname()[1]
    self._options = options
    self._process: Any = None

  @property
  def endpoint(self) -> str:
    return f'http://127.0.0.1:{self.port}'

  @property
  def environment(self) -> dict[str, str]:
    """Returns the environment variables that a client needs."""
    return {
      'AWS_ENDPOINT_URL': self.endpoint,
      'AWS_ACCESS_KEY_ID': KEY_ID,
      'AWS_SECRET_ACCESS_KEY': SECRET,
      'AWS_SESSION_TOKEN': TOKEN,
      'AWS_REGION': 'us-east-1',
    }

  def __enter__(self) -> Self:
    with open(self._log, 'wb') as log:
      self._process = subprocess.Popen(
        [sys.executable, '-m', 'moto.server', '-H', '127.0.0.1', '-p', str(self.port)],
        stdout=log,
        stderr=log,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **self._options},
      )
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
      try:
        urllib.request.urlopen(f'{self.endpoint}/moto-api/').close()
        return self
      except OSError:
        assert self._process.poll() is None, self._log.read_text()
        assert time.monotonic() < deadline, self._log.read_text()
        time.sleep(0.02)

  def __exit__(self, *error: Any) -> None:
    self.kill()

  def kill(self) -> None:
    self._process.kill()
    self._process.wait()

  def bucket(self, name: str) -> str:
    """Makes a bucket; returns its address."""
    # The server looks at who signs, and at nothing else.
    signed = (
      f'AWS4-HMAC-SHA256 Credential={KEY_ID}/20260101/us-east-1/s3/aws4_request, '
      'SignedHeaders=host, Signature=0'
    )
    with urllib.request.urlopen(
      urllib.request.Request(
        f'{self.endpoint}/{name}', method='PUT', headers={'Authorization': signed}
      )
    ) as answer:
      assert answer.status == 200
    return f's3://{name}'

  @contextlib.contextmanager
  def used(self, **other: str) -> Iterator[None]:
    """Within, this process finds the server; `other` changes its environment further."""
    with (
      mock.patch.dict(os.environ, {**self.environment, **other}),
      mock.patch.object(paths, 'RETRIES', IMPATIENT),
    ):
      yield


class Gate:
  """A proxy in front of a server, which a test can shut during requests.

  Args:
    port: port of the server.
  Attributes:
    shut_at: bytes of a request that shut it; b'' for never.
    is_shut: drops what is open, and takes nothing.
  """

  def __init__(self, port: int):
    self.shut_at = b''
    self.is_shut = False
    self._server_port = port
    self._open: list[socket.socket] = []
    self._listener = socket.create_server(('127.0.0.1', 0))
    self.port = self._listener.getsockname()[1]
    threading.Thread(target=self._accept, daemon=True).start()

  def shut(self) -> None:
    self.is_shut = True
    for end in self._open:
      with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)

  def open(self) -> None:
    self.shut_at, self.is_shut = b'', False

  def close(self) -> None:
    self.shut()
    self._listener.close()
    for end in self._open:
      end.close()

  def _accept(self) -> None:
    with contextlib.suppress(OSError):  # closed
      while True:
        client = self._listener.accept()[0]
        if self.is_shut:
          client.close()
          continue
        server = socket.create_connection(('127.0.0.1', self._server_port))
        self._open += [client, server]
        for ends in ((client, server), (server, client)):
          threading.Thread(target=self._carry, args=ends, daemon=True).start()

  def _carry(self, source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
      while data := source.recv(1 << 16):
        if self.shut_at and self.shut_at in data:
          self.shut()
          break
        target.sendall(data)
    for end in (source, target):
      with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
