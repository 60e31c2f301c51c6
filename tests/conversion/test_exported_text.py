"""What convert writes for Hugging Face starts, reads and ends texts as `infer` does on the run.

Nothing is set by hand: tokenizer, start, end and length come from the files of the export.
"""

import dataclasses
import json
import shutil
import sys

import flax.traverse_util
import jax
import numpy as np
import pytest

from t5x_gpu import convert, infer
from t5x_gpu.checkpoint.params_files import ParamsWriter
from t5x_gpu.config import gin_loader
from t5x_gpu.conversion.hf.config_json import CONFIG_FAMILIES, from_hf
from t5x_gpu.conversion.model_spec import gin_text
from t5x_gpu.conversion.to_hf import export_problem
from t5x_gpu.conversion.tokenizer import (
  FORCED_CLASSES,
  RunText,
  tokenizer_problem,
  tokenizer_warning,
)
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.decoding import DecodingConfig
from t5x_gpu.partitioning.axis_rules import split_names
from tests.conversion.hf_files import CONFIGS, untied, write_model
from tests.helpers_chat import (
  CHATML,
  GEMMA,
  LLAMA3,
  TALKS,
  TEXTS,
  THINKING,
  write_talks,
  write_tokenizer,
)
from tests.helpers_train import Project, run_here

transformers = pytest.importorskip('transformers')
torch = pytest.importorskip('torch')
pytestmark = pytest.mark.tf

PROMPTS = ['What is 2', 'Name a river!', 'It', 'user you', 'five  two \n a', 'é The', 'brief', '?']
RUN = """from __gin__ import dynamic_registration
from t5x_gpu import train as train_script
from t5x_gpu.models import decoding
include '{folder}/model.gin'
include 'gin_configs/parallel/dp.gin'
include 'gin_configs/runs/pretrain.gin'
MODEL_DIR = '{folder}'
MIXTURE_OR_TASK_NAME = 'jsonl:{data}'
TASK_FEATURE_LENGTHS = {lengths}
VOCABULARY = {vocabulary!r}
BATCH_SIZE = 1
TRAIN_STEPS = 1
LEARNING_RATE = 1e-3
"""


def write_params(folder, model, *, ends, seed=0):
  """Writes random parameters with which a text ends after some tokens."""
  shapes = split_names(jax.eval_shape(lambda: model.init(jax.random.key(0), None)))[0]
  rng = np.random.default_rng(seed)
  flat = {
    name: rng.normal(float('norm' in name), 0.5, a.shape).astype(np.float32)
    for name, a in flax.traverse_util.flatten_dict(shapes, sep='/').items()
  }
  for name, value in flat.items():
    for end in ends:
      if name.endswith('token_embedder/embedding') and not any('projection' in n for n in flat):
        value[end] *= 3
      if name.endswith('logits_dense/projection/kernel'):
        value[:, end] *= 2
  shapes = {name: value.shape for name, value in flat.items()}
  with ParamsWriter(
    folder, step=3, shapes=shapes, chunks=shapes, about={}, compress=False
  ) as writer:
    for name, value in flat.items():
      writer.write(name, (), value)


def write_run(folder, config, *, vocabulary, ends, data=None, gin=''):
  """Makes `folder` as a run of the model of `config` leaves it; `ends` are frequent ids."""
  folder.mkdir(parents=True, exist_ok=True)
  is_t5 = 'd_model' in config
  model = from_hf(config, has_tensor=lambda name: untied(config))
  (folder / 'model.gin').write_text(gin_text(model, title='a model'))
  if data is None:
    data = folder / 'data.jsonl'
    data.write_text(
      json.dumps({'inputs': 'What is 2', 'targets': 'five'} if is_t5 else {'text': 'a'})
    )
  lengths = {'inputs': 16, 'targets': 16} if is_t5 else {'targets': 32}
  text = RUN.format(folder=folder, data=data, lengths=lengths, vocabulary=vocabulary)
  (folder / 'my.gin').write_text(text + gin)
  loaded = gin_loader.load([folder / 'my.gin'])
  (folder / 'config.gin').write_text(loaded.provenance.config)
  write_params(folder, loaded.arguments()['model'], ends=ends)


