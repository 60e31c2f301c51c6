"""Tables of names and config.json: whole, invertible, streamed; what they refuse."""

import dataclasses
import math
import pathlib

import jax
import numpy as np
import pytest

from t5x_gpu.conversion import name_table
from t5x_gpu.conversion.hf.config_json import family_of, from_hf, guess_family, to_hf
from t5x_gpu.conversion.hf.names import FAMILIES, JOINED
from t5x_gpu.conversion.model_spec import describe, differences, gin_text
from t5x_gpu.conversion.name_table import Rule, Table
from t5x_gpu.convert import model_of_gin
from t5x_gpu.errors import CheckpointError
from t5x_gpu.layers.positions import RotaryEmbedding
from t5x_gpu.models.transformer import TransformerLayer
from tests.conversion.hf_files import CONFIGS, table_of, untied
from tests.messages import raises

ROOT = pathlib.Path(__file__).parents[3]


def model_of(config):
  return from_hf(config, has_tensor=lambda name: untied(config))


@pytest.mark.parametrize('name', CONFIGS)
def test_table_has_exactly_the_parameters_of_the_model(name):
  flat, _ = jax.tree_util.tree_flatten_with_path(model_of(CONFIGS[name]).abstract_params())
  want = {jax.tree_util.keystr(p, simple=True, separator='/'): a.shape for p, a in flat}
  assert table_of(CONFIGS[name]).our_shapes == want


@pytest.mark.quick_cases('*-1000', '*-1000000000')
@pytest.mark.parametrize('piece_bytes', [1, 1000, 10**9])
@pytest.mark.parametrize('name', [*CONFIGS, 'joined mixtral'])
def test_tensors_through_the_table_and_back_are_the_same(name, piece_bytes, monkeypatch):
  monkeypatch.setattr(name_table, 'PIECE_BYTES', piece_bytes)
  config = CONFIGS[name.removeprefix('joined ')]
  table = table_of(config, names={JOINED} if name.startswith('joined') else ())
  rng = np.random.default_rng(0)
  theirs = {n: rng.normal(size=s).astype(np.float32) for n, s in table.their_shapes.items()}
  ours = {n: np.full(s, np.nan, np.float32) for n, s in table.our_shapes.items()}
  num_pieces = 0
  for n in table.uses:
    end = 0
    for piece in table.pieces(n):
      assert piece.start == end
      end = piece.stop
      num_pieces += 1
      for path, value in table.to_ours(n, theirs[n][piece.start : piece.stop], piece).items():
        assert np.isnan(ours[path][piece.slices[path]]).all()  # nothing is written twice
        ours[path][piece.slices[path]] = value
        assert all(a <= b for a, b in zip(_as_shape(piece.slices[path]), table.chunks()[path]))
    assert end == theirs[n].shape[0]
  assert not any(np.isnan(value).any() for value in ours.values())
  fewest = sum(1 if uses[0].rule.block is None else len(uses) for uses in table.uses.values())
  assert (num_pieces > fewest) == (piece_bytes < 10**9)
  for n in table.uses:
    for piece in table.pieces(n):
      rows = table.to_theirs(
        n,
        {path: ours[path][place] for path, place in piece.slices.items()},
        num_rows=piece.stop - piece.start,
      )
      np.testing.assert_array_equal(rows, theirs[n][piece.start : piece.stop])


def _as_shape(place):
  return tuple(1 if isinstance(s, int) else s.stop - s.start for s in place)


def test_a_rule_splits_heads_transposes_and_stacks_layers():
  table = Table(
    [Rule('q', 'layer.{}.q', 'heads.kv embed -> embed heads kv')],
    {'layers': 2, 'heads': 3, 'kv': 4, 'embed': 5},
  )
  assert table.our_shapes == {'q': (2, 5, 3, 4)}
  theirs = np.arange(60.0).reshape(12, 5)
  [piece] = table.pieces('layer.1.q')
  np.testing.assert_array_equal(
    table.to_ours('layer.1.q', theirs, piece)['q'], theirs.reshape(3, 4, 5).transpose(2, 0, 1)
  )


