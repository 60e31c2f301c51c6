"""Run by test_processes.py: imports jax once, then forks real processes before any backend.

    python forked_processes.py SCENARIO '[{"devices": 2, "domain": "a"}, ...]'

Each entry is a process: its number of devices, T5X_GPU_DOMAIN, and what else a scenario reads. Each
prints one line RESULT {json}; the last line is EXITS [codes].
"""

import ipaddress
import json
import os
import pathlib
import signal
import socket
import sys
import time

import jax
import numpy as np
from jax.experimental.mesh_utils import create_hybrid_device_mesh

from t5x_gpu import cli
from t5x_gpu.partitioning.mesh import build_mesh
from t5x_gpu.partitioning.mesh_sizes import resolve_mesh_sizes
from t5x_gpu.runtime import distributed, preemption
from t5x_gpu.runtime.cluster import cluster
from t5x_gpu.runtime.topology import discover

STEPS = 400
# After which JAX itself would end processes that lost one. Far past the test's own deadline: what
# ends before that was not ended by it.
JAX_SECONDS = 3600


def join(index: int, processes: list[dict], port: int) -> None:
  own = processes[index]
  if own.get('domain'):
    os.environ['T5X_GPU_DOMAIN'] = own['domain']
  jax.config.update('jax_num_cpu_devices', own.get('devices', 1))
  distributed.join(
    cluster.detect(
      {},
      coordinator_address=f'{own.get("host", "127.0.0.1")}:{port}',
      process_count=len(processes),
      process_index=index,
    ),
    distributed.DistributedConfig(
      initialization_timeout_seconds=120,
      heartbeat_timeout_seconds=JAX_SECONDS,
      shutdown_timeout_seconds=JAX_SECONDS,
    ),
  )


def tell(**values) -> None:
  # One write: a print of several processes into one pipe mixes lines.
  os.write(1, f'RESULT {json.dumps({"index": jax.process_index(), **values})}\n'.encode())


def layout(index: int, processes: list[dict]) -> int:
  """The host of every device of a mesh data x model, and a sum over it."""
  topology, devices = discover()
  mesh = build_mesh(resolve_mesh_sizes(topology, num_partitions=2), topology, devices)
  host_of = {device: i // topology.devices_per_host for i, device in enumerate(devices)}
  x = jax.make_array_from_callback(
    (len(devices),),
    jax.NamedSharding(mesh, jax.P(('data', 'model'))),
    lambda part: np.arange(float(len(devices)))[part],
  )
  total = jax.jit(lambda x: x.sum(), out_shardings=jax.NamedSharding(mesh, jax.P()))(x)
  tell(
    hosts=topology.num_hosts,
    per_host=topology.devices_per_host,
    reason=topology.reason,
    blocks=[host_of[device] for device in mesh.devices.flat],
    sum=float(total),
  )
  return 0


def listening(index: int, processes: list[dict]) -> int:
  """The addresses on which this process listens, while a collective of all processes works."""
  mesh = jax.make_mesh((jax.device_count(),), ('data',))
  x = jax.make_array_from_callback(
    (jax.device_count(),),
    jax.NamedSharding(mesh, jax.P('data')),
    lambda part: np.ones(1, np.float32),
  )
  total = jax.jit(lambda x: x.sum(), out_shardings=jax.NamedSharding(mesh, jax.P()))(x)
  links = [
    os.readlink(f'/proc/self/fd/{fd}')
    for fd in os.listdir('/proc/self/fd')
    if os.path.islink(f'/proc/self/fd/{fd}')
  ]
  inodes = {link.removeprefix('socket:[').rstrip(']') for link in links}
  rows = [
    line.split()
    for table in ('tcp', 'tcp6')
    for line in pathlib.Path(f'/proc/net/{table}').read_text().splitlines()[1:]
  ]
  addresses = [
    bytes.fromhex(row[1].partition(':')[0]) for row in rows if row[3] == '0A' and row[9] in inodes
  ]  # LISTEN
  # The kernel shows 32-bit words in the order of the processor.
  hosts = [
    ipaddress.ip_address(b''.join(a[i : i + 4][::-1] for i in range(0, len(a), 4)))
    for a in addresses
  ]
  distributed.gather_json('all have looked')
  tell(
    listens=sorted({str(getattr(host, 'ipv4_mapped', None) or host) for host in hosts}),
    sum=float(total),
  )
  return 0


def hybrid(index: int, processes: list[dict]) -> int:
  """Whether JAX's own hybrid mesh, with hosts as slices, has the same blocks as t5x_gpu's."""
  topology, devices = discover()
  mesh = build_mesh(resolve_mesh_sizes(topology, num_partitions=2), topology, devices)

  class Told:  # a device of the GPU backend, where slice_index is what we handed to JAX
    def __init__(self, device):
      self.device, self.id, self.process_index = device, device.id, device.process_index
      self.platform, self.device_kind = 'gpu', 'fake'
      domains = list(dict.fromkeys(m.domain for m in distributed.members()))
      self.slice_index = domains.index(distributed.members()[device.process_index].domain)

  inner = topology.devices_per_host // 2
  theirs = create_hybrid_device_mesh(
    (inner, 2), (topology.num_hosts, 1), [Told(device) for device in jax.devices()]
  )
  hosts = [[d.slice_index for d in row] for row in theirs]
  ours = [[Told(d).slice_index for d in row] for row in mesh.devices.reshape(-1, 2)]
  tell(ours=ours, theirs=hosts)
  return 0


def stop(index: int, processes: list[dict]) -> int:
  """A loop with a collective per step; one process gets a signal at a different step."""
  mesh = jax.make_mesh((jax.device_count(),), ('data',))
  f = jax.jit(lambda x: x + x.sum(), out_shardings=jax.NamedSharding(mesh, jax.P('data')))
  x = jax.make_array_from_callback(
    (jax.device_count(),),
    jax.NamedSharding(mesh, jax.P('data')),
    lambda part: np.zeros(1, np.float32),
  )
  with preemption.StopRequest() as request:
    for step in range(1, STEPS + 1):
      if step == processes[index].get('at'):
        os.kill(os.getpid(), signal.Signals[processes[index]['signal']])
      if step == processes[index].get('raise_at'):
        raise ValueError('boom')
      if step == processes[index].get('kill_at'):
        os.kill(os.getpid(), signal.SIGKILL)
      time.sleep(0.01 * (index + 1))
      x = f(x).block_until_ready()
      if request.reached():
        break
  tell(step=step, signal=request.signal and request.signal.name)
  return request.exit_code


def main() -> None:
  scenario, processes = globals()[sys.argv[1]], json.loads(sys.argv[2])
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    port = s.getsockname()[1]
  pids = []
  for index in range(len(processes)):
    pid = os.fork()
    if pid == 0:

      def run() -> int:
        join(index, processes, port)
        return scenario(index, processes)

      cli.run_main(run)
    pids.append(pid)
  exits = {}
  while len(exits) < len(pids):
    pid, status = os.waitpid(-1, 0)
    exits[pid] = os.waitstatus_to_exitcode(status)
  print('EXITS ' + json.dumps([exits[pid] for pid in pids]), flush=True)


if __name__ == '__main__':
  main()
