"""Run by test_remote: several processes that save to object storage, and read it again.

`python -m tests.checkpoint.remote_ranks --count=2 --address=s3://BUCKET/FOLDER`; the last line has,
as JSON, the checksums of what was read. One import of everything, then the processes by fork.
"""

import argparse
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.checkpoint.arrays import checksums_of
from t5x_gpu.checkpoint.remote_checkpointer import open_checkpointer
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.launch import free_address
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster import cluster
from t5x_gpu.training.state import TrainState
from tests.checkpoint.test_checkpointer import abstract, save


def values_of(step: int) -> dict[str, np.ndarray]:
  """Returns what the parameters are at a step."""
  random = np.random.default_rng(step)
  return {
    name: random.normal(size=(64, 24)).astype(np.float32) for name in ('split', 'both', 'same')
  }


def state_of(step: int) -> TrainState:
  """Returns the state of a step over all devices: split over hosts, within them, and not at all."""
  mesh = jax.make_mesh((2, jax.device_count() // 2), ('hosts', 'local'))
  specs = {'split': jax.P('hosts'), 'both': jax.P('local', 'hosts'), 'same': jax.P()}
  params = {
    name: jax.make_array_from_callback(
      value.shape, jax.NamedSharding(mesh, specs[name]), lambda place, value=value: value[place]
    )
    for name, value in values_of(step).items()
  }
  count = jax.device_put(jnp.int32(step), jax.NamedSharding(mesh, jax.P()))
  return TrainState(step=count, params=params, opt_state={'none': None})


def rank(index: int, address: str, flags: argparse.Namespace) -> None:
  """Does the work of one process."""
  distributed.join(
    cluster.detect({}, coordinator_address=address, process_count=flags.count, process_index=index)
  )
  with open_checkpointer(flags.address, keep=Keep(last=2)) as checkpointer:
    for step in (1, 2, 3):
      save(checkpointer, step, state_of(step))
      checkpointer.raise_if_failed()
  with open_checkpointer(flags.address, keep=Keep(last=2)) as checkpointer:
    restored = checkpointer.restore_latest(abstract(state_of(0)))
    sums = checksums_of(restored.state)
  if index == 0:
    print(json.dumps(sums), flush=True)


def main() -> int:
  """Returns the largest exit code of the processes."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--count', type=int)
  parser.add_argument('--address')
  flags = parser.parse_args()
  address, pids = free_address(), []
  for index in range(flags.count):
    pids.append(os.fork())
    if pids[-1] == 0:
      rank(index, address, flags)
      return 0
  return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in pids)


if __name__ == '__main__':
  sys.exit(main())
