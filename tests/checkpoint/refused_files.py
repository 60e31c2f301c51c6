"""Run by test_refused_files: what processes do whose system does not let them open some files.

`LD_PRELOAD=... python -m tests.checkpoint.refused_files FOLDER` prints JSON in its last line. One
import of everything, then two processes by fork, which save and restore together; then runs.
"""

import argparse
import ctypes
import errno
import json
import os
import pathlib
import shutil
import signal
import sys
from typing import Any

import jax
import numpy as np

from t5x_gpu import checkpoint_tools
from t5x_gpu.checkpoint.checkpointer import Checkpointer
from t5x_gpu.checkpoint.initialize import restore_from
from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.checkpoint.store import CheckpointAddress
from t5x_gpu.errors import CheckpointError
from t5x_gpu.launch import free_address
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster import cluster
from t5x_gpu.training.state import TrainState
from tests.checkpoint.test_checkpointer import abstract, save
from tests.helpers_disk import refused
from tests.helpers_train import Project, run_here

PR_SET_PDEATHSIG = 1
ARRAYS = 'checkpoint_2/state/ocdbt'  # the files that hold the arrays of the newer checkpoint
# What a run cannot open, in turn.
OF_A_RUN = {
  'checkpoint_4/manifest/metadata': errno.EACCES,
  'checkpoint_4/state/manifest.ocdbt': errno.EMFILE,
  'checkpoint_4/state/ocdbt': errno.ESTALE,
}


def outcome(folder: pathlib.Path, target: TrainState) -> dict[str, Any]:
  """Returns what a restore says, and the names in MODEL_DIR after it."""
  error, step = '', None
  try:
    with Checkpointer(folder) as checkpointer:
      step = int(checkpointer.restore_latest(target).state.step)
  except CheckpointError as e:
    error = f'{type(e).__name__}: {e}'
  distributed.gather_json('')  # all have ended
  return {'error': error, 'step': step, 'names': sorted(p.name for p in folder.iterdir())}


def rank(index: int, address: str, folder: pathlib.Path) -> None:
  """Does the work of one of two processes; writes its result to `folder`/INDEX.json."""
  distributed.join(
    cluster.detect({}, coordinator_address=address, process_count=2, process_index=index)
  )
  mesh = jax.make_mesh((2,), ('data',))
  values = np.random.default_rng(0).standard_normal((256, 8), np.float32)

  def state(step: int) -> TrainState:
    def split(array: np.ndarray, *axes: str) -> jax.Array:
      sharding = jax.NamedSharding(mesh, jax.P(*axes))
      return jax.make_array_from_callback(array.shape, sharding, lambda place: array[place])

    kernel = split(values + np.float32(step), 'data')
    return TrainState(
      step=split(np.asarray(step, np.int32)), params={'kernel': kernel}, opt_state={}
    )

  model_dir = folder / 'ranks'
  with Checkpointer(model_dir) as checkpointer:
    for step in (1, 2):
      save(checkpointer, step, state(step))
  target, found = abstract(state(0)), {}
  # Process 1 alone: it has too many open files; then, its mount lacks files that are there.
  for number in (errno.EMFILE, errno.ENOENT):
    with refused(ARRAYS if index else '', number):
      found[errno.errorcode[number]] = outcome(model_dir, target)
  with refused(ARRAYS if index else '', errno.EMFILE):
    try:
      restore_from(CheckpointAddress(ModelDir(model_dir), 2), target)
    except CheckpointError as e:
      found['of another run'] = f'{type(e).__name__}: {e}'
  if index == 0:
    for path in model_dir.glob('checkpoint_2/state/ocdbt.process_1/d/*'):
      path.write_bytes(bytes(path.stat().st_size))
  distributed.gather_json('')
  found['damaged'] = outcome(model_dir, target)
  (folder / f'{index}.json').write_text(json.dumps(found))


def runs(folder: pathlib.Path) -> dict[str, Any]:
  """Returns how a run ends that cannot open a file of MODEL_DIR, and what is in MODEL_DIR then."""
  project, found = Project(folder), {}
  assert project.run(TRAIN_STEPS=4, SAVE_PERIOD=2, num_devices=1).code in (0, None)
  shutil.copytree(project.model_dir, folder / 'good')
  for part, number in OF_A_RUN.items():
    with refused(part, number):
      result = project.run(TRAIN_STEPS=6, SAVE_PERIOD=2, num_devices=1)
    found[part] = {
      'code': result.code,
      'error': result.err,
      'names': sorted(p.name for p in project.model_dir.glob('*checkpoint_*')),
    }
  with refused('checkpoint_4/state/ocdbt', errno.EIO):
    result = run_here(lambda: checkpoint_tools.main(['verify', str(folder / 'good')]))
  found['verify'] = {'code': result.code, 'error': result.err + result.out, 'names': []}
  return found


def main() -> int:
  """Returns the largest exit code of the processes."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('folder', type=pathlib.Path)
  folder = parser.parse_args().folder
  address, pids = free_address(), []
  for index in range(2):
    pids.append(os.fork())
    if pids[-1] == 0:
      ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a test that gives up kills one
      rank(index, address, folder)
      return 0
  code = max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in pids)
  if code == 0:
    found = {'ranks': [json.loads((folder / f'{i}.json').read_text()) for i in range(2)]}
    (folder / 'project').mkdir()
    print(json.dumps({**found, 'runs': runs(folder / 'project')}))
  return code


if __name__ == '__main__':
  sys.exit(main())
