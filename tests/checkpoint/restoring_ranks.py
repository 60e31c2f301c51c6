"""Run by test_any_to_any: several processes that write, or read and compute the next loss.

`python -m tests.checkpoint.restoring_ranks --count=4 --write=FOLDER --read=FOLDER`; the last line
prints JSON: for each folder read, the checksums of its arrays on the devices, and the loss.
One import of everything, then the processes by fork.
"""

import argparse
import ctypes
import json
import os
import pathlib
import signal
import sys

import jax

from t5x_gpu.checkpoint.arrays import checksums_of
from t5x_gpu.launch import free_address
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster import cluster
from tests import helpers_topologies

LAYOUT = 'fsdp_8'
PR_SET_PDEATHSIG = 1


def rank(index: int, address: str, flags: argparse.Namespace) -> None:
  """Does the work of one process."""
  distributed.join(
    cluster.detect({}, coordinator_address=address, process_count=flags.count, process_index=index)
  )
  assert jax.process_count() == flags.count and jax.device_count() == 8
  for folder in flags.write:
    helpers_topologies.write(folder, LAYOUT)
  found = {}
  for folder in flags.read:
    restored = helpers_topologies.read(folder, LAYOUT)
    batch = helpers_topologies.put(LAYOUT, next(helpers_topologies.data_of(restored)))
    sums = helpers_topologies.forward(LAYOUT)(restored.state.params, batch)
    found[str(folder)] = {
      'checksums': checksums_of(restored.state),
      'loss': helpers_topologies.loss_of(sums),
    }
  if index == 0:
    print(json.dumps(found), flush=True)


def main() -> int:
  """Returns the largest exit code of the processes."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--count', type=int)
  parser.add_argument('--write', type=pathlib.Path, action='append', default=[])
  parser.add_argument('--read', type=pathlib.Path, action='append', default=[])
  flags = parser.parse_args()
  address, pids = free_address(), []
  for index in range(flags.count):
    pids.append(os.fork())
    if pids[-1] == 0:
      ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a test that gives up kills one
      rank(index, address, flags)
      return 0
  return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in pids)


if __name__ == '__main__':
  sys.exit(main())
