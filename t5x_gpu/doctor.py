"""Check this machine before a run: `python -m t5x_gpu.doctor`.

Prints one line per check (ok, warn or FAIL) with the finding and the fix. Exits with 1 on a FAIL.
Started like a run of several processes (srun, mpirun, ...), it checks every host and measures the
links between them. Process 0 prints all checks, the others only problems.
"""

import argparse
import dataclasses
import json
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

from t5x_gpu import cli
from t5x_gpu.runtime import machine
from t5x_gpu.runtime.cluster import cluster as cluster_lib
from t5x_gpu.runtime.cluster.cluster import ClusterInfo
from t5x_gpu.runtime.health import checks as checks_lib
from t5x_gpu.runtime.health.checks import FAIL, OK, WARN, Check
from t5x_gpu.runtime.xla import flags as flags_lib
from t5x_gpu.runtime.xla import presets

EXAMPLES = """examples:
  {prog}
  {prog} --expect_gpus=8 --model_dir=/scratch/me/run1
  srun -N 2 --ntasks-per-node=8 --gpus-per-node=8 {prog} --expect_gpus=8
  {prog} --flags
"""
_COLORS = {OK: '\033[32m', WARN: '\033[33m', FAIL: '\033[31m'}


@dataclasses.dataclass(frozen=True)
class DoctorRequest:
  """What to check.

  Attributes:
    model_dir: folder whose disk is measured.
    expect_gpus: GPUs that jax must see on this machine, over all its processes; None for all GPUs
      of the machine.
    preset: XLA preset to try.
    timeout_seconds: deadline of each child process.
    cluster: this process among the doctor's processes.
    cluster_flags: the flags that define `cluster`, if any.
  """

  model_dir: str
  expect_gpus: Optional[int] = None
  preset: str = 'default'
  timeout_seconds: float = 60
  cluster: ClusterInfo = ClusterInfo('single', reason='no launcher and no flags')
  cluster_flags: tuple[str, ...] = ()

  @property
  def is_first_here(self) -> bool:
    """Whether this process checks resources that the processes of a host share."""
    return not self.cluster.local_process_index  # None if unknown: then every process does

  @property
  def expected_here(self) -> Optional[int]:
    """GPUs that jax must see in this process."""
    return self.expect_gpus and self.expect_gpus // (self.cluster.local_process_count or 1)


def examine(request: DoctorRequest) -> Iterator[Check]:
  """Yields each check as soon as it is done; returns in time even if something hangs.

  Args:
    request: what to check.
  """
  on_machine = max(machine.find_gpus({}).count, len(machine.pci_numa_nodes()))
  yield Check(
    'processes',
    WARN if request.cluster.warnings else OK,
    str(request.cluster),
    '\n'.join(request.cluster.warnings),
  )
  if request.is_first_here:
    yield from checks_lib.quick_checks(expect_gpus=request.expect_gpus)
    applied = flags_lib.prepare_environment(request.preset, environ=dict(os.environ))
    yield Check(
      'xla flags', WARN if applied.warnings else OK, applied.summary, '\n'.join(applied.warnings)
    )
  yield from _examine_devices(request, on_machine=on_machine)
  if request.is_first_here:
    done = machine.run_with_deadline(
      [sys.executable, '-m', 't5x_gpu.tools.doctor.measure_disk', request.model_dir],
      seconds=request.timeout_seconds,
    )
    yield checks_lib.check_disk(
      checks_lib.json_lines(done.output).get('disk'),
      folder=request.model_dir,
      problem=done.problem or _last_line(done.errors),
    )


def _examine_devices(request: DoctorRequest, *, on_machine: int) -> Iterator[Check]:
  """Yields checks of this process's devices, then of the links between all processes' devices."""
  seconds = request.timeout_seconds * (3 if on_machine else 1)  # NCCL, CUDA and autotuning
  found, problem = _measure('devices', request, seconds=seconds)
  devices = found.get('devices')
  chosen = request.cluster.local_device_ids
  seen = checks_lib.check_devices(
    devices,
    on_machine=len(chosen) if chosen else on_machine,
    expected=request.expected_here,
    environ=os.environ,
    problem=problem,
  )
  yield seen
  gpus = devices['count'] if devices and devices['platform'] != 'cpu' else 0
  if request.is_first_here:
    versions = checks_lib.installed_versions()
    yield checks_lib.check_library(
      'cudnn',
      versions,
      gpus=max(gpus, on_machine),
      loaded=(devices or {}).get('cudnn'),
      built=(devices or {}).get('cudnn_built'),
    )
    yield checks_lib.check_library('nccl', versions, gpus=max(gpus, on_machine))
  if devices is None:
    return  # reported above: jax did not start
  yield checks_lib.check_matmul(found.get('matmul'), devices=devices, problem=problem)
  if request.cluster.process_count == 1 and gpus < 2:
    yield Check('all-reduce', OK, f'not measured: jax sees {gpus or "no"} GPU')
  elif seen.status != FAIL:  # a process with CPU devices would make all other processes wait
    join = int(max(request.timeout_seconds, 1))
    found, problem = _measure(
      'all_reduce', request, f'--join_seconds={join}', seconds=seconds + join
    )
    check = checks_lib.check_all_reduce(found, problem=problem)
    if request.is_first_here or check.status == FAIL:  # one warning per host is enough
      yield check


