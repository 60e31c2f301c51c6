"""Hugging Face's models, made here with random weights, converted: the same logits and gradients.

Every parameter is redrawn, including norms and biases: at their initial one and zero, half of
what could be wrong would not show.
"""

import copy
import dataclasses
import functools
import json

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

from t5x_gpu import convert
from t5x_gpu.checkpoint.params_files import ParamsReader
from t5x_gpu.conversion import conversion
from t5x_gpu.conversion.conversion import params_of_checkpoint, params_of_files
from t5x_gpu.conversion.hf import folder as folder_lib
from t5x_gpu.conversion.hf.config_json import guess_family, to_hf
from t5x_gpu.conversion.hf.names import FAMILIES
from t5x_gpu.conversion.name_table import Table
from t5x_gpu.data.features import SCORE_UNIT
from t5x_gpu.models.encoder import MULTI_LABEL
from t5x_gpu.partitioning.axis_rules import AxisNames
from t5x_gpu.training.optimizers import AdamW
from tests.conversion.hf_files import CONFIGS, VARIANTS, files_of, write_model
from tests.messages import raises
from tests.parity.tolerances import HUGGING_FACE_GRADIENT, HUGGING_FACE_LOGITS

AUTO = {
  'decoder_only': 'AutoModelForCausalLM',
  'encoder_decoder': 'AutoModelForSeq2SeqLM',
  'classification': 'AutoModelForSequenceClassification',
  'mlm': 'AutoModelForMaskedLM',
}
LENGTH = 21  # longer than all windows


def each(names, *, quick):
  """Returns parameters for a test, those not in `quick` marked slow."""
  return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


def make_theirs(config, folder):
  """Returns a random model of Hugging Face, saved in `folder` by its own library."""
  torch.manual_seed(0)
  kind = type(transformers.AutoConfig.for_model(config['model_type']))
  model = (
    getattr(transformers, config['architectures'][0])
    ._from_config(kind.from_dict(copy.deepcopy(dict(config))), attn_implementation='eager')
    .eval()
  )
  if 't5' in config['model_type'] and config.get('tie_word_embeddings') is False:
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.shared.weight))
    model.config.tie_word_embeddings = False
  # Gemma-3 multiplies by 1 + scale. Queries and keys of twice the size make the softmax so steep
  # that their own float32 is 1e-4 from their float64.
  middle = 0.0 if config['model_type'] == 'gemma3_text' else 1.0
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.copy_(torch.randn_like(parameter) * 0.2 + middle * (parameter.dim() == 1))
  model.save_pretrained(folder)
  (folder / 'config.json').write_text(json.dumps(dict(config)))  # as transformers 4 wrote it
  return model


@pytest.fixture(scope='module')
def converted(tmp_path_factory):
  """Returns get(name) -> (their model, our fields, our parameters), made once."""

  @functools.cache
  def get(name):
    folder = tmp_path_factory.mktemp(name)
    theirs = make_theirs(VARIANTS[name], folder / 'theirs')
    convert.main([f'--from={folder / "theirs"}', f'--to={folder / "ours"}', '--check=tensors'])
    fields = convert.model_of_gin([folder / 'ours' / 'model.gin'])
    fields = dataclasses.replace(
      fields, config=dataclasses.replace(fields.config, dropout_rate=0.0)
    )
    return theirs, fields, params_of_checkpoint(ParamsReader(folder / 'ours'))

  return get


