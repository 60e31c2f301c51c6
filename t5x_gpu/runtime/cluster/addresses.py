"""HOST:PORT as text (IPv6 in brackets), and the interfaces that process 0 listens on."""

import dataclasses
import errno
import ipaddress
import logging
import socket
from collections.abc import Iterable, Sequence
from typing import Optional

from t5x_gpu.errors import ClusterError, ConfigError

BIND_VARIABLE = 'JAX_COORDINATOR_BIND_ADDRESS'
ALL_INTERFACES = ''

_log = logging.getLogger(__name__)


def join(host: str, port: int) -> str:
  """Returns 'host:port', '[host]:port' for an IPv6 address."""
  return f'[{host}]:{port}' if ':' in host else f'{host}:{port}'


def split(address: str, name: str = 'address') -> tuple[str, int]:
  """Returns host (an IPv6 address without its brackets) and port of `join`.

  Args:
    address: 'host:port'.
    name: the flag or variable that holds it, for the message.
  Raises:
    ConfigError: the port is missing or invalid, or an IPv6 address has no brackets.
  """
  host, _, port = address.rpartition(':')
  is_bracketed = host.startswith('[') and host.endswith(']')
  if not (host.strip('[]') and port.isdigit() and 0 < int(port) < 65536) or (
    is_bracketed != (':' in host)
  ):
    raise ConfigError(
      f'{name}={address} is not HOST:PORT.',
      fix='Write the name or address of the first host and a free port, such as '
      f'{name}=node01:62000 or {name}=[fd00::1]:62000.',
    )
  return host.strip('[]'), int(port)


def is_loopback(host: str) -> bool:
  """Returns whether only this host can reach a numeric address."""
  return ipaddress.ip_address(host).is_loopback


@dataclasses.dataclass(frozen=True)
class Listening:
  """The sockets on which process 0 listens.

  Attributes:
    sockets: one per interface, all on one port.
    address: the first of the run's 'host:port' addresses whose port was free.
  """

  sockets: tuple[socket.socket, ...]
  address: str

  @property
  def hosts(self) -> tuple[str, ...]:
    """Numeric addresses of the interfaces; '::' or '0.0.0.0' mean all."""
    return tuple(each.getsockname()[0] for each in self.sockets)

  @property
  def port(self) -> int:
    return self.sockets[0].getsockname()[1]

  def close(self) -> None:
    for each in self.sockets:
      each.close()


def listen(
  addresses: Iterable[str], *, bind_address: Optional[str], is_one_host: bool
) -> Listening:
  """Returns sockets on the first free port of the run.

  They listen only on the interface of the coordinator's address. If that address does not belong to
  this host (NAT, a Kubernetes service), or its name is loopback here but not on other hosts
  (Debian's 127.0.1.1), they listen on all interfaces, with a warning.

  Args:
    addresses: 'host:port' of process 0, best first.
    bind_address: JAX_COORDINATOR_BIND_ADDRESS; overrides `addresses`.
    is_one_host: whether all processes are known to be on this host.
  Raises:
    ClusterError: none of the ports is free.
  """
  by_port: dict[int, list[str]] = {}
  for address in addresses:
    host, port = split(bind_address, BIND_VARIABLE) if bind_address else split(address)
    by_port.setdefault(port, []).append(host)
  problems = []
  for port, hosts in by_port.items():
    own = (
      hosts[:1]
      if bind_address
      else [each for host in hosts for each in _own_addresses(host, is_one_host)]
    )
    try:
      return Listening(_open(own, port, is_fixed=bool(bind_address)), join(hosts[0], port))
    except OSError as e:
      in_use = e.errno == errno.EADDRINUSE
      problems.append(f'{port}: {"in use" if in_use else e.strerror or e}')
  raise ClusterError(
    f'Process 0 cannot listen on port {", ".join(problems)} on this host '
    f'({socket.gethostname()}). An earlier run may still be shutting down.',
    fix=f'Set {BIND_VARIABLE} to an address of this host and a free port.'
    if bind_address
    else 'Set --coordinator_address=HOST:PORT (or JAX_COORDINATOR_ADDRESS) to another port, or '
    'end that program.',
  )


def _own_addresses(host: str, is_one_host: bool) -> tuple[str, ...]:
  """Returns the numeric addresses of `host`; ALL_INTERFACES if other hosts may use another one."""
  try:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
  except OSError as e:
    _log_all_interfaces(f'{host!r} does not resolve on this host ({e.strerror})')
    return (ALL_INTERFACES,)
  # Link-local IPv6 addresses are unusable without an interface, which names lack; systemd lists
  # them under the host's name.
  numeric = tuple(
    each
    for each in dict.fromkeys(str(info[4][0]) for info in found)
    if ':' not in each or not ipaddress.ip_address(each).is_link_local
  )
  if not numeric:
    _log_all_interfaces(f'{host!r} has link-local addresses only')
    return (ALL_INTERFACES,)
  is_name = host not in (*numeric, 'localhost')
  if is_name and not is_one_host and all(map(is_loopback, numeric)):
    _log_all_interfaces(f'{host!r} means {numeric[0]} on this host')
    return (ALL_INTERFACES,)
  return numeric


def _open(hosts: Sequence[str], port: int, *, is_fixed: bool) -> tuple[socket.socket, ...]:
  """Returns sockets on the `hosts` that are addresses of this host, else on all interfaces."""
  if ALL_INTERFACES in hosts:
    return (_server(ALL_INTERFACES, port),)
  sockets: list[socket.socket] = []
  for host in dict.fromkeys(hosts):
    try:
      sockets.append(_server(host, port))
    except OSError as e:
      # An address of another host, or IPv6 on a kernel without IPv6.
      if e.errno != errno.EADDRINUSE and not is_fixed:
        continue
      for each in sockets:
        each.close()
      raise
  if sockets:
    return tuple(sockets)
  _log_all_interfaces(f'{" or ".join(hosts)} is not an address of this host')
  return (_server(ALL_INTERFACES, port),)


def _log_all_interfaces(reason: str) -> None:
  _log.warning('Listening on all interfaces: %s.', reason)


def _server(host: str, port: int) -> socket.socket:
  # Without SO_REUSEPORT, unlike JAX's service, so that two runs on one port are an error.
  is_dual = host in (ALL_INTERFACES, '::') and socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if is_dual or ':' in host else socket.AF_INET
  return socket.create_server((host, port), family=family, dualstack_ipv6=is_dual, backlog=1024)


def local_host(connection: socket.socket) -> str:
  """Returns the numeric address of this end of a connection."""
  return _unmapped(connection.getsockname()[0])


def peer_host(connection: socket.socket) -> str:
  """Returns the numeric address of the other end of a connection, for messages."""
  try:
    return _unmapped(connection.getpeername()[0])
  except OSError:  # it has hung up
    return 'an unknown address'


def _unmapped(host: str) -> str:
  """Returns '10.0.0.1' for '::ffff:10.0.0.1', the form that dual-stack sockets report."""
  return str(getattr(ipaddress.ip_address(host), 'ipv4_mapped', None) or host)
