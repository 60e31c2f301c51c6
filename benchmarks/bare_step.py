"""The decoder of gin_configs/models/decoder_14m.gin as a bare jax step: what a framework may cost.

No flax, no mesh, no names: parameters in a dict, layers in a Python loop, optax's AdamW. Prints one
JSON line with the median seconds of a step, CPU seconds per step, peak resident memory.

    python benchmarks/bare_step.py [--steps 10]
"""

import argparse
import json
import resource
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

BATCH, LENGTH, VOCAB, LAYERS, EMBED, HEADS, HEAD_DIM, MLP = 8, 256, 384, 8, 384, 6, 64, 1024


def init() -> dict[str, jax.Array]:
  """Returns parameters; matrices at 1/sqrt(fan in)."""
  shapes = {'embedding': (VOCAB, EMBED), 'bias': (HEADS, 32), 'norm': (EMBED,)}
  for i in range(LAYERS):
    shapes |= {
      f'{i}/q': (EMBED, HEADS, HEAD_DIM),
      f'{i}/k': (EMBED, HEADS, HEAD_DIM),
      f'{i}/v': (EMBED, HEADS, HEAD_DIM),
      f'{i}/o': (HEADS, HEAD_DIM, EMBED),
      f'{i}/wi0': (EMBED, MLP),
      f'{i}/wi1': (EMBED, MLP),
      f'{i}/wo': (MLP, EMBED),
      f'{i}/norm1': (EMBED,),
      f'{i}/norm2': (EMBED,),
    }
  rng = np.random.default_rng(0)
  return {
    name: jnp.ones(shape)
    if 'norm' in name
    else jnp.asarray(rng.normal(size=shape) / np.sqrt(EMBED), jnp.float32)
    for name, shape in shapes.items()
  }


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def loss_fn(p: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
  """Returns the mean next-token loss of [batch, length] tokens."""
  inputs = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
  distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None, :]
  bias = p['bias'] @ jax.nn.one_hot(jnp.clip(distance, 0, 31), 32).swapaxes(1, 2)
  bias = jnp.where(distance >= 0, bias.transpose(1, 0, 2), -1e10)[None]
  x = jax.nn.one_hot(inputs, VOCAB) @ p['embedding']
  for i in range(LAYERS):
    h = norm(x, p[f'{i}/norm1'])
    q, k, v = (jnp.einsum('ble,ehd->blhd', h, p[f'{i}/{n}']) for n in 'qkv')
    weights = jax.nn.softmax(jnp.einsum('bqhd,bkhd->bhqk', q, k) + bias)
    out = jnp.einsum('bhqk,bkhd->bqhd', weights, v)
    x = x + jnp.einsum('blhd,hde->ble', out, p[f'{i}/o'])
    h = norm(x, p[f'{i}/norm2'])
    x = x + (jax.nn.gelu(h @ p[f'{i}/wi0']) * (h @ p[f'{i}/wi1'])) @ p[f'{i}/wo']
  logits = norm(x, p['norm']) @ p['embedding'].T
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--steps', type=int, default=10)
  steps = parser.parse_args().steps
  tx = optax.adamw(1e-3)

  def step(params, state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  params = init()
  state = tx.init(params)
  tokens = jnp.asarray(np.random.default_rng(1).integers(1, 259, (BATCH, LENGTH)), jnp.int32)
  jitted = jax.jit(step, donate_argnums=(0, 1))
  seconds = []
  for i in range(steps + 2):
    if i == 2:
      cpu = time.process_time()
    begin = time.monotonic()
    params, state, loss = jitted(params, state, tokens)
    loss.block_until_ready()
    seconds.append(time.monotonic() - begin)
  print(
    json.dumps(
      {
        'what': 'bare jax step',
        'step_seconds': statistics.median(seconds[2:]),
        'cpu_seconds_per_step': (time.process_time() - cpu) / steps,
        'peak_rss_mib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
      }
    )
  )


if __name__ == '__main__':
  main()
