"""Sets XLA flags, NCCL and memory variables before jax starts a backend; never ends the process.

    applied = flags.prepare_environment('default', num_hosts=2)
    print(applied.report())
    ...
    step.lower(...).compile(compiler_options=applied.compile_options)

The user's settings win: flags in XLA_FLAGS stay, in their order, and replace the preset's flags of
the same name. Flags that the installed jaxlib does not know are replaced by their successors
(`LEGACY`) or dropped with a warning, also the user's, because XLA would abort. This module never
imports jax, so it can run before everything else.
"""

import dataclasses
import os
import pathlib
import re
import sys
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Optional

from t5x_gpu.errors import did_you_mean
from t5x_gpu.runtime import machine
from t5x_gpu.runtime.cluster import jax_internals
from t5x_gpu.runtime.xla import probe
from t5x_gpu.runtime.xla.presets import TABLE, Value, XlaPreset, XlaSetting, select


@dataclasses.dataclass(frozen=True)
class Applied:
  """The settings that were set or dropped, with reasons.

  Attributes:
    preset: name of the preset.
    gpu: device kind, None without GPU.
    generation: 'h200', '' for a GPU that the table does not know, None without GPU.
    num_hosts: hosts of the run.
    num_gpus: GPUs of the run, None if unknown.
    compile_options: for `lowered.compile(compiler_options=...)`, in the installed jax's spelling.
    xla_flags: all flags in XLA_FLAGS now, one each.
    env: other variables that were set.
    jax_config: values of jax.config that were set.
    dropped: flag or option -> why it is not used.
    kept: names of settings for which the user's value replaces the preset's.
    user_flags: names that the user set in XLA_FLAGS.
    warnings: sentences for the log.
    settings: rows of the table that apply.
    reason: how the GPU was found, or why there is none.
    jaxlib: 'jaxlib 0.10.2'.
  """

  preset: str
  gpu: Optional[str]
  generation: Optional[str]
  num_hosts: int
  num_gpus: Optional[int]
  compile_options: dict[str, Value]
  xla_flags: tuple[str, ...]
  env: dict[str, str]
  jax_config: dict[str, Value]
  dropped: dict[str, str]
  kept: tuple[str, ...]
  user_flags: tuple[str, ...]
  warnings: tuple[str, ...]
  settings: tuple[XlaSetting, ...]
  reason: str
  jaxlib: str

  @property
  def line(self) -> str:
    """One line for the log: `xla preset: ` and `summary`."""
    return f'xla preset: {self.summary}'

  @property
  def summary(self) -> str:
    """One line: `h200 single-host (default), ..., 1 flag dropped: not in jaxlib`."""
    if self.generation is None:
      text = f'nothing to set, no GPU ({self.reason})'
    else:
      hosts = 'single-host' if self.num_hosts == 1 else f'{self.num_hosts} hosts'
      text = (
        f'{self.generation or self.gpu} {hosts} ({self.preset}), '
        f'{_count(len(self.compile_options), "compile option")}, '
        f'{_count(len(self.xla_flags), "flag")}, '
        f'{_count(len(self.env) + len(self.jax_config), "variable")}'
      )
    if self.kept:
      text += f', {_count(len(self.kept), "setting")} of the user kept'
    if self.dropped:
      reasons = list(dict.fromkeys(self.dropped.values()))
      text += f', {_count(len(self.dropped), "flag")} dropped: ' + (
        reasons[0] if len(reasons) == 1 else 'see below'
      )
    return text

  def report(self) -> str:
    """Returns the line, followed by the warnings."""
    return '\n'.join([self.line, *(f'  {warning}' for warning in self.warnings)])


def _count(number: int, noun: str) -> str:
  return f'{number} {noun}{"" if number == 1 else "s"}'


AUTO = 'auto'


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
  system = probe.installed()
  merged = _merge_flags(wanted, environ.get('XLA_FLAGS', ''), system)
  options, refused = _usable_options(wanted, merged.user_flags, system)
  warnings = [*merged.warnings, *_refusals(refused), *_memory_problems(environ), *_too_late(live)]
  env = {name: value for name, value in wanted.env.items() if not _is_set(name, environ)}
  config = {name: value for name, value in wanted.jax_config.items() if name.upper() not in environ}
  kept = _kept(wanted, merged.user_flags, env=env, config=config)
  used = {*map(canonical, options), *env, *config, *map(probe.flag_name, merged.flags)}
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