def answers(folder, tmp_path, *flags):
  """Returns what `infer` answers to `PROMPTS`, with the flags that every run has."""
  path = tmp_path / 'prompts.jsonl'
  path.write_text(''.join(json.dumps({'inputs': prompt}) + '\n' for prompt in PROMPTS))
  result = run_here(
    lambda: infer.main([f'--checkpoint={folder}', f'--prompts={path}', *flags]), num_devices=1
  )
  assert result.code == 0, result.err
  return [json.loads(line) for line in result.out.splitlines()]


def generated(folder, *, chat=False, tokenizer='AutoTokenizer', **options):
  """Returns (text, number of tokens) of transformers' answers; without options its defaults."""
  tokenizer = getattr(transformers, tokenizer).from_pretrained(folder)
  config = transformers.AutoConfig.from_pretrained(folder)
  auto = 'AutoModelForSeq2SeqLM' if config.is_encoder_decoder else 'AutoModelForCausalLM'
  model = getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32).eval()
  found = []
  torch.set_num_threads(1)  # small matrices: threads would wait for each other
  for prompt in PROMPTS:
    if chat:
      messages = [{'role': 'user', 'content': prompt}]
      given = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors='pt', return_dict=True
      )
    else:
      given = tokenizer(prompt, return_tensors='pt', return_token_type_ids=False)
    with torch.no_grad():
      ids = model.generate(**given, **options)[0].tolist()
    new = ids[1:] if config.is_encoder_decoder else ids[given['input_ids'].shape[1] :]
    ended = new[-1] in np.atleast_1d(model.generation_config.eos_token_id)
    text = tokenizer.decode(new[:-1] if ended else new)
    found.append((text, len(new)))
  return found


def check_same_answers(run, tmp_path, capsys, *, chat=False, bytes_in_runs=False, ends=True):
  out = tmp_path / 'exported'
  assert convert.main([f'--from={run}', f'--to={out}', '--check=tensors']) == 0
  said = capsys.readouterr().out
  if json.loads((out / 'config.json').read_text())['model_type'] in FORCED_CLASSES:
    assert 'loads Qwen2Tokenizer, which reads' in said
    tokenizer = f'PreTrainedTokenizerFast.from_pretrained({str(out)!r})'
    assert f'Instead, load it with transformers.{tokenizer}' in said
  else:
    tokenizer = 'AutoTokenizer'
    assert 'WARNING' not in said
  ours = answers(run, tmp_path, *(['--chat'] if chat else []))
  theirs = generated(out, chat=chat, tokenizer=tokenizer.partition('.')[0])
  assert [r['num_tokens'] for r in ours] == [n for _, n in theirs]
  texts = [(shown(r['prediction']), shown(text)) for r, (text, _) in zip(ours, theirs)]
  # tokenizers drops the whole run of bytes that are not UTF-8; SentencePiece only those.
  assert all(our == their for our, their in texts) or bytes_in_runs
  assert any(r['is_complete'] for r in ours) or not ends
  assert all(r['num_tokens'] == 128 for r in ours if not r['is_complete'])
  return out, json.loads((out / 'config.json').read_text())


@pytest.fixture(scope='module')
def own_tokenizer(tmp_path_factory):
  """A tokenizer of 300 ids, pad 0, without a template."""
  return write_tokenizer(tmp_path_factory.mktemp('tokenizer') / 'own', None)


# A decoder that is deeper than its encoder: transformers makes no cache for that.
LONG = {
  'gpt2': {'n_positions': 256},
  'llama': {'max_position_embeddings': 256},
  **dict.fromkeys(('t5', 'mt5', 'umt5'), {'num_decoder_layers': 2}),
}
FAMILIES = [name for name in CONFIGS if not name.startswith('bert')]


def large(family, vocab_size=300):
  """Returns the config.json of a small model whose rows may be longer than answers."""
  return {**CONFIGS[family], 'vocab_size': vocab_size, **LONG.get(family, {})}


