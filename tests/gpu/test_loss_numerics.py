"""The loss without stored logits on this device equals the plain loss in float32."""

import jax
import jax.numpy as jnp
import pytest

from t5x_gpu.models.losses import TokenLoss, cross_entropy, linear_cross_entropy
from tests.gpu.helpers_numerics import ON_GPU, assert_close

# Libraries may warn about the jax of a GPU machine, which does not affect numbers.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings('default')]

TOKENS, EMBED, VOCAB = (1000, 512, 32000) if ON_GPU else (50, 16, 100)
BANDS = {'float32': 1e-5, 'bfloat16': 2e-2}


@pytest.mark.parametrize('dtype', BANDS)
@pytest.mark.parametrize('smoothing, softcap', [(0.0, None), (0.1, None), (0.0, 30.0)])
def test_the_chunked_loss_and_its_gradients(dtype, smoothing, softcap):
  keys = jax.random.split(jax.random.key(0), 4)
  x = jax.random.normal(keys[0], (1, TOKENS, EMBED), jnp.bfloat16)
  kernel = (jax.random.normal(keys[1], (EMBED, VOCAB)) * 2 * EMBED**-0.5).astype(jnp.bfloat16)
  kernel = kernel.astype(jnp.float32)
  targets = jax.random.randint(keys[2], (1, TOKENS), 0, VOCAB)
  weights = jax.random.bernoulli(keys[3], 0.8, (1, TOKENS)).astype(jnp.float32)

  def plain(x, kernel):
    logits = jnp.einsum('ble,ev->blv', x, kernel)
    if softcap is not None:
      logits = softcap * jnp.tanh(logits / softcap)
    sums = cross_entropy(logits, targets, weights, z_loss=1e-3, label_smoothing=smoothing)
    return sums['loss'][0]

  def chunked(x, kernel):
    loss = TokenLoss(1e-3, smoothing, softcap)
    options = dict(token_loss=loss, num_chunks=7)
    return linear_cross_entropy([(x, kernel)], None, targets, weights, **options)['loss']

  with jax.default_matmul_precision('highest'):
    exact = jax.jit(jax.value_and_grad(plain, (0, 1)))(x.astype(jnp.float32), kernel)
    got = jax.jit(jax.value_and_grad(chunked, (0, 1)))(x.astype(dtype), kernel)
  assert_close(got, exact, BANDS[dtype])
