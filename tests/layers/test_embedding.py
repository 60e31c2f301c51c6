"""Rows of a token table whose features are split over devices."""

import collections
import dataclasses
import functools

import pytest

from t5x_gpu.compiled.collectives import inventory, partitioned_hlo
from t5x_gpu.layers.embedding import sends_less_in_parts, traffic_per_step
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.lora import LoraModel
from tests.helpers_parity import assert_same_steps, program_on_mesh, recorded

CONFIG = TransformerConfig(
  vocab_size=512, num_layers=2, embed_dim=16, num_heads=4, head_dim=4, mlp_dim=32
)
TIED = dataclasses.replace(CONFIG, logits_via_embedding=True)
PLAIN = DecoderOnlyModel(CONFIG)
IDS = 16 * 16 // 8  # of a device


# Tests share the program of PLAIN over fsdp.
on_mesh = functools.cache(program_on_mesh)


@functools.cache
def sent(model, **mesh) -> collections.Counter:
  """Returns (kind, axes) -> bytes of a step."""
  found, p = collections.Counter(), on_mesh(model, **mesh)
  hlo = partitioned_hlo(p.train_step.lower(p.abstract_state, p.abstract_batch))
  for c in inventory(hlo, p.layout.mesh.shape):
    found[c.kind, c.axes] += c.bytes_per_call
  return found


@pytest.mark.parametrize(
  ('model', 'mesh'),
  [
    (PLAIN, dict(fsdp=8)),
    *(
      pytest.param(model, mesh, marks=pytest.mark.slow)
      for model, mesh in [
        (DecoderOnlyModel(TIED), dict(data=2, fsdp=4)),
        (PLAIN, dict(fsdp=4, context=2)),
        (PLAIN, dict(fsdp=8, num_microbatches=2, accumulate_by='microbatch')),
        (EncoderDecoderModel(CONFIG), dict(fsdp=8)),
        (LoraModel(PLAIN, rank=2), dict(fsdp=8)),
      ]
    ),
  ],
)
def test_gradients_are_those_of_a_whole_table(model, mesh):
  assert sent(model, **mesh)['all-to-all', ('fsdp',)] > 0
  assert_same_steps(recorded(on_mesh(model, **mesh)), recorded(on_mesh(model, data=8)))


def test_the_table_stays_where_it_is():
  sizes = dict(embed_dim=CONFIG.embed_dim, fsdp=8, dtype_bytes=4)
  found, table = sent(PLAIN, fsdp=8), 7 / 8 * 4 * CONFIG.vocab_size * CONFIG.embed_dim
  expected = traffic_per_step([IDS], **sizes)['all-to-all']
  assert found['all-to-all', ('fsdp',)] == pytest.approx(expected)
  # A vocabulary as small as this is gathered.
  small = DecoderOnlyModel(dataclasses.replace(CONFIG, vocab_size=16))
  assert sent(small, fsdp=8)['all-to-all', ('fsdp',)] == 0
  assert sends_less_in_parts(IDS, vocab_size=CONFIG.vocab_size, dtype_bytes=4)
  # Gathered for the logits alone: once, like the kernel of a model without tied logits.
  tied = sent(DecoderOnlyModel(TIED), fsdp=8)
  for kind in ('all-gather', 'reduce-scatter'):
    assert tied[kind, ('fsdp',)] == pytest.approx(found[kind, ('fsdp',)], abs=table / 50)