def refine(
  applied: Applied,
  *,
  mesh_axes: Collection[str] = (),
  layer_bytes: Optional[int] = None,
  num_gpus: Optional[int] = None,
  layers_ahead: bool = False,
  by_layer: bool = False,
) -> Applied:
  """Returns `applied` with the compile options for a mesh and model that are known only now.

  This sets nothing: compile options take effect when they are passed to `.compile()`.

  Args:
    applied: from `prepare_environment`.
    mesh_axes: mesh axes larger than 1.
    layer_bytes: size of one layer's gathered parameters.
    num_gpus: GPUs of the run, all hosts together, if not known before.
    layers_ahead: whether loops over layers communicate one layer ahead.
    by_layer: whether gradients accumulate layer by layer.
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
    by_layer=by_layer,
  )
  options, refused = _usable_options(wanted, applied.user_flags, probe.installed())
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


@dataclasses.dataclass(frozen=True)
class Legacy:
  """What replaced a flag.

  Attributes:
    reason: a sentence for the user.
    now: value -> the flags with the same meaning today ('--name=value'); None if none is needed.
  """

  reason: str
  now: Optional[Callable[[str], Sequence[str]]] = None


def is_true(value: Optional[str]) -> bool:
  """Returns whether XLA reads a flag's value as true; a flag without a value is true."""
  return value is None or value.strip('"\'').lower() in ('', 'true', '1', 'on')


def _on(value: str) -> str:
  return 'true' if is_true(value) else 'false'


def _async(*kinds: str) -> Legacy:
  return Legacy(
    'collectives are asynchronous unless xla_gpu_disable_async_collectives lists them',
    lambda value: (
      () if is_true(value) else (f'--xla_gpu_disable_async_collectives={",".join(kinds)}',)
    ),
  )


_ALWAYS = Legacy('XLA always does this now, and the flag is gone')
_PIPELINED_KINDS = ('all_gather', 'all_reduce', 'reduce_scatter')

# Flags that old scripts still set; used only for flags that the installed jaxlib does not know.
LEGACY: dict[str, Legacy] = {
  # T5X, contrib/gpu/scripts_gpu/*.sh
  'xla_gpu_simplify_all_fp_conversions': Legacy(
    'xla_allow_excess_precision, which is on by default, replaced it'
  ),
  'xla_gpu_enable_async_collectives': _async('allreduce', 'allgather', 'reducescatter'),
  'xla_gpu_enable_async_all_reduce': _async('allreduce'),
  'xla_gpu_enable_async_all_gather': _async('allgather'),
  'xla_gpu_enable_async_reduce_scatter': _async('reducescatter'),
  'xla_gpu_enable_pipelined_collectives': Legacy(
    'there is one flag per kind of collective',
    lambda value: [f'--xla_gpu_enable_pipelined_{kind}={_on(value)}' for kind in _PIPELINED_KINDS],
  ),
  **{
    f'xla_gpu_pipeline_{kind}': Legacy(
      'this jaxlib spells it xla_gpu_enable_pipelined_*',
      # 'default' means the same as no flag.
      lambda value, kind=kind: (
        () if value == 'default' else (f'--xla_gpu_enable_pipelined_{kind}={_on(value)}',)
      ),
    )
    for kind in _PIPELINED_KINDS
  },
  'xla_gpu_graph_level': Legacy(
    'xla_gpu_enable_command_buffer replaced it; level 0 is the empty list',
    lambda value: ('--xla_gpu_enable_command_buffer=',) if value == '0' else (),
  ),
  'xla_gpu_enable_custom_fusions': Legacy(
    'xla_gpu_enable_dynamic_slice_fusion replaced it',
    lambda value: (f'--xla_gpu_enable_dynamic_slice_fusion={_on(value)}',),
  ),
  'xla_gpu_enable_address_computation_fusion': Legacy(
    'it is now called xla_gpu_enable_dynamic_slice_fusion',
    lambda value: (f'--xla_gpu_enable_dynamic_slice_fusion={_on(value)}',),
  ),
  'xla_gpu_cudnn_gemm_fusion': Legacy(
    'it is now called xla_gpu_cudnn_gemm_fusion_level, from 0 to 3',
    lambda value: (f'--xla_gpu_cudnn_gemm_fusion_level={int(is_true(value))}',),
  ),
  'xla_gpu_lhs_enable_gpu_async_tracker': _ALWAYS,
  'xla_gpu_enable_triton_softmax_fusion': _ALWAYS,
  'xla_gpu_all_reduce_contiguous': Legacy('XLA no longer has this option'),
  'xla_gpu_enable_nccl_per_stream_comms': Legacy('XLA no longer has this option'),
}


_TOKEN = re.compile(r"""--?[A-Za-z_]\w*(?:=(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\S*))?(?=\s|$)""")
_OLD_PIPELINED = re.compile(rf'xla_gpu_pipeline_({"|".join(_PIPELINED_KINDS)})')


def read_flags(text: str) -> tuple[list[str], list[str]]:
  """Returns the flags in XLA_FLAGS, one each, and a sentence for each word that is not a flag.

  XLA reads a value that does not begin with '-' as a file name, and aborts if that file is missing.
  Otherwise it silently stops reading at the first word that is not a flag.

  Args:
    text: the value of XLA_FLAGS.
  """
  warnings = []
  text = text.strip()
  if text and not text.startswith('-'):
    try:
      text = pathlib.Path(text).read_text(encoding='utf-8').strip()
    except (OSError, ValueError):
      pass  # Not a file name: read it word by word, below.
  flags, position = [], 0
  while position < len(text):
    if text[position].isspace():
      position += 1
    elif match := _TOKEN.match(text, position):
      flags.append(match.group())
      position = match.end()
    else:
      word = text[position:].split(maxsplit=1)[0]
      position += len(word)
      warnings.append(
        f'XLA_FLAGS contains the literal {word}: in single quotes the shell does not expand it, so '
        'your earlier flags are lost. Use double quotes, "${XLA_FLAGS} --xla_..."'
        if '$' in word
        else f'XLA_FLAGS contains {word!r}, which is not a flag: dropped. XLA would have ignored '
        'everything after it, or read it as a file name.'
      )
  return flags, warnings


