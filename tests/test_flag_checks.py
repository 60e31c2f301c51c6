"""Flags of a plan that contradict each other are errors before anything is compiled."""

import pytest

from t5x_gpu import plan
from t5x_gpu.errors import ConfigError
from tests.helpers_train import TINY_GIN
from tests.messages import raises


@pytest.fixture
def refused(tmp_path):
  """Returns a function that plans with flags, and returns the error."""
  (tmp_path / 'tiny.gin').write_text(TINY_GIN)

  def error(*flags):
    with raises(ConfigError) as e:
      plan.main([f'--gin_file={tmp_path / "tiny.gin"}', *flags])
    assert e.value.docs
    return e.value.what

  return error


@pytest.mark.parametrize('show', ['sharding', 'remat'])
def test_flags_of_a_prediction_are_refused_elsewhere(refused, tmp_path, show):
  more = ['--calibrate=none', f'--html={tmp_path}/a.html']
  refused(f'--show={show}', *more)
  refused(f'--show={show}', '--dry_run', *more)
  for flag in more:
    refused(f'--show={show}', flag)


def test_a_dry_run_has_no_costs_of_remat_to_write(refused, tmp_path):
  argv = ['--show=remat', '--dry_run', f'--json={tmp_path}/plan.json']
  refused(*argv)


def test_a_search_refuses_flags_of_one_layout(refused):
  refused('--search', '--show=remat')
  refused('--search', '--html=a.html')
  refused('--search_processes=2')
