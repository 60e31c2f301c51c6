"""Look at this machine before a run does: `python -m t5x_gpu.doctor`.

One line per check, ok, warn or FAIL, with what was found and what to do. Exit code 1 if any failed.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

from t5x_gpu import cli
from t5x_gpu.errors import ConfigError
from t5x_gpu.runtime import (
    children, gpu_detect, health, health_gpus, xla_docs, xla_flags, xla_presets)
from t5x_gpu.runtime.health import FAIL, OK, WARN, Check

EXAMPLES = """examples:
  {prog}
  {prog} --expect_gpus=8 --model_dir=/scratch/me/run1
  {prog} --flags
"""
_COLOURS = {OK: '\033[32m', WARN: '\033[33m', FAIL: '\033[31m'}


@dataclasses.dataclass(frozen=True)
class Request:
  """What to look at.

  Attributes:
    model_dir: folder whose disk is measured.
    expect_gpus: GPUs that jax must see; None for whatever the machine has.
    preset: XLA preset to try.
    timeout_seconds: deadline of each child process.
  """
  model_dir: str
  expect_gpus: Optional[int] = None
  preset: str = 'default'
  timeout_seconds: float = 60


def examine(request: Request) -> Iterator[Check]:
  """Yields each check as soon as it is done; returns in time whatever hangs.

  Args:
    request: what to look at.
  """
  yield from health.quick_checks(expect_gpus=request.expect_gpus)
  on_machine = max(gpu_detect.find_gpus({}).count, len(gpu_detect.pci_numa_nodes()))
  environ = dict(os.environ)
  applied = xla_flags.prepare_environment(request.preset, environ=environ)
  yield Check('xla flags', WARN if applied.warnings else OK,
              applied.line.removeprefix('xla preset: '), '\n'.join(applied.warnings))
  yield from _examine_gpus(request, on_machine, environ)
  module = [sys.executable, '-m', 't5x_gpu.runtime.health_measure']
  done = children.run([*module, 'disk', request.model_dir], seconds=request.timeout_seconds)
  yield health_gpus.check_disk(health_gpus.json_lines(done.output).get('disk'),
                               folder=request.model_dir,
                               problem=done.problem or _last_line(done.errors))


def _examine_gpus(request: Request, on_machine: int, environ: Mapping[str, str]
                  ) -> Iterator[Check]:
  topology = children.run(['nvidia-smi', 'topo', '-m'], seconds=request.timeout_seconds
                          ) if on_machine > 1 else None
  links = health_gpus.check_links(topology.output if topology else '', gpus=on_machine)
  yield links
  # Not 90% of a GPU's memory for a look: somebody else may be on it.
  environ = {**environ, 'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
  seconds = request.timeout_seconds * (3 if on_machine else 1)  # NCCL, CUDA and autotuning
  done = children.run([sys.executable, '-m', 't5x_gpu.runtime.health_measure', 'jax'],
                      seconds=seconds, environ=environ)
  found = health_gpus.json_lines(done.output)
  devices = found.get('devices')
  problem = done.problem or _last_line(done.errors)
  yield health_gpus.check_devices(devices, on_machine=on_machine, expected=request.expect_gpus,
                                  environ=os.environ, problem=problem)
  gpus = devices['count'] if devices and devices['platform'] != 'cpu' else 0
  versions = health.installed_versions()
  yield health.check_library('cudnn', versions, gpus=max(gpus, on_machine),
                             loaded=(devices or {}).get('cudnn'),
                             built=(devices or {}).get('cudnn_built'))
  yield health.check_library('nccl', versions, gpus=max(gpus, on_machine))
  if devices is None:
    return  # Said already: jax did not start.
  yield health_gpus.check_matmul(found.get('matmul'), devices=devices, problem=problem)
  yield health_gpus.check_all_reduce(found.get('all_reduce'), devices=devices, problem=problem,
                                     nvlink='NV' in links.value)
  yield health_gpus.check_clocks(found.get('clocks'), gpus=gpus)


def _last_line(text: str) -> str:
  return next((line for line in reversed(text.splitlines()) if line.strip()), '').strip()


def format_check(check: Check, *, colour: bool = False) -> str:
  """Returns `ok    python      3.11.2 (...)`, with the fix on lines of its own."""
  status = f'{check.status:5}'
  if colour:
    status = f'{_COLOURS[check.status]}{status}\033[0m'
  lines = [f'{status} {check.name:10}  {check.value}']
  lines += [f'{"":18}{line}' for line in check.fix.splitlines()]
  return '\n'.join(lines)


def _add_flags(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('doctor')
  group.add_argument('--model_dir', default='.', metavar='FOLDER',
                     help='measure the disk of this folder (default: the working folder)')
  group.add_argument('--expect_gpus', type=int, metavar='N',
                     help='GPUs that jax must see on this machine; fail at any other number')
  group.add_argument('--preset', default='default', metavar='NAME',
                     help=f'XLA preset to try: {", ".join(xla_presets.PRESETS)}')
  group.add_argument('--timeout_seconds', type=float, default=60, metavar='S',
                     help='deadline of each check that could hang (default: 60)')
  group.add_argument('--json', action='store_true', help='print one JSON object')
  group.add_argument('--flags', action='store_true',
                     help='print the table of XLA, NCCL and memory settings instead')
  group.add_argument('--markdown', action='store_true',
                     help='with --flags: print the page docs/xla_flags.md')


def main(argv: Sequence[str]) -> int:
  """Returns 1 if a check failed, else 0."""
  args = cli.parse_args('python -m t5x_gpu.doctor',
                        'Looks at this machine before a run does: versions, GPUs, links, speeds.',
                        argv, extra=_add_flags, gin_file_required=False, takes_config=False,
                        examples=EXAMPLES)
  if args.has_config:
    raise ConfigError('The doctor looks at a machine, not at a configuration.',
                      fix='Leave the gin files and bindings out; --model_dir names the folder of '
                          'the run. A run itself is checked by python -m t5x_gpu.train --dry_run.')
  if args.extra.markdown and not args.extra.flags:
    raise ConfigError('--markdown is set without --flags.', fix='Add --flags.')
  xla_presets.check_preset(args.extra.preset)
  if args.extra.flags:
    print(xla_docs.page() if args.extra.markdown else xla_docs.table(), end='')
    return 0
  request = Request(model_dir=args.extra.model_dir, expect_gpus=args.extra.expect_gpus,
                    preset=args.extra.preset, timeout_seconds=args.extra.timeout_seconds)
  checks = []
  for check in examine(request):
    checks.append(check)
    if not args.extra.json:
      print(format_check(check, colour=sys.stdout.isatty()), flush=True)
  failed = [check.name for check in checks if check.status == FAIL]
  if args.extra.json:
    print(json.dumps({'failed': failed, 'checks': [dataclasses.asdict(c) for c in checks]},
                     indent=2))
  else:
    warned = sum(check.status == WARN for check in checks)
    print(f'{len(checks)} checks, {warned} warnings, {len(failed)} failed'
          + (f': {", ".join(failed)}' if failed else ''))
  return int(bool(failed))


if __name__ == '__main__':
  cli.run_main(lambda: main(sys.argv[1:]))