def shown(text):
  """Returns `text` without what is shown differently: unknown ids, bytes that are not UTF-8."""
  for mark in (' \u2047 ', ' \u2047', '<unk>', '\ufffd'):
    text = text.replace(mark, '')
  return text.strip()


@pytest.mark.slow
@pytest.mark.quick_cases('llama')
@pytest.mark.parametrize('family', FAMILIES)
def test_an_export_from_scratch_generates_what_infer_does(family, tmp_path, own_tokenizer, capsys):
  config = large(family)
  write_run(tmp_path / 'run', config, vocabulary=f'huggingface:{own_tokenizer}', ends=[2])
  # With tied logits, random models repeat a token.
  out, written = check_same_answers(tmp_path / 'run', tmp_path, capsys, ends=untied(config))
  assert written['eos_token_id'] == 2 and written['pad_token_id'] == 0
  starts = 'decoder_start_token_id' if 'd_model' in written else 'bos_token_id'
  assert written[starts] == 0
  made = json.loads((out / 'generation_config.json').read_text())
  assert made['max_new_tokens'] == 128 and made['do_sample'] is False


@pytest.mark.parametrize(
  'family', ['llama', *(pytest.param(name, marks=pytest.mark.slow) for name in ('qwen2', 't5_1_1'))]
)
def test_bytes_become_a_tokenizer(family, tmp_path, capsys):
  write_run(tmp_path / 'run', large(family, 259), vocabulary='byte', ends=[1])
  check_same_answers(tmp_path / 'run', tmp_path, capsys)


def write_sentencepiece(folder, **options):
  sentencepiece = pytest.importorskip('sentencepiece')
  (folder / 'text').write_text('\n'.join([*PROMPTS, *TEXTS, str(TALKS)] * 4))
  sentencepiece.SentencePieceTrainer.train(
    input=str(folder / 'text'),
    model_prefix=str(folder / 'own'),
    minloglevel=2,
    hard_vocab_limit=False,
    **options,
  )
  return folder / 'own.model'


T5_IDS = {'pad_id': 0, 'eos_id': 1, 'unk_id': 2, 'bos_id': -1}
LLAMA_IDS = {'pad_id': 3, 'eos_id': 2, 'unk_id': 0, 'bos_id': 1}


@pytest.mark.slow
@pytest.mark.parametrize(
  'family, options',
  [
    pytest.param('t5', {'model_type': 'unigram', 'vocab_size': 120, **T5_IDS}, id='t5-unigram'),
    pytest.param('mt5', {'model_type': 'bpe', 'vocab_size': 120, **T5_IDS}, id='mt5-bpe'),
    pytest.param(
      'llama',
      {'model_type': 'bpe', 'vocab_size': 360, 'byte_fallback': True, **T5_IDS},
      id='llama-bpe-bytes',
    ),
    pytest.param(
      'llama', {'model_type': 'unigram', 'vocab_size': 120, **LLAMA_IDS}, id='llama-unknown-is-0'
    ),
    pytest.param(
      'gpt2',
      {'model_type': 'unigram', 'vocab_size': 120, 'add_dummy_prefix': False, **T5_IDS},
      id='gpt2-unigram',
    ),
    pytest.param(
      'qwen2',
      {
        'model_type': 'bpe',
        'vocab_size': 120,
        'remove_extra_whitespaces': False,
        'normalization_rule_name': 'identity',
        **T5_IDS,
      },
      id='qwen2-spaces',
    ),
  ],
)
def test_sentencepiece_becomes_a_tokenizer(family, options, tmp_path, capsys):
  model = write_sentencepiece(tmp_path, **options)
  config = large(family, options['vocab_size'])
  write_run(tmp_path / 'run', config, vocabulary=f'sentencepiece:{model}', ends=[options['eos_id']])
  out, _ = check_same_answers(
    tmp_path / 'run',
    tmp_path,
    capsys,
    bytes_in_runs=options.get('byte_fallback', False),
    ends=untied(config) or 't5' in family,
  )
  assert (out / ('spiece.model' if 't5' in family else 'tokenizer.model')).is_file()


