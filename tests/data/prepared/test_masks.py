"""Rows of earlier versions have no mask: id 0 is padding where no weight says otherwise."""

import grain
import numpy as np

from t5x_gpu.data import features
from t5x_gpu.data.prepared.batches import PreparedBatches
from t5x_gpu.data.prepared.shard_writer import encode_row

ROW = {
  'decoder_input_tokens': [0, 5, 0, 7, 0, 0],
  'decoder_loss_weights': [1, 1, 1, 1, 0, 0],
  'decoder_target_tokens': [5, 0, 7, 1, 0, 0],
}


def test_rows_of_earlier_versions_get_their_mask():
  spec = features.batch_spec(
    'lm', task_feature_lengths={'targets': 6}, batch_size=2, pack=False, vocab_size=10
  )
  record = encode_row({name: np.asarray(x) for name, x in ROW.items()}, names=tuple(ROW))
  batches = PreparedBatches(
    grain.MapDataset.source([record]),
    num_rows=1,
    names=tuple(ROW),
    spec=spec,
    name='old',
    fingerprint={},
    files={},
  )
  batch = next(batches)
  spec.check(batch)
  assert np.asarray(batch['decoder_target_tokens']).tolist() == [
    ROW['decoder_target_tokens'],
    [0] * 6,
  ]
  assert np.asarray(batch['decoder_segment_ids']).tolist() == [[1, 1, 1, 1, 0, 0], [0] * 6]
  batches.close()
