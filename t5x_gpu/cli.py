"""Flags and exit codes that all commands share: `parse_args` and `run_main`."""

import argparse
import contextlib
import dataclasses
import gc
import os
import pathlib
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Optional

from t5x_gpu.config import gin_loader, gin_text, provenance
from t5x_gpu.config.report import CONFIG
from t5x_gpu.data.data_module import open_class_names
from t5x_gpu.errors import (
  AccessError,
  ConfigError,
  MeshError,
  ModelError,
  ShapeError,
  UserError,
  did_you_mean,
)
from t5x_gpu.runtime import import_interrupts, machine, process_exit
from t5x_gpu.runtime.process_exit import SecondInterruptLeaves
from t5x_gpu.storage.files import (
  check_not_refused,
  check_temporary_folder,
  is_refused,
  reason_of,
  remedy,
)
from t5x_gpu.storage.json_schema import read_bytes
from t5x_gpu.storage.paths import as_path
from t5x_gpu.storage.user_paths import check_encoding, without_dots
from t5x_gpu.terminal import streams
from t5x_gpu.terminal.printable import printable

EXAMPLES = """examples:
  {prog} --gin_file=gin_configs/examples/demo.gin
  {prog} --gin_file=my.gin --gin.MODEL_DIR=runs/a --gin.TRAIN_STEPS=1000
  {prog} --gin_file=my.gin --gin.train/DatasetConfig.batch_size=8 --dry_run

--gin.X=VALUE sets any macro (BATCH_SIZE), parameter (Partitioner.num_partitions) or scoped
parameter (train/DatasetConfig.batch_size), after all gin files. Text may be unquoted; numbers,
True, None, [1, 2], %MACRO and @module.name() mean the same as in gin. To see where a value is set:
  python -m t5x_gpu.config explain BATCH_SIZE --gin_file=my.gin
"""

_LOGS = 'log lines are always printed; T5X_GPU_VERBOSE=1 adds the lines of all libraries'
# Flags of T5X's commands (t5x/train.py, t5x/main.py, absl) that are accepted -> why they have no
# effect here.
T5X_NO_EFFECT = {
  '--alsologtostderr': _LOGS,
  '--jax_backend_target': 'JAX_PLATFORMS selects the backend',
  '--logtostderr': _LOGS,
  '--multiprocess_gpu': 'the launcher of several processes is detected (docs/slurm.md)',
  '--stderrthreshold': _LOGS,
}
# absl's other ways to write a boolean flag.
_DRY_RUN = {
  **{f'--dry_run={value}': True for value in ('True', 'true', '1')},
  **{f'--dry_run={value}': False for value in ('False', 'false', '0')},
  '--nodry_run': False,
}
_WITH_VALUE = ('--jax_backend_target', '--stderrthreshold')
# Other flags of T5X's commands that t5x_gpu lacks -> what to do instead.
T5X_FLAGS = {
  '--gin_bindings': 'Write each binding as a flag: --gin.NAME=VALUE.',
  '--initialization_timeout': 'Set it in gin: DistributedConfig.initialization_timeout_seconds '
  '(docs/slurm.md).',
  '--run_mode': 'Each mode is a command: python -m t5x_gpu.train, t5x_gpu.eval, t5x_gpu.infer; '
  'precompile is python -m t5x_gpu.train --precompile.',
  '--seqio_additional_cache_dirs': 'Call seqio.add_global_cache_dirs in the module that '
  'MIXTURE_OR_TASK_MODULE names.',
}


# Environment variable with the exit code for errors that a retry cannot fix.
CONFIG_ERROR_CODE = 'T5X_GPU_CONFIG_ERROR_CODE'
_CONFIG_ERRORS = (ConfigError, MeshError, ModelError, ShapeError)


_NUM_CLASSES = 'NUM_CLASSES'
_OF_A_MODEL = re.compile(r'\bgin_configs/models/\w+\.gin:\d+$')


