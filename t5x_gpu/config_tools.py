"""`python -m t5x_gpu.config explain | show | diff | from_t5x | from_hf`.

The first three tell where the values of a run come from; the last two write the gin file of a run
from gin files of T5X, and from a Hugging Face model.
"""

import argparse
import dataclasses
import importlib
import re
import sys
from typing import Optional

from t5x_gpu import cli
from t5x_gpu.config import gin_loader, report
from t5x_gpu.config.provenance import Provenance
from t5x_gpu.config.t5x import translation
from t5x_gpu.errors import ConfigError, did_you_mean
from t5x_gpu.storage.files import write_atomically
from t5x_gpu.storage.user_paths import expanded_path

PROG = 'python -m t5x_gpu.config'
DESCRIPTION = (
  'Shows where the values of a run come from and what they override; writes the gin file of a run '
  'from gin files of T5X or from a Hugging Face model. Runs nothing.'
)
EXAMPLES = """examples:
  {prog} explain BATCH_SIZE --gin_file=my.gin       one value; part of a name is enough
  {prog} show --gin_file=my.gin --gin.BATCH_SIZE=8  all values
  {prog} diff a.gin b.gin                           what differs between two
  {prog} from_t5x t5x/examples/a.gin --gin_search_paths=T5X --output=ours.gin
                                                    what becomes of each value, and our file
  {prog} from_hf Llama-3.2-1B --task='jsonl:chat/*.jsonl' --gpus=8 --gpu=h100 --output=my.gin
                                                    converts the model, and writes a run that
                                                    fine-tunes it
"""
# Writes gin files from Hugging Face models. Imported when it is called: the other commands answer
# in a fraction of a second, and need neither jax nor a model.
_FROM_HF = 't5x_gpu.tools.from_hf'


COMMANDS = ('explain', 'show', 'diff', 'from_t5x', 'from_hf')


def _flags(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('command', choices=COMMANDS)
  parser.add_argument('names', nargs='*', metavar='KEY|FILE|FOLDER')
  parser.add_argument(
    '--entry',
    default=gin_loader.ENTRY,
    metavar='MODULE.FUNCTION',
    help='function that the configuration is for (default: %(default)s)',
  )
  parser.add_argument(
    '--output', metavar='FILE', help='from_t5x, from_hf: the gin file to write; it must not exist'
  )
  group = parser.add_argument_group('from_hf')
  group.add_argument(
    '--task', metavar='TASK', help='the data, as MIXTURE_OR_TASK_NAME: jsonl:chat/*.jsonl'
  )
  group.add_argument('--lora', action='store_true', help='train adapters (default: all parameters)')
  group.add_argument(
    '--export', metavar='FOLDER', help='export the model to this new folder when the run has ended'
  )
  group.add_argument(
    '--gpus', type=int, metavar='N', help='choose a layout that fits on N GPUs (default: any GPUs)'
  )
  group.add_argument(
    '--gpus_per_host', type=int, metavar='N', help='GPUs per host (default: 8, or all if fewer)'
  )
  group.add_argument('--gpu', metavar='NAME', help='which GPU, as for plan (default: h100)')
  group.add_argument(
    '--converted', metavar='FOLDER', help='the converted model (default: runs/<name of the model>)'
  )
  group.add_argument(
    '--model_dir', metavar='FOLDER', help='MODEL_DIR of the run (default: runs/<name of --output>)'
  )


def main(argv: Optional[list[str]] = None) -> Optional[int]:
  """Answers one command on standard output."""
  args = cli.parse_args(
    PROG, DESCRIPTION, argv, extra=_flags, gin_file_required=False, examples=EXAMPLES
  )
  command, names = args.extra.command, args.extra.names
  if command == 'from_t5x':
    _from_t5x(args)
    return None
  if command == 'from_hf':
    importlib.import_module(_FROM_HF).main(names, args.extra, dry_run=args.dry_run)
    return None
  wanted = {'show': 0, 'diff': 2}.get(command, max(1, len(names)))
  if len(names) != wanted:
    raise ConfigError(
      f'{command} takes {wanted} name(s), got {len(names)}: {" ".join(names)}',
      fix=f'{PROG} --help shows the usage.',
    )
  if command != 'diff' and not args.gin_files:
    raise ConfigError('No --gin_file is given.', fix=f'{PROG} {command} ... --gin_file=FILE')

  def provenance_of(files: tuple[str, ...]) -> Provenance:
    config = dataclasses.replace(args, gin_files=files).load(entry=args.extra.entry)
    for note in config.notes:
      print(f'note: {note}', file=sys.stderr)
    return config.provenance

  if command == 'diff':
    a, b = (provenance_of((*args.gin_files, name)) for name in names)
    print('\n'.join(report.diff(a, b)) or 'No value differs.')
    return None
  provenance = provenance_of(args.gin_files)
  if command == 'show':
    report.print_table(provenance)
  else:
    for name in names:
      print('\n'.join(report.explain(provenance, name)))
  return None


def _from_t5x(args: cli.Args) -> None:
  """Prints what becomes of each value of T5X's files, and writes our file.

  Raises:
    ConfigError: nothing is given, the output exists, or a value is refused.
  """
  files = [*args.extra.names, *args.gin_files]
  output = args.extra.output and expanded_path(args.extra.output)
  if not files:
    raise ConfigError('No file is given.', fix=f'{PROG} from_t5x FILE --output=ours.gin')
  if output and output.exists():
    raise ConfigError(f'{output} exists.', fix='Give a new file: --output=FILE')
  found = translation.translate(
    files,
    bindings=args.bindings,
    search_paths=args.gin_search_paths,
    script=translation.configured_script(files, search_paths=args.gin_search_paths) or 'train',
  )
  if found.ours:
    key = found.ours[0].partition('=')[0].strip()
    macros = re.findall(r'^(\w+) =', found.text, re.MULTILINE)
    raise ConfigError(
      f'--gin.{found.ours[0]} names nothing of these files.{did_you_mean(key, macros)}',
      fix='Correct the name. Give parameters of t5x_gpu to the command that runs the new file.',
      docs='from_t5x.md',
    )
  for line in translation.table(found.outcomes):
    print(line)
  if found.unused:
    print('nothing uses')
    for key, origin in found.unused:
      print(f'  {key}  ({origin})')
  if found.problems:
    raise ConfigError(
      "T5X's gin files ask for things that do not exist here",
      problems=found.problems,
      docs='from_t5x.md',
    )
  if output:
    write_atomically(output, found.text)
    print(f'written: {output}')
  else:
    print('--output=FILE writes our file.')
