"""A checkpoint with adapters becomes one without, or a Hugging Face model, with the same logits."""

import flax.traverse_util
import jax
import numpy as np
import pytest

from t5x_gpu import convert
from t5x_gpu.checkpoint.params_files import ParamsReader, ParamsWriter
from t5x_gpu.conversion import conversion, name_table
from t5x_gpu.conversion.model_spec import differences
from t5x_gpu.conversion.to_hf import MergedParams
from t5x_gpu.errors import CheckpointError, ConfigError
from t5x_gpu.models.lora import LoraModel
from t5x_gpu.partitioning.axis_rules import split_names
from tests.conversion.hf_files import CONFIGS, write_model
from tests.messages import raises

pytestmark = pytest.mark.tf  # the tokenizer of a Hugging Face model is read with SeqIO

LORA_GIN = """
from t5x_gpu.models import lora
MODEL = @lora.LoraModel()
lora.LoraModel:
  model = @decoder_only.DecoderOnlyModel()
  rank = 3
  alpha = 12.0
  pattern = r'layers/.*/kernel'
"""


@pytest.fixture(scope='module')
def tuned(tmp_path_factory):
  """Returns (folder, LoraModel, its parameters): `hf`, `base` and `lora` of a small Llama."""
  folder = tmp_path_factory.mktemp('tuned')
  write_model(folder / 'hf', CONFIGS['llama'], dtype='float32')
  assert convert.main([f'--from={folder / "hf"}', f'--to={folder / "base"}', '--check=own']) == 0
  text = (folder / 'base' / 'model.gin').read_text()
  first = text[: text.index('MODEL = ')]
  (folder / 'lora.gin').write_text(first + LORA_GIN + text[len(first) :].split('\n', 1)[1])
  lora = convert.object_of_gin([folder / 'lora.gin'])
  assert isinstance(lora, LoraModel) and lora.scale == 4.0
  reader, rng = ParamsReader(folder / 'base'), np.random.default_rng(0)
  params, _ = split_names(jax.eval_shape(lambda: lora.init(jax.random.key(0), None)))
  values = {
    name: reader.read_at(name, ())
    if name in reader.shapes
    else rng.normal(size=a.shape, scale=0.2).astype(np.float32)
    for name, a in flax.traverse_util.flatten_dict(params, sep='/').items()
  }
  (folder / 'lora').mkdir()
  shapes = {name: a.shape for name, a in values.items()}
  with ParamsWriter(
    folder / 'lora', step=5, shapes=shapes, chunks=shapes, about={}, compress=False
  ) as writer:
    for name, value in values.items():
      writer.write(name, (), value)
  return folder, lora, values


def merged(lora: LoraModel, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  return flax.traverse_util.flatten_dict(
    lora.merged(flax.traverse_util.unflatten_dict(values, sep='/')), sep='/'
  )


def test_every_part_that_is_read_has_the_factors_in_it(tuned):
  folder, lora, values = tuned
  reader, want = MergedParams(ParamsReader(folder / 'lora'), lora), merged(lora, values)
  assert set(reader.shapes) == set(want) and reader.num_merged == 7
  places = [(), (0,), (1, slice(1, 3)), (slice(0, 2), slice(2, 4)), (slice(1, 2),)]
  for name in (
    'layers/self_attention/query/kernel',
    'layers/self_attention/out/kernel',
    'layers/mlp/wo/kernel',
    'decoder_norm/scale',
  ):
    for place in places[: 1 if 'scale' in name else None]:
      np.testing.assert_allclose(reader.read_at(name, place), want[name][place], atol=1e-5)
  np.testing.assert_allclose(
    reader.read('layers/mlp/wo/kernel', 1), want['layers/mlp/wo/kernel'][1:], atol=1e-5
  )
  assert np.abs(want['layers/mlp/wo/kernel'] - values['layers/mlp/wo/kernel']).max() > 0.1


def test_merged_checkpoint_is_one_of_the_plain_model(tuned, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(name_table, 'PIECE_BYTES', 2048)  # several pieces of most kernels
  folder, lora, values = tuned
  (folder / 'lora' / 'hf').mkdir()  # as a run has that started from a converted model
  (folder / 'lora' / 'hf' / 'tokenizer.json').write_text('{}')
  assert (
    convert.main(
      [
        f'--from={folder / "lora"}',
        f'--to={tmp_path / "merged"}',
        f'--gin_file={folder / "lora.gin"}',
        '--format=t5x_gpu',
      ]
    )
    == 0
  )
  out = capsys.readouterr().out
  assert '7 kernels with adapters of rank 3' in out
  assert 'ours against the model with its adapters' in out
  assert (tmp_path / 'merged' / 'hf' / 'tokenizer.json').read_text() == '{}'
  reader = ParamsReader(tmp_path / 'merged')
  assert reader.step == 5 and reader.manifest['converted_from']['merged']['alpha'] == 12.0
  for name, value in merged(lora, values).items():
    np.testing.assert_allclose(reader.read_at(name, ()), value, atol=1e-5, err_msg=name)
  model = convert.model_of_gin([tmp_path / 'merged' / 'model.gin'])
  assert not differences(model, convert.model_of_gin([folder / 'lora.gin']))
  # It is a converted checkpoint like any other.
  assert (
    convert.main(
      [
        f'--from={tmp_path / "merged"}',
        f'--to={tmp_path / "hf"}',
        '--check=own',
        f'--gin_file={tmp_path / "merged" / "model.gin"}',
      ]
    )
    == 0
  )


def test_a_run_with_adapters_becomes_a_hugging_face_model_at_once(tuned, tmp_path):
  folder, lora, values = tuned
  assert (
    convert.main(
      [
        f'--from={folder / "lora"}',
        f'--to={tmp_path / "hf"}',
        '--check=own',
        f'--gin_file={folder / "lora.gin"}',
        f'--like={folder / "hf"}',
      ]
    )
    == 0
  )
  got = convert.SafetensorsFolder(tmp_path / 'hf').read('model.layers.1.mlp.down_proj.weight')
  np.testing.assert_allclose(got, merged(lora, values)['layers/mlp/wo/kernel'][1].T, atol=1e-5)


def test_a_merge_whose_logits_differ_leaves_nothing(tuned, tmp_path, monkeypatch):
  folder, _, _ = tuned
  logits = conversion.logits_of
  monkeypatch.setattr(
    conversion,
    'logits_of',
    lambda model, *args: logits(model, *args) * (1.01 if isinstance(model, LoraModel) else 1.0),
  )
  with raises(CheckpointError):
    convert.main(
      [
        f'--from={folder / "lora"}',
        f'--to={tmp_path / "merged"}',
        f'--gin_file={folder / "lora.gin"}',
        '--format=t5x_gpu',
      ]
    )
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  'source, gin, flags, error',
  [
    ('base', 'base/model.gin', [], ConfigError),
    ('base', 'lora.gin', [], CheckpointError),
    ('lora', 'lora.gin', ['--dtype=bfloat16'], ConfigError),
  ],
)
def test_what_cannot_be_merged_is_refused(tuned, tmp_path, source, gin, flags, error):
  folder, _, _ = tuned
  with raises(error) as e:
    convert.main(
      [
        f'--from={folder / source}',
        f'--to={tmp_path / "merged"}',
        f'--gin_file={folder / gin}',
        '--format=t5x_gpu',
        *flags,
      ]
    )
  assert e.value.fix and not list(tmp_path.iterdir())