def test_separate_and_joined_experts_are_the_same_parameters():
  rng = np.random.default_rng(0)
  table, joined = (table_of(CONFIGS['mixtral'], names=names) for names in ((), {JOINED}))
  layer = 'model.layers.1.'
  gate_up, down = (
    rng.normal(size=joined.their_shapes[f'{layer}mlp.experts.{name}']).astype(np.float32)
    for name in ('gate_up_proj', 'down_proj')
  )
  whole = {}
  for name, value in (('gate_up_proj', gate_up), ('down_proj', down)):
    [piece] = joined.pieces(f'{layer}mlp.experts.{name}')
    whole |= joined.to_ours(f'{layer}mlp.experts.{name}', value, piece)
  for branch, name, theirs in (
    ('wi_0', 'w1', gate_up[2, :48]),
    ('wi_1', 'w3', gate_up[2, 48:]),
    ('wo', 'w2', down[2]),
  ):
    name, path = f'{layer}block_sparse_moe.experts.2.{name}.weight', f'layers/moe/{branch}/kernel'
    [piece] = table.pieces(name)
    assert piece.slices[path][:2] == (1, 2)
    np.testing.assert_array_equal(table.to_ours(name, theirs, piece)[path], whole[path][2])


def test_a_piece_of_a_large_tensor_is_of_the_size_asked_for():
  table = Table([Rule('table', 'table', 'vocab embed')], {'vocab': 100_003, 'embed': 1024})
  pieces = list(table.pieces('table'))
  sizes = {(p.stop - p.start) * 1024 * 4 for p in pieces}
  assert max(sizes) <= name_table.PIECE_BYTES and len(pieces) == math.ceil(
    100_003 * 4096 / name_table.PIECE_BYTES
  )


@pytest.mark.parametrize('name', CONFIGS)
def test_config_json_from_our_fields_gives_the_same_fields(name):
  model = model_of(CONFIGS[name])
  family = family_of(CONFIGS[name])
  assert guess_family(model) == family
  for like in (None, CONFIGS[name]):
    written = to_hf(model, family=family, like=like)
    assert (
      differences(
        model_of(
          {
            **written,
            'tie_word_embeddings': CONFIGS[name].get(
              'tie_word_embeddings', written.get('tie_word_embeddings')
            ),
          }
        ),
        model,
      )
      == []
    )
  assert written['model_type'] == CONFIGS[name]['model_type']


@pytest.mark.parametrize('name', CONFIGS)
def test_gin_model_file_from_our_fields_gives_the_same_fields(name, tmp_path):
  model = model_of(CONFIGS[name])
  path = tmp_path / 'model.gin'
  path.write_text(gin_text(model, title='Any.\nModel.'))
  again = model_of_gin([path])
  assert again.config == model.config and differences(again, model) == []
  assert describe(again.build()) == again


def test_a_converted_model_gets_a_longer_context_with_the_lines_of_the_page(tmp_path):
  page = (ROOT / 'docs' / 'models.md').read_text('utf-8')
  section = page[page.index('## Longer contexts') :]
  lines = section[section.index('```text\n') + 8 :].partition('```')[0]
  config = {**CONFIGS['qwen3'], 'max_position_embeddings': 8192}
  (tmp_path / 'model.gin').write_text(gin_text(model_of(config), title='Any.'))
  (tmp_path / 'longer.gin').write_text(lines)
  longer = model_of_gin([tmp_path / 'model.gin', tmp_path / 'longer.gin'])
  assert longer.config.rope == RotaryEmbedding(
    1e6, scaling='yarn', factor=4.0, original_length=8192
  )
  made = to_hf(longer, family='qwen3', like=config)
  assert made['max_position_embeddings'] == 32768
  assert made['rope_scaling'] == {
    'rope_type': 'yarn',
    'factor': 4.0,
    'beta_fast': 32.0,
    'beta_slow': 1.0,
    'truncate': True,
    'original_max_position_embeddings': 8192,
  }


