"""`t5x_gpu COMMAND ...`: the same as `python -m t5x_gpu.COMMAND ...`."""

import importlib
import sys

from t5x_gpu import cli
from t5x_gpu.errors import ConfigError, did_you_mean
from t5x_gpu.runtime import import_interrupts

COMMANDS = {
  'train': 'train a model from a gin file',
  'prepare': 'tokenize and pack a task once, into shards that training reads',
  'launch': 'start one training process per GPU on this machine',
  'plan': 'show the mesh, sharding and traffic of a gin file on N GPUs, without a GPU',
  'bench': 'time the training step on synthetic batches',
  'eval': 'evaluate the checkpoints of a run on held-out data',
  'report': 'write an HTML report of a run, or of several side by side',
  'top': 'show a run in the terminal while it trains',
  'infer': 'write text: continue prompts, or score given continuations',
  'parity': 'check that a model trains on its mesh as on one device',
  'doctor': 'check this machine: versions, GPUs, links, speeds, XLA flags',
  'data': "inspect a run's data: rows, lengths, speed, checksums",
  'convert': 'convert checkpoints from and to Hugging Face, and from T5X',
  'checkpoint': 'inspect, compare, verify, average and prune checkpoints',
  'reshard': 'rewrite a checkpoint with other dtypes, chunks or groups of layers',
  'config': 'show or explain the values of a configuration',
}
# Folders have the names of these commands, so their modules are named differently.
MODULES = {name: f'{name}_tools' for name in ('checkpoint', 'config', 'data')}


def _run() -> int:
  arguments = sys.argv[1:]
  if not arguments or arguments[0] in ('-h', '--help'):
    print('usage: t5x_gpu COMMAND [flags]\n\ncommands (each has --help):')
    print('\n'.join(f'  {name:10} {text}' for name, text in COMMANDS.items()))
    return 0
  name, *rest = arguments
  if name not in COMMANDS:
    raise ConfigError(
      f'{name!r} is not a command.{did_you_mean(name, COMMANDS)}',
      fix=f'Commands: {", ".join(COMMANDS)}.',
    )
  import_interrupts.leave()
  module = importlib.import_module(f't5x_gpu.{MODULES.get(name, name)}')
  import_interrupts.raise_again()
  return module.main(rest)


def main() -> None:
  """Runs the command named on the command line and exits with its code."""
  cli.run_main(_run)


if __name__ == '__main__':
  main()
