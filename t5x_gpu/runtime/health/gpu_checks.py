"""Checks of GPUs, links, speeds and disks, from the output of nvidia-smi and of child processes.

Each function takes printed output and returns a `Check`, so all can be tested without a GPU.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.runtime import hardware
from t5x_gpu.runtime.health.checks import FAIL, GIB, OK, WARN, Check
from t5x_gpu.runtime.xla.presets import generation

# Share of the datasheet: a healthy GPU reaches 65 to 85% on large bfloat16 matmuls.
LEAST_MATMUL_SHARE = 0.55
# Allowed spread between the GPUs of one host; the slowest GPU sets the pace of all.
MOST_SPREAD = 0.1
# One direction, bytes/s: half of the total that the data sheets print.
NVLINK = {'a100': 300e9, 'h100': 450e9, 'h200': 450e9, 'b200': 900e9}
LEAST_LINK_SHARE = 0.5
LEAST_DISK = 100e6
LEAST_FREE = 20 * GIB
# Bits of nvidia-smi's clocks_throttle_reasons.active: hardware slowdown, by heat, by power brake;
# software slowdown by heat. Every healthy GPU reaches its power cap (4) under load.
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
SLOWDOWNS = {0x8: 'hardware slowdown', 0x40: 'heat', 0x80: 'power brake', 0x20: 'heat'}


def json_lines(text: str) -> dict[str, Any]:
  """Merges the objects that a measuring child printed into one dictionary."""
  found = {}
  for line in text.splitlines():
    try:
      found |= json.loads(line)
    except (ValueError, TypeError):
      continue  # a line printed by a library
  return found


def check_devices(
  found: Optional[Mapping[str, Any]],
  *,
  on_machine: int,
  problem: str = '',
  expected: Optional[int] = None,
  environ: Mapping[str, str],
) -> Check:
  """Checks that jax sees the expected GPUs.

  Args:
    found: 'devices' of the measuring child; None if it failed before that.
    on_machine: GPUs that the driver or the PCI bus shows.
    problem: the child's last line.
    expected: GPUs that the user expects.
    environ: JAX_PLATFORMS and CUDA_VISIBLE_DEVICES in it may hide GPUs.
  """
  if found is None:
    fix = 'Read the whole message: python -c "import jax; print(jax.devices())"'
    return Check('devices', FAIL, f'jax did not start: {problem or "no answer"}', fix)
  seen = 0 if found['platform'] == 'cpu' else found['count']
  kinds = ', '.join(found['kinds'])
  value = f'{seen} x {kinds}' if seen else f'jax runs on {found["platform"]}'
  hiding = {
    name: environ[name] for name in ('JAX_PLATFORMS', 'CUDA_VISIBLE_DEVICES') if name in environ
  }
  hidden = ', '.join(f'{name}={text}' for name, text in hiding.items())
  unhide = (
    f'{hidden} is set: unset it to see all GPUs.'
    if hidden
    else ('JAX_PLATFORMS=cuda python -c "import jax; jax.devices()" shows why.')
  )
  reason = f': {problem}' if problem and not seen else ''
  if expected is not None and seen != expected:
    if on_machine < expected:
      unhide = f'This machine shows {on_machine} GPUs: request {expected} from the scheduler.'
    return Check('devices', FAIL, f'{value}, {expected} expected{reason}', unhide)
  if on_machine and not seen:
    # A warning if the user asked for the CPU; otherwise a mistake.
    status = WARN if environ.get('JAX_PLATFORMS') == 'cpu' else FAIL
    return Check('devices', status, f'{value}, though {on_machine} GPUs are here{reason}', unhide)
  if seen < on_machine and not hidden:
    return Check('devices', FAIL, f'{value}, though {on_machine} GPUs are here', unhide)
  if not on_machine and not seen:
    return Check('devices', OK, f'{value}, no GPU on this machine')
  return Check('devices', OK, value + (f' ({hidden})' if hidden else ''))


def check_links(topology: str, *, gpus: int) -> Check:
  """Checks how the GPUs of this host are linked.

  Args:
    topology: output of `nvidia-smi topo -m`.
    gpus: number of GPUs on this machine.
  """
  if gpus < 2:
    return Check('nvlink', OK, 'one GPU, no link needed' if gpus else 'no GPU here')
  rows = re.findall(
    r'^\s*GPU(\d+)((?:\s+(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS))+)', topology, re.MULTILINE
  )
  cells = {(int(i), j): cell for i, row in rows for j, cell in enumerate(row.split()[: len(rows)])}
  pairs = [cell for (i, j), cell in cells.items() if i < j]
  if not pairs:
    return Check('nvlink', WARN, 'nvidia-smi topo -m shows no links', 'Run it by hand.')
  kinds = {kind: pairs.count(kind) for kind in sorted(set(pairs))}
  value = ', '.join(f'{count} pairs by {kind}' for kind, count in kinds.items())
  linked = sum(count for kind, count in kinds.items() if kind.startswith('NV'))
  if linked == len(pairs):
    return Check('nvlink', OK, value)
  fix = (
    'Some pairs have no NVLink: keep num_partitions within pairs that have it, or have the bridge '
    'or switch checked.'
    if linked
    else 'No NVLink: tensor parallelism will be slow, prefer data or fsdp. On an SXM machine, is '
    'nvidia-fabricmanager running?'
  )
  return Check('nvlink', WARN, value, fix)


def check_matmul(
  rates: Optional[Sequence[float]], *, devices: Optional[Mapping[str, Any]], problem: str = ''
) -> Check:
  """Compares the speed of a large matmul with the datasheet.

  Args:
    rates: FLOP/s per device; None if not measured.
    devices: 'devices' of the measuring child.
    problem: why `rates` is missing.
  """
  if not rates or devices is None:
    fix = 'If it hangs: nvidia-smi, dmesg | grep -i xid'
    return Check('matmul', FAIL, problem or 'not measured', fix)
  if devices['platform'] == 'cpu':
    return Check('matmul', OK, f'{rates[0] / 1e9:.0f} GFLOP/s float32 on the CPU')
  slowest, fastest = min(rates), max(rates)
  each = f'{slowest / 1e12:.0f}' + (f' to {fastest / 1e12:.0f}' if len(rates) > 1 else '')
  peak = hardware.peak_flops(devices['kinds'][0], 'bfloat16')
  share = f', {slowest / peak:.0%} of {peak / 1e12:.0f}' if peak else ', peak unknown'
  value = f'{each} TFLOP/s bfloat16{share}'
  if slowest < fastest * (1 - MOST_SPREAD):
    fix = f'GPU {list(rates).index(slowest)} is slower than the others, and all will wait for it: '
    return Check('matmul', WARN, value, fix + 'is it hot, throttled, or in use?')
  if peak and slowest < peak * LEAST_MATMUL_SHARE:
    return Check('matmul', WARN, value, 'Is another job on this GPU (nvidia-smi)? See also clocks.')
  return Check('matmul', OK, value)


def check_all_reduce(found: Mapping[str, Any], *, nvlink: bool = True, problem: str = '') -> Check:
  """Checks the bus bandwidth of an all-reduce, per tier of links.

  Args:
    found: from the measuring child: 'all_reduce', tier -> bytes/s; 'together', the devices; or a
      'problem' and its fix.
    nvlink: whether NVLink connects the GPUs.
    problem: why the child ended early.
  """
  together, rates = found.get('together'), found.get('all_reduce')
  if 'problem' in found:
    return Check('all-reduce', FAIL, found['problem']['what'], found['problem']['fix'])
  if rates is None:
    came = f'{together["topology"]} were ready, then' if together else 'did not start'
    fix = (
      'If one of several processes prints another error, that is the cause. NCCL_DEBUG=INFO '
      'shows where it stops; check /dev/shm, the network and the driver first.'
    )
    return Check('all-reduce', FAIL, f'{came}: {problem or "no answer"}', fix)
  value = (
    ', '.join(f'{rate / 1e9:.3g} GB/s {tier.replace("_", " ")}' for tier, rate in rates.items())
    + f' ({together["topology"]})'
  )
  link = NVLINK.get(generation(together['kind']) or '')
  if nvlink and link and rates.get('in_host', link) < LEAST_LINK_SHARE * link:
    fix = 'NCCL_DEBUG=INFO shows which transport it chose; P2P may be off (IOMMU, ACS).'
    return Check('all-reduce', WARN, f'{value}, NVLink reaches {link / 1e9:.0f}', fix)
  return Check('all-reduce', OK, value)


def check_clocks(text: Optional[str], *, gpus: int) -> Check:
  """Checks the GPUs' clocks under load, and what slows them.

  Args:
    text: a line 'current, maximum, reasons' per GPU, MHz and a bit mask.
    gpus: number of GPUs that jax sees.
  """
  if not gpus:
    return Check('clocks', OK, 'not measured: jax sees no GPU')
  rows = [[cell.strip() for cell in line.split(',')] for line in (text or '').splitlines()]
  rows = [row for row in rows if len(row) == 3 and row[0].isdigit() and row[1].isdigit()]
  if not rows:
    fix = 'nvidia-smi -q -d CLOCK,PERFORMANCE'
    return Check('clocks', WARN, 'nvidia-smi did not report them', fix)
  slow = {}
  for i, (_, _, reasons) in enumerate(rows):
    mask = int(reasons, 16) if re.fullmatch(r'0x[0-9a-fA-F]+', reasons) else 0
    if names := sorted({name for bit, name in SLOWDOWNS.items() if mask & bit}):
      slow[i] = ' and '.join(names)
  lowest = min(int(row[0]) for row in rows)
  value = f'{lowest} of {rows[0][1]} MHz under load'
  if slow:
    reasons = ', '.join(f'GPU {i}: {reason}' for i, reason in slow.items())
    return Check('clocks', WARN, f'{value}; {reasons}', 'Have cooling and power checked.')
  return Check('clocks', OK, value)


def check_disk(found: Optional[Mapping[str, float]], *, folder: str, problem: str = '') -> Check:
  """Checks how fast checkpoints can be written to a folder.

  Args:
    found: 'disk' of the measuring child; None if it failed.
    folder: the measured folder.
    problem: why the child failed.
  """
  if found is None:
    fix = 'Choose a folder that you can write to: --model_dir=FOLDER'
    return Check('disk', FAIL, f'{folder}: {problem or "no answer"}', fix)
  value = (
    f'{folder}: write {found["write"] / 1e6:.0f} MB/s, read {found["read"] / 1e6:.0f} MB/s, '
    f'{found["sync_seconds"] * 1e3:.0f} ms per sync, {found["free"] / GIB:.0f} GiB free'
  )
  if found['write'] < LEAST_DISK:
    minutes = 12e9 / found['write'] / 60
    fix = f'Checkpoints will be slow: a model of 1 billion parameters with Adam takes {minutes:.0f}'
    return Check('disk', WARN, value, fix + ' min here. Use a local or parallel file system.')
  if found['free'] < LEAST_FREE:
    return Check('disk', WARN, value, 'Free some space, or keep fewer checkpoints.')
  return Check('disk', OK, value)
