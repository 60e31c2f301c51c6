"""The text at the end of a run names the next commands, and what they do to the learning rate."""

import pytest

from t5x_gpu.run.finish import closing_text


def text(**changes):
  return closing_text((), **{'shown': 'runs/a', 'step': 400, 'rates': (1e-3, 1e-3), **changes})


def test_the_next_commands_are_report_infer_convert_and_continue():
  lines = text().splitlines()
  assert '  report       python -m t5x_gpu.report runs/a' in lines
  assert any('t5x_gpu.infer --checkpoint=runs/a' in line for line in lines)
  assert any('t5x_gpu.convert --from=runs/a' in line for line in lines)
  assert '  continue     the same command with --gin.TRAIN_STEPS=800' in lines
  assert 'learning rate' not in text()


def test_a_model_that_cannot_be_exported_is_offered_no_convert():
  assert 't5x_gpu.convert' not in text(can_export=False)


def test_infer_is_offered_with_trust_if_model_or_data_are_the_users_code():
  assert '--trust_gin' in text(own_code=True) and '--trust_gin' not in text()


def test_a_folder_with_a_space_is_quoted():
  assert "t5x_gpu.report 'my runs/a'" in text(shown='my runs/a')


@pytest.mark.parametrize(
  'rates, words', [((1e-4, 5e-4), 'constant.learning_rate=0.0001'), ((0.0, 5e-4), 'rate=5e-05')]
)
def test_a_schedule_that_would_rise_again_is_said_with_both_rates_and_another_schedule(
  rates, words
):
  found = text(rates=rates)
  assert f'from {rates[0]:.2g} to 0.0005' in found and words in found
