"""Any legal layout of any model trains like one device; any illegal one is refused with one error.

Meshes are powers of two: a size that is odd fits no axis that splits it.
"""

import collections
import dataclasses
import functools
import pathlib
from typing import Optional

import hypothesis
import hypothesis.strategies as st
import jax
import pytest

from t5x_gpu.errors import MeshError
from t5x_gpu.layers.attention import FEATURE_NORMS
from t5x_gpu.layers.positions import RotaryEmbedding
from t5x_gpu.models.config import NORM_POSITIONS, REMAT_POLICIES, TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.schedules import constant
from tests.helpers_parity import OPTIMIZER, assert_same_steps, recorded
from tests.helpers_programs import build_with

DOCS = pathlib.Path(__file__).parents[2] / 'docs'
BATCH, LENGTH = 16, 16
AXES = {
  'context': 'context',
  'fsdp': 'fsdp',
  'model': 'num_partitions',
  'expert': 'expert',
  'stage': 'stage',
  'data': 'data',
}


@dataclasses.dataclass(frozen=True)
class Layout:
  """What is drawn: a model, and how it is split."""

  model: TransformerConfig
  num_devices: int
  mesh: tuple[tuple[str, int], ...]
  zero_stage: int
  sequence_parallel: bool
  context_attention: str
  schedule: str
  num_microbatches: int

  @property
  def partitioner(self) -> Partitioner:
    circular = self.schedule == 'circular' and self.size('stage') > 1
    return Partitioner(
      **{AXES[axis]: size for axis, size in self.mesh},
      zero_stage=self.zero_stage,
      sequence_parallel=self.sequence_parallel,
      context_attention=self.context_attention,
      pipeline_schedule=self.schedule if circular or self.schedule != 'circular' else 'gpipe',
      pipeline_repeats=2 if circular else 1,
    )

  def size(self, axis: str) -> int:
    return dict(self.mesh)[axis]


@st.composite
def ropes(draw, head_dim: int) -> tuple[Optional[RotaryEmbedding], ...]:
  """Draws rotary positions of up to three layers; some examples have long factors, some short."""
  fraction = draw(st.sampled_from([1.0, 0.5])) if head_dim % 4 == 0 else 1.0
  pairs = int(head_dim * fraction) // 2
  kinds = (
    None,
    RotaryEmbedding(10.0, fraction=fraction),
    RotaryEmbedding(100.0, fraction=fraction, scaling='yarn', factor=4.0, original_length=8),
    RotaryEmbedding(
      10.0,
      fraction=fraction,
      scaling='longrope',
      factor=4.0,
      original_length=5,
      short_factors=(1.0,) * pairs,
      long_factors=(3.0,) * pairs,
    ),
  )
  return tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3)))


@st.composite
def models(draw) -> TransformerConfig:
  """Draws models whose sizes eight devices divide in any way, but for key and value heads."""

  def multiple(of: int) -> int:
    return of * draw(st.sampled_from([1, 2, 3]))

  num_heads, head_dim, gated = multiple(8), multiple(2), draw(st.booleans())
  positions = draw(st.sampled_from(['shared', 'per_layer', 'rope', 'ropes', 'table']))
  num_experts = draw(st.sampled_from([0, 0, 8]))
  return TransformerConfig(
    vocab_size=multiple(16),
    num_layers=4,
    embed_dim=multiple(8),
    num_heads=num_heads,
    head_dim=head_dim,
    mlp_dim=multiple(8),
    dropout_rate=draw(st.sampled_from([0.0, 0.1])),
    mlp_activations=('silu', 'linear') if gated else ('gelu',),
    num_kv_heads=draw(st.sampled_from([None, 1, 2, 4])),
    relative_bias=positions if positions in ('shared', 'per_layer') else 'none',
    rope=RotaryEmbedding() if positions == 'rope' else None,
    ropes=draw(ropes(head_dim)) if positions == 'ropes' else (),
    num_positions=LENGTH if positions == 'table' else 0,
    logits_via_embedding=draw(st.booleans()),
    norm=draw(st.sampled_from(['rms', 'layer'])),
    norm_position=draw(st.sampled_from(NORM_POSITIONS)),
    windows=draw(st.sampled_from([(0,), (5, 0)])),
    qk_norm=draw(st.booleans()),
    qk_norm_kind=draw(st.sampled_from(FEATURE_NORMS)),
    mlp_bias=num_experts == 0 and draw(st.booleans()),
    remat_policy=draw(st.sampled_from(REMAT_POLICIES)),
    num_experts=num_experts,
    router_balance_loss=draw(st.sampled_from([0.0, 0.1])),
  )


