"""DPO: losses and gradients of the papers' equations, a frozen reference, any mesh."""

import dataclasses
import functools
import math

import flax.traverse_util
import jax
import numpy as np
import pytest

from t5x_gpu.errors import DataError, ModelError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.dpo import DpoModel
from t5x_gpu.models.encoder import EncoderModel
from t5x_gpu.models.lora import LoraModel
from t5x_gpu.partitioning.axis_rules import split_names
from t5x_gpu.partitioning.layer_stacks import REFERENCE
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.schedules import constant
from tests.helpers_layouts import QUICK
from tests.helpers_programs import build_with
from tests.messages import raises

CONFIG = TransformerConfig(
  vocab_size=32, num_layers=2, embed_dim=16, num_heads=4, head_dim=8, mlp_dim=24, dropout_rate=0.0
)
PLAIN = DecoderOnlyModel(CONFIG)
ADAPTED = LoraModel(PLAIN, rank=2, pattern=r'.*/kernel')
ROWS, LENGTH = 8, 24
# Tokens of (prompt, chosen, rejected) of the pairs in a row.
PAIRS = ([(2, 3, 4), (1, 5, 2)], [(3, 9, 9)], [(4, 1, 1), (1, 1, 1), (1, 2, 3)], [])


def batch(seed: int = 0) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  names = ('target_tokens', 'input_tokens', 'loss_weights', 'segment_ids', 'positions')
  found = {f'decoder_{name}': np.zeros((ROWS, LENGTH), np.int32) for name in names}
  for row in range(ROWS):
    at, segment = 0, 0
    for prompt, *answers in PAIRS[row % len(PAIRS)]:
      asked = rng.integers(1, 32, prompt + 1)
      for size in answers:
        segment, n = segment + 1, prompt + size
        ids = np.concatenate([asked, rng.integers(1, 32, size)])
        place = row, slice(at, at + n)
        found['decoder_input_tokens'][place] = ids[:-1]
        found['decoder_target_tokens'][place] = ids[1:]
        found['decoder_loss_weights'][place] = np.arange(n) >= prompt
        found['decoder_segment_ids'][place] = segment
        found['decoder_positions'][place] = np.arange(n)
        at += n
  return found


def params_of(model, seed: int = 0):
  """Returns parameters; the policy's differ from the reference's."""
  params, _ = split_names(model.init(jax.random.key(seed), None))
  other, _ = split_names(model.init(jax.random.key(seed + 1), None))
  flat, other = (flax.traverse_util.flatten_dict(x, sep='/') for x in (params, other))
  for name in flat:
    if not name.startswith(REFERENCE) and model.is_trained(name):
      flat[name] = 0.7 * flat[name] + 0.3 * other[name] + 0.02
  return flax.traverse_util.unflatten_dict(flat, sep='/')


def by_hand(log_probs, reference, features, *, loss_type, beta, label_smoothing):
  """Returns the mean loss, and TRL's metrics, in torch: text by text, pair by pair.

  Args:
    log_probs, reference: of the target tokens, [rows, length].
  """
  import torch

  def of_text(x, row, segment):
    place = features['decoder_segment_ids'][row] == segment
    has_loss = place & (features['decoder_loss_weights'][row] > 0)
    return x[row, has_loss].sum(), has_loss.sum()

  losses, metrics = [], []
  sigma = torch.nn.functional.logsigmoid
  for row in range(ROWS):
    for segment in range(1, features['decoder_segment_ids'][row].max(), 2):
      (w, num_w), (v, num_v) = (of_text(log_probs, row, segment + i) for i in (0, 1))
      (ref_w, _), (ref_v, _) = (of_text(reference, row, segment + i) for i in (0, 1))
      margin = (w - ref_w) - (v - ref_v)
      if loss_type == 'sigmoid':
        right, wrong = sigma(beta * margin), sigma(-beta * margin)
        loss = -(1 - label_smoothing) * right - label_smoothing * wrong
      elif loss_type == 'hinge':
        loss = torch.clamp(1 - beta * margin, min=0)
      else:
        loss = ((w - ref_w) / num_w - (v - ref_v) / num_v - 1 / (2 * beta)) ** 2
      losses.append(loss)
      w, v, ref_w, ref_v = (float(x.detach()) for x in (w, v, ref_w, ref_v))
      chosen, rejected = beta * (w - ref_w), beta * (v - ref_v)
      metrics.append((chosen, rejected, chosen > rejected, chosen - rejected, w, v))
  names = ('rewards/chosen', 'rewards/rejected', 'rewards/accuracies', 'rewards/margins')
  names += ('logps/chosen', 'logps/rejected')
  means = dict(zip(names, np.mean(np.array(metrics, np.float64), 0)))
  return torch.stack(losses).mean(), means, len(losses)


