"""Sets XLA flags, NCCL and memory variables before jax starts a backend; never ends the process.

    applied = xla_flags.prepare_environment('default', num_hosts=2, mesh_axes=('fsdp', 'model'))
    print(applied.report())
    ...
    step.lower(...).compile(compiler_options=applied.compile_options)

What the user set wins: flags in XLA_FLAGS stay, in their order, and take the place of ours of the
same name. Flags that the installed jaxlib does not know, whoever set them, are dropped with a
sentence, since XLA would abort. This module never imports jax, so it can run before all else.
"""

import dataclasses
import os
import pathlib
import re
import sys
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Optional

from t5x_gpu.errors import did_you_mean
from t5x_gpu.runtime import gpus
from t5x_gpu.runtime.xla import probe as xla_probe
from t5x_gpu.runtime.xla.legacy import LEGACY
from t5x_gpu.runtime.xla.presets import TABLE, Setting, Value, XlaPreset, select

AUTO = 'auto'
_MEMORY = ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION')
_TOKEN = re.compile(r"""--?[A-Za-z_]\w*(?:=(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\S*))?(?=\s|$)""")
_PIPELINED = re.compile(r'xla_gpu_enable_pipelined_(all_gather|all_reduce|reduce_scatter)')
_PIPELINE = re.compile(r'xla_gpu_pipeline_(all_gather|all_reduce|reduce_scatter)')