@st.composite
def layouts(draw) -> Layout:
  """Draws layouts in which everything divides."""
  model = draw(models())
  num_devices = draw(st.sampled_from([8, 8, 4, 2]))
  mesh = dict.fromkeys(AXES, 1)
  splits = [axis for axis in AXES if axis != 'expert' or model.num_experts]
  for _ in range(num_devices.bit_length() - 1):
    # Circular needs two blocks per stage, of four layers or a multiple.
    mesh[draw(st.sampled_from([a for a in splits if a != 'stage' or mesh['stage'] == 1]))] *= 2
  return Layout(
    model,
    num_devices,
    tuple(mesh.items()),
    zero_stage=draw(st.sampled_from([3, 2, 1])),
    sequence_parallel=draw(st.booleans()),
    context_attention=draw(st.sampled_from(['ring', 'gather'])),
    schedule=draw(st.sampled_from(['1f1b', 'gpipe', 'circular'])),
    num_microbatches=draw(st.sampled_from([1, 2])),
  )


def build(layout, *, config=None, batch_size=BATCH, length=LENGTH, **partitioner):
  return build_with(
    model=DecoderOnlyModel(config or layout.model),
    optimizer=OPTIMIZER,
    learning_rate=constant(1e-2),
    partitioner=dataclasses.replace(layout.partitioner, **partitioner),
    topology=Topology(1, layout.num_devices),
    devices=jax.devices()[: layout.num_devices],
    task_feature_lengths={'targets': length},
    batch_size=batch_size,
    pack=True,
    num_microbatches=layout.num_microbatches,
  )


@functools.cache
def alone(model):
  axes = tuple((axis, 1) for axis in AXES)
  return recorded(build(Layout(model, 1, axes, 3, False, 'ring', '1f1b', 1)))


GENERATE = [hypothesis.Phase.generate]  # to shrink takes a compilation each time


@pytest.mark.slow
@hypothesis.settings(max_examples=8, deadline=None, phases=GENERATE)  # others each time
@hypothesis.given(layout=layouts())
def test_the_first_steps_of_many_legal_layouts_equal_one_device(layout):
  check_first_step(layout)


def check_first_step(layout):
  assert_same_steps(recorded(build(layout)), alone(layout.model))


# A size that the test makes odd -> the mesh axes that split it, and parameters. The error must name
# one of them.
MODEL = 'Partitioner.num_partitions'
SIZES = {
  'num_layers': (('stage',), ('TransformerConfig.num_layers', 'Partitioner.stage')),
  'num_heads': (('model',), ('TransformerConfig.num_heads', MODEL)),
  'mlp_dim': (('model',), ('TransformerConfig.mlp_dim', MODEL)),
  'vocab_size': (('model',), ('TransformerConfig.vocab_size', MODEL)),
  'num_experts': (('expert',), ('TransformerConfig.num_experts', 'Partitioner.expert')),
  'batch_size': (('data', 'fsdp', 'expert'), ('BATCH_SIZE',)),
  'length': (('context',), ('TASK_FEATURE_LENGTHS',)),
}


@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
@hypothesis.given(layout=layouts(), data=st.data())
def test_sizes_that_do_not_divide_are_one_error_that_names_each_and_what_to_set(layout, data):
  breakable = [
    name for name, (axes, _) in SIZES.items() if any(layout.size(axis) > 1 for axis in axes)
  ]
  hypothesis.assume(breakable)
  broken = data.draw(st.lists(st.sampled_from(breakable), min_size=1, max_size=3, unique=True))
  odd = {name: data.draw(st.sampled_from([3, 5, 7, 9, 11])) for name in broken}
  sizes = {name: odd.pop(name) for name in ('batch_size', 'length') if name in odd}
  layout = dataclasses.replace(layout, num_microbatches=1)
  config = dataclasses.replace(layout.model, num_kv_heads=None, **odd)
  with pytest.raises(MeshError) as e:
    build(layout, config=config, **sizes)
  text = str(e.value)
  for name, value in {**odd, **sizes}.items():
    assert f'= {value} ' in text, text
    assert any(parameter in text for parameter in SIZES[name][1]), text
  complete(e.value)


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(
  layout=layouts(), axis=st.sampled_from(sorted(AXES)), size=st.sampled_from([3, 5, 7])
)
def test_sizes_that_do_not_multiply_to_the_devices_are_one_error_with_the_fix(layout, axis, size):
  with pytest.raises(MeshError) as e:
    build(layout, **{AXES[axis]: size})
  assert f'{AXES[axis]} = {size}' in str(e.value) or f'{axis}={size}' in str(e.value)
  complete(e.value)


def complete(error):
  """Checks the four parts: what happened, the fix, parameters that exist, a page to read."""
  text = str(error)
  assert 'Set ' in text and error.what and error.parameters and error.docs, text
  owners = collections.defaultdict(
    set,
    Partitioner={f.name for f in dataclasses.fields(Partitioner)},
    TransformerConfig={f.name for f in dataclasses.fields(TransformerConfig)},
  )
  for parameter in error.parameters:
    owner, _, name = parameter.rpartition('.')
    assert name in owners[owner] if owner in owners else name.isupper(), parameter
  assert (DOCS / error.docs.partition('#')[0]).is_file(), error.docs
