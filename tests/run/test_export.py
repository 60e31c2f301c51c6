"""A run that exports its model at the end is refused at the start if it could not."""

import dataclasses

import pytest

from t5x_gpu.conversion.hf.config_json import from_hf
from t5x_gpu.errors import ConfigError
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.run.export import ExportConfig
from tests.conversion.hf_files import CONFIGS
from tests.messages import raises

GPT2 = from_hf(CONFIGS['gpt2'], has_tensor=lambda name: False).config


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'there').mkdir()


@pytest.mark.parametrize(
  'config, model_dir, changes',
  [
    (ExportConfig('there'), 'run', {}),
    (ExportConfig('new', like='there'), 'run', {}),
    (ExportConfig('new'), 's3://bucket/run', {}),
    (ExportConfig('new'), 'run', {'query_pre_attn_scalar': 3.0}),
  ],
  ids=['exists', 'like-nothing', 'object-storage', 'no-family'],
)
def test_what_could_not_be_exported_is_refused_before_the_run(config, model_dir, changes):
  model = DecoderOnlyModel(dataclasses.replace(GPT2, **changes))
  with raises(ConfigError):
    config.check(model, model_dir)


def test_a_model_with_a_family_and_a_new_folder_are_accepted():
  ExportConfig('new').check(DecoderOnlyModel(GPT2), 'run')


def test_an_exported_folder_is_left_as_it_is():
  assert ExportConfig('there').write('run') == 0
