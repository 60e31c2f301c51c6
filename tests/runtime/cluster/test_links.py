"""Links of agents: signed messages over TCP."""

import os
import resource
import select
import socket
import time

from t5x_gpu.runtime.cluster import generations, links
from tests.helpers_train import DEADLINE_SECONDS


def until(poll, kind) -> list[links.Event]:
  """Polls until an event of `kind` comes; returns all events."""
  events, deadline = [], time.monotonic() + DEADLINE_SECONDS
  while not any(isinstance(event, kind) for event in events):
    assert time.monotonic() < deadline, events
    events += poll()
  return events


def test_a_link_that_is_closed_before_the_other_end_is_known_delivers_its_messages():
  server, client = (links.Links('secret', run_id='run') for _ in range(2))
  with socket.create_server(('127.0.0.1', 0)) as listening:
    server.listen([listening])
    client.connect(0, [f'127.0.0.1:{listening.getsockname()[1]}'])
    opened = until(lambda: [*server.poll(0.01), *client.poll(0.01)], links.Opened)[-1]
    for number in range(3):
      client.send(opened.link, generations.Asked(number))
    client.close(opened.link)

    def both() -> list[links.Event]:
      assert client.poll(0.01) == []
      return server.poll(0.01)

    events = until(both, links.Closed)
    assert [event.message['signal'] for event in events[:-1]] == [0, 1, 2]
    client.leave()
    server.leave()


def test_an_agent_that_comes_while_too_many_files_are_open_is_taken_in_later():
  server, client = (links.Links('secret', run_id='run') for _ in range(2))
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  with socket.create_server(('127.0.0.1', 0)) as listening:
    server.listen([listening])
    client.connect(0, [f'127.0.0.1:{listening.getsockname()[1]}'])
    assert select.select([listening], [], [], DEADLINE_SECONDS)[0]  # its own socket is open
    os.close(unused := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (unused, hard))
    try:
      full = until(lambda: server.poll(0.01), links.NoRoom)[-1]
      assert full.reason == (
        f'Too many open files (EMFILE); the limit of this process is {unused} (ulimit -Hn)'
      )
      assert server.poll(0.01) == []  # it rests
    finally:
      resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    opened = until(lambda: [*server.poll(0.01), *client.poll(0.01)], links.Opened)[-1]
    client.send(opened.link, generations.Welcome())
    came = until(lambda: [*client.poll(0.01), *server.poll(0.01)], links.Came)[-1]
    assert came.message['kind'] == 'Welcome'
    client.leave()
    server.leave()


def test_a_stopped_agent_is_not_connected_though_its_kernel_accepts(monkeypatch):
  monkeypatch.setattr(links, 'CONNECT_SECONDS', 0.2)
  client = links.Links('secret', run_id='run')
  with socket.create_server(('127.0.0.1', 0)) as stopped:
    address = f'127.0.0.1:{stopped.getsockname()[1]}'
    client.connect(3, [address])
    reason = f'{address}: it accepts connections and does not answer'
    assert until(lambda: client.poll(0.01), links.Failed)[-1] == links.Failed(3, reason)
  client.leave()


def test_a_silent_end_is_closed_with_the_seconds_of_its_silence(monkeypatch):
  monkeypatch.setattr(links, 'SILENT_SECONDS', 0.3)
  server, client = (links.Links('secret', run_id='run') for _ in range(2))
  with socket.create_server(('127.0.0.1', 0)) as listening:
    server.listen([listening])
    client.connect(0, [f'127.0.0.1:{listening.getsockname()[1]}'])
    until(lambda: [*server.poll(0.01), *client.poll(0.01)], links.Opened)
    closed = until(lambda: client.poll(0.01), links.Closed)[-1]
    assert 0.3 < closed.silent_seconds < 10
    client.leave()
    server.leave()
