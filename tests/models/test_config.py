"""The groups of settings that make up TransformerConfig."""

import dataclasses
import inspect
import re

import pytest

from t5x_gpu.models.config import TransformerConfig

GROUPS = [c for c in TransformerConfig.__mro__ if dataclasses.is_dataclass(c)]


@pytest.mark.parametrize('group', GROUPS, ids=lambda c: c.__name__)
def test_every_setting_is_declared_once_and_described_in_the_same_order(group):
  text = inspect.getdoc(group).partition('Attributes:\n')[2]
  described = [
    name
    for names in re.findall(r'^  ((?:\w+, )*\w+(?:,\n    (?:\w+, )*\w+)*):', text, re.M)
    for name in re.split(r',\s+', names)
  ]
  own = list(group.__annotations__)
  assert described == own
  assert not {f for other in GROUPS if other is not group for f in other.__annotations__} & set(own)