@dataclasses.dataclass(frozen=True)
class Args:
  """The parsed command line.

  Attributes:
    gin_files: gin files in the order given; later files override earlier ones.
    bindings: 'KEY=VALUE' of each `--gin.KEY=VALUE`, in order.
    gin_search_paths: more folders to search for gin files.
    tfds_data_dir: folder of TensorFlow Datasets, or None.
    dry_run: parse, check, print, exit.
    extra: values of the command's own flags.
  """

  gin_files: tuple[str, ...]
  bindings: tuple[str, ...]
  gin_search_paths: tuple[str, ...]
  tfds_data_dir: Optional[str]
  dry_run: bool
  extra: argparse.Namespace

  def load(self, **options: Any) -> gin_loader.LoadedConfig:
    """Returns the configuration that the flags name; sets TFDS_DATA_DIR from --tfds_data_dir.

    Args:
      **options: further arguments of `gin_loader.load`.
    Raises:
      AccessError: there is no folder for temporary files.
    """
    check_temporary_folder()  # before a gin file imports TensorFlow, which would end in a traceback
    if self.tfds_data_dir:
      os.environ['TFDS_DATA_DIR'] = self.tfds_data_dir
    return gin_loader.load(
      self.gin_files, bindings=self.bindings, search_paths=self.gin_search_paths, **options
    )

  def load_with_classes(self) -> gin_loader.LoadedConfig:
    """Returns the configuration as `load`, with NUM_CLASSES from the data unless the user sets it.

    The value counts as unset if it is the default in a file of gin_configs/models. A run that has
    already begun keeps its number of classes.

    Raises:
      ConfigError, DataError: the data cannot be read.
      AccessError: the configuration of the run that has begun cannot be opened.
    """
    loaded = self.load()
    macros = {b.key: b for b in loaded.bindings.final() if b.is_macro}
    default = macros.get(_NUM_CLASSES)
    if default is None or not _OF_A_MODEL.search(default.origin):
      return loaded
    arguments = loaded.arguments(only=('train_dataset_cfg', 'model_dir'))
    names = open_class_names(arguments['train_dataset_cfg']) or ()
    begun = _begun_with(arguments.get('model_dir'))
    number = begun or len(names)
    if not names or number == default.value:
      return loaded
    loaded = self.load(
      computed={f'{_NUM_CLASSES}={number}': provenance.OF_RUN if begun else provenance.OF_DATA}
    )
    whose = 'this run began with' if begun else 'the data has'
    note = f'{_NUM_CLASSES} = {number}: {whose} that many classes, and nothing else sets it'
    return dataclasses.replace(loaded, notes=(*loaded.notes, note))


def _begun_with(model_dir: Optional[str]) -> int:
  """Returns NUM_CLASSES in the configuration that a run has written to its folder, or 0."""
  if not model_dir:
    return 0
  path = as_path(model_dir, parameter='MODEL_DIR') / CONFIG
  try:
    text = read_bytes(path).decode('utf-8')
  except (OSError, ValueError) as e:
    check_not_refused(e, str(path))
    return 0
  found = re.search(rf'^{_NUM_CLASSES} = (\d+)$', text, re.MULTILINE)
  return int(found[1]) if found else 0


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    raise ConfigError(
      f'{message[0].upper()}{message[1:]}.', fix=f'{self.prog} --help lists all flags.'
    )