@pytest.mark.parametrize('type_name', [pytest.param('word', marks=pytest.mark.slow), 'char'])
def test_weights_leave_with_a_tokenizer_that_tokenizer_json_cannot_hold(
  type_name, tmp_path, capsys
):
  model = write_sentencepiece(tmp_path, model_type=type_name, vocab_size=120, **T5_IDS)
  name = f'sentencepiece:{model}'
  write_run(tmp_path / 'run', large('llama', 120), vocabulary=name, ends=[1])
  reason = tokenizer_problem(name)
  assert f'of type {type_name}; tokenizer.json can hold' in reason
  out = tmp_path / 'exported'
  assert convert.main([f'--from={tmp_path / "run"}', f'--to={out}', '--check=tensors']) == 0
  assert f'vocabulary: left out: {reason}' in capsys.readouterr().out
  assert (out / 'tokenizer.model').read_bytes() == model.read_bytes()
  assert (out / 'model.safetensors').is_file() and not (out / 'tokenizer.json').exists()
  assert json.loads((out / 'generation_config.json').read_text())['eos_token_id'] == 1


@pytest.mark.parametrize('has_transformers', [True, False])
@pytest.mark.parametrize(
  'family, is_qwens, said',
  [('qwen2', False, 'Qwen2Tokenizer'), ('qwen2', True, ''), ('llama', False, '')],
)
def test_a_class_that_replaces_the_tokenizer_is_named(
  family, is_qwens, said, has_transformers, tmp_path, monkeypatch
):
  write_tokenizer(tmp_path, None)
  (tmp_path / 'config.json').write_text(json.dumps(large(family)))
  content = json.loads((tmp_path / 'tokenizer.json').read_text())
  if is_qwens:
    qwens = json.loads(transformers.Qwen2Tokenizer().backend_tokenizer.to_str())
    content |= {name: qwens[name] for name in ('normalizer', 'pre_tokenizer')}
    (tmp_path / 'tokenizer.json').write_text(json.dumps(content))
  plain = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  text = RunText('', 300, (), plain.encode, DecodingConfig(start_token=None))
  if not has_transformers:
    monkeypatch.setitem(sys.modules, 'transformers', None)
    said = FORCED_CLASSES.get(family, '')
  warning = tokenizer_warning(text, tmp_path, target=tmp_path, is_t5=False)
  assert said in warning and bool(said) == bool(warning)
  assert not said or ('not checked' in warning) != has_transformers


def test_all_model_types_whose_tokenizer_is_replaced_are_known():
  auto = transformers.models.auto.tokenization_auto
  forced = {
    name: auto.TOKENIZER_MAPPING_NAMES[name]
    for name in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
  }
  assert FORCED_CLASSES == {
    name: kind
    for name, kind in forced.items()
    if name in CONFIG_FAMILIES and kind != 'TokenizersBackend'
  }


def write_base(folder, config, template, **tokenizer):
  """Writes a Hugging Face model that samples, with a different id at the end of a text."""
  write_model(folder, {**config, 'eos_token_id': 9})
  write_tokenizer(folder, template, **tokenizer)
  (folder / 'generation_config.json').write_text(
    json.dumps({'do_sample': True, 'temperature': 0.6, 'top_p': 0.9, 'eos_token_id': [9, 10]})
  )
  return folder


@pytest.mark.slow
@pytest.mark.parametrize('family', ['qwen3', 'gpt2', 't5'])
def test_a_fine_tuned_export_generates_what_infer_does(family, tmp_path, capsys):
  base = write_base(tmp_path / 'hf', large(family), None, zero_is_a_word=family != 't5')
  run = tmp_path / 'run'
  assert convert.main([f'--from={base}', f'--to={run}', '--check=tensors']) == 0
  shutil.rmtree(run / 'checkpoint_0')
  end = int(json.loads((base / 'tokenizer.json').read_text())['added_tokens'][2]['id'])
  write_run(run, large(family), vocabulary=f'huggingface:{run}/hf', ends=[end])
  _, written = check_same_answers(run, tmp_path, capsys, ends=untied(large(family)))
  assert written['eos_token_id'] == end
  if family != 't5':  # id 0 is a word
    assert written['bos_token_id'] == 0 and written.get('pad_token_id') is None


