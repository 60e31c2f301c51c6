"""Hugging Face tokenizers give the ids that they give elsewhere."""

import json
import sys

import numpy as np
import pytest

from t5x_gpu.data import data_module, features
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.data_module import ModelOutputs
from t5x_gpu.data.prepared import shard_writer
from t5x_gpu.data.prepared.index import read_index
from t5x_gpu.data.tasks import objectives
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies import vocabularies
from t5x_gpu.data.vocabularies.huggingface import HuggingFaceVocabulary
from t5x_gpu.errors import DataError
from tests import eval_tasks
from tests.helpers_prepared import prepare_here
from tests.messages import raises

tokenizers = pytest.importorskip('tokenizers')
pytestmark = pytest.mark.tf
TEXTS = [
  'Hello, world! How are you?',
  'def f(x):\n  return x  # twice',
  'line 17 of the text!',
  'Stra\u00dfe \u4f60\u597d \U0001f600',
] * 5


def save(folder, tokenizer, config=None, name='tokenizer_config.json'):
  folder.mkdir(exist_ok=True)
  tokenizer.save(str(folder / 'tokenizer.json'))
  if config:
    (folder / name).write_text(json.dumps(config))
  return folder


@pytest.fixture(name='bert')
def _bert(tmp_path):
  """WordPiece as BERT has it: [PAD] is 0; a template adds [CLS] and [SEP]; rows are cut to 4."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token='[UNK]'))
  tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
  tokenizer.decoder = tokenizers.decoders.WordPiece()
  special = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
  tokenizer.train_from_iterator(
    TEXTS,
    tokenizers.trainers.WordPieceTrainer(
      vocab_size=120, special_tokens=special, show_progress=False
    ),
  )
  tokenizer.post_processor = tokenizers.processors.BertProcessing(('[SEP]', 3), ('[CLS]', 2))
  tokenizer.enable_truncation(4)
  tokenizer.enable_padding()
  return save(
    tmp_path / 'bert',
    tokenizer,
    {
      'pad_token': '[PAD]',
      'unk_token': '[UNK]',
      'cls_token': '[CLS]',
      'sep_token': '[SEP]',
      'mask_token': {'content': '[MASK]', 'lstrip': True},
      'model_max_length': 512,
    },
  )


@pytest.fixture(name='gpt2')
def _gpt2(tmp_path):
  """Byte-level BPE as GPT-2 has it: '!' is 0, and there is no padding."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.train_from_iterator(
    TEXTS,
    tokenizers.trainers.BpeTrainer(
      vocab_size=300,
      show_progress=False,
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    ),
  )
  tokenizer.add_special_tokens(['<|endoftext|>'])
  assert tokenizer.id_to_token(0) == '!'
  return save(
    tmp_path / 'gpt2', tokenizer, {'eos_token': '<|endoftext|>'}, name='special_tokens_map.json'
  )


