"""`t5x_gpu COMMAND ...`: the same as `python -m t5x_gpu.COMMAND ...`."""

import importlib
import sys

from t5x_gpu import cli
from t5x_gpu.errors import ConfigError, did_you_mean
from t5x_gpu.runtime import import_interrupts

COMMANDS = {
  'train': 'train a model from a gin file',
  'prepare': 'tokenise and pack a task once, into shards that training reads',
  'launch': 'start one training process per GPU on this machine',
  'plan': 'show what a gin file would do on N GPUs, without one',
  'bench': 'time the training step on synthetic batches',
  'eval': 'evaluate the checkpoints of a run on held-back data',
  'infer': 'write text: continue prompts, or score given continuations',
  'parity': 'prove that a model trains on its mesh as on one device',
  'doctor': 'look at this machine: versions, GPUs, links, speeds, XLA flags',
  'data': "look at a run's data: rows, lengths, speed, checksums",
  'convert': 'convert checkpoints from and to Hugging Face, and from T5X',
  'checkpoint': 'inspect, compare, verify, average and prune checkpoints',
  'reshard': 'write a checkpoint anew: other dtypes, chunks, groups of layers',
  'config': 'show or explain the values of a configuration',
}
# A folder has the name; the command has its own module.
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
