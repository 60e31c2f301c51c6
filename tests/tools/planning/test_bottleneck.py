"""The sentence on what limits a step: the largest cost, and advice that the run can follow."""

import dataclasses

import jax
import pytest

from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.planning import screen
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.gpu_targets import find_target
from t5x_gpu.tools.planning.prediction import Planner
from tests.aot.cases import Case

DOTS = "REMAT_POLICY = 'dots'"
LONG = Case(model='llama3_2_1b', layout='fsdp', batch=(64, 4096), bindings=(DOTS,))
SHORT = Case(model='llama3_2_1b', layout='fsdp', batch=(8, 512))
WITH_BIAS = Case(model='decoder_base', layout='dp', batch=(1536, 512), gpu='h200', bindings=(DOTS,))


def predicted(case, topology=Topology(1, 8)):
  planner = Planner(find_target(case.gpu), Assumptions(), jax.devices())
  return planner.by_formula(case.config(), topology)


def sentence(case, topology=Topology(1, 8), **changes):
  return screen.bottleneck_sentence(predicted(dataclasses.replace(case, **changes), topology))


def test_attention_is_named_where_it_takes_most():
  assert sentence(LONG, batch=(8, 65536)).startswith('Attention takes ')
  assert 'needs shorter rows' in sentence(LONG, batch=(8, 65536))
  assert sentence(LONG).startswith('Matrix products take ')


@pytest.mark.parametrize(
  'gpu, precision, advice',
  [
    ('h100', 'bfloat16', 'needs FP8, a faster GPU'),
    ('h100', 'fp8', 'needs a faster GPU'),
    ('a100-40', 'bfloat16', 'needs a faster GPU'),
  ],
)
def test_fp8_is_advised_where_it_would_be_new(gpu, precision, advice):
  settings = DOTS, f"PRECISION = '{precision}'", 'TransformerConfig.scan_unroll = 16'
  assert advice in sentence(LONG, gpu=gpu, bindings=settings)


@pytest.mark.parametrize('policy', ['none', 'dots'])
def test_layers_under_full_cost_their_share_of_a_forward_pass(policy):
  """The policy alone recomputes nothing."""

  def again(number):
    full = f'TransformerConfig.full_remat_layers = {number}'
    case = dataclasses.replace(LONG, bindings=(f'REMAT_POLICY = {policy!r}', full))
    of_layers = [c.seconds for c in screen.costs(predicted(case)) if 'layers again' in c.what]
    return sum(of_layers)

  assert again(0) == 0
  assert again(8) == pytest.approx(again(16) / 2, rel=0.01) and again(8) > 0


def test_stacks_of_stored_activations_cost_nothing_without_a_loop():
  def settings(layers):
    return "REMAT_POLICY = 'none'", f'TransformerConfig.scan_unroll = {layers}'

  assert 'Copying what layers store' in sentence(LONG, bindings=settings(1))
  assert 'a remat_policy that stores less' in sentence(LONG, bindings=settings(1))
  without = dataclasses.replace(LONG, bindings=settings(16))
  assert not [c for c in screen.costs(predicted(without)) if 'Copying' in c.what]


def test_hsdp_is_advised_where_fsdp_crosses_the_network():
  assert 'over fsdp (NVLink)' in sentence(SHORT) and 'hsdp' not in sentence(SHORT)
  on_two = sentence(SHORT, Topology(2, 4))
  assert 'over fsdp (network)' in on_two and 'hsdp.gin' in on_two
  assert 'hsdp' not in sentence(SHORT, Topology(8, 1)), 'hosts of one GPU'


def test_the_advice_about_attention_is_the_one_that_gets_a_kernel():
  found = sentence(WITH_BIAS)
  assert 'a kernel would store 1.1 GiB of bias gradients' in found
  assert 'more NUM_MICROBATCHES' in found and 'install' not in found
  assert 'Attention' not in sentence(WITH_BIAS, bindings=(DOTS, 'NUM_MICROBATCHES = 2'))


@pytest.mark.parametrize(
  'binding, reason, advice',
  [
    ("DTYPE = 'float32'", 'computes in bfloat16, not in float32', "dtype = 'bfloat16'"),
    ("ATTENTION = 'dense'", "TransformerConfig.attention = 'dense'", "attention = 'auto'"),
  ],
)
def test_settings_that_keep_kernels_from_attention_are_named(binding, reason, advice):
  case = Case(model='gpt2_xl', layout='dp', batch=(64, 1024), bindings=(binding,))
  [cost] = [c for c in screen.costs(predicted(case)) if c.what.startswith('Attention without')]
  assert reason in cost.what and cost.remedy == f'TransformerConfig.{advice}'
