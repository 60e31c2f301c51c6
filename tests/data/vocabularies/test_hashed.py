"""Words hashed into ids."""

import numpy as np
import pytest

from t5x_gpu.data.tf_runtime import tf
from t5x_gpu.data.vocabularies.vocabularies import (
  named_vocabulary,
  ordinary_ids,
  sentinel_ids,
  text_vocabulary,
  vocabulary_fingerprint,
)
from t5x_gpu.errors import DataError
from tests.messages import raises

TEXT = 'def get_loop(self, x=12):  # Größe'


@pytest.fixture(scope='module')
def words():
  return named_vocabulary('words:8192')


def test_each_word_number_and_mark_is_one_id_and_white_space_is_none(words):
  ids = words.encode(TEXT)
  assert len(ids) == len(
    ['def', 'get', '_', 'loop', '(', 'self', ',', 'x', '=', '12', ')', ':', '#', 'Größe']
  )
  assert words.encode('  def\n\tget _loop(self,x = 12): # Größe ') == ids
  assert all(2 <= i < 8194 for i in ids)


def test_the_hash_never_changes(words):
  # Else checkpoints would lose the meaning of their token tables. FarmHash64('def') mod 8192 + 2.
  assert words.encode('def get self Größe') == [4885, 8175, 1267, 2314]


def test_the_graph_gives_the_same_ids_as_python(words):
  texts = [TEXT, 'a b', '']
  rows = words.encode_tf(tf.constant(texts)).to_list()
  assert rows == [words.encode(text) for text in texts]
  dataset = tf.data.Dataset.from_tensor_slices(texts).map(words.encode_tf)
  assert [row.tolist() for row in dataset.as_numpy_iterator()] == rows


def test_bytes_that_are_not_text_are_harmless(words):
  ids = words.encode_tf(tf.constant(b'ok \xff\xfe ok')).numpy()
  assert ids[0] == ids[-1] == words.encode('ok')[0]


def test_decoding_says_numbers_rather_than_pretend_words(words):
  assert words.decode([17, 4203]) == '<17> <4203>'
  assert text_vocabulary(words).decode([17, 0, 4203, 1, 5]) == '<17> <4203>'
  assert words.decode_tf(tf.constant([17, 4203, 1])).numpy() == b'<17> <4203>'
  assert words.decode_tf(tf.constant([[17, 1, 0], [5, 6, 7]])).numpy().tolist() == [
    b'<17>',
    b'<5> <6> <7>',
  ]


def test_ids_beyond_the_words_are_padding_end_and_sentinels():
  words = named_vocabulary('words:10', extra_ids=2)
  assert (words.vocab_size, words.eos_id, sentinel_ids(words)) == (14, 1, (13, 12))
  np.testing.assert_array_equal(ordinary_ids(words), np.arange(2, 12))


def test_the_number_of_ids_is_part_of_its_name_and_fingerprint(words):
  assert text_vocabulary(words).name == 'words:8192'
  assert vocabulary_fingerprint(words) == 'words:8192, 8194 ids'
  assert words == named_vocabulary('words:8192') != named_vocabulary('words:4096')


@pytest.mark.parametrize(
  'name', ['words:', 'words:0', 'words:many', 'words:-3', 'words:9999999999']
)
def test_a_bad_number_of_ids_is_refused(name):
  with raises(DataError):
    named_vocabulary(name)
