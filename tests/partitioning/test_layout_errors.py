"""Models that do not fit their mesh: one error with every problem, its rule and its fix."""

import re
from typing import Any

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import pytest

from t5x_gpu.errors import MeshError, ShapeError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.partitioning.axis_rules import split_names, with_axes
from t5x_gpu.partitioning.layout import Layout
from t5x_gpu.partitioning.mesh_sizes import divisors
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.schedules import constant
from tests.helpers_programs import build_with
from tests.messages import raises
from tests.test_docs_names import knob_problem

LENGTH = 'TASK_FEATURE_LENGTHS'  # here their sum
FITS = {
  'BATCH_SIZE': 16,
  LENGTH: 32,
  'NUM_MICROBATCHES': 1,
  'TransformerConfig.vocab_size': 64,
  'TransformerConfig.num_layers': 8,
  'TransformerConfig.embed_dim': 16,
  'TransformerConfig.num_heads': 8,
  'TransformerConfig.mlp_dim': 32,
}


def arguments(prefix: str, settings: dict[str, Any]) -> dict[str, Any]:
  return {
    name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)
  }


def lay_out(settings: dict[str, Any], topology: Topology = Topology(1, 8)) -> Layout:
  """Returns the layout of a run with gin settings `settings`, as `build_program` asks for it."""
  settings = {**FITS, **settings}
  of_both = arguments('EncoderDecoderModel.', settings)
  model = (EncoderDecoderModel if of_both else DecoderOnlyModel)(
    TransformerConfig(head_dim=4, **arguments('TransformerConfig.', settings)), **of_both
  )
  return Partitioner(**arguments('Partitioner.', settings)).lay_out(
    topology,
    jax.devices()[: topology.num_devices],
    logical_sizes={
      **model.logical_sizes(),
      'stacks': len(model.stacks),
      'batch': settings['BATCH_SIZE'],
      'length': settings[LENGTH],
    },
    num_microbatches=settings['NUM_MICROBATCHES'],
  )


def refusal(settings: dict[str, Any]) -> MeshError:
  with raises(MeshError) as e:
    lay_out(settings)
  return e.value