def theirs_of(model, **given):
  found = model(
    **{name: torch.from_numpy(np.asarray(value, np.int64)) for name, value in given.items()}
  )
  if 'logits' in found:
    return found.logits
  mask = torch.from_numpy(np.asarray(given['attention_mask']))[..., None]  # an embedding
  vectors = (found.last_hidden_state * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
  return torch.nn.functional.normalize(vectors, dim=-1)


def near(got, want):
  assert np.abs(want).max() > 0.05
  np.testing.assert_allclose(got, want, rtol=HUGGING_FACE_LOGITS, atol=HUGGING_FACE_LOGITS)


def their_logits(theirs, fields, batch):
  """Returns their logits of rows padded at the end."""
  with torch.no_grad():
    if fields.kind == 'decoder_only':
      return theirs_of(
        theirs,
        input_ids=batch['decoder_input_tokens'],
        attention_mask=batch['decoder_segment_ids'] > 0,
      ).numpy()
    given = {
      'input_ids': batch['encoder_input_tokens'],
      'attention_mask': batch['encoder_segment_ids'] > 0,
    }
    if 'encoder_token_types' in batch:
      given['token_type_ids'] = batch['encoder_token_types']
    if fields.kind == 'encoder_decoder':
      given['decoder_input_ids'] = batch['decoder_input_tokens']
    return theirs_of(theirs, **given).numpy()


# Each family once, and each head.
QUICK = {
  't5_1_1',
  'umt5',
  'bert_classification',
  'bert_multi_label',
  'bert_regression',
  'bert_tags',
  'bert_embedding',
  'bert_mlm',
  'gpt2',
  'llama',
  'mistral',
  'gemma2',
  'gemma3_text',
  'qwen2_windows',
  'qwen3',
  'smollm3_windows',
  'olmo2',
  'phi3_longrope',
  'mixtral',
  'qwen3_moe_windows',
}


@pytest.mark.parametrize('name', each(VARIANTS, quick=QUICK))
def test_logits_of_padded_rows_equal_hugging_face(name, converted):
  theirs, fields, params = converted(name)
  batch = conversion.random_batch(fields, seed=1)
  got = conversion.our_logits(fields, params, batch)
  index = conversion.counted(fields, batch)
  near(got[index], their_logits(theirs, fields, batch)[index])


def packed(parts, length):
  """Returns (tokens, segment ids, positions) [1, length] of examples in one row."""
  tokens, ids, positions = (np.zeros((1, length), np.int32) for _ in range(3))
  start = 0
  for number, part in enumerate(parts, 1):
    place = slice(start, start + len(part))
    tokens[0, place], ids[0, place], positions[0, place] = part, number, np.arange(len(part))
    start += len(part)
  return tokens, ids, positions


@pytest.mark.parametrize(
  'name',
  each(
    [n for n in VARIANTS if not n.startswith('bert_') or n in ('bert_mlm', 'bert_tags')],
    quick={'t5_1_1', 'bert_mlm', 'gpt2', 'llama', 'gemma2', 'qwen3', 'phi3_longrope'},
  ),
)
def test_logits_of_packed_rows_equal_hugging_faces_of_each_example(name, converted):
  theirs, fields, params = converted(name)
  rng = np.random.default_rng(2)
  parts = [rng.integers(2, fields.config.vocab_size, n) for n in (LENGTH, 5, 9)]
  row = packed(parts, 40)
  if fields.kind == 'encoder':
    batch = dict(zip(('encoder_input_tokens', 'encoder_segment_ids', 'encoder_positions'), row))
    alone = [
      {'encoder_input_tokens': p[None], 'encoder_segment_ids': np.ones((1, len(p)), np.int32)}
      for p in parts
    ]
  else:
    batch = dict(zip(('decoder_input_tokens', 'decoder_segment_ids', 'decoder_positions'), row))
    batch['decoder_target_tokens'] = batch['decoder_input_tokens']
    alone = [
      {
        'decoder_input_tokens': p[None],
        'decoder_target_tokens': p[None],
        'decoder_segment_ids': np.ones((1, len(p)), np.int32),
      }
      for p in parts
    ]
  if fields.kind == 'encoder_decoder':
    sources = [rng.integers(2, fields.config.vocab_size, n) for n in (7, 12, LENGTH)]
    batch.update(
      zip(('encoder_input_tokens', 'encoder_segment_ids', 'encoder_positions'), packed(sources, 42))
    )
    for example, source in zip(alone, sources):
      example['encoder_input_tokens'] = source[None]
      example['encoder_segment_ids'] = np.ones((1, len(source)), np.int32)
  got = conversion.our_logits(fields, params, batch)
  segments = row[1][0]
  for number, example in enumerate(alone, 1):
    near(got[0, segments == number], their_logits(theirs, fields, example)[0])


def test_token_types_of_bert_are_used(converted):
  theirs, fields, params = converted('bert_classification')
  batch = conversion.random_batch(fields)
  batch['encoder_token_types'] = (np.arange(batch['encoder_input_tokens'].shape[1]) > 20).astype(
    np.int32
  ) * np.ones((2, 1), np.int32)
  near(conversion.our_logits(fields, params, batch), their_logits(theirs, fields, batch))


# Every objective, and one family for each option of a layer; logits are compared of all variants.
@pytest.mark.quick_cases('phi3_longrope', 't5_1_1')
@pytest.mark.parametrize(
  'name',
  [
    'bert_classification',
    'bert_multi_label',
    'bert_regression',
    'bert_tags',
    'bert_mlm',
    't5',
    't5_1_1',
    'umt5',
    'gpt2',
    'gemma2',
    'qwen2_windows',
    'gemma3_text',
    'smollm3_windows',
    'olmo2',
    'phi3_longrope',
    'mixtral',
    'qwen3_moe_windows',
  ],
)
def test_gradients_and_a_step_of_adamw_equal_hugging_face(name, converted, tmp_path):
  theirs, fields, params = converted(name)
  batch = conversion.random_batch(fields, seed=3)
  # transformers does not train the embedding of pad_token_id, which may be 0.
  for feature in batch.keys() & {'encoder_input_tokens', 'decoder_input_tokens'}:
    batch[feature] = np.where(batch[feature] == 0, 2, batch[feature])
  model = fields.build()
  rng = np.random.default_rng(3)
  labels = batch.get('decoder_target_tokens', batch.get('encoder_input_tokens'))
  if fields.kind == 'encoder':  # padding has no label
    labels = np.where(batch['encoder_segment_ids'] > 0, labels, 0)
  if fields.options.get('problem_type') == MULTI_LABEL:
    labels = np.float32([[1, 0, 1], [0, 0, 0]])
    numbers = np.zeros_like(batch['encoder_input_tokens'])
    numbers[0, :2] = 3, 1  # in any order
    batch.update(encoder_labels=numbers, label_weights=np.ones(2, np.int32))
  elif fields.options.get('head_type') == 'token_classification':
    labels = rng.integers(0, 4, labels.shape) * (labels > 0)  # 0: not the first token of a word
    batch.update(encoder_labels=labels.astype(np.int32))
    labels = labels - 1
  elif fields.options.get('head_type') == 'regression':
    labels = np.float32([1.25, -3.5])
    scores = (labels * SCORE_UNIT).astype(np.int32)
    batch.update(scores=scores, rows=np.arange(2), label_weights=np.ones(2, np.int32))
  elif fields.options.get('head_type') == 'classification':
    labels = rng.integers(0, 3, 2)
    batch.update(label=labels.astype(np.int32), label_weights=np.ones(2, np.int32))
  else:
    labels = np.where(labels > 0, rng.integers(2, fields.config.vocab_size, labels.shape), 0)
    weights = (labels > 0).astype(np.int32)
    side = 'encoder' if fields.kind == 'encoder' else 'decoder'
    batch.update(
      {f'{side}_target_tokens': labels.astype(np.int32), f'{side}_loss_weights': weights}
    )

  def loss(params):
    total, weight = model.loss(params, batch)['loss']
    return total / weight

  got_loss, got = jax.jit(jax.value_and_grad(loss))(jax.tree.map(jnp.asarray, params))
  given = (
    {'input_ids': batch['decoder_input_tokens']}
    if fields.kind == 'decoder_only'
    else {
      'input_ids': batch['encoder_input_tokens'],
      'attention_mask': batch['encoder_segment_ids'] > 0,
    }
  )
  if fields.kind == 'encoder_decoder':
    given['decoder_input_ids'] = batch['decoder_input_tokens']
  if fields.kind == 'encoder':
    given['token_type_ids'] = batch['encoder_token_types']
  theirs = copy.deepcopy(theirs)  # other tests want its weights
  logits = theirs_of(theirs, **given)
  if fields.options.get('problem_type') == MULTI_LABEL:
    want_loss = torch.nn.BCEWithLogitsLoss()(logits, torch.from_numpy(labels))
  elif fields.options.get('head_type') == 'regression':
    want_loss = torch.nn.MSELoss()(logits.squeeze(), torch.from_numpy(labels))
  else:
    none = -1 if 'encoder_labels' in batch else 0
    wanted = torch.from_numpy(
      np.where(labels > none, labels, -100) if logits.dim() == 3 else labels
    ).long()
    want_loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), wanted.flatten())
  optimizer = torch.optim.AdamW(
    theirs.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
  )
  want_loss.backward()
  np.testing.assert_allclose(got_loss, want_loss.item(), rtol=HUGGING_FACE_LOGITS)

  # Theirs, laid out as ours by the table that lays out the weights.
  def laid_out(title):
    theirs.save_pretrained(tmp_path / title)
    (tmp_path / title / 'config.json').write_text(json.dumps(dict(VARIANTS[name])))
    return params_of_files(folder_lib.open_hf(tmp_path / title).weights)

  optimizer.step()
  stepped = laid_out('stepped')
  with torch.no_grad():
    for parameter in theirs.parameters():
      if parameter.grad is not None:
        parameter.copy_(parameter.grad)
      else:
        parameter.zero_()
  want = laid_out('gradients')

  def compare(path, a, b):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if name.endswith('key/bias') and not any(
      fields.config.rope_of_layers
    ):  # it changes no logit: its gradient is what rounding leaves
      assert np.abs(a).max() < 1e-5 and np.abs(b).max() < 1e-5
    else:
      assert np.abs(a - b).max() <= HUGGING_FACE_GRADIENT * np.abs(b).max(), name
      assert np.abs(b).max() > 0, name

  jax.tree_util.tree_map_with_path(compare, got, want)
  names = jax.tree.map(lambda x: AxisNames((None,) * x.ndim), want)
  ours, step = AdamW(), dict(names=names, learning_rate=0.01, step=0)
  moved, _ = ours.update(want, ours.init(params, names), params, **step)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6), moved, stepped)