def parse_args(
  prog: str,
  description: str,
  argv: Optional[Sequence[str]],
  *,
  extra: Optional[Callable[[argparse.ArgumentParser], None]] = None,
  gin_file_required: bool = True,
  without_config: str = '',
  examples: str = EXAMPLES,
) -> Args:
  """Returns the parsed flags; prints and exits on --help.

  Args:
    prog: the command as users type it, 'python -m t5x_gpu.train'.
    description: one or two sentences on what the command does.
    argv: arguments without the program's name; None for the arguments of this process.
    extra: adds the command's flags; their values are in `Args.extra`.
    gin_file_required: whether --gin_file is required.
    without_config: for commands without a configuration: advice if one is given.
    examples: the end of --help; `{prog}` in it is replaced.
  Raises:
    ConfigError: an unknown flag (with the closest known ones), a bad value, no --gin_file, or flags
      of a configuration for a command without one.
  """
  parser = _Parser(
    prog=prog,
    description=description,
    allow_abbrev=False,
    epilog=examples.format(prog=prog),
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  _add_config_flags(parser, shown=not without_config)
  known = {action.dest for action in parser._actions}
  if extra is not None:
    extra(parser)
  rest, bindings = _take_bindings(list(sys.argv[1:] if argv is None else argv))
  if not without_config:
    rest = _as_ours(rest, command=prog.rpartition('.')[2])
  values, unknown = parser.parse_known_intermixed_args(rest)
  if unknown:
    raise _unknown_argument(unknown[0], parser)
  files = _split(values.gin_file)
  if without_config:
    if bindings or any((files, values.gin_search_paths, values.tfds_data_dir, values.dry_run)):
      raise ConfigError(f'{prog} does not take a configuration.', fix=without_config)
  elif gin_file_required and not files:
    shipped = gin_text.GinFiles().shipped('examples')
    raise ConfigError(
      'No --gin_file is given.',
      fix='Give your own gin file or one of the shipped examples:\n'
      + '\n'.join(f'  {prog} --gin_file={name}' for name in shipped),
    )
  return Args(
    gin_files=files,
    bindings=tuple(bindings),
    gin_search_paths=_split(values.gin_search_paths),
    tfds_data_dir=values.tfds_data_dir and without_dots(values.tfds_data_dir),
    dry_run=values.dry_run,
    extra=argparse.Namespace(**{k: v for k, v in vars(values).items() if k not in known}),
  )


def _add_config_flags(parser: argparse.ArgumentParser, *, shown: bool) -> None:
  group = parser.add_argument_group('configuration')

  def text(help_text: str) -> str:
    return help_text if shown else argparse.SUPPRESS

  group.add_argument(
    '--gin_file',
    action='append',
    default=[],
    metavar='FILE',
    help=text('gin file; repeat the flag or separate files by commas, later ones override'),
  )
  group.add_argument(
    '--gin.X',
    dest='gin_x',
    metavar='VALUE',
    help=text('set X to VALUE after the gin files (any macro or parameter X)'),
  )
  group.add_argument(
    '--gin_search_paths',
    action='append',
    default=[],
    metavar='FOLDERS',
    help=text('comma-separated folders to search for gin files'),
  )
  group.add_argument(
    '--tfds_data_dir', metavar='FOLDER', help=text('folder of TensorFlow Datasets')
  )
  group.add_argument(
    '--dry_run',
    action='store_true',
    help=text('parse and check everything, print what would run, and exit'),
  )


def _split(values: list[str]) -> tuple[str, ...]:
  """Returns the paths in comma-separated lists; an existing path may itself contain commas."""
  paths: list[str] = []
  for value in values:
    is_path = os.path.exists(os.path.expanduser(value))
    paths += [value] if is_path else filter(None, map(str.strip, value.split(',')))
  return tuple(paths)


def _take_bindings(argv: list[str]) -> tuple[list[str], list[str]]:
  """Returns the other arguments, and 'KEY=VALUE' of `--gin.KEY=VALUE` and `--gin.KEY VALUE`."""
  rest, bindings = [], []
  while argv:
    argument = argv.pop(0)
    if not argument.startswith('--gin.'):
      rest.append(argument)
      continue
    binding = argument.removeprefix('--gin.')
    if '=' not in binding:
      if not argv or argv[0].startswith('--'):
        raise ConfigError(f'{argument} has no value.', fix=f'Write {argument}=VALUE.')
      binding = f'{binding}={argv.pop(0)}'
    bindings.append(binding)
  return rest, bindings


def _as_ours(argv: Sequence[str], *, command: str) -> list[str]:
  """Returns arguments that T5X accepts as ours; prints which flags have no effect here."""
  ours, left = [], list(argv)
  while left:
    argument = left.pop(0)
    name, has_value, value = argument.partition('=')
    flag = name.replace('--no', '--', 1)
    if name == '--run_mode' and command == (value or next(iter(left), '')):
      left = left if has_value else left[1:]
    elif argument in _DRY_RUN:
      ours += ['--dry_run'] if _DRY_RUN[argument] else []
    elif flag in T5X_NO_EFFECT:
      left = left[1:] if flag in _WITH_VALUE and not has_value else left
      print(f'note: {name} of T5X has no effect: {T5X_NO_EFFECT[flag]}', file=sys.stderr)
    else:
      ours.append(argument)
  return ours


def _unknown_argument(argument: str, parser: argparse.ArgumentParser) -> ConfigError:
  if not argument.startswith('-'):
    fix = (
      f'Write --gin_file={argument}'
      if argument.endswith('.gin')
      else f'Flags start with --; {parser.prog} --help lists them.'
    )
    return ConfigError(f'Unknown argument {argument!r}.', fix=fix)
  name = argument.split('=', 1)[0]
  flags = [flag for action in parser._actions for flag in action.option_strings]
  if name in T5X_FLAGS:
    return ConfigError(f'{name} is a flag of T5X, not of t5x_gpu.', fix=T5X_FLAGS[name])
  hint = did_you_mean(name, flags)
  word = name.lstrip('-').replace('-', '_')
  gin = f' Set a macro with --gin.{word.upper()}=VALUE, a parameter with --gin.Class.{word}=VALUE.'
  if hint:
    gin = ''
  elif '.' in word:
    gin = f' To set a value in gin, write --gin.{word.partition(".")[2]}=VALUE.'
  return ConfigError(
    f'Unknown flag {name}.{hint}', fix=f'{parser.prog} --help lists all flags.{gin}'
  )


def add_trust_flag(group: argparse._ArgumentGroup) -> None:
  """Adds --trust_gin, for commands that read the gin file of a checkpoint folder."""
  group.add_argument(
    '--trust_gin',
    action='store_true',
    default=None,
    help=(
      "run the folder's own gin file, which may import and call anything (default: read it as data)"
    ),
  )


def check_trust_flag(args: Args) -> None:
  """Raises ConfigError for --trust_gin together with --gin_file."""
  if args.extra.trust_gin and args.gin_files:
    raise ConfigError(
      "--trust_gin runs a folder's own gin file, but --gin_file replaces that file.",
      fix='Leave one of them out.',
      docs='infer.md#trust',
    )


def trusted(gin_file: str) -> str:
  """Returns the line to print before a folder's gin file runs."""
  return f'--trust_gin: running {gin_file}, which may import and call anything.'


def check_given(usage: str, **flags: Optional[str]) -> None:
  """Raises ConfigError, with the `usage`, unless each of `flags` has a value."""
  missing = [f'--{name}' for name, value in flags.items() if not value]
  if missing:
    raise ConfigError(f'{" and ".join(missing)} must be given.', fix=usage)


def check_folders_of(*paths: Optional[str]) -> None:
  """Raises ConfigError if the folder of an output file does not exist."""
  for path in filter(None, paths):
    folder = os.path.dirname(path) or '.'
    file = next((p for p in (folder, *pathlib.Path(folder).parents) if os.path.isfile(p)), None)
    if file:
      raise ConfigError(
        f'{path!r} cannot be written: {str(file)!r} is a file, not a folder.',
        fix='Name another path.',
      )
    if not os.path.isdir(folder):
      raise ConfigError(
        f'{path!r} cannot be written: the folder {folder!r} does not exist.',
        fix=f'Create it first: mkdir -p {shlex.quote(folder)}',
      )


def run_main(main: Callable[[], Optional[int]]) -> NoReturn:
  """Runs `main` and exits with its code or 0, 1 on an error, 130 on Ctrl-C (a second one at once).

  `T5X_GPU_CONFIG_ERROR_CODE` replaces the 1 for configuration errors (docs/slurm.md).

  Prints a `UserError` without a traceback, followed by where each of its parameters was set. In a
  run of several processes, an error exits at once, since the processes would wait for each other.
  """
  import_interrupts.open_closed_streams()
  streams.install()
  import_interrupts.raise_again()
  machine.this_is_a_command()
  gc.freeze()  # no collection visits the imported modules
  gc.enable()
  failed, config_error_code = True, int(os.environ.get(CONFIG_ERROR_CODE) or 1)
  try:
    check_encoding(*sys.argv[1:])
    with (
      process_exit.ignored_signals_repeated(),
      SecondInterruptLeaves(leave=process_exit.leave_at_once),
    ):
      code = main() or 0
    failed = False
  except UserError as error:
    print(process_exit.label() + describe_error(error), file=sys.stderr)
    code = config_error_code if isinstance(error, _CONFIG_ERRORS) else 1
  except KeyboardInterrupt:
    print(process_exit.label() + 'Interrupted.', file=sys.stderr)
    code = 130
  except Exception as error:
    if is_refused(error):  # wherever it happens: a file server may fail at any time
      refused = AccessError(
        f'{error.filename} cannot be used: {reason_of(error)}.',
        fix=remedy(error),
        docs='checkpoints.md#no-access',
      )
      print(process_exit.label() + describe_error(refused), file=sys.stderr)
    elif error is not streams.lost_output():  # a bug in t5x_gpu: show the whole traceback
      print(process_exit.label() + printable(traceback.format_exc()), end='', file=sys.stderr)
    code = 1
  with contextlib.suppress(OSError):
    sys.stdout.flush()
  lost = streams.lost_output()
  if lost is not None:
    code = code or 1
    if not isinstance(lost, BrokenPipeError):  # `| head` has read enough
      print(f'Standard output cannot be written: {lost.strerror or lost}.', file=sys.stderr)
    # Python would flush once more on exit and complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  sys.stderr.flush()
  process_exit.leave(code, failed=failed)


def describe_error(error: UserError) -> str:
  """Returns `MeshError: ...`, the fix, and the origin of each gin parameter involved."""
  # gin re-raises a subclass whose __str__ appends gin's call stack, so call UserError's __str__.
  text = f'{type(error).__name__}: {UserError.__str__(error)}'
  lines = [sentence for name in error.parameters for sentence in provenance.origin_sentences(name)]
  return printable('\n'.join([text, *('  ' + line for line in lines)]))
