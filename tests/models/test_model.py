"""A custom model is checked against the `Model` protocol before anything compiles."""

import math

import jax
import pytest

from t5x_gpu.errors import ModelError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.dpo import DpoModel
from t5x_gpu.models.encoder import EncoderModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.lora import LoraModel
from t5x_gpu.models.model import (
  Model,
  OptionalMembers,
  check_model,
  classifies,
  is_layered,
  missing_members,
  writes_text,
)
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import build_program
from t5x_gpu.training.schedules import constant

CONFIG = TransformerConfig(
  vocab_size=64, num_layers=2, embed_dim=16, num_heads=2, head_dim=8, mlp_dim=32
)
DECODER = DecoderOnlyModel(CONFIG)


class Custom:
  """A model with the members of `DECODER` that are named."""

  def __init__(self, *names):
    for name in names:
      setattr(self, name, getattr(DECODER, name))


REQUIRED = missing_members(object(), Model)


def build(model):
  return build_program(
    model=model,
    optimizer=AdamW(),
    schedule=constant(1e-2),
    partitioner=Partitioner(),
    topology=Topology(1, 8),
    devices=jax.devices(),
    task_feature_lengths={'targets': 16},
    batch_size=16,
    pack=False,
    seed=0,
  )


def test_a_model_that_lacks_methods_is_refused_with_their_signatures_and_the_page():
  model = Custom(*(name for name in REQUIRED if name not in ('init', 'loss')))
  with pytest.raises(ModelError) as error:
    build(model)
  for part in (
    'Custom lacks init, loss',
    'def init(self, rng, spec)',
    'def loss(self, params, batch, *, dropout_key=None)',
    'docs/add_a_model.md',
  ):
    assert part in str(error.value)


def test_a_method_with_other_parameters_is_refused():
  model = Custom(*REQUIRED)
  model.loss = lambda params, batch: {}
  with pytest.raises(ModelError, match=r'loss\(params, batch\)') as error:
    build(model)
  assert 'def loss(self, params, batch, *, dropout_key=None)' in str(error.value)


def test_a_class_in_place_of_a_model_is_refused():
  with pytest.raises(ModelError, match='DecoderOnlyModel is a class'):
    check_model(DecoderOnlyModel)


def test_a_member_that_is_only_inherited_from_the_protocol_is_missing():
  class Derived(Model):
    num_outcomes = 3

  assert missing_members(Derived(), Model) == [n for n in REQUIRED if n != 'num_outcomes']


def test_a_model_with_the_required_members_alone_is_built():
  model = Custom(*REQUIRED)
  assert not is_layered(model) and not writes_text(model) and not classifies(model)
  assert build(model).num_params == build(DECODER).num_params


@pytest.mark.parametrize(
  'model, is_text',
  [(DECODER, True), (EncoderDecoderModel(CONFIG), True), (EncoderModel(CONFIG), False)],
)
def test_our_models_have_their_members_with_adapters_too(model, is_text):
  for each in (model, LoraModel(model)):
    check_model(each)
    assert is_layered(each)
    assert writes_text(each) == is_text
    assert classifies(each) == (not is_text)


def test_optional_members_are_those_of_the_model_or_the_declared_defaults():
  custom = Custom(*REQUIRED)
  defaults = OptionalMembers(custom)
  assert defaults.stacks == ('',) and not defaults.gathers_layers and defaults.is_trained is None
  assert not defaults.is_adapter('a/kernel') and defaults.source_of('a/kernel') == 'a/kernel'
  assert defaults.guess_loss == pytest.approx(math.log(64))
  custom.guess_loss, custom.couples_rows = None, True
  assert OptionalMembers(custom).guess_loss is None and OptionalMembers(custom).couples_rows


def test_a_wrapped_model_keeps_its_optional_members():
  wrapped = OptionalMembers(LoraModel(EncoderDecoderModel(CONFIG)))
  assert wrapped.stacks == ('encoder', 'decoder') and wrapped.gathers_layers
  assert wrapped.is_adapter('a/lora_a') and wrapped.is_trained is not None
  without_parts = OptionalMembers(DpoModel(DECODER))
  assert not without_parts.gathers_layers and without_parts.config is CONFIG


def test_a_member_that_is_not_declared_is_an_error():
  custom = Custom(*REQUIRED)
  custom.undeclared = True
  with pytest.raises(AttributeError, match='undeclared'):
    OptionalMembers(custom).undeclared  # noqa: B018