def test_the_command_compares_with_transformers_and_writes_what_it_loads(tmp_path, capsys):
  make_theirs(CONFIGS['llama'], tmp_path / 'a')
  convert.main([f'--from={tmp_path / "a"}', f'--to={tmp_path / "ours"}'])
  convert.main([f'--from={tmp_path / "ours"}', f'--to={tmp_path / "b"}', '--dtype=bfloat16'])
  out = capsys.readouterr().out
  assert out.count(f'ours against transformers {transformers.__version__}') == 2
  convert.main([f'--from={tmp_path / "ours"}', f'--to={tmp_path / "c"}', '--check=transformers'])
  assert files_of(tmp_path / 'c') == files_of(tmp_path / 'a')


@pytest.mark.slow
@pytest.mark.parametrize('extra', [{}, {'factor': 3.0}, {'attention_factor': 1.5}], ids=str)
def test_the_command_compares_short_and_long_factors(extra, tmp_path, capsys):
  config = VARIANTS['phi3_longrope']
  scaling = {**config['rope_scaling'], **extra}
  longer = {'original_max_position_embeddings': 20, 'max_position_embeddings': 80}
  make_theirs({**config, **longer, 'rope_scaling': scaling}, tmp_path / 'a')
  convert.main([f'--from={tmp_path / "a"}', f'--to={tmp_path / "ours"}', '--check=transformers'])
  assert capsys.readouterr().out.count('ours against transformers') == 2
  convert.main([f'--from={tmp_path / "ours"}', f'--to={tmp_path / "b"}', '--check=tensors'])
  assert files_of(tmp_path / 'b') == files_of(tmp_path / 'a')