@pytest.mark.slow
@pytest.mark.quick_cases('chatml-pad')
@pytest.mark.parametrize(
  'family, template, end, zero_is_a_word',
  [
    pytest.param('llama', CHATML, '<|im_end|>', False, id='chatml-pad'),
    pytest.param('llama', LLAMA3, '<|eot_id|>', True, id='llama3-word'),
    pytest.param('qwen2', CHATML, '<|im_end|>', False, id='qwen2-pad'),
    pytest.param('qwen3', THINKING, '<|im_end|>', True, id='qwen3-word'),
    pytest.param('gemma3_text', GEMMA, '<end_of_turn>', False, id='gemma3-pad'),
  ],
)
def test_a_chat_export_ends_its_turns(family, template, end, zero_is_a_word, tmp_path, capsys):
  config = large(family)
  base = write_base(tmp_path / 'hf', config, template, zero_is_a_word=zero_is_a_word)
  run = tmp_path / 'run'
  assert convert.main([f'--from={base}', f'--to={run}', '--check=tensors']) == 0
  shutil.rmtree(run / 'checkpoint_0')
  added = json.loads((base / 'tokenizer.json').read_text())['added_tokens']
  ids = {token['content']: token['id'] for token in added}
  write_run(
    run,
    config,
    vocabulary=f'huggingface:{run}/hf',
    ends=[ids[end]],
    data=write_talks(tmp_path / 'chats.jsonl', TALKS),
  )
  _, written = check_same_answers(run, tmp_path, capsys, chat=True, ends=untied(config))
  assert written['eos_token_id'] == [ids['<eos>'], ids[end]]


@pytest.mark.slow
def test_a_decoder_deeper_than_its_encoder_generates(tmp_path, own_tokenizer, capsys):
  config = {**large('t5_1_1'), 'num_decoder_layers': 3}  # transformers makes caches for two
  write_run(tmp_path / 'run', config, vocabulary=f'huggingface:{own_tokenizer}', ends=[2])
  check_same_answers(tmp_path / 'run', tmp_path, capsys)


def export(run, tmp_path, capsys, *flags):
  """Returns what convert says, config.json and generation_config.json, if there is one."""
  assert convert.main([f'--from={run}', f'--to={tmp_path / "out"}', '--check=tensors', *flags]) == 0
  made = tmp_path / 'out' / 'generation_config.json'
  return (
    capsys.readouterr().out,
    json.loads((tmp_path / 'out' / 'config.json').read_text()),
    json.loads(made.read_text()) if made.is_file() else None,
  )


def test_sampling_and_stop_tokens_of_the_run_are_exported(tmp_path, capsys):
  gin = """
decoding.DecodingConfig:
  temperature = 0.5
  top_k = 7
  stop_tokens = (12,)
  max_decode_length = 40
train_script.train.decoding_cfg = @decoding.DecodingConfig()
"""
  write_run(tmp_path / 'run', large('llama', 259), vocabulary='byte', ends=[1], gin=gin)
  said, config, made = export(tmp_path / 'run', tmp_path, capsys)
  assert 'a text starts with id 0; ids that end it: 12, 1' in said
  assert config['eos_token_id'] == [12, 1]
  assert made == {
    'eos_token_id': [12, 1],
    'pad_token_id': 0,
    'bos_token_id': 0,
    'suppress_tokens': [0],
    'max_new_tokens': 40,
    'do_sample': True,
    'temperature': 0.5,
    'top_k': 7,
    'top_p': 1.0,
  }


def test_a_task_that_is_gone_leaves_the_vocabulary(tmp_path, capsys):
  write_run(tmp_path / 'run', large('llama', 259), vocabulary='byte', ends=[1])
  (tmp_path / 'run' / 'data.jsonl').unlink()
  said, config, _ = export(tmp_path / 'run', tmp_path, capsys)
  assert 'generation: the task cannot be opened, so only its vocabulary counts: ' in said
  assert config['eos_token_id'] == 1 and (tmp_path / 'out' / 'tokenizer.json').is_file()


