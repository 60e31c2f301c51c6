"""Run by test_faults: one import of everything, then the ranks of each run by fork.

Reads a run per line, {"count", "folder", "port", "fault", "argv", "hosts"}; rank i of it writes
to folder/rank_i.txt, and counts as a separate host if "hosts" is true. Answers ENDS
[[exit code, time], ...]. Ranks that are stopped (SIGSTOP) would never end: they are killed once all
others have ended.
"""

import json
import os
import signal
import sys
import time

from t5x_gpu import cli, train

POLL_SECONDS = 0.01


def rank(index: int, run: dict) -> None:
  """Becomes a rank, as `python -m t5x_gpu.train` does."""
  os.chdir(run['folder'])
  file = os.open(f'rank_{index}.txt', os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
  os.dup2(file, 1)
  os.dup2(file, 2)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.environ.update(RANK_OF_TEST=str(index), FAULT=run['fault'])
  if run['hosts']:
    os.environ['T5X_GPU_DOMAIN'] = f'host {index}'
  sys.path.insert(0, run['folder'])
  cli.run_main(
    lambda: train.main(
      [
        *run['argv'],
        f'--coordinator_address=127.0.0.1:{run["port"]}',
        f'--process_count={run["count"]}',
        f'--process_index={index}',
      ]
    )
  )


def is_stopped(pid: int) -> bool:
  with open(f'/proc/{pid}/stat', encoding='ascii', errors='replace') as f:
    return f.read().rpartition(')')[2].split()[0] == 'T'


def wait(pids: list[int]) -> list[tuple[int, float]]:
  """Returns exit code and time of each."""
  ends: dict[int, tuple[int, float]] = {}
  while len(ends) < len(pids):
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid:
      ends[pid] = os.waitstatus_to_exitcode(status), time.time()
      continue
    left = [pid for pid in pids if pid not in ends]
    if ends and all(is_stopped(pid) for pid in left):
      for pid in left:
        os.kill(pid, signal.SIGKILL)
    time.sleep(POLL_SECONDS)
  return [ends[pid] for pid in pids]


def main() -> None:
  for line in sys.stdin:
    run = json.loads(line)
    pids = []
    for index in range(run['count']):
      pid = os.fork()
      if pid == 0:
        rank(index, run)
      pids.append(pid)
    print('ENDS ' + json.dumps(wait(pids)), flush=True)


if __name__ == '__main__':
  main()
