"""Small files of MODEL_DIR stay readable; damaged ones neither stop nor hang a start."""

import errno
import json

from t5x_gpu.checkpoint.run_files import append_sample, carried_generation
from t5x_gpu.errors import AccessError
from tests.helpers_disk import refused_to_python
from tests.messages import raises


def test_settings_of_a_converted_model_that_cannot_be_opened_are_not_called_damaged(tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  with refused_to_python('config.json', errno.EACCES), raises(AccessError):
    carried_generation(tmp_path)


def test_a_sample_after_one_that_was_cut_short_can_be_read(tmp_path):
  (tmp_path / 'samples.jsonl').write_text('{"step": 4, "prom')
  append_sample(tmp_path, 8, prompt='a', temperature=1.0, text='ab')
  last = (tmp_path / 'samples.jsonl').read_text().splitlines()[-1]
  assert json.loads(last)['text'] == 'ab'