ENCODER_LAYERS = 'EncoderDecoderModel.num_encoder_layers'
PIPELINE_OF_BOTH = {
  'Partitioner.stage': 2,
  'Partitioner.pipeline_schedule': 'gpipe',
  ENCODER_LAYERS: None,
}
LAYERS = ('TransformerConfig.num_layers', 'Partitioner.stage')
ROWS = ('BATCH_SIZE', 'Partitioner.num_pipeline_microbatches')
SCHEDULE, REPEATS = 'Partitioner.pipeline_schedule', 'Partitioner.pipeline_repeats'
WRONG = [  # settings, what is wrong, parameters involved, a change that follows the fix
  (
    {'Partitioner.stage': 4, 'TransformerConfig.num_layers': 6},
    'layers = 6 does not divide over stage=4.',
    LAYERS,
    {'Partitioner.stage': 2},
  ),
  (
    {'Partitioner.stage': 2, SCHEDULE: 'circular', REPEATS: 4, 'TransformerConfig.num_layers': 12},
    'layers = 12 does not divide over stage=2 x 4 blocks each (= 8).',
    (*LAYERS, REPEATS),
    {REPEATS: 3},
  ),
  (
    {'Partitioner.num_partitions': 4, 'TransformerConfig.num_heads': 6},
    'heads = 6 does not divide over model=4.',
    ('TransformerConfig.num_heads', 'Partitioner.num_partitions'),
    {'Partitioner.num_partitions': 2},
  ),
  (
    {'Partitioner.num_partitions': 8, 'TransformerConfig.vocab_size': 100},
    'vocab = 100 does not divide over model=8.',
    ('TransformerConfig.vocab_size', 'Partitioner.num_partitions'),
    {'Partitioner.num_partitions': 4},
  ),
  (
    {'Partitioner.context': 4, LENGTH: 20},
    'length = 20 does not divide over 2 x context=4',
    (LENGTH, 'Partitioner.context'),
    {LENGTH: 24},
  ),
  (
    {'Partitioner.context': 2, LENGTH: 4124},
    'length = 4124 over 2 x context=2 makes chunks of 1031',
    (LENGTH, 'Partitioner.context'),
    {LENGTH: 4096 + 512},
  ),
  (
    {'Partitioner.expert': 4, 'TransformerConfig.num_experts': 6},
    'experts = 6 does not divide over expert=4',
    ('TransformerConfig.num_experts', 'Partitioner.expert'),
    {'Partitioner.expert': 2},
  ),
  (
    {'Partitioner.fsdp': 4, 'BATCH_SIZE': 12},
    'batch = 12 does not divide over data=2 x fsdp=4 (= 8).',
    ('BATCH_SIZE', 'Partitioner.data', 'Partitioner.fsdp'),
    {'BATCH_SIZE': 24},
  ),
  (
    {'BATCH_SIZE': 16, 'NUM_MICROBATCHES': 4},
    'batch = 16 does not divide over data=8 in each of 4 microbatches.',
    ('BATCH_SIZE', 'Partitioner.data'),
    {'BATCH_SIZE': 32},
  ),
  (
    {
      'Partitioner.fsdp': 2,
      'Partitioner.stage': 2,
      'BATCH_SIZE': 6,
      'Partitioner.num_pipeline_microbatches': 3,
    },
    'batch = 6 does not divide over data=2 x fsdp=2 (= 4).',
    ('BATCH_SIZE', 'Partitioner.data', 'Partitioner.fsdp'),
    {'BATCH_SIZE': 12},
  ),
  (
    {'Partitioner.stage': 2, 'Partitioner.num_pipeline_microbatches': 3},
    'batch = 16: the 4 rows of each of 4 parts cannot be cut into '
    'Partitioner.num_pipeline_microbatches = 3.',
    ROWS,
    {'Partitioner.num_pipeline_microbatches': 4},
  ),
  (
    {'Partitioner.stage': 4, 'Partitioner.num_pipeline_microbatches': 4, 'NUM_MICROBATCHES': 4},
    'the 2 rows of each of 8 parts cannot be cut',
    ROWS,
    {'Partitioner.num_pipeline_microbatches': 2},
  ),
  (
    {'Partitioner.stage': 4, SCHEDULE: 'circular', 'BATCH_SIZE': 4, REPEATS: 2},
    'is fewer than the 4 stages',
    ROWS,
    {'BATCH_SIZE': 8},
  ),
  (
    {'Partitioner.stage': 2, SCHEDULE: 'circular', 'TransformerConfig.num_layers': 6},
    'The circular schedule with',
    (SCHEDULE, REPEATS),
    {SCHEDULE: 'gpipe'},
  ),
  (
    {'Partitioner.stage': 2, REPEATS: 2},
    'under 1f1b each microbatch',
    (REPEATS, SCHEDULE),
    {SCHEDULE: 'circular'},
  ),
  (
    {'Partitioner.num_partitions': 4, 'Partitioner.sequence_parallel': True, LENGTH: 30},
    'With Partitioner.sequence_parallel, length = 30 does not divide over model=4.',
    (LENGTH, 'Partitioner.num_partitions'),
    {LENGTH: 32},
  ),
  (
    {**PIPELINE_OF_BOTH, SCHEDULE: '1f1b'},
    "Partitioner.pipeline_schedule = '1f1b' starts the backward pass of a microbatch once it has "
    'passed the 2 stages; with an encoder and a decoder it passes them 2 times.',
    (SCHEDULE, REPEATS),
    {SCHEDULE: 'gpipe'},
  ),
  (
    {**PIPELINE_OF_BOTH, SCHEDULE: '1f1b', REPEATS: 2},
    "Partitioner.pipeline_schedule = '1f1b' starts the backward pass",
    (SCHEDULE, REPEATS),
    {SCHEDULE: 'circular'},
  ),
  (
    {**PIPELINE_OF_BOTH, ENCODER_LAYERS: 4, SCHEDULE: 'circular'},
    'passes the 2 stages once per stack of layers, 2 times.',
    (SCHEDULE, REPEATS),
    {SCHEDULE: 'gpipe'},
  ),
  (
    {**PIPELINE_OF_BOTH, REPEATS: 2},
    'under gpipe each microbatch passes the 2 stages once per stack of layers.',
    (REPEATS, SCHEDULE),
    {SCHEDULE: 'circular'},
  ),
  (
    {**PIPELINE_OF_BOTH, 'Partitioner.context': 2, 'Partitioner.context_attention': 'ring'},
    "Partitioner.context_attention = 'ring' in a pipeline of encoder and decoder",
    ('Partitioner.context_attention', 'Partitioner.stage'),
    {'Partitioner.context_attention': 'gather'},
  ),
  (
    {**PIPELINE_OF_BOTH, 'Partitioner.num_pipeline_microbatches': 1},
    'is fewer than the 2 stages: from the encoder to the decoder the first',
    ROWS,
    {'Partitioner.num_pipeline_microbatches': 2},
  ),
  (
    {**PIPELINE_OF_BOTH, 'Partitioner.stage': 4, 'BATCH_SIZE': 4},
    'is fewer than the 4 stages: from the encoder to the decoder the first',
    ROWS,
    {'BATCH_SIZE': 8},
  ),
  (
    {**PIPELINE_OF_BOTH, 'Partitioner.stage': 4, ENCODER_LAYERS: 6},
    'encoder_layers = 6 does not divide over stage=4 (layers = 8 does).',
    (ENCODER_LAYERS, 'Partitioner.stage'),
    {'Partitioner.stage': 2},
  ),
  (
    {
      **PIPELINE_OF_BOTH,
      'Partitioner.stage': 4,
      ENCODER_LAYERS: 6,
      'TransformerConfig.num_layers': 10,
    },
    'layers = 10 and encoder_layers = 6 do not divide over stage=4.',
    ('TransformerConfig.num_layers', ENCODER_LAYERS, 'Partitioner.stage'),
    {'Partitioner.stage': 2},
  ),
  (
    {**PIPELINE_OF_BOTH, SCHEDULE: 'circular', ENCODER_LAYERS: 6, REPEATS: 2},
    'encoder_layers = 6 does not divide over stage=2 x 2 blocks each (= 4) (layers = 8 does).',
    (ENCODER_LAYERS, 'Partitioner.stage', REPEATS),
    {'Partitioner.stage': 1, REPEATS: 2},
  ),
  (
    {
      'TransformerConfig.num_heads': 12,
      'TransformerConfig.num_kv_heads': 3,
      'Partitioner.num_partitions': 4,
    },
    'kv_heads = 3 neither divides over model=4 nor divides it',
    ('TransformerConfig.num_kv_heads', 'Partitioner.num_partitions'),
    {'Partitioner.num_partitions': 1},
  ),
  (
    {'Partitioner.expert': 2},
    'this model has none',
    ('TransformerConfig.num_experts', 'Partitioner.expert'),
    {'Partitioner.expert': 1},
  ),
]


