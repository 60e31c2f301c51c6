"""Draws docs/images/schedules.png: the learning rates of the built-in schedules.

python scripts/draw_schedules.py [OUTPUT]
"""

import pathlib
import sys

import matplotlib

matplotlib.use('Agg')
import jax.numpy as jnp
import matplotlib.pyplot as plt

from t5x_gpu.training import schedules

PICTURE = pathlib.Path(__file__).parents[1] / 'docs' / 'images' / 'schedules.png'
STEPS, WARMUP = 1000, 100
SCHEDULES = {
  'constant': schedules.constant(1.0, warmup_steps=WARMUP),
  'rsqrt, base = sqrt(warmup_steps)': schedules.rsqrt(WARMUP**0.5, warmup_steps=WARMUP),
  'linear': schedules.linear(1.0, total_steps=STEPS, warmup_steps=WARMUP),
  'cosine, final = 0.1': schedules.cosine(1.0, total_steps=STEPS, warmup_steps=WARMUP, final=0.1),
}


def main() -> None:
  """Writes the picture."""
  picture = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
  steps = jnp.arange(STEPS)
  figure, axes = plt.subplots(figsize=(9, 2.8), layout='constrained')
  for name, schedule in SCHEDULES.items():
    axes.plot(steps, schedule(steps), label=name)
  axes.set(xlabel='step', ylabel='learning rate', xlim=(0, STEPS), ylim=(0, 1.05))
  axes.set_title(f'total_steps = {STEPS}, warmup_steps = {WARMUP}, peak = 1', fontsize=10)
  figure.legend(fontsize=9, loc='outside right center')
  figure.savefig(picture, dpi=110)


if __name__ == '__main__':
  main()
