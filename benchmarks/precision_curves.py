"""Loss curves of 200 steps in each precision, emulated where it must be; see precision_curves.json.

    python benchmarks/precision_curves.py [--steps 200]

A byte-level decoder with 1.0 million parameters learns the source text of Python's standard
library, from the same seed and on the same batches in every precision. Needs no GPU: the CPU rounds
as a GPU would, and adds up the products in float32. Gradients are sent between eight devices, which
the CPU simulates.
"""

import argparse
import dataclasses
import json
import pathlib
import sysconfig
from collections.abc import Iterator
from typing import Any, Optional

import jax
import numpy as np

from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.layers.positions import RotaryEmbedding
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import build_program
from t5x_gpu.training.schedules import constant
from t5x_gpu.training.train_step import StepConfig


@dataclasses.dataclass(frozen=True)
class Run:
  """A precision, and how gradients are sent between devices, if there are several."""

  precision: str
  gradient_dtype: str = 'float32'
  num_devices: int = 1


RUNS = {
  'float32': Run('float32'),
  'bfloat16': Run('bfloat16'),
  'fp8': Run('fp8'),
  'float32, gradients sent in bfloat16': Run('float32', 'bfloat16', 8),
}
BATCH, LENGTH = 16, 64
# Steps over which losses are averaged before they are compared.
WINDOW = 20
MODULES = ('argparse', 'ast', 'dataclasses', 'datetime', 'inspect', 'pathlib', 'pickle', 'tarfile')
OUT = pathlib.Path(__file__).parent / 'results' / 'precision_curves.json'


def text_batches(num_steps: int) -> Iterator[dict[str, np.ndarray]]:
  """Yields batches of random rows of bytes from the source of `MODULES`."""
  folder = pathlib.Path(sysconfig.get_path('stdlib'))
  text = np.frombuffer(b''.join((folder / f'{m}.py').read_bytes() for m in MODULES), np.uint8)
  random = np.random.default_rng(0)
  for _ in range(num_steps):
    starts = random.integers(len(text) - LENGTH - 1, size=BATCH)
    rows = np.stack([text[i : i + LENGTH + 1] for i in starts]).astype(np.int32)
    yield {
      'decoder_input_tokens': rows[:, :-1],
      'decoder_target_tokens': rows[:, 1:],
      'decoder_loss_weights': np.ones((BATCH, LENGTH), np.int32),
      'decoder_segment_ids': np.ones((BATCH, LENGTH), np.int32),
    }


def curve(
  run: Run, num_steps: int, compiler_options: Optional[dict[str, Any]] = None, **options: Any
) -> list[float]:
  """Returns the loss of each step, in nats per byte; `options` are of the TransformerConfig."""
  config = TransformerConfig(
    vocab_size=256,
    num_layers=4,
    embed_dim=128,
    num_heads=4,
    head_dim=32,
    mlp_dim=384,
    mlp_activations=('silu', 'linear'),
    relative_bias='none',
    rope=RotaryEmbedding(),
    query_pre_attn_scalar=32.0,
    init_stddev=0.02,
    dtype=run.precision,
    **options,
  )
  settings = StepConfig(
    model=DecoderOnlyModel(config),
    train_dataset_cfg=DatasetConfig('', {'targets': LENGTH}, 'train', BATCH, pack=False),
    partitioner=Partitioner(gradient_dtype=run.gradient_dtype),
    optimizer=AdamW(),
    learning_rate=constant(2e-3),
    max_grad_norm=1.0,
  )
  program = build_program(
    settings, topology=Topology(1, run.num_devices), devices=jax.devices()[: run.num_devices]
  )
  batches = map(program.layout.put_batch, text_batches(num_steps))
  state, losses, step = program.init(), [], None
  for batch in batches:
    step = step or program.train_step.lower(state, batch).compile(compiler_options)
    state, sums = step(state, batch)
    losses.append(float(sums['loss'][0] / sums['loss'][1]))
  return losses


def averages(losses: list[float]) -> list[float]:
  """Returns the mean loss of each `WINDOW` of steps."""
  return [float(np.mean(losses[i : i + WINDOW])) for i in range(0, len(losses), WINDOW)]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--steps', type=int, default=200)
  parser.add_argument('--only', choices=RUNS, help='run this one; keep the recorded others')
  args = parser.parse_args()
  jax.config.update('jax_num_cpu_devices', max(run.num_devices for run in RUNS.values()))
  found = json.loads(OUT.read_text())['losses'] if args.only else {}
  for name in [args.only] if args.only else RUNS:
    found[name] = averages(curve(RUNS[name], args.steps))
    print(name, ' '.join(f'{loss:.4f}' for loss in found[name]), flush=True)
  worst = {
    name: max(abs(a / b - 1) for a, b in zip(losses, found['float32']))
    for name, losses in found.items()
    if name != 'float32'
  }
  print('largest relative difference from float32:', worst)
  OUT.write_text(json.dumps({'window': WINDOW, 'losses': found, 'off_by': worst}, indent=1) + '\n')


if __name__ == '__main__':
  main()