def test_old_and_new_keys_of_rotary_positions_mean_the_same():
  old = CONFIGS['llama']
  new = {k: v for k, v in old.items() if not k.startswith('rope')}
  new['rope_parameters'] = {**old['rope_scaling'], 'rope_theta': old['rope_theta']}
  assert model_of(new) == model_of(old)
  assert model_of(old).config.rope.scaling == 'llama3'


@pytest.mark.parametrize('name', ['llama', 'mistral', 'qwen2', 'gemma2', 'qwen3'])
def test_the_length_that_a_model_was_made_for_goes_there_and_back(name):
  model = model_of({**CONFIGS[name], 'max_position_embeddings': 128})
  assert model.config.length_limit == 128
  assert model_of(CONFIGS['gemma2']).config.length_limit == 8192  # transformers' default
  assert to_hf(model, family=name)['max_position_embeddings'] == 128
  longer = dataclasses.replace(model, config=dataclasses.replace(model.config, max_length=256))
  assert differences(model, longer) == []  # the weights are the same
  assert to_hf(longer, family=name, like=CONFIGS[name])['max_position_embeddings'] == 256


def test_windows_are_the_shortest_period_of_the_layers():
  assert model_of(CONFIGS['gemma2']).config.windows == (8, 0)
  qwen = {
    **CONFIGS['qwen3'],
    'num_hidden_layers': 4,
    'use_sliding_window': True,
    'sliding_window': 16,
    'max_window_layers': 3,
  }
  assert model_of(qwen).config.windows == (0, 0, 0, 16)
  assert model_of({**qwen, 'layer_types': ['sliding_attention'] * 4}).config.windows == (16,)
  assert model_of({**qwen, 'use_sliding_window': False}).config.windows == (0,)


@pytest.mark.parametrize(
  'name, change',
  [
    ('llama', {'model_type': 'falcon'}),
    ('llama', {'model_type': 'lama'}),
    ('bert_mlm', {'architectures': ['BertForQuestionAnswering']}),
    ('gpt2', {'scale_attn_by_inverse_layer_idx': True}),
    ('llama', {'rope_scaling': {'rope_type': 'longrope', 'factor': 2.0}}),
    ('llama', {'hidden_act': 'quick_gelu'}),
    ('llama', {'head_dim': None, 'num_attention_heads': 3}),
  ],
)
def test_models_that_ours_cannot_be_are_refused(name, change):
  with raises(CheckpointError):
    model_of({**CONFIGS[name], **change})


@pytest.mark.parametrize(
  'name, change',
  [
    ('llama', {'num_attention_heads': '4'}),
    ('llama', {'rms_norm_eps': [1e-5], 'tie_word_embeddings': 'no'}),
    ('llama', {'architectures': 3}),
    ('llama', {'hidden_size': None}),
    ('gpt2', {'n_head': 0}),
    ('llama', {'num_hidden_layers': -1}),
    ('llama', {'rope_scaling': {'rope_type': 'linear', 'factor': 0.0}}),
    ('llama', {'rope_scaling': {'rope_type': 'linear', 'factor': '2'}}),
    ('qwen3', {'rope_theta': -1e4}),
    ('qwen3', {'rope_scaling': {'rope_type': 'yarn', 'factor': -2.0}}),
    ('qwen3', {'rope_scaling': {'rope_type': 'yarn'}}),
    ('phi3', {'rope_scaling': {'type': 'longrope', 'short_factor': [1.0]}}),
  ],
)
def test_values_that_cannot_be_are_refused(name, change):
  with raises(CheckpointError):
    model_of({**CONFIGS[name], **change})


def test_a_missing_key_is_named():
  with raises(CheckpointError):
    model_of({k: v for k, v in CONFIGS['llama'].items() if k != 'hidden_size'})


