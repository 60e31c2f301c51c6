"""Loss curves with AdamW's moments in float32 and in bfloat16; writes moments.json.

    python benchmarks/moments.py [--steps 200]

A decoder of two layers learns the bytes of the standard library's own source, on one CPU device.
Every run sees the same batches. `nearest` rounds the second moment to the nearest bfloat16, which
AdamW does not offer: it shows why AdamW rounds stochastically. Other seeds in float32 show how far
apart equal settings are.
"""

import argparse
import dataclasses
import json
import pathlib
import sysconfig
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import build_program, bytes_per_device
from t5x_gpu.training.schedules import cosine
from t5x_gpu.training.train_step import StepConfig

OUT = pathlib.Path(__file__).parent / 'results' / 'moments.json'
BATCH, LENGTH, HELD_OUT = 8, 128, 16
MODEL = TransformerConfig(
  vocab_size=256,
  num_layers=2,
  embed_dim=64,
  num_heads=4,
  head_dim=16,
  mlp_dim=192,
  init_stddev=0.02,
  query_pre_attn_scalar=16.0,
  scan_unroll=2,
)


class Nearest(AdamW):
  """AdamW with a second moment in bfloat16, rounded to the nearest."""

  def _stored(self, state: Any, names: Any) -> Any:
    exact = AdamW(**dataclasses.asdict(self) | {'nu_dtype': 'float32'})
    adam, *rest = exact._stored(state, names)
    return adam._replace(nu=jax.tree.map(lambda x: x.astype(jnp.bfloat16), adam.nu)), *rest


def batches(num: int) -> list[dict[str, np.ndarray]]:
  """Returns batches of consecutive bytes of the standard library, in a random order of places."""
  files = sorted(pathlib.Path(sysconfig.get_path('stdlib')).glob('*.py'))
  text = np.frombuffer(b''.join(path.read_bytes() for path in files), np.uint8).astype(np.int32)
  places = np.random.default_rng(0).permutation(len(text) // LENGTH)[: num * BATCH]
  rows = text[: len(text) // LENGTH * LENGTH].reshape(-1, LENGTH)[places].reshape(num, BATCH, -1)
  return [
    {
      'decoder_target_tokens': targets,
      'decoder_input_tokens': np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
      'decoder_loss_weights': np.ones_like(targets),
      'decoder_segment_ids': np.ones_like(targets),
    }
    for targets in rows
  ]


def run(optimizer: AdamW, *, steps: int, seed: int = 0) -> dict[str, Any]:
  """Returns the losses of a run, every tenth of it, and of held-out rows at its end."""
  config = StepConfig(
    model=DecoderOnlyModel(MODEL),
    train_dataset_cfg=DatasetConfig('', {'targets': LENGTH}, 'train', BATCH, pack=False),
    partitioner=Partitioner(),
    optimizer=optimizer,
    learning_rate=cosine(peak=3e-3, warmup_steps=steps // 10, total_steps=steps),
    random_seed=seed,
    max_grad_norm=1.0,
  )
  program = build_program(config, topology=Topology(1, 1), devices=jax.devices()[:1])
  state, losses = program.init(), []
  data = batches(steps + HELD_OUT)
  for batch in data[:steps]:
    state, sums = program.train_step(state, program.layout.put_batch(batch))
    losses.append(sums['loss'])
  losses = [float(loss / weight) for loss, weight in losses]
  totals = [
    program.eval_step(state.params, program.layout.put_batch(b))['loss'] for b in data[steps:]
  ]
  return {
    'b2': optimizer.b2,
    'mu_dtype': optimizer.mu_dtype,
    'nu_dtype': 'nearest' if isinstance(optimizer, Nearest) else optimizer.nu_dtype,
    'seed': seed,
    'moments_bytes': bytes_per_device(program.abstract_state.opt_state),
    'losses': [round(float(np.mean(part)), 4) for part in np.array_split(np.asarray(losses), 10)],
    'held_out_loss': round(float(sum(t[0] for t in totals) / sum(t[1] for t in totals)), 4),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--steps', type=int, default=200)
  args = parser.parse_args()
  rows = []
  for b2 in (0.95, 0.999):
    both = dict(b2=b2, mu_dtype='bfloat16', nu_dtype='bfloat16')
    for optimizer, seed in (
      (AdamW(b2=b2), 0),
      (AdamW(b2=b2), 1),
      (AdamW(b2=b2, mu_dtype='bfloat16'), 0),
      (AdamW(**both), 0),
      (Nearest(**both), 0),
    ):
      rows.append(run(optimizer, steps=args.steps, seed=seed))
      print(rows[-1], flush=True)
  OUT.write_text(json.dumps({'steps': args.steps, 'jax': jax.__version__, 'rows': rows}, indent=1))


if __name__ == '__main__':
  main()
