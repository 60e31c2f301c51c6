"""Run by test_faults: one import of everything, then the ranks of a run by fork, before any backend.

    python fault_ranks.py NUM_RANKS PORT TRAIN_ARGUMENT...

Rank i writes to rank_i.txt. The last line here is ENDS [[exit code, time], ...]. Ranks that are
stopped (SIGSTOP) would never end: they are killed once all others have ended.
"""

import json
import os
import signal
import sys
import time

from t5x_gpu import cli, train

POLL_SECONDS = 0.01
STOPPED_SECONDS = 1


def rank(index: int, count: int, port: str, argv: list[str]) -> None:
  """Becomes a rank, as `python -m t5x_gpu.train` would be it."""
  file = os.open(f'rank_{index}.txt', os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
  os.dup2(file, 1)
  os.dup2(file, 2)
  os.environ['RANK_OF_TEST'] = str(index)
  cli.run_main(lambda: train.main([
      *argv, f'--coordinator_address=127.0.0.1:{port}', f'--process_count={count}',
      f'--process_index={index}']))


def is_stopped(pid: int) -> bool:
  with open(f'/proc/{pid}/stat', encoding='ascii', errors='replace') as f:
    return f.read().rpartition(')')[2].split()[0] == 'T'


def main() -> None:
  count, port, argv = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
  pids = []
  for index in range(count):
    pid = os.fork()
    if pid == 0:
      rank(index, count, port, argv)
    pids.append(pid)
  ends: dict[int, tuple[int, float]] = {}
  while len(ends) < count:
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid:
      ends[pid] = os.waitstatus_to_exitcode(status), time.time()
      continue
    left = [pid for pid in pids if pid not in ends]
    if ends and all(is_stopped(pid) for pid in left):
      for pid in left:
        os.kill(pid, signal.SIGKILL)
    time.sleep(POLL_SECONDS)
  print('ENDS ' + json.dumps([ends[pid] for pid in pids]), flush=True)


if __name__ == '__main__':
  main()
