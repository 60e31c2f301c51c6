"""Memory of BERT-Large on one device under tensor parallelism; writes tp_memory.json.

    python benchmarks/tp_memory.py [--batch 8] [--length 512]

Compiles a training step for 1, 2, 4 and 8 fake devices of one replica, with and without sequence
parallelism and rematerialisation, and reads XLA's own account of memory; nothing runs. The model is
gin_configs/models/bert_large.gin with masked language modelling and its 30,522 tokens
padded to 30,592, which eight devices divide. CPUs hold attention weights whole, as do GPUs
without a fused kernel.
"""

import argparse
import json
import os
import pathlib
from typing import Any

import gin
import jax

from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import build_program
from t5x_gpu.training.schedules import constant
from t5x_gpu.training.train_step import StepConfig

DEVICES = (1, 2, 4, 8)
MODEL = pathlib.Path(__file__).parents[1] / 'gin_configs' / 'models' / 'bert_large.gin'
OUT = pathlib.Path(__file__).parent / 'results' / 'tp_memory.json'


def measure(
  args: argparse.Namespace, remat: str, model: int, sequence_parallel: bool
) -> dict[str, Any]:
  """Returns parameters, and bytes of state and of everything else on one of `model` devices."""
  with gin.unlock_config():
    gin.clear_config()
    gin.parse_config_files_and_bindings(
      [str(MODEL)],
      ["HEAD = 'mlm'", 'VOCAB_SIZE = 30_592', "DTYPE = 'float32'", f'REMAT_POLICY = {remat!r}'],
    )
    bert = gin.query_parameter('%MODEL').scoped_configurable_fn()
  lengths = {'inputs': args.length, 'targets': args.length}
  config = StepConfig(
    model=bert,
    train_dataset_cfg=DatasetConfig('', lengths, 'train', args.batch, pack=False),
    partitioner=Partitioner(num_partitions=model, sequence_parallel=sequence_parallel),
    optimizer=AdamW(),
    learning_rate=constant(1e-4),
  )
  program = build_program(config, topology=Topology(1, model), devices=jax.devices()[:model])
  compiled = program.train_step.lower(program.abstract_state, program.abstract_batch).compile(
    compiler_options={'xla_llvm_disable_expensive_passes': True}
  )
  memory = compiled.memory_analysis()
  unaliased = memory.output_size_in_bytes - memory.alias_size_in_bytes
  return {
    'remat_policy': remat,
    'model': model,
    'sequence_parallel': sequence_parallel,
    'parameters': program.num_params,
    'state_bytes': memory.argument_size_in_bytes,
    'temporary_bytes': memory.temp_size_in_bytes + unaliased,
  }


def table(rows: list[dict[str, Any]]) -> str:
  """Returns the rows as text, with the total relative to a fair share of one device's."""

  def total(row: dict[str, Any]) -> int:
    return row['state_bytes'] + row['temporary_bytes']

  lines = [
    f'{"model":>5} {"sequence":>8} {"state GiB":>10} {"rest GiB":>9} {"total GiB":>10} '
    f'{"of 1/model":>10}'
  ]
  for row in rows:
    gib = [n / 2**30 for n in (row['state_bytes'], row['temporary_bytes'], total(row))]
    share = total(row) * row['model'] / total(rows[0])
    split = 'split' if row['sequence_parallel'] else 'whole'
    lines.append(
      f'{row["model"]:>5} {split:>8} {gib[0]:>10.2f} {gib[1]:>9.2f} {gib[2]:>10.2f} {share:>9.2f}x'
    )
  return '\n'.join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--batch', type=int, default=8, help='rows of the replica')
  parser.add_argument('--length', type=int, default=512)
  parser.add_argument('--out', type=pathlib.Path, default=OUT)
  args = parser.parse_args()
  # Before jax starts its backend.
  os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={max(DEVICES)}'
  jax.config.update('jax_platforms', 'cpu')
  rows = []
  for remat in ('none', 'full'):
    part = [measure(args, remat, 1, False)] + [
      measure(args, remat, model, split) for split in (False, True) for model in DEVICES[1:]
    ]
    print(
      f'{part[0]["parameters"]:,} parameters, batch {args.batch} x {args.length}, float32, '
      f'AdamW, remat_policy = {remat!r}'
    )
    print(table(part))
    rows += part
  args.out.write_text(
    json.dumps(
      {
        'command': f'python benchmarks/tp_memory.py --batch {args.batch} --length {args.length}',
        'batch': args.batch,
        'length': args.length,
        'dtype': 'float32',
        'jax': jax.__version__,
        'rows': rows,
      },
      indent=2,
    )
    + '\n'
  )


if __name__ == '__main__':
  main()
