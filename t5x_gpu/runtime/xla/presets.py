"""Presets of XLA, NCCL and memory settings: `select` is a pure function of `table.TABLE`.

Nothing here touches the machine or jax. `flags.py` merges the result with the user's settings and
with what the installed jaxlib knows.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Optional

from t5x_gpu.errors import ConfigError, did_you_mean
from t5x_gpu.runtime.xla.table import ONE_LAYER, TABLE, Value, XlaSetting

PRESETS = {
  'safe': 'XLA with fewer custom kernels: to check whether a setting causes a bug',
  'default': 'overlaps communication with computation, as NVIDIA and the JAX authors advise',
  'max_overlap': 'default plus every further overlap that XLA offers: measure before you keep it',
  'deterministic': 'default without its optimizations; a program gives the same bits on every run',
  'none': 'sets nothing; your own XLA_FLAGS are still checked',
}
MIB = 2**20
# A combined collective is as large as one layer, within these bounds. Below, latency dominates;
# above, no computation is left to overlap with it.
LEAST_COMBINED_BYTES = 128 * MIB  # across hosts
XLA_COMBINED_BYTES = 30 * MIB  # XLA's default, enough inside a host
MOST_COMBINED_BYTES = {
  'a100': 1024 * MIB,
  'h100': 1024 * MIB,
  'h200': 1024 * MIB,
  'b200': 2048 * MIB,
}


@dataclasses.dataclass(frozen=True)
class XlaPreset:
  """The settings of one preset on one kind of machine, grouped by how they are set.

  Attributes:
    name: name of the preset.
    generation: 'h200', '' for a GPU that the table does not know, None for no GPU.
    compile_options: for `lowered.compile(compiler_options=...)`, as jax 0.10 spells them; see
      `flags.compile_options`.
    xla_flags: name (without dashes) -> value, for the variable XLA_FLAGS.
    env: other environment variables.
    jax_config: values for `jax.config.update`.
    settings: rows of the table, for their reasons.
  """

  name: str
  generation: Optional[str]
  compile_options: Mapping[str, Value]
  xla_flags: Mapping[str, Value]
  env: Mapping[str, str]
  jax_config: Mapping[str, Value]
  settings: tuple[XlaSetting, ...]


def check_preset(name: str) -> None:
  """Raises ConfigError unless `name` is a preset."""
  if name not in PRESETS:
    raise ConfigError(
      f'{name!r} is not an XLA preset.{did_you_mean(name, PRESETS)}',
      fix='Presets:\n' + '\n'.join(f'  {k}: {v}' for k, v in PRESETS.items()),
      docs='xla_flags.md',
    )


def generation(device_kind: Optional[str]) -> Optional[str]:
  """Returns the table's name for a GPU, 'h100'; '' for an unknown kind, None for None.

  Args:
    device_kind: the driver's name ('NVIDIA H100 80GB HBM3'), or the table's name itself.
  """
  if device_kind is None:
    return None
  # Variants share the die of a GPU in the table, with less NVLink, memory or clock.
  for pattern, name in (
    (r'A[18]00', 'a100'),
    (r'H[18]00|GH200|H20', 'h100'),
    (r'H200', 'h200'),
    (r'G?B[123]00', 'b200'),
  ):
    if re.search(rf'(?<![A-Z0-9])({pattern})(?![0-9])', device_kind, re.IGNORECASE):
      return name
  return ''


def select(
  preset: str = 'default',
  *,
  gpu: Optional[str] = None,
  num_hosts: int = 1,
  num_gpus: Optional[int] = None,
  mesh_axes: Collection[str] = (),
  layer_bytes: Optional[int] = None,
  layers_ahead: bool = False,
) -> XlaPreset:
  """Returns the settings of a preset for one kind of machine.

  Args:
    preset: one of `PRESETS`.
    gpu: device kind or generation; None for a machine without GPU, where nothing is set.
    num_hosts: hosts of the run.
    num_gpus: GPUs of the run, all hosts together; None for "several".
    mesh_axes: mesh axes larger than 1, if known.
    layer_bytes: size of one layer's gathered parameters; None for the smallest bound.
    layers_ahead: whether loops over layers communicate one layer ahead.
  Raises:
    ConfigError: no such preset.
  """
  check_preset(preset)
  kind = generation(gpu)
  rows = [
    row
    for row in TABLE
    if kind is not None
    and preset in row.presets
    and row.layers_ahead in (None, layers_ahead)
    and _applies(row, kind=kind, num_hosts=num_hosts, num_gpus=num_gpus, mesh_axes=mesh_axes)
  ]
  most = MOST_COMBINED_BYTES.get(kind or '', LEAST_COMBINED_BYTES)
  least = LEAST_COMBINED_BYTES if num_hosts > 1 else XLA_COMBINED_BYTES
  combined = min(max(layer_bytes or 0, least), most)
  rows = [
    dataclasses.replace(row, value=combined) if row.value == ONE_LAYER else row for row in rows
  ]

  def of_kind(wanted: str) -> dict[str, Value]:
    return {row.name: row.value for row in rows if row.kind == wanted}

  return XlaPreset(
    name=preset,
    generation=kind,
    compile_options=of_kind('compile_option'),
    xla_flags=of_kind('xla_flag'),
    jax_config=of_kind('jax_config'),
    env={k: str(v) for k, v in of_kind('env').items()},
    settings=tuple(rows),
  )


def _applies(
  row: XlaSetting, *, kind: str, num_hosts: int, num_gpus: Optional[int], mesh_axes: Collection[str]
) -> bool:
  several_gpus = num_hosts > 1 or num_gpus is None or num_gpus > 1
  return (
    (not row.generations or kind in row.generations)
    and row.hosts in ('any', 'several' if num_hosts > 1 else 'one')
    and (not row.axes or bool(set(row.axes) & set(mesh_axes)))
    and not set(row.without_axes) & set(mesh_axes)
    and (several_gpus or not row.several_gpus)
  )