@pytest.mark.parametrize(
  'settings, parameters, change',
  [(settings, parameters, change) for settings, _, parameters, change in WRONG],
  ids=[name[:32] for _, name, _, _ in WRONG],
)
def test_a_model_that_does_not_fit_is_one_problem_with_its_parameters_and_a_fix(
  settings, parameters, change
):
  error = refusal(settings)
  [problem] = error.problems
  assert problem.parameters == parameters
  assert not any(map(knob_problem, parameters))
  assert all(name in problem.fix for name in change if name != REPEATS), problem.fix
  assert error.docs == 'mesh.md#sizes'
  lay_out({**settings, **change})


def test_legal_partitions_of_a_width_are_listed():
  settings = {'Partitioner.num_partitions': 8, 'TransformerConfig.num_heads': 12}
  refusal(settings)


def test_all_that_does_not_fit_is_in_one_error():
  settings = {
    'Partitioner.stage': 2,
    'Partitioner.context': 2,
    'Partitioner.num_partitions': 2,
    'Partitioner.num_pipeline_microbatches': 3,
    'Partitioner.sequence_parallel': True,
    'TransformerConfig.num_layers': 7,
    'TransformerConfig.num_heads': 5,
    'TransformerConfig.mlp_dim': 31,
    LENGTH: 30,
  }
  error = refusal(settings)
  assert str(error).startswith('The model does not fit the mesh: 6 problems.')
  assert [problem.parameters[0] for problem in error.problems] == [
    'TransformerConfig.num_heads',
    'TransformerConfig.mlp_dim',
    LENGTH,
    LENGTH,
    'TransformerConfig.num_layers',
    'BATCH_SIZE',
  ]
  assert all(problem.fix for problem in error.problems)


def test_the_length_is_a_multiple_for_both_kinds_of_parallelism_that_split_it():
  """16 is a multiple of 2 x context, and not of context x model."""
  settings = {
    'Partitioner.context': 2,
    'Partitioner.num_partitions': 4,
    LENGTH: 18,
    'Partitioner.sequence_parallel': True,
  }
  problems = refusal(settings).problems
  assert len(problems) == 2