@pytest.fixture(name='t5')
def _t5(tmp_path):
  """Ids 0, 1, 2 and sentinels at the end as T5 has them."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token='<unk>', fuse_unk=True))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
  tokenizer.decoder = tokenizers.decoders.Metaspace()
  tokenizer.train_from_iterator(
    TEXTS,
    tokenizers.trainers.BpeTrainer(
      vocab_size=100, special_tokens=['<pad>', '</s>', '<unk>'], show_progress=False
    ),
  )
  tokenizer.add_special_tokens([f'<extra_id_{i}>' for i in range(99, -1, -1)])
  return save(
    tmp_path / 't5', tokenizer, {'eos_token': '</s>', 'pad_token': '<pad>', 'unk_token': '<unk>'}
  )


def ids_of(folder, text):
  tokenizer = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  tokenizer.no_truncation()
  tokenizer.no_padding()
  return tokenizer.encode(text, add_special_tokens=False).ids


def test_bert_ids_are_the_tokenizers_without_template_cutting_and_padding(bert):
  vocabulary = HuggingFaceVocabulary(bert)
  assert not vocabulary.zero_is_a_word and vocabulary.pad_id == 0
  assert (vocabulary.unk_id, vocabulary.start_id, vocabulary.eos_id, vocabulary.mask_id) == (
    1,
    2,
    3,
    4,
  )
  for text in TEXTS:
    assert vocabulary.encode(text) == ids_of(bert, text)
  assert len(vocabulary.encode(TEXTS[0])) > 4
  assert vocabulary.decode([2, *vocabulary.encode('hello, world!'), 3, 0, 0, 17]) == 'hello, world!'


def test_gpt2_text_survives_and_its_exclamation_mark_is_not_padding(gpt2):
  vocabulary = HuggingFaceVocabulary(gpt2 / 'tokenizer.json')
  own = tokenizers.Tokenizer.from_file(str(gpt2 / 'tokenizer.json')).get_vocab_size()
  assert vocabulary.zero_is_a_word and vocabulary.vocab_size == own
  for text in TEXTS:
    ids = vocabulary.encode(text)
    assert ids == ids_of(gpt2, text)
    assert vocabulary.decode([*ids, vocabulary.eos_id, 5]) == text
  assert 0 in vocabulary.encode('wow !') and 0 in vocabulary.ordinary_ids
  assert vocabulary.unk_id is None and vocabulary.start_id is None
  assert HuggingFaceVocabulary(gpt2, extra_ids=3).vocab_size == own + 3


def test_id_0_is_a_word_if_padding_is_declared_elsewhere(gpt2):
  (gpt2 / 'tokenizer_config.json').write_text(json.dumps({'pad_token': '<|endoftext|>'}))
  assert HuggingFaceVocabulary(gpt2).zero_is_a_word


def test_t5_sentinels_are_the_tokenizers_own_and_descend(t5):
  vocabulary = vocabularies.named_vocabulary(f'huggingface:{t5}', extra_ids=100)
  assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (0, 1, 2)
  size = vocabulary.vocab_size
  assert vocabulary.extra_ids == 0 and not vocabulary.zero_is_a_word
  assert vocabularies.sentinel_ids(vocabulary) == tuple(range(size - 1, size - 101, -1))
  assert vocabularies.mask_id(vocabulary) == size - 1
  assert vocabulary.decode(vocabulary.encode('Hello, world!') + [1]) == 'Hello, world!'


def test_tokenizer_without_sentinels_gets_them_after_its_own_ids(bert):
  vocabulary = vocabularies.named_vocabulary(f'huggingface:{bert}', extra_ids=100)
  assert vocabularies.sentinel_ids(vocabulary)[0] == vocabulary.vocab_size - 1
  assert len(vocabularies.sentinel_ids(vocabulary)) == 100
  assert vocabularies.named_vocabulary(f'huggingface:{bert}', extra_ids=1).extra_ids == 0  # [MASK]
  assert not {0, 1, 2, 3, 4} & set(vocabularies.ordinary_ids(vocabulary).tolist())


@pytest.mark.parametrize('kind', ['bert', 'gpt2', 't5'])
def test_tensorflow_and_python_agree(kind, request):
  vocabulary = HuggingFaceVocabulary(request.getfixturevalue(kind))
  dataset = tf.data.Dataset.from_tensor_slices(TEXTS).map(vocabulary.encode_tf)
  assert [x.tolist() for x in dataset.as_numpy_iterator()] == list(map(vocabulary.encode, TEXTS))
  ragged = vocabulary.encode_tf(tf.constant(TEXTS[:3]))
  assert ragged.to_list() == list(map(vocabulary.encode, TEXTS[:3]))
  assert vocabulary.encode_tf(tf.constant('')).numpy().tolist() == []
  rows = ragged.to_tensor(vocabulary.pad_id)
  texts = [text.decode() for text in vocabulary.decode_tf(rows).numpy()]
  assert texts == [vocabulary.decode(vocabulary.encode(text)) for text in TEXTS[:3]]
  assert vocabulary.decode_tf(rows[0]).numpy().decode() == texts[0]
  # What follows the end of a text is not part of it.
  after = tf.concat([ragged[0], [vocabulary.eos_id, 7, 8]], axis=0)
  assert vocabulary.decode_tf(after).numpy().decode() == texts[0]


EXCLAIMED = [f'well ! number {i} !!' for i in range(200)]


@pytest.mark.quick_cases('packed')
@pytest.mark.parametrize('way', ['packed', 'one_a_row', 'prepared'])
def test_batches_have_the_tokenizers_own_ids_and_lose_none(open_data, gpt2, tmp_path, way):
  (tmp_path / 'a.txt').write_text('\n'.join(EXCLAIMED))
  size = HuggingFaceVocabulary(gpt2).vocab_size
  name, options = f'text_lines:{tmp_path}/a.txt', {'vocabulary': f'huggingface:{gpt2}'}
  if way == 'prepared':
    prepare_here(
      name, tmp_path / 'rows', num_parts=1, lengths={'targets': 64}, vocab_size=size, **options
    )
    assert read_index(tmp_path / 'rows', split='train').tokens > 2000
    name, options = f'prepared:{tmp_path}/rows', {}
  opened = open_data(
    name, vocab_size=size, lengths={'targets': 64}, repeat=False, pack=way != 'one_a_row', **options
  )
  vocabulary = data_module.open_vocabulary(opened.config, feature_converter='lm')
  assert vocabulary.size == size and vocabulary.decode(vocabulary.encode('a !')) == 'a !'
  got = []
  for batch in opened.iterator:
    segments = batch.get('decoder_segment_ids', batch['decoder_loss_weights'])
    for row, weights, segment in zip(
      batch['decoder_target_tokens'], batch['decoder_loss_weights'], segments
    ):
      assert ((segment > 0) == (weights > 0)).all()
      assert (row[weights > 0] == 0).any() or not weights.any()
      got += [row[segment == s].tolist() for s in range(1, segment.max() + 1)]
  own = [ids_of(gpt2, line) + [vocabulary.eos_id] for line in EXCLAIMED]
  assert len(got) > 150 and all(row in own for row in got)
  facts = opened.iterator.describe()
  assert facts['vocabulary of targets'].startswith('huggingface:tokenizer.json (')
  assert facts['vocabulary of targets'].endswith(f', {size} ids')
  rows = shard_writer.RowStats()
  for _text, row in zip(got, map(np.asarray, got)):
    rows.add({'decoder_target_tokens': row, 'decoder_loss_weights': row < size})
    [piece] = shard_writer.pieces(
      {'decoder_target_tokens': row, 'decoder_loss_weights': row < size}, decode=vocabulary.decode
    )
    assert piece.text in EXCLAIMED
  assert rows.tokens == sum(map(len, got))


def test_a_prefix_keeps_its_words_of_id_0(open_data, gpt2, tmp_path):
  (tmp_path / 'train.tsv').write_text('! what !\ta !\n' * 60)
  opened = open_data(
    f'text_pairs:{tmp_path}/*.tsv',
    vocabulary=f'huggingface:{gpt2}',
    vocab_size=384,
    lengths={'inputs': 24, 'targets': 24},
    converter='prefix_lm',
    pack=False,
  )
  row = shard_writer.row_of(next(opened.iterator), 0)
  inputs, targets = ids_of(gpt2, '! what !'), ids_of(gpt2, 'a !')
  where = features.is_token(row, 'decoder_target_tokens')
  got = row['decoder_target_tokens'][where].tolist()
  eos = HuggingFaceVocabulary(gpt2).eos_id
  assert [i for i in got if i != eos] == inputs + targets and 0 in inputs and 0 in targets


@pytest.mark.parametrize('converter', ['encoder_decoder', 'prefix_lm'])
def test_inputs_and_targets_have_the_tokenizers_own_ids(open_data, gpt2, tmp_path, converter):
  (tmp_path / 'train.tsv').write_text('! what !\ta !\n' * 60)
  vocabulary = HuggingFaceVocabulary(gpt2)
  options = dict(
    vocabulary=f'huggingface:{gpt2}',
    lengths={'inputs': 24, 'targets': 24},
    converter=converter,
    pack=False,
  )
  opened = open_data(f'text_pairs:{tmp_path}/*.tsv', vocab_size=vocabulary.vocab_size, **options)
  batch = next(opened.iterator)
  stack = 'encoder_input' if converter == 'encoder_decoder' else 'decoder_target'
  begin = [*ids_of(gpt2, '! what !'), vocabulary.eos_id]
  assert batch[f'{stack}_tokens'][0, : len(begin)].tolist() == begin and begin[0] == 0
  assert batch[f'{stack.split("_")[0]}_segment_ids'][0, : len(begin)].all()
  with raises(DataError):
    open_data(f'text_pairs:{tmp_path}/*.tsv', vocab_size=vocabulary.vocab_size - 1, **options)


def test_metrics_read_and_get_the_ids_of_the_model(gpt2):
  config = DatasetConfig(
    'turned',
    {'inputs': 8, 'targets': 8},
    'validation',
    4,
    pack=False,
    vocabulary=f'huggingface:{gpt2}',
  )
  [task] = data_module.open_evaluated_tasks(config, feature_converter='prefix_lm')
  assert task.zero_is_a_word and task.inputs[0][:3] == ids_of(gpt2, 'abc')
  answers = [[*ids_of(gpt2, 'cba!'), task.eos_id]] * 5
  task.metrics(ModelOutputs(answers, [0.0] * 5, [0.0] * 5))
  assert eval_tasks.seen['exact_match'][1][0] == 'prediction: cba!'


def test_masked_model_over_bert_has_cls_mask_and_sep(open_data, bert, tmp_path):
  lines = [f'Hello world, number {i}, how are you' for i in range(99)]
  (tmp_path / 'a.txt').write_text('\n'.join(lines))
  opened = open_data(
    f'mlm:text_lines:{tmp_path}/a.txt',
    converter='encoder_mlm',
    pack=False,
    vocabulary=f'huggingface:{bert}',
    lengths={'inputs': 12, 'targets': 12},
    vocab_size=120,
  )
  batch = next(opened.iterator)
  tokens, targets = batch['encoder_input_tokens'], batch['encoder_target_tokens']
  assert (tokens[:, 0] == 2).all() and (targets[:, 0] == 2).all()
  ends = (targets > 0).sum(1) - 1
  assert (targets[np.arange(4), ends] == 3).all() and (tokens == 4).any()
  assert not batch['encoder_loss_weights'][targets == 3].any()


def test_classification_over_bert_keeps_its_end_and_its_classes(open_data, bert, tmp_path):
  (tmp_path / 'train.csv').write_text('text,label\nhello world how are you,a\nline of text,b\n')
  (tmp_path / 'dev.csv').write_text('text,label\nyou,a\n')
  opened = open_data(
    f'imdb_csv:{tmp_path}/*.csv',
    converter='encoder_classification',
    pack=False,
    vocabulary=f'huggingface:{bert}',
    lengths={'inputs': 5},
    vocab_size=120,
    batch_size=2,
    num_classes=2,
    repeat=False,
  )
  tokens = next(opened.iterator)['encoder_input_tokens']
  assert (tokens[:, 0] == 2).all() and (tokens.max(1) > 4).all()
  assert all(row[row > 0][-1] == 3 for row in tokens)
  assert data_module.open_class_names(opened.config) == ('a', 'b')


def test_same_files_are_the_same_vocabulary(bert, t5):
  one, same = HuggingFaceVocabulary(bert), HuggingFaceVocabulary(bert / 'tokenizer.json')
  assert one == same and hash(one) == hash(same) and one != HuggingFaceVocabulary(t5)
  before = vocabularies.vocabulary_fingerprint(one)
  (bert / 'tokenizer_config.json').write_text('{}')
  assert vocabularies.vocabulary_fingerprint(HuggingFaceVocabulary(bert)) != before


@pytest.mark.parametrize(
  'break_it',
  [
    lambda folder: (folder / 'tokenizer.json').unlink(),
    lambda folder: (folder / 'tokenizer.json').write_text('{"model": '),
    lambda folder: (folder / 'tokenizer_config.json').write_text('[1'),
    lambda folder: (folder / 'tokenizer_config.json').write_text('{"eos_token": "</end>"}'),
  ],
)
def test_broken_tokenizers_are_named(bert, break_it):
  break_it(bert)
  with raises(DataError) as e:
    vocabularies.named_vocabulary(f'huggingface:{bert}')
  assert e.value.parameters


# Where a file next to tokenizer.json may declare the token '<|end|>', whose id is 301.
_TOKEN = {'content': '<|end|>', 'rstrip': True, 'special': True}
DECLARED = {
  'added_tokens_decoder': {'tokenizer_config.json': {'added_tokens_decoder': {'301': _TOKEN}}},
  'added_tokens': {'added_tokens.json': {'<|end|>': 301}},
  'list': {'tokenizer_config.json': {'additional_special_tokens': ['<|end|>']}},
  'list_of_map': {'special_tokens_map.json': {'extra_special_tokens': ['<|end|>']}},
  'named': {'special_tokens_map.json': {'eos_token': '<|end|>'}},
}


@pytest.mark.parametrize('how', DECLARED)
@pytest.mark.parametrize('is_in', ['nothing', 'vocab', 'added_tokens'])
def test_tokens_that_other_files_declare_stay_whole_as_in_transformers(gpt2, how, is_in):
  parsed = json.loads((gpt2 / 'tokenizer.json').read_text())
  if is_in == 'vocab':
    parsed['model']['vocab'] |= {'<|endoftext|>': 300, '<|end|>': 301}
  elif is_in == 'added_tokens':
    parsed['added_tokens'].append({**parsed['added_tokens'][0], 'id': 301, 'content': '<|end|>'})
  (gpt2 / 'tokenizer.json').write_text(json.dumps(parsed))
  before = HuggingFaceVocabulary(gpt2).fingerprint
  for name, content in DECLARED[how].items():
    (gpt2 / name).write_text(json.dumps(content))
  if (how, is_in) == ('named', 'nothing'):  # the token has no id anywhere
    with raises(DataError):
      HuggingFaceVocabulary(gpt2)
    return
  vocabulary = HuggingFaceVocabulary(gpt2)
  text = 'Hello, <|end|>  world!'
  ids = list(vocabulary.encode(text))
  assert ids.count(301) == 1 and vocabulary.vocab_size == 302
  assert is_in == 'added_tokens' or vocabulary.fingerprint != before
  transformers = pytest.importorskip('transformers')
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(gpt2)
  assert ids == theirs(text, add_special_tokens=False)['input_ids']


def test_a_declared_token_that_cannot_have_its_id_is_refused(gpt2):
  for declared in ({'305': _TOKEN}, {'first': _TOKEN}):
    (gpt2 / 'tokenizer_config.json').write_text(json.dumps({'added_tokens_decoder': declared}))
    with raises(DataError):
      HuggingFaceVocabulary(gpt2)


@pytest.mark.parametrize('is_new', [False, True])
def test_the_file_that_names_a_special_token_is_the_file_of_transformers(gpt2, is_new):
  (gpt2 / 'special_tokens_map.json').write_text('{"eos_token": "<|endoftext|>", "bos_token": "H"}')
  config = {'eos_token': '!', 'extra_special_tokens': {'image_token': 'e'}}
  if is_new:
    config['added_tokens_decoder'] = {'300': {'content': '<|endoftext|>', 'special': True}}
  (gpt2 / 'tokenizer_config.json').write_text(json.dumps(config))
  vocabulary = HuggingFaceVocabulary(gpt2)
  named = {'eos_token': '!'} if is_new else {'eos_token': '<|endoftext|>', 'bos_token': 'H'}
  assert vocabulary.special_tokens == {**named, 'image_token': 'e'}
  transformers = pytest.importorskip('transformers')
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(gpt2)
  assert vocabulary.special_tokens == theirs.special_tokens_map


def test_a_tokenizer_that_drops_unknown_letters_is_reported(tmp_path, caplog):
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({'a': 0, 'b': 1}, []))
  save(tmp_path / 'dropping', tokenizer, {})
  vocabulary = HuggingFaceVocabulary(tmp_path / 'dropping')
  assert vocabulary.encode('aéb') == [0, 1]
  assert 'it drops letters outside of its vocabulary' in caplog.text


def test_tokenizer_without_an_end_is_named_where_an_end_is_needed(bert, open_data, tmp_path):
  (bert / 'tokenizer_config.json').unlink()
  (tmp_path / 'a.txt').write_text('hello\n' * 9)
  with raises(DataError):
    open_data(
      f'mlm:text_lines:{tmp_path}/a.txt',
      converter='encoder_mlm',
      vocab_size=400,
      vocabulary=f'huggingface:{bert}',
      lengths={'inputs': 12, 'targets': 12},
    )
  with raises(DataError):
    open_data(f'text_lines:{tmp_path}/a.txt', vocabulary=f'huggingface:{bert}', vocab_size=400)


def test_missing_package_names_the_pip_command(bert, monkeypatch):
  monkeypatch.setitem(sys.modules, 'tokenizers', None)
  with raises(DataError):
    HuggingFaceVocabulary(bert)


def test_framing_counts_what_it_adds(bert, t5):
  for folder, added in ((bert, 2), (t5, 1)):
    feature = seqio.Feature(HuggingFaceVocabulary(folder), add_eos=True)
    assert objectives.frame_size(feature) == added
    assert len(objectives.framed(tf.constant([9, 9]), feature)) == 2 + added