@dataclasses.dataclass(frozen=True)
class Applied:
  """What was set, what was not, and why.

  Attributes:
    preset: its name.
    gpu: device kind, None without GPU.
    generation: 'h200', '' for a GPU without rows of its own, None without GPU.
    num_hosts: hosts of the run.
    num_gpus: GPUs of the run, None if unknown.
    compile_options: for `lowered.compile(compiler_options=...)`, in the installed jax's spelling.
    xla_flags: the whole of XLA_FLAGS as it is now, one flag each.
    env: further variables that were set here.
    jax_config: values of jax.config that were set here.
    dropped: flag or option -> why it is not used.
    kept: what the user set in the place of ours.
    user_flags: names in XLA_FLAGS that are the user's.
    warnings: sentences for the log.
    settings: the rows of the table that are in force.
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
  settings: tuple[Setting, ...]
  reason: str
  jaxlib: str

  @property
  def line(self) -> str:
    """One line: `xla preset: h200 single-host (default), ..., 1 flag dropped: not in jaxlib`."""
    if self.generation is None:
      text = f'xla preset: nothing to set, no GPU ({self.reason})'
    else:
      hosts = 'single-host' if self.num_hosts == 1 else f'{self.num_hosts} hosts'
      text = (
        f'xla preset: {self.generation or self.gpu} {hosts} ({self.preset}), '
        f'{_count(len(self.compile_options), "compile option")}, '
        f'{_count(len(self.xla_flags), "flag")}, '
        f'{_count(len(self.env) + len(self.jax_config), "variable")}'
      )
    if self.kept:
      text += f', {len(self.kept)} of yours kept'
    if self.dropped:
      whys = list(dict.fromkeys(self.dropped.values()))
      text += f', {_count(len(self.dropped), "flag")} dropped: ' + (
        whys[0] if len(whys) == 1 else 'see below'
      )
    return text

  def report(self) -> str:
    """Returns the line and, under it, each warning."""
    return '\n'.join([self.line, *(f'  {warning}' for warning in self.warnings)])


def _count(number: int, noun: str) -> str:
  return f'{number} {noun}{"" if number == 1 else "s"}'


def prepare_environment(
  preset: str = 'default',
  *,
  gpu: Optional[str] = AUTO,
  num_hosts: int = 1,
  num_gpus: Optional[int] = None,
  mesh_axes: Collection[str] = (),
  layer_bytes: Optional[int] = None,
  environ: Optional[MutableMapping[str, str]] = None,
) -> Applied:
  """Returns what it set in the environment; call once, before jax starts a backend.

  Call it in the process that trains, not in what launches it: a child takes inherited variables for
  the user's own.

  Args:
    preset: 'safe', 'default', 'max_overlap', 'deterministic' or 'none'.
    gpu: device kind ('NVIDIA H200') or generation ('h200'); None for no GPU; 'auto' to look.
    num_hosts: hosts of the run.
    num_gpus: GPUs of the run, all hosts together; None for unknown.
    mesh_axes: mesh axes larger than 1, as far as they are known.
    layer_bytes: of the parameters of one layer as they are gathered, if known.
    environ: `os.environ` by default.
  Raises:
    ConfigError: no such preset.
  """
  live = environ is None
  environ = os.environ if environ is None else environ
  found = (
    gpus.find_gpus(environ)
    if gpu == AUTO
    else gpus.MachineGpus(gpu, num_gpus or 0, 'given' if gpu else 'none asked for')
  )
  if num_gpus is None and gpu == AUTO and num_hosts == 1:
    num_gpus = found.count
  wanted = select(
    preset,
    gpu=found.kind,
    num_hosts=num_hosts,
    num_gpus=num_gpus,
    mesh_axes=mesh_axes,
    layer_bytes=layer_bytes,
  )
  system = xla_probe.installed()
  theirs, warnings = read_flags(environ.get('XLA_FLAGS', ''))
  names = {_canonical(xla_probe.flag_name(flag)) for flag in theirs}
  ours = [
    f'--{name}={_flag_value(value)}'
    for name, value in wanted.xla_flags.items()
    if name not in names
  ]
  flags, dropped, notes = _known_flags([*ours, *theirs], system)
  # What the user's flags became may be what a compile option of ours would override.
  names |= {_canonical(xla_probe.flag_name(flag)) for flag in flags if flag not in ours}
  options, refused = _usable_options(wanted, names, system)
  dropped |= refused
  warnings += [
    *notes,
    *(f'compile option {name} is not used: {why}.' for name, why in refused.items()),
    *_memory_problems(environ),
  ]
  env = {name: value for name, value in wanted.env.items() if not _is_set(name, environ)}
  config = {name: value for name, value in wanted.jax_config.items() if name.upper() not in environ}
  kept = tuple(
    sorted(
      {n for n in (*wanted.xla_flags, *wanted.compile_options) if _canonical(n) in names}
      | (wanted.env.keys() - env.keys())
      | {n.upper() for n in wanted.jax_config if n not in config}
    )
  )
  if live and _backend_started():
    warnings.append(
      'jax has started a backend already: flags and variables come too late for this '
      'process. Call prepare_environment first.'
    )
  if flags or 'XLA_FLAGS' in environ:
    environ['XLA_FLAGS'] = ' '.join(flags)
  environ.update(env)
  _set_jax_config(config, environ, live=live)
  used = {*map(_canonical, options), *env, *config, *map(xla_probe.flag_name, flags)} - set(kept)
  return Applied(
    preset=preset,
    gpu=found.kind,
    generation=wanted.generation,
    num_hosts=num_hosts,
    num_gpus=num_gpus,
    compile_options=options,
    xla_flags=tuple(flags),
    env=env,
    jax_config=config,
    dropped=dropped,
    kept=kept,
    user_flags=tuple(sorted(names)),
    warnings=tuple(warnings),
    reason=found.reason,
    jaxlib=str(system),
    settings=tuple(row for row in wanted.settings if row.name in used),
  )


def _set_jax_config(
  values: Mapping[str, Value], environ: MutableMapping[str, str], *, live: bool
) -> None:
  environ.update({name.upper(): str(value) for name, value in values.items()})
  if live and 'jax' in sys.modules:  # It read its environment when it was imported.
    for name, value in values.items():
      sys.modules['jax'].config.update(name, value)


def refine(
  applied: Applied,
  *,
  mesh_axes: Collection[str] = (),
  layer_bytes: Optional[int] = None,
  num_gpus: Optional[int] = None,
) -> Applied:
  """Returns `applied` with the compile options for what is known once the mesh and model are built.

  Nothing is set: compile options take effect with `.compile()`, whenever that is.

  Args:
    applied: from `prepare_environment`.
    mesh_axes: mesh axes larger than 1.
    layer_bytes: of the parameters of one layer as they are gathered.
    num_gpus: GPUs of the run, all hosts together, if it was not known before.
  """
  num_gpus = applied.num_gpus if num_gpus is None else num_gpus
  wanted = select(
    applied.preset,
    gpu=applied.gpu,
    num_hosts=applied.num_hosts,
    num_gpus=num_gpus,
    mesh_axes=mesh_axes,
    layer_bytes=layer_bytes,
  )
  options, refused = _usable_options(wanted, applied.user_flags, xla_probe.installed())
  dropped = {name: why for name, why in refused.items() if name not in applied.dropped}
  others = [row for row in applied.settings if row.kind != 'compile_option']
  return dataclasses.replace(
    applied,
    compile_options=options,
    dropped=applied.dropped | dropped,
    warnings=(
      *applied.warnings,
      *(f'compile option {name} is not used: {why}.' for name, why in dropped.items()),
    ),
    num_gpus=num_gpus,
    settings=(
      *others,
      *(row for row in wanted.settings if row.name in {_canonical(name) for name in options}),
    ),
  )


def _usable_options(
  wanted: XlaPreset, user_flags: Collection[str], system: xla_probe.Installed
) -> tuple[dict[str, Value], dict[str, str]]:
  """Returns the compile options to use, and name -> why of those that this jaxlib refuses."""
  options = {
    name: value
    for name, value in compile_options(wanted, system.jaxlib).items()
    if _canonical(name) not in user_flags
  }  # An option would override the user's flag.
  refused = xla_probe.refused_options(options, system=system)
  return {name: value for name, value in options.items() if name not in refused}, refused


def compile_options(preset: XlaPreset, jax_version: Optional[str] = None) -> dict[str, Value]:
  """Returns the compile options of a preset in the spelling of one version of jax.

  `lowered.compile(compiler_options=...)` takes them on any backend; the CPU ignores those of GPUs.

  Args:
    preset: from `xla_presets.select`.
    jax_version: '0.11.2'; the installed jaxlib's by default.
  """
  version = jax_version or xla_probe.installed().jaxlib
  return dict(_translate(name, value, version) for name, value in preset.compile_options.items())


def _translate(name: str, value: Value, version: Optional[str]) -> tuple[str, Value]:
  # From 0.11 on an enum; the old name still parses as a flag, but is no compile option.
  if (match := _PIPELINED.fullmatch(name)) and _version_tuple(version) >= (0, 11):
    return f'xla_gpu_pipeline_{match[1]}', f'COLLECTIVE_PIPELINING_MODE_{"ON" if value else "OFF"}'
  return name, value


def _version_tuple(version: Optional[str]) -> tuple[int, ...]:
  return tuple(int(part) for part in re.findall(r'\d+', version or '')[:2])


def read_flags(text: str) -> tuple[list[str], list[str]]:
  """Returns the flags of XLA_FLAGS, one each, and a sentence for whatever else was in it.

  XLA takes a text that does not begin with '-' for the name of a file, and aborts if there is none;
  inside of a text it stops reading, silently, at the first word that is no flag.

  Args:
    text: the value of XLA_FLAGS.
  """
  warnings = []
  text = text.strip()
  if text and not text.startswith('-'):
    try:
      text = pathlib.Path(text).read_text(encoding='utf-8').strip()
    except (OSError, ValueError):
      pass  # Not the name of a file: looked at word by word, below.
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
        f'XLA_FLAGS contains the literal {word}: single quotes kept the shell from putting your '
        'earlier flags there, so they are lost. Use double quotes, "${XLA_FLAGS} --xla_..."'
        if '$' in word
        else f'XLA_FLAGS contains {word!r}, which is no flag: left out. XLA would have ignored '
        'everything after it, or taken it for the name of a file.'
      )
  return flags, warnings


def _known_flags(
  flags: Sequence[str], system: xla_probe.Installed
) -> tuple[list[str], dict[str, str], list[str]]:
  """Returns the flags to set, those dropped with a reason, and a sentence for each change."""
  refused = xla_probe.refused_flags(flags, system=system)
  now = {
    flag: list(legacy.now(_value(flag)) if legacy.now else ())
    for flag in refused
    if (legacy := LEGACY.get(xla_probe.flag_name(flag)))
  }
  translated = [new for news in now.values() for new in news]
  unusable = xla_probe.refused_flags(translated, system=system)
  known, dropped, notes = [], {}, []
  for flag in flags:
    name = xla_probe.flag_name(flag)
    if flag not in refused:
      known.append(flag)
    elif flag in now:
      news = [new for new in now[flag] if new not in unusable]
      known += news
      why = LEGACY[name].why
      if not news:
        dropped[name] = refused[flag]
      notes.append(
        f'{flag} is {"replaced by " + " ".join(news) if news else "dropped"}: '
        f'{refused[flag]}; {why}.'
      )
    else:
      dropped[name] = refused[flag]
      notes.append(
        f'{flag} is dropped: {refused[flag].rstrip(".")}.'
        + did_you_mean(name, {row.name for row in TABLE} | set(LEGACY))
      )
  return known, dropped, notes


def _value(flag: str) -> Optional[str]:
  return flag.split('=', 1)[1].strip('"\'') if '=' in flag else None


def _flag_value(value: Value) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)


def _canonical(name: str) -> str:
  match = _PIPELINE.fullmatch(name)
  return f'xla_gpu_enable_pipelined_{match[1]}' if match else name


def _is_set(name: str, environ: Mapping[str, str]) -> bool:
  return any(other in environ for other in (_MEMORY if name in _MEMORY else (name,)))


def _memory_problems(environ: MutableMapping[str, str]) -> list[str]:
  """Returns a sentence per bad memory variable; takes away the one that jax would raise at."""
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


def _backend_started() -> bool:
  bridge = sys.modules.get('jax._src.xla_bridge')
  return bridge is not None and bridge.backends_are_initialized()
