"""Sets XLA flags, NCCL and memory variables before jax starts a backend; never ends the process.

    applied = xla_flags.prepare_environment('default', num_hosts=2)
    print(applied.report())
    ...
    step.lower(...).compile(compiler_options=applied.compile_options)

The user's settings win: flags in XLA_FLAGS stay, in their order, and replace the preset's flags of
the same name. Flags that the installed jaxlib does not know are dropped with a warning, also the
user's, because XLA would abort. This module never imports jax, so it can run before everything
else.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Collection, Mapping, MutableMapping
from typing import Optional

from t5x_gpu.runtime import gpus
from t5x_gpu.runtime.cluster import jax_internals
from t5x_gpu.runtime.xla import probe as xla_probe
from t5x_gpu.runtime.xla.applied import Applied
from t5x_gpu.runtime.xla.presets import XlaPreset, select
from t5x_gpu.runtime.xla.table import Value
from t5x_gpu.runtime.xla.user_flags import canonical, known_flags, read_flags

AUTO = 'auto'
_MEMORY = ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION')
_PIPELINED = re.compile(r'xla_gpu_enable_pipelined_(all_gather|all_reduce|reduce_scatter)')


def prepare_environment(
  preset: str = 'default',
  *,
  gpu: Optional[str] = AUTO,
  num_hosts: int = 1,
  num_gpus: Optional[int] = None,
  environ: Optional[MutableMapping[str, str]] = None,
) -> Applied:
  """Sets up the environment and returns the settings; call once, before jax starts a backend.

  Call it in the training process, not in its launcher: a child process cannot distinguish inherited
  variables from the user's.

  Args:
    preset: 'safe', 'default', 'max_overlap', 'deterministic' or 'none'.
    gpu: device kind ('NVIDIA H200') or generation ('h200'); None for no GPU; 'auto' to detect.
    num_hosts: hosts of the run.
    num_gpus: GPUs of the run, all hosts together; None if unknown.
    environ: `os.environ` by default.
  Raises:
    ConfigError: no such preset.
  """
  live = environ is None
  environ = os.environ if environ is None else environ
  found = _find_gpus(gpu, num_gpus, environ)
  if num_gpus is None and gpu == AUTO and num_hosts == 1:
    num_gpus = found.count
  wanted = select(preset, gpu=found.kind, num_hosts=num_hosts, num_gpus=num_gpus)
  system = xla_probe.installed()
  merged = _merge_flags(wanted, environ.get('XLA_FLAGS', ''), system)
  options, refused = _usable_options(wanted, merged.user_flags, system)
  warnings = [*merged.warnings, *_refusals(refused), *_memory_problems(environ), *_too_late(live)]
  env = {name: value for name, value in wanted.env.items() if not _is_set(name, environ)}
  config = {name: value for name, value in wanted.jax_config.items() if name.upper() not in environ}
  kept = _kept(wanted, merged.user_flags, env=env, config=config)
  used = {*map(canonical, options), *env, *config, *map(xla_probe.flag_name, merged.flags)}
  if merged.flags or 'XLA_FLAGS' in environ:
    environ['XLA_FLAGS'] = ' '.join(merged.flags)
  environ.update(env)
  _set_jax_config(config, environ, live=live)
  return Applied(
    preset=preset,
    gpu=found.kind,
    generation=wanted.generation,
    num_hosts=num_hosts,
    num_gpus=num_gpus,
    compile_options=options,
    xla_flags=merged.flags,
    env=env,
    jax_config=config,
    dropped=merged.dropped | refused,
    kept=kept,
    user_flags=tuple(sorted(merged.user_flags)),
    warnings=tuple(warnings),
    reason=found.reason,
    jaxlib=str(system),
    settings=tuple(row for row in wanted.settings if row.name in used - set(kept)),
  )


def _find_gpus(
  gpu: Optional[str], num_gpus: Optional[int], environ: Mapping[str, str]
) -> gpus.MachineGpus:
  if gpu == AUTO:
    return gpus.find_gpus(environ)
  return gpus.MachineGpus(gpu, num_gpus or 0, 'given' if gpu else 'none asked for')


def _too_late(live: bool) -> list[str]:
  if not (live and jax_internals.backends_started()):
    return []
  return [
    'jax has already started a backend: it is too late for flags and variables in this process. '
    'Call prepare_environment first.'
  ]


def _kept(
  wanted: XlaPreset,
  user_flags: Collection[str],
  *,
  env: Mapping[str, str],
  config: Mapping[str, Value],
) -> tuple[str, ...]:
  """Returns the names of settings for which the user's value replaces the preset's."""
  flags = {n for n in (*wanted.xla_flags, *wanted.compile_options) if canonical(n) in user_flags}
  values = {n.upper() for n in wanted.jax_config if n not in config}
  return tuple(sorted(flags | values | (wanted.env.keys() - env.keys())))


@dataclasses.dataclass(frozen=True)
class _MergedFlags:
  """XLA_FLAGS with the preset's flags first, without unknown flags.

  Attributes:
    flags: one flag each.
    user_flags: canonical names that the user set.
    dropped: flag -> reason.
    warnings: sentences for the log.
  """

  flags: tuple[str, ...]
  user_flags: frozenset[str]
  dropped: dict[str, str]
  warnings: tuple[str, ...]


def _merge_flags(wanted: XlaPreset, text: str, system: xla_probe.Installed) -> _MergedFlags:
  theirs, warnings = read_flags(text)
  names = {canonical(xla_probe.flag_name(flag)) for flag in theirs}
  ours = [
    f'--{name}={_flag_value(value)}'
    for name, value in wanted.xla_flags.items()
    if name not in names
  ]
  flags, dropped, notes = known_flags([*ours, *theirs], system)
  # A translated flag of the user may equal a compile option that the preset would set.
  names |= {canonical(xla_probe.flag_name(flag)) for flag in flags if flag not in ours}
  return _MergedFlags(tuple(flags), frozenset(names), dropped, (*warnings, *notes))


def _refusals(refused: Mapping[str, str]) -> list[str]:
  return [f'compile option {name} is not used: {reason}.' for name, reason in refused.items()]


def _set_jax_config(
  values: Mapping[str, Value], environ: MutableMapping[str, str], *, live: bool
) -> None:
  environ.update({name.upper(): str(value) for name, value in values.items()})
  if live and 'jax' in sys.modules:  # jax read its environment when it was imported
    for name, value in values.items():
      sys.modules['jax'].config.update(name, value)


def refine(
  applied: Applied,
  *,
  mesh_axes: Collection[str] = (),
  layer_bytes: Optional[int] = None,
  num_gpus: Optional[int] = None,
  layers_ahead: bool = False,
) -> Applied:
  """Returns `applied` with the compile options for a mesh and model that are known only now.

  This sets nothing: compile options take effect when they are passed to `.compile()`.

  Args:
    applied: from `prepare_environment`.
    mesh_axes: mesh axes larger than 1.
    layer_bytes: size of one layer's gathered parameters.
    num_gpus: GPUs of the run, all hosts together, if not known before.
    layers_ahead: whether loops over layers communicate one layer ahead.
  """
  num_gpus = applied.num_gpus if num_gpus is None else num_gpus
  wanted = select(
    applied.preset,
    gpu=applied.gpu,
    num_hosts=applied.num_hosts,
    num_gpus=num_gpus,
    mesh_axes=mesh_axes,
    layer_bytes=layer_bytes,
    layers_ahead=layers_ahead,
  )
  options, refused = _usable_options(wanted, applied.user_flags, xla_probe.installed())
  dropped = {name: reason for name, reason in refused.items() if name not in applied.dropped}
  others = [row for row in applied.settings if row.kind != 'compile_option']
  return dataclasses.replace(
    applied,
    compile_options=options,
    dropped=applied.dropped | dropped,
    warnings=(*applied.warnings, *_refusals(dropped)),
    num_gpus=num_gpus,
    settings=(
      *others,
      *(row for row in wanted.settings if row.name in {canonical(name) for name in options}),
    ),
  )


def _usable_options(
  wanted: XlaPreset, user_flags: Collection[str], system: xla_probe.Installed
) -> tuple[dict[str, Value], dict[str, str]]:
  """Returns the compile options to use, and name -> reason for options this jaxlib refuses."""
  options = {
    name: value
    for name, value in compile_options(wanted, system.jaxlib).items()
    if canonical(name) not in user_flags
  }  # An option would override the user's flag.
  refused = xla_probe.refused_options(options, system=system)
  return {name: value for name, value in options.items() if name not in refused}, refused


def compile_options(preset: XlaPreset, jax_version: Optional[str] = None) -> dict[str, Value]:
  """Returns the compile options of a preset as one version of jax spells them.

  `lowered.compile(compiler_options=...)` takes them on any backend; the CPU ignores GPU options.

  Args:
    preset: from `presets.select`.
    jax_version: '0.11.2'; by default the version of the installed jaxlib.
  """
  version = jax_version or xla_probe.installed().jaxlib
  return dict(_translate(name, value, version) for name, value in preset.compile_options.items())


def _translate(name: str, value: Value, version: Optional[str]) -> tuple[str, Value]:
  # An enum since 0.11. The old name still parses as a flag, but not as a compile option.
  if (match := _PIPELINED.fullmatch(name)) and _version_tuple(version) >= (0, 11):
    return f'xla_gpu_pipeline_{match[1]}', f'COLLECTIVE_PIPELINING_MODE_{"ON" if value else "OFF"}'
  return name, value


def _version_tuple(version: Optional[str]) -> tuple[int, ...]:
  return tuple(int(part) for part in re.findall(r'\d+', version or '')[:2])


def _flag_value(value: Value) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)


def _is_set(name: str, environ: Mapping[str, str]) -> bool:
  return any(other in environ for other in (_MEMORY if name in _MEMORY else (name,)))


def _memory_problems(environ: MutableMapping[str, str]) -> list[str]:
  """Returns a sentence per bad memory variable; removes the variable that would make jax raise."""
  problems = []
  new, old = _MEMORY
  if environ.get(new) and environ.get(old):
    problems.append(
      f'{old}={environ[old]} is dropped: {new}={environ[new]} is set too, and jax '
      'refuses to start with both.'
    )
    del environ[old]
  for name in _MEMORY:
    if name in environ:
      try:
        fraction = float(environ[name])
      except ValueError:
        fraction = -1.0
      if not 0 < fraction <= 1:
        problems.append(
          f'{name}={environ[name]} is not a fraction between 0 and 1. Write .9 for '
          '90% of the memory of a GPU.'
        )
  return problems
