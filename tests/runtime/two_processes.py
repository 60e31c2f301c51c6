"""Run by test_distributed as two real processes; each prints its results as a line of JSON."""

import json
import os
import pathlib
import sys

import jax
import numpy as np

from t5x_gpu.errors import ConfigError
from t5x_gpu.partitioning.mesh import build_mesh
from t5x_gpu.partitioning.mesh_sizes import resolve_mesh_sizes
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster import cluster
from t5x_gpu.runtime.topology import discover


def mesh_results() -> dict:
  topology, devices = discover()
  sizes = resolve_mesh_sizes(topology, num_partitions=2)
  mesh = build_mesh(sizes, topology, devices)
  x = jax.make_array_from_callback(
    (4, 2),
    jax.NamedSharding(mesh, jax.P('data', 'model')),
    lambda index: np.arange(8.0).reshape(4, 2)[index],
  )
  return {
    'topology': [topology.num_hosts, topology.devices_per_host],
    'reason': topology.reason,
    'model_groups': [
      sorted({d.process_index for d in group}) for group in mesh.devices.reshape(-1, 2)
    ],
    'sum': float(jax.jit(lambda x: x.sum(), out_shardings=jax.NamedSharding(mesh, jax.P()))(x)),
  }


def gather_rounds(folder: pathlib.Path, index: int) -> list[bool]:
  """Returns, for each round, whether what the other wrote before the gather was there after it."""
  seen = []
  for i in range(6):
    if i % 2 == index:
      # Something that takes the writer longer than the other takes to arrive.
      np.linalg.svd(np.random.default_rng(i).normal(size=(300, 300)))
      (folder / f'round_{i}').touch()
    distributed.gather_json(f'round {i}')
    seen.append((folder / f'round_{i}').exists())
  return seen


def lengths(index: int) -> dict:
  """Returns whether texts of all lengths arrive, and how many programs that compiled."""
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: compiled.append(name) if 'backend_compile' in name else None
  )
  are_equal = True
  for length in (*range(0, 1400, 100), 1017, 1018, 1019, 5000, 20_000):
    texts = ['é' * (length // 6), 'x' * length]  # 6 bytes of JSON for each é
    are_equal &= distributed.gather_json(texts[index]) == texts
    are_equal &= distributed.broadcast_json(texts[index]) == texts[0]
  return {'lengths_are_equal': are_equal, 'num_compiled': len(compiled)}


def main(address: str, index: int, folder: str) -> None:
  joined = distributed.join(
    cluster.detect(os.environ, coordinator_address=address, process_count=2, process_index=index),
    distributed.DistributedConfig(initialization_timeout_seconds=60),
  )
  results = {
    'joined': joined,
    'index': distributed.process_index(),
    'count': distributed.process_count(),
    'main': distributed.is_main_process(),
    'waited': gather_rounds(pathlib.Path(folder), index),
    'broadcast': distributed.broadcast_json({'from': 0, 'text': 'é' * 100} if index == 0 else None),
    'gathered': distributed.gather_json({'i': index, 'pad': 'x' * (50 * index)}),
    **lengths(index),
    **mesh_results(),
  }
  distributed.assert_equal_across_hosts({'a': 1, 'b': [2]} if index else {'b': [2], 'a': 1}, 'same')
  try:
    distributed.assert_equal_across_hosts(
      {'lr': 0.1 * (index + 1), 'steps': 100, 'text': 'x' * 1000}, 'The config'
    )
  except ConfigError as e:
    results['difference'] = str(e)
  print('RESULT ' + json.dumps(results), flush=True)
  jax.distributed.shutdown()


if __name__ == '__main__':
  main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
