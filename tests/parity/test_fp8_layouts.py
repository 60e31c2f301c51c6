"""Layouts train in FP8 as one device does, with float32 around the FP8 matmuls.

A scale is a power of two, so a device that knows only its own rows rounds as one device that has
all of them, and blocks of MXFP8 may have other rows; gradients then agree to MESH_GRADIENT. On
another CPU, a sum in another order may move a value to the next 8-bit number, which later matmuls
amplify for that token. The band is half of what the rounding of one product does to its gradient
(tests/layers/test_fp8.py). A batch with a value on the edge between two 8-bit numbers may exceed
it; another batch then decides: its values are other ones, and a mistake in a layout is in every
batch.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from t5x_gpu.data.synthetic import uneven_batches
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.schedules import constant
from tests.helpers_layouts import QUICK
from tests.helpers_parity import OPTIMIZER
from tests.helpers_programs import build_with
from tests.parity.test_layouts import BATCH, CASES, FAMILIES, LENGTH, LENGTHS, MODELS, Case

FP8_GRADIENT = 0.03
BATCHES = 3
FAST = ('fsdp',)  # the others take more than 10 CPU seconds
# Each two parallelisms that meet in CASES, and each parallelism with each kind of stack: a decoder,
# experts, an encoder, an encoder-decoder. Attention and norms are not in FP8.
NAMES = (
  'fsdp',
  'zero2_remat',
  'fsdp_by_microbatch',
  'hsdp_minimal',
  'pp_zero1_overlap',
  'modern_gather_shared_kv_heads',
  'modern_pp_fsdp_model',
  'by_layer_pp_fsdp_offload',
  'charged_moe_fsdp_by_layer',
  'charged_moe_context_stage',
  'charged_moe_model',
  'classifier_fsdp_model',
  'classifier_context_stage',
  't5_zero2_by_layer',
  't5_fsdp_stage',
  't5_data_stage_model',
  't5_gather_stage',
  't5_circular',
  'data_stage_model',
  'fsdp_context_model',
  'fsdp_circular',
  'expert_fsdp',
)


def shares_heads(case: Case) -> bool:
  """Returns whether devices share a key and value head."""
  heads = MODELS[case.model].num_kv_heads if case.model in MODELS else None
  return heads is not None and heads < case.partitioner.get('num_partitions', 1)


def build(case: Case, num_devices: int, **change):
  """Returns the program of a case in FP8; `change` is of the model's config."""
  change = dict(case.config, dtype='fp8_float32') | change
  if case.model in FAMILIES:
    model = FAMILIES[case.model]()
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, **change))
  else:
    model = DecoderOnlyModel(dataclasses.replace(MODELS[case.model], **change))
  return build_with(
    model=model,
    optimizer=OPTIMIZER,
    learning_rate=constant(1e-2),
    partitioner=Partitioner(**case.partitioner),
    topology=Topology(case.num_hosts, num_devices // case.num_hosts),
    devices=jax.devices()[:num_devices],
    task_feature_lengths=LENGTHS.get(case.model, {'targets': LENGTH}),
    batch_size=BATCH,
    pack='classifier' not in case.model,
    num_microbatches=case.num_microbatches,
  )


# In MXFP8: each way to gather kernels and to add up gradients. `model` does not split it.
MXFP8_NAMES = (
  'fsdp',
  'dp_overlap_2_microbatches',
  'zero2_overlap',
  'fsdp_by_microbatch',
  'gpt2_context_stage',
  'pp_zero1_overlap',
  't5_fsdp_by_layer',
)


def first_step(program, with_params=lambda params: params):
  """Returns number of a batch -> (loss, path -> gradient) of the first step.

  Args:
    program: is compiled once.
    with_params: parameters of `program` -> parameters to start from.
  """
  uneven = uneven_batches(program.spec, seed=1, num_batches=BATCHES)
  first, *_ = batches = [program.layout.put_batch(batch) for batch in uneven]
  init = program.init.lower().compile(compiler_options=QUICK)
  step = program.train_step.lower(program.abstract_state, first).compile(compiler_options=QUICK)

  def run(number):
    state = init()
    state, sums = step(state.replace(params=with_params(state.params)), batches[number])
    grads, _ = jax.tree_util.tree_flatten_with_path(program.in_saved_form(state).opt_state.gradient)
    return float(sums['loss'][0] / sums['loss'][1]), {
      jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(x) for path, x in grads
    }

  return run


@functools.cache
def one_device(model: str, **change):
  return first_step(build(Case({}, model), 1, **change))


@functools.cache
def one_device_with_copies(model: str, **change):
  """Returns `first_step` of a model that has a key and value head per device, copied.

  With fewer of these heads than devices, each device rounds the gradient of the copy it holds.
  """
  case, config = Case({}, model), MODELS[model]
  few, count = config.num_kv_heads, config.num_heads // config.num_kv_heads
  narrow, wide = (build(case, 1, num_kv_heads=n, **change) for n in (few, config.num_heads))

  def with_copies(_):
    params = narrow.init.lower().compile(compiler_options=QUICK)().params
    block = dict(params['layers']['self_attention'])
    for name in ('key', 'value'):
      block[name] = {n: jax.numpy.repeat(x, count, axis=-2) for n, x in block[name].items()}
    return {**params, 'layers': {**params['layers'], 'self_attention': block}}

  def of_heads(path, x):
    if not path.startswith(('layers/self_attention/key/', 'layers/self_attention/value/')):
      return x
    return x.reshape(*x.shape[:-2], few, count, x.shape[-1]).sum(-2)

  run = first_step(wide, with_copies)

  def joined(number):
    loss, grads = run(number)
    return loss, {path: of_heads(path, x) for path, x in grads.items()}

  return joined


def differences(got, want):
  """Returns path -> norm of the difference of gradients, relative to the norm of `want`.

  Without the biases of keys: they shift all logits of a query alike, so their gradient is rounding
  alone.
  """
  return {
    path: np.linalg.norm(got[path] - x) / np.linalg.norm(x)
    for path, x in want.items()
    if not path.endswith('key/bias')
  }


def cases(names):
  return pytest.mark.parametrize(
    'name', [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]
  )


@cases(NAMES)
def test_first_step_in_fp8_equals_one_device(name):
  case = CASES[name]
  change = dict(num_layers=2, dropout_rate=0.0) if name in FAST else dict(num_layers=4)
  if shares_heads(case):
    change['dropout_rate'] = 0.0  # dropout masks of values belong to heads
    reference = one_device_with_copies(case.model, **change)
  else:
    reference = one_device(case.model, **change)
  assert_equal_in_a_batch(reference, first_step(build(case, 8, **change)))


@cases(MXFP8_NAMES)
def test_first_step_in_mxfp8_equals_one_device(name):
  case = CASES[name]
  change = dict(num_layers=2 if name in FAST else 4, dropout_rate=0.0, fp8_scaling='mxfp8')
  reference = one_device(case.model, **change)
  assert_equal_in_a_batch(reference, first_step(build(case, 8, **change)))


def assert_equal_in_a_batch(reference, layout):
  """Asserts that a batch has equal losses and gradients; arguments are results of `first_step`."""
  for number in range(BATCHES):
    (want_loss, want), (loss, grads) = reference(number), layout(number)
    np.testing.assert_allclose(loss, want_loss, rtol=FP8_GRADIENT)
    errors = differences(grads, want)
    if max(errors.values()) < FP8_GRADIENT:
      return
  assert max(errors.values()) < FP8_GRADIENT, errors