def known_flags(
  flags: Sequence[str], system: probe.Installed
) -> tuple[list[str], dict[str, str], list[str]]:
  """Returns the flags to set, dropped flag -> reason, and a sentence for each change."""
  refused = probe.refused_flags(flags, system=system)
  now = {
    flag: list(legacy.now(_value_in(flag)) if legacy.now else ())
    for flag in refused
    if (legacy := LEGACY.get(probe.flag_name(flag)))
  }
  translated = [new for news in now.values() for new in news]
  unusable = probe.refused_flags(translated, system=system)
  known, dropped, notes = [], {}, []
  for flag in flags:
    name = probe.flag_name(flag)
    if flag not in refused:
      known.append(flag)
    elif flag in now:
      news = [new for new in now[flag] if new not in unusable]
      known += news
      reason = LEGACY[name].reason
      if not news:
        dropped[name] = refused[flag]
      notes.append(
        f'{flag} is {"replaced by " + " ".join(news) if news else "dropped"}: '
        f'{refused[flag]}; {reason}.'
      )
    else:
      dropped[name] = refused[flag]
      notes.append(
        f'{flag} is dropped: {refused[flag].rstrip(".")}.'
        + did_you_mean(name, {row.name for row in TABLE} | set(LEGACY))
      )
  return known, dropped, notes


def _value_in(flag: str) -> Optional[str]:
  return flag.split('=', 1)[1].strip('"\'') if '=' in flag else None


def canonical(name: str) -> str:
  match = _OLD_PIPELINED.fullmatch(name)
  return f'xla_gpu_enable_pipelined_{match[1]}' if match else name


_MEMORY = ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION')
_PIPELINED = re.compile(rf'xla_gpu_enable_pipelined_({"|".join(_PIPELINED_KINDS)})')


def _find_gpus(
  gpu: Optional[str], num_gpus: Optional[int], environ: Mapping[str, str]
) -> machine.MachineGpus:
  if gpu == AUTO:
    return machine.find_gpus(environ)
  return machine.MachineGpus(gpu, num_gpus or 0, 'given' if gpu else 'none asked for')


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


def _merge_flags(wanted: XlaPreset, text: str, system: probe.Installed) -> _MergedFlags:
  theirs, warnings = read_flags(text)
  names = {canonical(probe.flag_name(flag)) for flag in theirs}
  ours = [
    f'--{name}={_flag_text(value)}' for name, value in wanted.xla_flags.items() if name not in names
  ]
  flags, dropped, notes = known_flags([*ours, *theirs], system)
  # A translated flag of the user may equal a compile option that the preset would set.
  names |= {canonical(probe.flag_name(flag)) for flag in flags if flag not in ours}
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


def _usable_options(
  wanted: XlaPreset, user_flags: Collection[str], system: probe.Installed
) -> tuple[dict[str, Value], dict[str, str]]:
  """Returns the compile options to use, and name -> reason for options this jaxlib refuses."""
  options = {
    name: value
    for name, value in compile_options(wanted, system.jaxlib).items()
    if canonical(name) not in user_flags
  }  # An option would override the user's flag.
  refused = probe.refused_options(options, system=system)
  return {name: value for name, value in options.items() if name not in refused}, refused


def compile_options(preset: XlaPreset, jax_version: Optional[str] = None) -> dict[str, Value]:
  """Returns the compile options of a preset as one version of jax spells them.

  `lowered.compile(compiler_options=...)` takes them on any backend; the CPU ignores GPU options.

  Args:
    preset: from `presets.select`.
    jax_version: '0.11.2'; by default the version of the installed jaxlib.
  """
  version = jax_version or probe.installed().jaxlib
  return dict(_translate(name, value, version) for name, value in preset.compile_options.items())


def _translate(name: str, value: Value, version: Optional[str]) -> tuple[str, Value]:
  # An enum since 0.11. The old name still parses as a flag, but not as a compile option.
  if (match := _PIPELINED.fullmatch(name)) and _version_tuple(version) >= (0, 11):
    return f'xla_gpu_pipeline_{match[1]}', f'COLLECTIVE_PIPELINING_MODE_{"ON" if value else "OFF"}'
  return name, value


def _version_tuple(version: Optional[str]) -> tuple[int, ...]:
  return tuple(int(part) for part in re.findall(r'\d+', version or '')[:2])


def _flag_text(value: Value) -> str:
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