def _measure(
  what: str, request: DoctorRequest, *flags: str, seconds: float
) -> tuple[Mapping[str, Any], str]:
  """Returns the output of a measuring child, and its last line if it failed."""
  # PREALLOCATE: do not take 90% of a GPU's memory, which another job may be using.
  environ = {
    'CUDA_DEVICE_ORDER': 'PCI_BUS_ID',
    **os.environ,
    'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
  }
  done = machine.run_with_deadline(
    [
      sys.executable,
      '-m',
      't5x_gpu.tools.doctor.measure',
      what,
      f'--preset={request.preset}',
      *request.cluster_flags,
      *flags,
    ],
    seconds=seconds,
    environ=environ,
  )
  ended = f'ended by {signal.Signals(-done.code).name}' if (done.code or 0) < 0 else ''
  return checks_lib.json_lines(done.output), done.problem or ended or _last_line(done.errors)


def _last_line(text: str) -> str:
  return next((line for line in reversed(text.splitlines()) if line.strip()), '').strip()


def format_check(check: Check, *, color: bool = False) -> str:
  """Returns `ok    python      3.11.2 (...)`, with the fix on separate lines."""
  status = f'{check.status:5}'
  if color:
    status = f'{_COLORS[check.status]}{status}\033[0m'
  lines = [f'{status} {check.name:10}  {check.value}']
  lines += [f'{"":18}{line}' for line in check.fix.splitlines()]
  return '\n'.join(lines)


def _add_flags(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('doctor')
  group.add_argument(
    '--model_dir',
    default='.',
    metavar='FOLDER',
    help='measure the disk of this folder (default: the working directory)',
  )
  group.add_argument(
    '--expect_gpus',
    type=int,
    metavar='N',
    help='number of GPUs that jax must see on each machine; any other fails',
  )
  group.add_argument(
    '--preset',
    default='default',
    metavar='NAME',
    help=f'XLA preset to try: {", ".join(presets.PRESETS)}',
  )
  group.add_argument(
    '--timeout_seconds',
    type=float,
    default=60,
    metavar='S',
    help='deadline of each check that could hang (default: 60)',
  )
  group.add_argument(
    '--json', action='store_true', help='print JSON: one object, or one line per process'
  )
  group.add_argument(
    '--flags', action='store_true', help='print the table of XLA, NCCL and memory settings instead'
  )
  cluster_lib.add_flags(parser)


def main(argv: Sequence[str]) -> int:
  """Returns 1 if a check failed, else 0."""
  args = cli.parse_args(
    'python -m t5x_gpu.doctor',
    'Checks this machine before a run: versions, GPUs, links, speeds.',
    argv,
    extra=_add_flags,
    without_config='Leave out the gin files and bindings; --model_dir names the folder of the run. '
    'To check a run, use python -m t5x_gpu.train --dry_run.',
    examples=EXAMPLES,
  )
  presets.check_preset(args.extra.preset)
  if args.extra.flags:
    print(presets.preset_table(), end='')
    return 0
  cluster = cluster_lib.detect_here(args.extra)
  request = DoctorRequest(
    model_dir=args.extra.model_dir,
    expect_gpus=args.extra.expect_gpus,
    preset=args.extra.preset,
    timeout_seconds=args.extra.timeout_seconds,
    cluster=cluster,
    cluster_flags=cluster_lib.as_flags(args.extra),
  )
  if args.extra.json:
    return _report_json(list(examine(request)), cluster)
  return _report(examine(request), cluster)


def _report(checks: Iterable[Check], cluster: ClusterInfo) -> int:
  """Prints each check (process 0) or only the problems (others); returns the exit code."""
  statuses = []
  failed = []
  who = (
    f'{socket.gethostname()}, process {cluster.process_index}: ' if (cluster.process_index) else ''
  )
  for check in checks:
    statuses.append(check.status)
    failed += [check.name] * (check.status == FAIL)
    if not who or check.status != OK:
      lines = format_check(check, color=sys.stdout.isatty()).splitlines()
      # One write, so that lines of several processes do not mix.
      print('\n'.join(who + line for line in lines), flush=True)
  if not who:
    print(
      f'{len(statuses)} checks, {statuses.count(WARN)} warnings, {len(failed)} failed'
      + (f': {", ".join(failed)}' if failed else '')
    )
  return int(bool(failed))


def _report_json(checks: Sequence[Check], cluster: ClusterInfo) -> int:
  failed = [check.name for check in checks if check.status == FAIL]
  report = {
    'host': socket.gethostname(),
    'process': cluster.process_index,
    'failed': failed,
    'checks': [dataclasses.asdict(check) for check in checks],
  }
  print(json.dumps(report, indent=2 if cluster.process_count == 1 else None))
  return int(bool(failed))


if __name__ == '__main__':
  cli.run_main(lambda: main(sys.argv[1:]))
