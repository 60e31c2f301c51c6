"""The value of each assumption on a GPU, and its source."""

import pytest

from t5x_gpu.errors import ConfigError
from t5x_gpu.tools.planning.assumptions import SOURCES, Assumptions
from t5x_gpu.tools.planning.gpu_targets import TARGETS, find_target
from tests.messages import raises

H100 = find_target('h100')


@pytest.mark.parametrize('gpu', TARGETS.values(), ids=TARGETS)
def test_every_assumption_has_a_value_and_a_source(gpu):
  effective = Assumptions().effective(gpu)
  assert effective.keys() == SOURCES.keys()
  assert all(e.value and e.source for e in effective.values())
  assert effective['network_gigabits'].value == gpu.network_gigabits
  assert effective['gemm_efficiency'].value == Assumptions().gemm_share(gpu)


def test_a_value_of_gin_has_no_source_of_a_default():
  mine = Assumptions(network_gigabits=200, gemm_efficiency=0.5, hidden_shares={'fsdp': 0.1})
  effective = mine.effective(H100)
  assert effective['network_gigabits'] == (200, 'set in gin')
  assert effective['gemm_efficiency'] == (0.5, 'set in gin')
  assert effective['hidden_shares'].source == 'set in gin'
  assert effective['hidden_shares'].value['fsdp'] == 0.1
  assert effective['hidden_shares'].value['data'] > 0.1, 'the default of other axes'
  assert effective['fp8_gemm_efficiency'].source == SOURCES['fp8_gemm_efficiency']


def test_a_source_that_is_given_is_kept():
  sources = {'gemm_efficiency': 'measured: by us'}
  effective = Assumptions(gemm_efficiency=0.5, sources=sources).effective(H100)
  assert effective['gemm_efficiency'] == (0.5, 'measured: by us')
  with raises(ConfigError):
    Assumptions(sources={'gem_efficiency': 'x'})


def test_efficiencies_of_hopper_are_not_known_for_newer_gpus():
  unknown = {
    name: [n for n, e in Assumptions().effective(gpu).items() if 'not known' in e.source]
    for name, gpu in TARGETS.items()
  }
  newer = unknown.pop('b200')
  assert newer == unknown.pop('gb200') and 'gemm_efficiency' in newer
  assert not any(unknown.values())
  measured = Assumptions(gemm_efficiency=0.5).effective(find_target('b200'))
  assert measured['gemm_efficiency'].source == 'set in gin'
