"""Entities of tag sequences, worked out by hand; seqeval 1.2.2 finds the same."""

import numpy as np
import pytest

from t5x_gpu.data import entities


@pytest.mark.parametrize(
  'tags, want',
  [
    ('B-PER I-PER O B-LOC', [('PER', 0, 2), ('LOC', 3, 4)]),
    ('B-PER B-PER I-PER', [('PER', 0, 1), ('PER', 1, 3)]),
    ('O I-PER I-PER', [('PER', 1, 3)]),  # no B: it begins all the same
    ('B-PER I-LOC I-LOC', [('PER', 0, 1), ('LOC', 1, 3)]),
    ('B-PER E-PER I-PER', [('PER', 0, 2), ('PER', 2, 3)]),
    ('S-LOC S-LOC E-LOC', [('LOC', 0, 1), ('LOC', 1, 2), ('LOC', 2, 3)]),
    ('B-a-b I-a-b', [('a-b', 0, 2)]),
    ('O O', []),
  ],
)
def test_entities_are_found_as_by_conlleval(tags, want):
  found = entities.entities_of(tags.split())
  assert [(e.kind, e.start, e.stop) for e in found] == want


def test_names_that_are_not_tags_have_no_entities():
  assert entities.entity_kinds(('O', 'I-PER', 'B-PER', 'B-LOC')) == ('LOC', 'PER')
  assert entities.entity_kinds(('NOUN', 'VERB', 'O')) == ()
  numbers = entities.kind_numbers(('O', 'I-PER', 'B-PER', 'B-LOC'))
  np.testing.assert_array_equal(numbers, [0, 1, 1, 0])
