"""samples.jsonl stays readable after an interrupted write."""

import json

from t5x_gpu.checkpoint.run_files import append_sample


def test_a_sample_after_one_that_was_cut_short_can_be_read(tmp_path):
  (tmp_path / 'samples.jsonl').write_text('{"step": 4, "prom')
  append_sample(tmp_path, 8, prompt='a', temperature=1.0, text='ab')
  last = (tmp_path / 'samples.jsonl').read_text().splitlines()[-1]
  assert json.loads(last)['text'] == 'ab'