def test_weights_of_another_model_are_found_by_the_logits(tmp_path):
  make_theirs(CONFIGS['llama'], tmp_path / 'a')
  config = {**CONFIGS['llama'], 'rope_scaling': None, 'rope_theta': 10.0}
  fields = folder_lib.open_hf(tmp_path / 'a').model
  batch = conversion.random_batch(fields)
  (tmp_path / 'a' / 'config.json').write_text(json.dumps(config))
  theirs, against = conversion.transformers_logits(tmp_path / 'a', fields, batch)
  hf = folder_lib.open_hf(tmp_path / 'a')
  ours = conversion.our_logits(fields, params_of_files(hf.weights), batch)
  with raises(convert.CheckpointError):
    conversion.compare_logits(fields, ours, theirs, batch, against=against)


def test_the_check_sees_a_window_that_is_longer_than_its_rows(tmp_path):
  config = {'sliding_window': 4096, 'max_position_embeddings': 8192}
  make_theirs({**CONFIGS['mistral'], **config}, tmp_path / 'a')
  hf = folder_lib.open_hf(tmp_path / 'a')
  assert set(hf.model.config.windows) == {4096}
  batch = conversion.random_batch(hf.model)
  theirs, against = conversion.transformers_logits(tmp_path / 'a', hf.model, batch)
  params = params_of_files(hf.weights)
  ours = conversion.our_logits(hf.model, params, batch)
  conversion.compare_logits(hf.model, ours, theirs, batch, against=against)
  without = dataclasses.replace(hf.model, config=dataclasses.replace(hf.model.config, windows=(0,)))
  ours = conversion.our_logits(without, params, batch)
  with raises(convert.CheckpointError):
    conversion.compare_logits(without, ours, theirs, batch, against=against)


def write_again(fields, params, folder):
  """Writes `params` with a config.json that nothing but `fields` has made; returns the model."""
  family = guess_family(fields)
  table = Table(FAMILIES[family].rules(fields), fields.sizes())
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  tensors = {
    name: np.concatenate(
      [
        table.to_theirs(
          name,
          {path: flat[path][place] for path, place in piece.slices.items()},
          num_rows=piece.stop - piece.start,
        )
        for piece in table.pieces(name)
      ]
    )
    for name in table.uses
  }
  write_model(folder, to_hf(fields, family=family), tensors)
  return folder_lib.open_hf(folder).model


@pytest.mark.parametrize('name', CONFIGS)
def test_a_config_json_made_from_our_fields_alone_is_loaded(name, converted, tmp_path):
  theirs, fields, params = converted(name)
  made = write_again(fields, params, tmp_path)
  batch = conversion.random_batch(fields, seed=4)
  got, _ = conversion.transformers_logits(tmp_path, made, batch)
  index = conversion.counted(fields, batch)
  near(got[index], their_logits(theirs, fields, batch)[index])
