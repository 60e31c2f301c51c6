"""A SentencePiece model in the folder of a Hugging Face tokenizer."""

import json
import shutil

import pytest

from t5x_gpu.data.vocabularies.vocabularies import named_vocabulary
from t5x_gpu.errors import DataError
from tests.helpers_tokenizers import write_sentencepiece, write_tokenizer
from tests.messages import raises

pytestmark = pytest.mark.tf
IMAGE = {'<image>': 288}
NAMED = {'bos_token': '<s>', 'eos_token': '</s>', 'unk_token': '<unk>'}


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp('llama')
  write_tokenizer(folder, 'sp_bytes')
  return folder / 'sp.model'


@pytest.fixture
def folder(tmp_path, model):
  shutil.copyfile(model, tmp_path / 'tokenizer.model')
  return tmp_path


def write(folder, name, content):
  (folder / name).write_text(json.dumps(content))


def of(token, number):
  return {str(number): {'content': token, 'special': True}}


def test_tokens_that_the_files_next_to_it_add_are_not_split_in_silence(folder):
  name = f'sentencepiece:{folder}/tokenizer.model'
  size = named_vocabulary(name).vocab_size
  write(folder, 'tokenizer_config.json', NAMED)
  write(folder, 'added_tokens.json', {'<|im_start|>': size, '<|im_end|>': size + 1})
  with raises(DataError, parameters=('DatasetConfig.vocabulary',)):
    named_vocabulary(name)
  # The way that the error names gives transformers' ids.
  transformers = pytest.importorskip('transformers')
  write(folder, 'config.json', {'model_type': 'llama'})
  write(folder, 'tokenizer_config.json', {**NAMED, 'tokenizer_class': 'LlamaTokenizer'})
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  tokenizer.save_pretrained(folder)
  text = '<|im_start|>a b<|im_end|>'
  ids = named_vocabulary(f'huggingface:{folder}').encode(text)
  assert ids == tokenizer(text, add_special_tokens=False)['input_ids']
  assert (ids[0], ids[-1]) == (size, size + 1)
  with raises(DataError):  # still the SentencePiece model
    named_vocabulary(name)


def test_tokens_that_no_text_produces_are_split_too(tmp_path):
  write_sentencepiece(tmp_path / 'tokenizer.model', control_symbols=['[INST]'])
  name = f'sentencepiece:{tmp_path}/tokenizer.model'
  size = named_vocabulary(name).vocab_size
  write(tmp_path, 'tokenizer_config.json', {**NAMED, 'added_tokens_decoder': of('[INST]', 3)})
  assert 3 < size
  with raises(DataError):
    named_vocabulary(name)


def test_texts_do_not_end_with_another_token_than_the_named_one(folder):
  write(folder, 'tokenizer_config.json', {**NAMED, 'eos_token': {'content': '<s>'}})
  with raises(DataError):
    named_vocabulary(f'sentencepiece:{folder}/tokenizer.model')


@pytest.mark.parametrize(
  'files',
  [
    {'tokenizer_config.json': NAMED},
    # Llama 2 with padding; T5, whose sentinels DatasetConfig.extra_ids adds
    {'tokenizer_config.json': {**NAMED, 'pad_token': '[PAD]'}, 'added_tokens.json': {'[PAD]': 288}},
    {'tokenizer_config.json': NAMED, 'added_tokens.json': {'<pad>': 288}},  # named <unk>, or null
    {'tokenizer_config.json': {**NAMED, 'eos_token': '', 'bos_token': ''}},
    {'tokenizer_config.json': {**NAMED, 'image_token': '<image>'}, 'added_tokens.json': IMAGE},
    {'special_tokens_map.json': {**NAMED, 'additional_special_tokens': ['<extra_id_0>']}},
  ],
)
def test_tokens_that_it_has_or_that_texts_do_not_have_are_accepted(folder, files):
  alone = named_vocabulary(f'sentencepiece:{folder}/tokenizer.model')
  for name, content in files.items():
    write(folder, name, content)
  beside = named_vocabulary(f'sentencepiece:{folder}/tokenizer.model')
  assert beside.encode('a b') == alone.encode('a b')