def mean_loss(sums):
  total, weight = sums['loss']
  return total / weight, sums


@pytest.mark.parametrize(
  ('loss_type', 'beta', 'label_smoothing'),
  [('sigmoid', 0.1, 0.0), ('sigmoid', 0.5, 0.1), ('hinge', 0.3, 0.0), ('ipo', 0.2, 0.0)],
)
def test_losses_metrics_and_gradients_are_those_of_the_papers(loss_type, beta, label_smoothing):
  torch = pytest.importorskip('torch')
  features, rng = batch(), np.random.default_rng(1)
  log_probs, reference = (-rng.gamma(2.0, size=(ROWS, LENGTH)).astype(np.float32) for _ in 'pr')
  ours = torch.tensor(log_probs.astype(np.float64), requires_grad=True)
  options = dict(loss_type=loss_type, beta=beta, label_smoothing=label_smoothing)
  expected, metrics, num_pairs = by_hand(ours, torch.tensor(reference), features, **options)
  expected.backward()
  model = DpoModel(PLAIN, beta, loss_type, label_smoothing)
  gradients_of = jax.value_and_grad(
    lambda x: mean_loss(model.sums(x, reference, features)), has_aux=True
  )
  (loss, sums), gradients = jax.jit(gradients_of)(log_probs)
  assert num_pairs == 12 and {float(weight) for _, weight in sums.values()} == {num_pairs}
  assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
  means = {name: float(total) / num_pairs for name, (total, _) in sums.items() if name != 'loss'}
  assert means == pytest.approx(metrics, rel=1e-4, abs=1e-5)
  np.testing.assert_allclose(gradients, ours.grad, rtol=1e-4, atol=1e-7)
  assert 0.2 < means['rewards/accuracies'] < 0.8


@pytest.mark.parametrize(
  'adapted', (pytest.param(False, marks=pytest.mark.slow), True), ids=('copy', 'adapters')
)
def test_the_gradient_reaches_what_is_trained_and_the_reference_is_the_first_model(adapted):
  torch = pytest.importorskip('torch')
  model = DpoModel(ADAPTED if adapted else PLAIN, 0.3)
  params, features = params_of(model), batch()

  def of_logits(logits):
    each = jax.nn.log_softmax(logits)
    return jax.numpy.take_along_axis(each, features['decoder_target_tokens'][..., None], -1)[..., 0]

  @jax.jit
  def found(params):
    first = _without_factors(params) if adapted else params[REFERENCE]
    reference = of_logits(PLAIN.logits(first, features))
    log_probs = of_logits(model.logits(params, features))
    grads, sums = jax.grad(lambda p: mean_loss(model.loss(p, features)), has_aux=True)(params)
    return reference, log_probs, grads, sums

  @jax.jit
  def pulled_back(params, cotangent):
    return jax.vjp(lambda p: of_logits(model.logits(p, features)), params)[1](cotangent)

  reference, log_probs, grads, sums = found(params)
  ours = torch.tensor(np.asarray(log_probs, np.float64), requires_grad=True)
  expected, metrics, num_pairs = by_hand(
    ours,
    torch.tensor(np.asarray(reference, np.float64)),
    features,
    loss_type='sigmoid',
    beta=0.3,
    label_smoothing=0.0,
  )
  expected.backward()
  means = {name: float(total) / num_pairs for name, (total, _) in sums.items()}
  assert means.pop('loss') == pytest.approx(float(expected.detach()), rel=1e-5)
  assert means == pytest.approx(metrics, rel=1e-4, abs=1e-5)
  [by_torch] = pulled_back(params, np.asarray(ours.grad, np.float32))
  flat, want = (flax.traverse_util.flatten_dict(x, sep='/') for x in (grads, by_torch))
  trained = [name for name in flat if model.is_trained(name)]
  for name in trained:
    np.testing.assert_allclose(flat[name], want[name], rtol=1e-3, atol=2e-6, err_msg=name)
  assert max(float(np.abs(flat[name]).max()) for name in trained) > 1e-3
  assert adapted or all(not np.any(x) for name, x in flat.items() if name not in trained)


def _without_factors(params):
  flat = flax.traverse_util.flatten_dict(params)
  return flax.traverse_util.unflatten_dict(
    {path: x for path, x in flat.items() if not path[-1].startswith('lora')}
  )


def program(model, num_devices=1, **partitioner):
  return build_with(
    model=model,
    optimizer=AdamW(weight_decay=0.1),
    learning_rate=constant(1e-2),
    partitioner=Partitioner(**partitioner),
    topology=Topology(1, num_devices),
    devices=jax.devices()[:num_devices],
    batch_size=ROWS,
    pack=True,
    num_microbatches=1,
    task_feature_lengths={'targets': LENGTH},
  )