@pytest.mark.parametrize(
  'parameter, value',
  [
    ('pipeline_schedule', '1F1B'),
    ('pipeline_schedule', 'cirular'),
    ('zero_stage', 4),
    ('zero_stage', '3'),
    ('context_attention', 'rings'),
  ],
)
def test_an_unknown_choice_is_an_error_with_all_choices(parameter, value):
  with raises(MeshError) as e:
    Partitioner(**{parameter: value})
  assert e.value.parameters == (f'Partitioner.{parameter}',)


@st.composite
def meshes(draw) -> dict[str, int]:
  """Draws sizes that multiply to 8."""
  sizes, left = {}, 8
  for axis in draw(st.permutations(['stage', 'fsdp', 'context', 'num_partitions'])):
    sizes[f'Partitioner.{axis}'] = draw(st.sampled_from(divisors(left)))
    left //= sizes[f'Partitioner.{axis}']
  return sizes


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(
  meshes(),
  st.sampled_from(
    [{}, {'Partitioner.pipeline_schedule': 'circular', 'Partitioner.pipeline_repeats': 2}]
  ),
  st.booleans(),
  st.sampled_from([None, 1, 2, 3, 4]),
  st.sampled_from([1, 2]),
  st.integers(2, 24),
  st.integers(1, 12),
  st.integers(1, 12),
  st.integers(2, 40),
)
def test_whatever_the_sizes_there_is_a_layout_or_problems_that_are_complete(
  mesh, schedule, sequence_parallel, microbatches, accumulation, batch, layers, heads, length
):
  settings = {
    **mesh,
    **schedule,
    'Partitioner.sequence_parallel': sequence_parallel,
    'Partitioner.num_pipeline_microbatches': microbatches,
    'NUM_MICROBATCHES': accumulation,
    'BATCH_SIZE': batch * accumulation,
    'TransformerConfig.num_layers': layers,
    'TransformerConfig.num_heads': heads,
    LENGTH: length,
  }
  try:
    lay_out(settings)
  except MeshError as e:
    assert all(p.what and p.fix and p.parameters for p in e.problems)


def test_the_table_shows_the_bubble_of_a_pipeline_of_both_stacks():
  # M = 4 in 2 blocks of S = 2 stages: (S-1) / (2M + S-1) = 1 / 9.
  assert (
    'pipeline: gpipe, 4 microbatches, bubble 11.1% of the time of the layers'
    in lay_out({**PIPELINE_OF_BOTH, 'Partitioner.num_pipeline_microbatches': 4}).table()
  )


def test_fewer_key_and_value_heads_than_devices_are_shared_and_the_table_shows_the_cost():
  settings = {'TransformerConfig.num_kv_heads': 2, 'Partitioner.num_partitions': 8}
  layout = lay_out(settings)
  assert 'kv_heads' not in layout.rules.parameters
  # 2 maps x 8 layers x 16 x 2 heads x 4 features x 4 bytes = 8 KiB, of which 7/8 more than split.
  assert (
    'kv_heads = 2 < model = 8: every device holds all heads and computes one, shared by 4 '
    'devices: 0.00684 MiB of parameters more than if split'
  ) in layout.table()
  assert 'kv_heads =' not in lay_out({**settings, 'Partitioner.num_partitions': 2}).table()


class Nameless(nn.Module):
  """A layer as one brings it along from elsewhere."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x: jax.Array, *inputs: Any) -> jax.Array:
    del inputs
    gain = self.param('gain', with_axes(nn.initializers.ones, ('embed',)), x.shape[-1:])
    return gain * nn.Dense(x.shape[-1], name='adapter')(x)


def test_a_layer_whose_parameters_have_no_names_is_named_with_the_code_that_mends_it():
  config = TransformerConfig(head_dim=4, **arguments('TransformerConfig.', FITS))
  with raises(ShapeError) as e:
    build_with(
      model=DecoderOnlyModel(config, layer=Nameless),
      optimizer=AdamW(),
      learning_rate=constant(1e-2),
      partitioner=Partitioner(),
      topology=Topology(1, 8),
      devices=jax.devices(),
      task_feature_lengths={'targets': 32},
      batch_size=16,
      pack=False,
    )
  text = str(e.value)
  # The code that it shows, with names for NAMES.
  code = re.search(r'from t5x_gpu\S+ import with_axes', text).group()
  scope: dict[str, Any] = {}
  exec(code, scope)
  boxed = scope['with_axes'](nn.initializers.zeros, ('embed',))(jax.random.key(0), (16,))
  assert split_names({'bias': boxed})[1]['bias'].names == ('embed',)
