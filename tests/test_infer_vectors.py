"""Embeddings from own pairs of texts: trained, compared with people's scores, and written."""

import json

import numpy as np
import pytest

from t5x_gpu import infer
from tests.helpers_train import Project, run_here
from tests.test_infer_words import GIN

pytestmark = [pytest.mark.tf, pytest.mark.slow]
PAIRS = """encoder.EncoderModel.head_type = 'embedding'
MIXTURE_OR_TASK_NAME = 'sentence_pairs:csv:%s/*.csv'
"""
WORDS = ('sun', 'rain', 'snow', 'fog')
OTHER = ('sol', 'pluie', 'neige', 'brume')


def test_texts_that_belong_together_get_similar_vectors(tmp_path):
  data = tmp_path / 'data'
  data.mkdir()
  rows = [f'{WORDS[i % 4]},{OTHER[i % 4]},{OTHER[(i + 1) % 4]}\n' for i in range(32)]
  (data / 'train.csv').write_text('anchor,positive,negative\n' + ''.join(rows))
  scored = [
    (a, b, 5.0 if i == k else 0.5) for i, a in enumerate(WORDS) for k, b in enumerate(OTHER)
  ]
  (data / 'dev.csv').write_text(
    'sentence1,sentence2,score\n' + ''.join(f'{a},{b},{s}\n' for a, b, s in scored)
  )
  project = Project(tmp_path, gin=GIN + PAIRS % data)
  result = project.run('--gin.TASK_FEATURE_LENGTHS={"inputs": 12}', num_devices=2)
  assert result.code == 0, result.err
  # Ties: four scores of 5.0 and twelve of 0.5; a perfect order gives 0.751.
  assert project.metrics('eval/spearman')[60] > 0.7
  prompts, lines, array = tmp_path / 'p.txt', tmp_path / 'v.jsonl', tmp_path / 'v.npy'
  prompts.write_text('sun\nsol\npluie\n')
  for out in (lines, array):
    flags = [f'--checkpoint={project.model_dir}', f'--prompts={prompts}', f'--output={out}']
    result = run_here(lambda: infer.main(flags), num_devices=1)
    assert result.code == 0, result.err
  vectors = np.load(array)
  assert vectors.shape == (3, 16) and vectors.dtype == np.float32
  found = [json.loads(line) for line in lines.read_text().splitlines()]
  np.testing.assert_allclose(vectors, [record['vector'] for record in found], rtol=1e-6)
  cosines = vectors @ vectors.T
  np.testing.assert_allclose(np.diag(cosines), 1.0, rtol=1e-5)
  assert cosines[0, 1] > cosines[0, 2] + 0.2
