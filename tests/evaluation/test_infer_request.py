"""Flags and gin files become one request."""

import argparse

from t5x_gpu.evaluation.infer_request import InferSetup, _with_flags
from t5x_gpu.models.decoding import DecodingConfig


def test_flag_of_shard_0_wins_over_the_gin_file():
  setup = InferSetup(decoding_cfg=DecodingConfig(), shard_id=1, num_shards=2, score=True)
  flags = argparse.Namespace(shard_id=0, num_shards=None, score=False, checkpoint=None)
  found = _with_flags(setup, flags)
  assert (found.shard_id, found.num_shards, found.score) == (0, 2, True)