def test_a_run_without_text_says_so_and_has_no_id_beyond_its_table(tmp_path, capsys):
  gin = (
    "\nfrom t5x_gpu.data import batches\nbatches.DatasetConfig.module = 't5x_gpu.data.synthetic'\n"
  )
  write_run(tmp_path / 'run', large('gpt2'), vocabulary=None, ends=[], gin=gin)
  said, config, made = export(tmp_path / 'run', tmp_path, capsys)
  assert 'generation: generation_config.json left out: ' in said and made is None
  assert config['eos_token_id'] is None and config['bos_token_id'] is None


def test_a_converted_model_keeps_its_files_and_names_what_infer_does_not_apply(tmp_path, capsys):
  base = write_base(tmp_path / 'hf', large('llama'), None)
  generation = base / 'generation_config.json'
  settings = {**json.loads(generation.read_text()), 'repetition_penalty': 1.1, 'num_beams': 1}
  generation.write_text(json.dumps(settings))
  ours = tmp_path / 'ours'
  assert convert.main([f'--from={base}', f'--to={ours}', '--check=tensors']) == 0
  text = 'do_sample = True, repetition_penalty = 1.1, temperature = 0.6, top_p = 0.9'
  said = capsys.readouterr().out
  assert f'generation: the files set {text}; infer does not apply them' in said
  _, config, made = export(ours, tmp_path, capsys)
  assert config == json.loads((base / 'config.json').read_text()) and made == settings
  (tmp_path / 'prompts.txt').write_text('It')
  flags = [f'--checkpoint={ours}', f'--prompts={tmp_path / "prompts.txt"}', '--dry_run']
  result = run_here(lambda: infer.main(flags), num_devices=1)
  assert result.code == 0 and f'the files set {text}' in result.err


@pytest.mark.parametrize(
  'family, factor', [('gpt2', 0.5), pytest.param('qwen3', 2.0, marks=pytest.mark.slow)]
)
def test_an_exact_factor_of_attention_is_folded_into_the_queries(family, factor, tmp_path, capsys):
  config = large(family, 259)
  scale = (config.get('head_dim') or 8) / factor**2
  gin = f"""
from t5x_gpu.models import config
config.TransformerConfig.query_pre_attn_scalar = {scale}
"""
  write_run(tmp_path / 'run', config, vocabulary='byte', ends=[1], gin=gin)
  assert convert.main([f'--from={tmp_path / "run"}', f'--to={tmp_path / "out"}']) == 0
  said = capsys.readouterr().out
  assert f'queries are multiplied by {factor:g}' in said
  assert 'ours against transformers' in said  # the run's own parameters and scale


def test_a_run_says_at_start_that_it_cannot_be_exported(tmp_path):
  def said(**fields):
    c = dataclasses.replace(
      from_hf(CONFIGS['gpt2'], has_tensor=lambda name: False).config, **fields
    )
    problem = export_problem(DecoderOnlyModel(c))
    return problem and problem.what

  assert said() is said(query_pre_attn_scalar=2.0) is None
  assert 'query_pre_attn_scalar = 3.0, where gpt2 has 8' in said(query_pre_attn_scalar=3.0)
  assert '\n' not in said(norm_position='post', attention_softcap=1.0)
  result = Project(tmp_path).run('--dry_run')
  assert 'export: not possible to Hugging Face' in result.out and 'relative_bias' in result.out
  like_gpt2 = {'relative_bias': 'none', 'num_positions': 32, 'norm': 'layer', 'mlp_bias': True}
  like_gpt2 |= {'attention_bias': 'all', 'mlp_activations': ('gelu',), 'head_dim': 2}
  like_gpt2 |= {'query_pre_attn_scalar': 2.0, 'scale_tied_logits': False}
  like_gpt2 |= {'logits_via_embedding': True}
  model = {f'TransformerConfig.{name}': value for name, value in like_gpt2.items()}
  result = Project(tmp_path).run('--dry_run', VOCABULARY='words:264', **model)
  assert 'export: without a tokenizer.json' in result.out and "'words:264'" in result.out