def trained(model, steps: int = 2, **options):
  """Returns the parameters after some steps, in the order of the model, and the means of each."""
  p = program(model, **options)
  state, means = p.init(), []
  step_of = p.train_step.lower(p.abstract_state, p.abstract_batch).compile(compiler_options=QUICK)
  for step in range(steps):
    state, sums = step_of(state, p.layout.put_batch(batch(step)))
    means.append({name: float(total) / float(weight) for name, (total, weight) in sums.items()})
  flat = flax.traverse_util.flatten_dict(p.in_saved_form(state).params, sep='/')
  return {name: np.asarray(x) for name, x in flat.items()}, means


CHUNKED = DecoderOnlyModel(dataclasses.replace(CONFIG, loss_chunks=5))
MESHES = {
  'data': dict(num_devices=2, data=2),
  'fsdp': dict(num_devices=2, fsdp=2),
  'model': dict(num_devices=2, num_partitions=2),
  'context': dict(num_devices=2, context=2),
  'all': dict(num_devices=8, fsdp=2, num_partitions=2, context=2),
}


@functools.cache
def single(kind):
  """Returns parameters and means on one device."""
  return trained(DpoModel(PLAIN if kind == 'copy' else ADAPTED, 0.3))


@pytest.mark.slow
@pytest.mark.parametrize(
  ('mesh', 'kind'),
  [
    ('fsdp', 'copy'),
    *(
      pytest.param(mesh, kind, marks=pytest.mark.slow)
      for mesh in MESHES
      for kind in ('copy', 'adapters')
      if (mesh, kind) != ('fsdp', 'copy')
    ),
  ],
)
def test_a_mesh_trains_as_one_device_with_logits_in_chunks(mesh, kind):
  model = CHUNKED if kind == 'copy' else dataclasses.replace(ADAPTED, model=CHUNKED)
  params, means = trained(DpoModel(model, 0.3), **MESHES[mesh])
  expected, expected_means = single(kind)
  for ours, theirs in zip(means, expected_means, strict=True):
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
  assert means[0]['loss'] == pytest.approx(np.log(2), abs=1e-6)
  assert means[1]['loss'] != pytest.approx(np.log(2), abs=1e-3)
  for name, value in expected.items():
    np.testing.assert_allclose(params[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
  if kind == 'copy':
    first = program(DpoModel(PLAIN, 0.3))
    first = flax.traverse_util.flatten_dict(first.in_saved_form(first.init()).params, sep='/')
    for name, value in params.items():
      if name.startswith(REFERENCE):
        np.testing.assert_allclose(value, first[name], rtol=1e-6, atol=1e-7)


def test_the_reference_has_no_optimizer_state_and_is_split_as_the_parameters():
  p = program(DpoModel(PLAIN), num_devices=2, fsdp=2)
  plain = program(PLAIN, num_devices=2, fsdp=2)
  assert (p.num_params, p.num_trained) == (2 * plain.num_params, plain.num_params)
  assert jax.tree.structure(p.abstract_state.opt_state) == jax.tree.structure(
    plain.abstract_state.opt_state
  )
  params = p.abstract_state.params
  for name, reference in params[REFERENCE].items():
    assert jax.tree.map(lambda x: x.sharding, reference) == jax.tree.map(
      lambda x: x.sharding, params[name]
    )


@pytest.mark.parametrize(
  'make',
  [
    lambda: DpoModel(PLAIN, beta=0.0),
    lambda: DpoModel(PLAIN, beta=math.nan),
    lambda: DpoModel(PLAIN, loss_type='sigmoyd'),
    lambda: DpoModel(PLAIN, label_smoothing=0.5),
    lambda: DpoModel(PLAIN, loss_type='ipo', label_smoothing=0.1),
    lambda: DpoModel(EncoderModel(CONFIG)),
    lambda: DpoModel(dataclasses.replace(ADAPTED, also_train='decoder_norm/.*')),
    lambda: DpoModel(dataclasses.replace(PLAIN, z_loss=1e-4)),
    lambda: DpoModel(DecoderOnlyModel(dataclasses.replace(CONFIG, dtype='fp8'))),
    lambda: program(DpoModel(PLAIN), num_devices=2, stage=2),
  ],
)
def test_what_cannot_be_is_refused_before_anything_compiles(make):
  with raises(ModelError):
    make()


def test_a_row_needs_one_length():
  with raises(DataError):
    DpoModel(PLAIN).batch_spec({'inputs': 4, 'targets': 8}, batch_size=2, pack=True)