@pytest.mark.parametrize(
  'family, change, name',
  [
    ('llama', {'relative_bias': 'shared'}, 'relative_bias'),
    ('llama', {'logits_softcap': 30.0}, 'logits_softcap'),
    ('gpt2', {}, 'rope'),
    ('qwen3', {}, 'qk_norm'),
  ],
)
def test_a_model_that_the_family_cannot_have_is_refused_with_the_field(family, change, name):
  model = model_of(CONFIGS['llama'])
  model = dataclasses.replace(model, config=dataclasses.replace(model.config, **change))
  with raises(CheckpointError) as e:
    to_hf(model, family=family)
  assert f'TransformerConfig.{name}' in e.value.parameters


@pytest.mark.parametrize(
  'name, option, cls',
  [
    ('llama', {'inputs_bidirectional_attention': True}, 'DecoderOnlyModel'),
    ('bert_classification', {'pooling': 'mean'}, 'EncoderModel'),
    ('bert_classification', {'head_mlp_dim': 16}, 'EncoderModel'),
  ],
)
def test_options_that_the_family_cannot_have_are_refused_with_the_field(name, option, cls):
  model = model_of(CONFIGS[name])
  other = describe(dataclasses.replace(model.build(), **option))
  [field] = option
  with raises(CheckpointError) as e:
    to_hf(other, family=guess_family(model))
  assert e.value.parameters == (f'{cls}.{field}',)
  assert [field] == [name for name, _, _ in differences(model, other)]


@pytest.mark.parametrize('name', ['llama', 'bert_mlm', 't5'])
def test_a_model_with_custom_layers_is_refused(name):
  class Mine(TransformerLayer):
    pass

  model = dataclasses.replace(model_of(CONFIGS[name]).build(), layer=Mine)
  with raises(CheckpointError) as e:
    describe(model)
  assert e.value.parameters == (f'{type(model).__name__}.layer',)


MODEL_FILES = sorted((ROOT / 'gin_configs' / 'models').glob('*.gin'))
OURS_ALONE = ('decoder', 'encoder')  # and in no other library
FAMILY_OF = {
  'byt5': 't5',
  'mt5': 't5',
  'llama3': 'llama',
  'gemma3': 'gemma3_text',
  'phi4': 'phi3',
  'qwen3_moe_30b_a3b': 'qwen3_moe',
}
# Of these families, but the same numbers as a model of another.
GUESSED = {'mistral_7b_v0_3': 'llama', 'phi3_mini': 'mistral', 'phi4': 'llama'}


@pytest.mark.quick_cases(
  't5_small',
  't5_1_1_small',
  'mt5_small',
  'umt5_small',
  'byt5_small',
  'gpt2_small',
  'llama3_2_1b',
  'gemma2_2b',
  'mistral_7b',
  'qwen2_5_0_5b',
  'gemma3_270m',
  'qwen3_0_6b',
  'smollm3_3b',
  'olmo2_1b',
  'phi3_mini',
  'mixtral_8x7b',
  'bert_base',
)
@pytest.mark.parametrize(
  'path', [p for p in MODEL_FILES if not p.name.startswith(OURS_ALONE)], ids=lambda p: p.stem
)
def test_shipped_models_are_models_of_their_family(path):
  model = model_of_gin([path])
  stem = path.stem.split('_')[0]
  name = FAMILY_OF.get(path.stem, FAMILY_OF.get(stem, stem))
  config = to_hf(model, family=name)
  assert config['model_type'] == name
  assert guess_family(model) == GUESSED.get(path.stem, name)
  table = Table(FAMILIES[family_of(config)].rules(model), model.sizes())
  flat, _ = jax.tree_util.tree_flatten_with_path(model.abstract_params())
  assert table.our_shapes == {
    jax.tree_util.keystr(p, simple=True, separator='/'): a.shape for p, a in flat
  }


def test_every_family_has_a_table_and_a_config():
  assert {family_of(config) for config in CONFIGS.values()} == FAMILIES.keys()
