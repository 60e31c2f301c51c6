"""Separate hosts on this machine: network namespaces on one switch, whose links can be cut.

    with NetLab(num_hosts=2) as lab:
      process = lab.start(0, ['python', '-m', ...])
      lab.cut(1)
      lab.heal(1)

Every host has a name, an address 10.77.0.I and a hosts file in the place of DNS. The switch is in a
namespace as well, so that nothing of this machine's own network is touched. Needs root and `ip`.
"""

import os
import pathlib
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any, Self

_NETWORK = '10.77.0'


class NetLabError(Exception):
  """This machine does not allow it."""


class NetLab:
  """Hosts h1, h2, ... and a switch between them.

  Args:
    num_hosts: how many.
    own_address: what a host's own name means on that host; its address on the switch by default.
    names: the names of each host, its own first; h1, h2, ... by default.
  Raises:
    NetLabError: in `__enter__`, with the reason, where it is not permitted.
  """

  def __init__(self, *, num_hosts: int, own_address: str = '', names: Sequence[Sequence[str]] = ()):
    self._num_hosts = num_hosts
    self._own_address = own_address
    self._names = names or [[f'h{i + 1}'] for i in range(num_hosts)]
    self._addresses = [f'{_NETWORK}.{i + 1}' for i in range(num_hosts)]
    self._prefix = f'nl{os.getpid()}'
    self._switch = f'{self._prefix}s'

  def address(self, host: int) -> str:
    return self._addresses[host]

  def replace_address(self, host: int) -> None:
    """Gives a host another address under its names."""
    self._addresses[host] = f'{_NETWORK}.{int(self._addresses[host].rpartition(".")[2]) + 100}'
    _ip('-n', self._name(host), 'address', 'flush', 'dev', 'eth0')
    self._add_address(host)
    for each in range(self._num_hosts):
      self._write_names(each)

  def __enter__(self) -> Self:
    if os.getuid() != 0 or not shutil.which('ip') or not shutil.which('unshare'):
      raise NetLabError('network namespaces need root, ip (iproute2) and unshare')
    try:
      self._up()
    except (NetLabError, OSError) as e:
      self._down()
      raise NetLabError(f'network namespaces cannot be used here: {e}') from e
    return self

  def __exit__(self, *exc_info: Any) -> None:
    self._down()

  def cut(self, host: int) -> None:
    """Unplugs a host at the switch."""
    _ip('-n', self._switch, 'link', 'set', f'port{host}', 'down')

  def heal(self, host: int) -> None:
    _ip('-n', self._switch, 'link', 'set', f'port{host}', 'up')

  def start(self, host: int, command: list[str], **options: Any) -> subprocess.Popen:
    """Starts a command on a host; `ip netns exec` gives it the host's own /etc/hosts."""
    named = ['unshare', '--uts', 'sh', '-c', 'hostname "$0" && exec "$@"', self._names[host][0]]
    return subprocess.Popen(['ip', 'netns', 'exec', self._name(host), *named, *command], **options)

  def _name(self, host: int) -> str:
    return f'{self._prefix}h{host + 1}'

  def _up(self) -> None:
    _ip('netns', 'add', self._switch)
    _ip('-n', self._switch, 'link', 'add', 'br0', 'type', 'bridge')
    _ip('-n', self._switch, 'link', 'set', 'br0', 'up')
    for host in range(self._num_hosts):
      name = self._name(host)
      _ip('netns', 'add', name)
      _ip(
        '-n',
        self._switch,
        'link',
        'add',
        f'port{host}',
        'type',
        'veth',
        'peer',
        'name',
        'eth0',
        'netns',
        name,
      )
      _ip('-n', self._switch, 'link', 'set', f'port{host}', 'master', 'br0', 'up')
      _ip('-n', name, 'link', 'set', 'lo', 'up')
      self._add_address(host)
      _ip('-n', name, 'link', 'set', 'eth0', 'up')
      (pathlib.Path('/etc/netns') / name).mkdir(parents=True)
      self._write_names(host)
    if self.start(0, ['true'], stderr=subprocess.DEVNULL).wait(20) != 0:
      raise NetLabError('a command cannot be run in a namespace')

  def _add_address(self, host: int) -> None:
    _ip('-n', self._name(host), 'address', 'add', f'{self.address(host)}/24', 'dev', 'eth0')

  def _write_names(self, host: int) -> None:
    """Writes a host's hosts file, in place: processes that run have it mounted."""
    (pathlib.Path('/etc/netns') / self._name(host) / 'hosts').write_text(
      '127.0.0.1 localhost\n'
      + ''.join(
        f'{i == host and self._own_address or self.address(i)} {" ".join(names)}\n'
        for i, names in enumerate(self._names)
      )
    )

  def _down(self) -> None:
    for name in [*(self._name(host) for host in range(self._num_hosts)), self._switch]:
      subprocess.run(['ip', 'netns', 'delete', name], stderr=subprocess.DEVNULL, check=False)
      shutil.rmtree(pathlib.Path('/etc/netns') / name, ignore_errors=True)


def _ip(*arguments: str) -> None:
  done = subprocess.run(['ip', *arguments], stderr=subprocess.PIPE, text=True, check=False)
  if done.returncode:
    raise NetLabError(f'ip {" ".join(arguments)}: {done.stderr.strip()}')
