"""Samples from a model: the tokens that its logits say, on any mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from t5x_gpu.errors import ConfigError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.decoding import sample
from t5x_gpu.partitioning.axis_rules import split_names
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology

MODEL = DecoderOnlyModel(TransformerConfig(vocab_size=16, num_layers=2, embed_dim=16, num_heads=4,
                                           head_dim=8, mlp_dim=32))
PROMPT = np.array([3, 7, 5], np.int32)
LENGTH = 12


@pytest.fixture(scope='module')
def params():
  spec = MODEL.batch_spec({'targets': LENGTH}, batch_size=1, pack=False)
  return jax.jit(lambda: split_names(MODEL.init(jax.random.key(0), spec))[0])()


def sample_on(num_devices, params, **options):
  layout = Partitioner(num_partitions=min(num_devices, 2)).lay_out(
      Topology(1, num_devices), jax.devices()[:num_devices],
      logical_sizes={**MODEL.logical_sizes(), 'batch': num_devices})
  params = jax.device_put(jax.device_get(params), layout.replicated)
  return sample(MODEL, params, PROMPT, layout=layout, length=LENGTH, num_tokens=6, **options)


def test_a_greedy_sample_takes_the_likeliest_token_at_each_place(params):
  wanted = PROMPT
  for _ in range(6):  # Rows as short as they are: nothing is there to look ahead to.
    batch = {'decoder_input_tokens': np.append(0, wanted)[None],
             'decoder_target_tokens': np.append(wanted, 1)[None]}
    wanted = np.append(wanted, np.argmax(MODEL.logits(params, batch)[0, -1]))
  assert sample_on(1, params, temperature=0).tolist() == wanted.tolist()


@pytest.mark.parametrize('temperature', [0, 1.0])
def test_a_sample_is_the_same_on_any_mesh(params, temperature):
  one, eight = (sample_on(n, params, temperature=temperature).tolist() for n in (1, 8))
  assert one[:3] == PROMPT.tolist() and len(one) == 9
  assert eight == one


def test_a_sample_with_experts_is_the_same_on_a_mesh_of_three_axes():
  model = dataclasses.replace(MODEL, config=dataclasses.replace(MODEL.config, num_experts=4))
  spec = model.batch_spec({'targets': LENGTH}, batch_size=1, pack=False)
  params, names = split_names(model.init(jax.random.key(0), spec))

  def sampled(partitioner, num_devices):
    layout = partitioner.lay_out(Topology(1, num_devices), jax.devices()[:num_devices],
                                 logical_sizes={**model.logical_sizes(), 'batch': num_devices})
    return sample(model, jax.device_put(params, layout.shardings(params, names)), PROMPT,
                  layout=layout, length=LENGTH, num_tokens=6, temperature=0).tolist()
  assert sampled(Partitioner(expert=2, fsdp=2, num_partitions=2), 8) == sampled(Partitioner(), 1)


def test_other_seeds_give_other_samples(params):
  assert len({tuple(sample_on(1, params, temperature=5.0, seed=s)) for s in range(4)}) > 1


def test_a_sample_that_does_not_fit_the_length_is_refused(params):
  with pytest.raises(ConfigError, match='3 prompt tokens and 10 new ones; the model takes 12'):
    sample(MODEL, params, PROMPT, layout=None, length=LENGTH, num_tokens=10, temperature=0)
