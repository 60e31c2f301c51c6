"""An anatomy as text for the terminal."""

from collections.abc import Mapping
from typing import Any

from t5x_gpu.metrics.throughput import pauses_that_took_time

_SHOWN = 8
_LONGEST = 70  # characters of a place in the model
_PARTS = (
  ('compute', 'compute'),
  ('exposed_communication', 'exposed communication'),
  ('idle', 'idle'),
  ('input_wait', 'input wait'),
  ('dispatch', 'dispatch'),
)


def anatomy_text(anatomy: Mapping[str, Any], *, where: str) -> str:
  """Returns the contents of anatomy.json, on one screen.

  Args:
    anatomy: contents of anatomy.json.
    where: the folder of the profile, as the user wrote it.
  """
  step = anatomy['seconds_per_step']
  lines = [
    f'profile of steps {anatomy["first_step"]}-{anatomy["last_step"]} ({anatomy["reason"]}): '
    f'{step:.4g} s per step on {anatomy["num_devices"]} x {anatomy["device_kind"]}',
    '  ' + ', '.join(f'{text} {_percent(anatomy["parts"][name], step)}' for name, text in _PARTS),
  ]
  pauses = pauses_that_took_time(anatomy['parts'])
  if pauses:
    shares = ', '.join(f'{text} {_percent(seconds, step)}' for text, seconds in pauses.items())
    lines.append(f'  between steps, on average since the start: {shares} of a step')
  lines += [
    f'  {_speed(anatomy)}',
    '  longest operations (ms per step and device, share of the step):',
  ]
  for o in anatomy['operations'][:_SHOWN]:
    place = f'  {_short(o["op_name"])}' if o['op_name'] else ''
    lines.append(
      f'    {1e3 * o["seconds"]:9.3f}  {o["share"]:6.1%}  {o["name"]} ({o["kind"]}){place}'
    )
  if anatomy['collectives']:
    lines.append('  collectives (ms and MB sent per step and device):')
  for c in anatomy['collectives'][:_SHOWN]:
    speed = '' if c['gb_per_second'] is None else f'  {c["gb_per_second"]:.3g} GB/s'
    over = f' over {" + ".join(c["axes"])}' if c['axes'] else ''
    lines.append(
      f'    {1e3 * c["seconds"]:9.3f}  {c["bytes"] / 1e6:8.2f}  {c["kind"]}{over}{speed}'
    )
  if len(anatomy['ranks']) > 1:
    last = max(anatomy['ranks'], key=lambda r: r['compute'])
    lines.append(
      f'  process {last["rank"]} on {last["host"]} computes longest: {last["compute"]:.4f} s'
    )
  lines.append(f'  {where}: anatomy.json; trace for Perfetto and `tensorboard --logdir {where}`')
  return '\n'.join(lines)


def _percent(seconds: float, step: float) -> str:
  return f'{seconds / step:.1%}' if step else '-'


def _speed(anatomy: Mapping[str, Any]) -> str:
  mfu = '' if anatomy['mfu'] is None else f', MFU {anatomy["mfu"]:.1%}'
  return (
    f'{anatomy["tokens_per_second_per_device"]:,.0f} tokens/s and '
    f'{anatomy["tflops_per_second_per_device"]:.4g} TFLOP/s per device{mfu}'
  )


def _short(op_name: str) -> str:
  """Returns the last parts of a path in the traced program."""
  parts = op_name.split('/')
  short = op_name if len(parts) <= 4 else '.../' + '/'.join(parts[-4:])
  return short if len(short) <= _LONGEST else '...' + short[-_LONGEST:]
