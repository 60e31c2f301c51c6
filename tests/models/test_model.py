"""A custom model derives from `Model`, which is checked before anything compiles."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from t5x_gpu.errors import ModelError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.dpo import DpoModel
from t5x_gpu.models.encoder import EncoderModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.lora import LoraModel
from t5x_gpu.models.model import (
  PIECES,
  REQUIRED,
  Model,
  ModelWrapper,
  check_model,
  config_of,
  is_layered,
  owner_of_loss,
  writes_text,
)
from t5x_gpu.partitioning.axis_rules import NamedParam
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.schedules import constant
from tests.helpers_programs import build_with
from tests.messages import raises

CONFIG = TransformerConfig(
  vocab_size=64, num_layers=2, embed_dim=16, num_heads=2, head_dim=8, mlp_dim=32
)
DECODER = DecoderOnlyModel(CONFIG)


class Custom(Model):
  """A model with the members of `DECODER` that are named."""

  def __init__(self, *names):
    for name in names:
      setattr(self, name, getattr(DECODER, name))


COMPLETE = (*REQUIRED, 'loss')


def build(model):
  return build_with(
    model=model,
    optimizer=AdamW(),
    learning_rate=constant(1e-2),
    partitioner=Partitioner(),
    topology=Topology(1, 8),
    devices=jax.devices(),
    task_feature_lengths={'targets': 16},
    batch_size=16,
    pack=False,
  )


def test_a_model_that_lacks_methods_is_refused_with_their_signatures_and_the_page():
  model = Custom('num_outcomes', 'feature_converter')
  with raises(ModelError):
    build(model)


def test_a_method_with_other_parameters_is_refused():
  model = Custom(*COMPLETE)
  model.loss = lambda params, batch: {}
  with raises(ModelError):
    build(model)


def test_a_class_in_place_of_a_model_is_refused():
  with raises(ModelError):
    check_model(DecoderOnlyModel)


@pytest.mark.parametrize('wrapped', [lambda m: m, LoraModel, DpoModel])
def test_an_object_that_is_not_a_model_is_refused_with_the_base_class(wrapped):
  class Duck:
    num_outcomes = 3

  with raises(ModelError):
    check_model(wrapped(Duck()))


def test_a_model_with_the_required_members_alone_is_built():
  model = Custom(*COMPLETE)
  assert not is_layered(model) and not writes_text(model) and not model.classifies
  program, same = build(model), build(DECODER)
  assert program.num_params == same.num_params
  assert program.spec == same.spec


def test_three_parts_replace_the_loss():
  model = Custom(*REQUIRED, *PIECES)
  check_model(model)
  params = nn.unbox(model.init(jax.random.key(0), None))
  tokens = jnp.arange(1, 17)[None]
  batch = {
    'decoder_input_tokens': tokens,
    'decoder_target_tokens': tokens,
    'decoder_loss_weights': jnp.ones_like(tokens),
  }
  assert model.loss(params, batch) == DECODER.loss(params, batch)


def test_sizes_and_flops_follow_from_the_parameters():
  class Two(Model):
    def init(self, rng, spec):
      return {
        'wi': NamedParam(jnp.zeros((4, 6, 10)), ('layers', 'embed', 'mlp')),
        'wo': NamedParam(jnp.zeros((10, 9)), (None, 'embed')),
      }

  assert Two().logical_sizes() == {'layers': 4, 'embed': 3, 'mlp': 10}
  assert Two().flops_per_token(8) == 6 * (4 * 6 * 10 + 10 * 9)


@pytest.mark.parametrize(
  'model, is_text',
  [(DECODER, True), (EncoderDecoderModel(CONFIG), True), (EncoderModel(CONFIG), False)],
)
def test_our_models_have_their_members_with_adapters_too(model, is_text):
  for each in (model, LoraModel(model)):
    check_model(each)
    assert is_layered(each)
    assert writes_text(each) == is_text
    assert each.classifies == (not is_text)


def test_a_model_without_optional_members_has_their_defaults():
  custom = Custom(*COMPLETE)
  assert custom.stacks == ('',) and not custom.gathers_layers and custom.is_trained is None
  assert not custom.is_adapter('a/kernel') and custom.source_of('a/kernel') == 'a/kernel'
  assert custom.guess_loss == pytest.approx(math.log(64)) and config_of(custom) is None


def test_a_dataclass_still_requires_the_fields_that_it_declares():
  with pytest.raises(TypeError, match='config'):
    DecoderOnlyModel()


def test_a_wrapped_model_keeps_its_optional_members():
  wrapped = LoraModel(EncoderDecoderModel(CONFIG))
  assert wrapped.stacks == ('encoder', 'decoder') and wrapped.gathers_layers
  assert wrapped.is_adapter('a/lora_a') and wrapped.is_trained is not None
  without_parts = DpoModel(DECODER)
  assert not is_layered(without_parts) and not without_parts.gathers_layers
  assert without_parts.config is CONFIG and writes_text(without_parts)


@pytest.mark.parametrize('wrapper', [LoraModel, DpoModel])
def test_a_wrapper_hides_no_member_of_its_model_behind_a_default(wrapper):
  bases = wrapper.__mro__[: wrapper.__mro__.index(Model)]
  assert ModelWrapper in bases
  members = {name for name in {**vars(Model), **Model.__annotations__} if name[0] != '_'}
  assert members <= set().union(*map(vars, bases))


def test_a_wrapper_without_the_parameters_of_its_model_is_refused():
  class Wrapper(ModelWrapper):
    model = DECODER

  with pytest.raises(ModelError, match='Wrapper lacks params_of_model') as error:
    build(Wrapper())
  assert 'def params_of_model(self, params)' in error.value.fix


def test_a_wrapper_trains_and_counts_as_its_model_does():
  class Head(type(DECODER)):
    def is_trained(self, path):
      return path.startswith('head')

  class Wrapper(ModelWrapper):
    model = Head(DECODER.config)

    def params_of_model(self, params):
      return params

  assert Wrapper().is_trained('head/x') and not Wrapper().is_trained('layers/x')
  assert Wrapper().flops_per_token(8) == DECODER.flops_per_token(8)


class OwnLoss(DecoderOnlyModel):
  def loss(self, params, batch, *, dropout_key=None):
    return super().loss(params, batch, dropout_key=dropout_key)


class OwnParts(OwnLoss):
  def embed(self, *args, **options):
    return super().embed(*args, **options)

  def run_layers(self, *args, **options):
    return super().run_layers(*args, **options)

  def head(self, *args, **options):
    return super().head(*args, **options)


class OnlyLoss(Model):
  def loss(self, params, batch, *, dropout_key=None):
    return {}


@pytest.mark.parametrize('kind', [OwnLoss, OwnParts])
def test_a_loss_of_another_class_than_the_parts_replaces_them(kind):
  for model in (kind(CONFIG), LoraModel(kind(CONFIG))):
    assert not is_layered(model) and model.missing(*PIECES) == [*PIECES]
    assert owner_of_loss(model) == 'OwnLoss'


def test_parts_that_do_not_exist_are_not_replaced():
  assert owner_of_loss(OnlyLoss()) is None and OnlyLoss().missing(*PIECES) == [*PIECES]
