"""Models of sentence-transformers keep the vector of a text: its pooling and its length."""

import json

import pytest

from t5x_gpu import convert
from t5x_gpu.conversion.hf.folder import open_hf
from t5x_gpu.errors import CheckpointError
from tests.conversion.hf_files import VARIANTS, write_model
from tests.messages import raises

TYPES = 'sentence_transformers.models.'


def write(folder, *kinds, **modes):
  """Writes an encoder with modules; `modes` are settings of the pooling."""
  write_model(folder, VARIANTS['bert_embedding'])
  paths = [f'{i}_{kind}' if i else '' for i, kind in enumerate(kinds)]
  modules = [
    {'idx': i, 'name': str(i), 'path': path, 'type': TYPES + kind}
    for i, (kind, path) in enumerate(zip(kinds, paths))
  ]
  (folder / 'modules.json').write_text(json.dumps(modules))
  (folder / paths[1]).mkdir()
  settings = {'word_embedding_dimension': 12, 'include_prompt': True}
  settings |= {f'pooling_mode_{name}': on for name, on in modes.items()}
  (folder / paths[1] / 'config.json').write_text(json.dumps(settings))
  return folder


def files(folder):
  return {
    path.relative_to(folder).as_posix(): path.read_bytes()
    for path in folder.rglob('*')
    if path.is_file()
  }


@pytest.mark.quick_cases('kinds0*')
@pytest.mark.parametrize(
  'kinds, modes, options',
  [
    (
      ('Transformer', 'Pooling', 'Normalize'),
      dict(cls_token=True, mean_tokens=False),
      {'pooling': 'first_token', 'normalize': True},
    ),
    (
      ('Transformer', 'Pooling'),
      dict(cls_token=False, mean_tokens=True),
      {'pooling': 'mean', 'normalize': False},
    ),
  ],
)
def test_pooling_and_length_are_read_and_go_back_to_the_last_byte(
  tmp_path, capsys, kinds, modes, options
):
  theirs, ours, back = write(tmp_path / 'a', *kinds, **modes), tmp_path / 'b', tmp_path / 'c'
  assert convert.main([f'--from={theirs}', f'--to={ours}', '--check=own']) == 0
  assert f"vectors: pooling = '{options['pooling']}' (modules.json)" in capsys.readouterr().out
  model = convert.model_of_gin([ours / 'model.gin']).build()
  assert {name: getattr(model, name) for name in options} == options
  assert convert.main([f'--from={ours}', f'--to={back}', '--check=own']) == 0
  assert {**files(back), 'model.safetensors': b''} == {**files(theirs), 'model.safetensors': b''}
  # A run may have trained another vector.
  text = (ours / 'model.gin').read_text()
  other = {'first_token': 'mean', 'mean': 'first_token'}[options['pooling']]
  (ours / 'model.gin').write_text(text.replace(repr(options['pooling']), repr(other)))
  assert convert.main([f'--from={ours}', f'--to={tmp_path / "d"}', '--check=own']) == 0
  assert open_hf(tmp_path / 'd').model.options == {
    'head_type': 'embedding',
    **options,
    'pooling': other,
  }


def test_without_modules_it_is_the_mean_and_nothing_is_added(tmp_path, capsys):
  write_model(tmp_path / 'a', VARIANTS['bert_embedding'])
  for source, target in (('a', 'b'), ('b', 'c')):
    arguments = [f'--from={tmp_path / source}', f'--to={tmp_path / target}', '--check=own']
    assert convert.main(arguments) == 0
  assert "pooling = 'mean' (there is no modules.json)" in capsys.readouterr().out
  assert not (tmp_path / 'c' / 'modules.json').exists()


@pytest.mark.parametrize(
  'kinds, modes',
  [
    (('Transformer', 'Pooling', 'Dense'), dict(mean_tokens=True)),
    (('Transformer', 'Pooling'), dict(max_tokens=True)),
    (('Transformer', 'Pooling'), dict(cls_token=True, mean_tokens=True)),
    (('Transformer', 'Pooling'), {}),
  ],
)
def test_other_vectors_are_refused(tmp_path, kinds, modes):
  with raises(CheckpointError):
    open_hf(write(tmp_path / 'a', *kinds, **modes))


def test_a_prompt_left_out_and_broken_files_are_refused(tmp_path):
  folder = write(tmp_path / 'a', 'Transformer', 'Pooling', mean_tokens=True)
  path = folder / '1_Pooling' / 'config.json'
  path.write_text('{"pooling_mode_mean_tokens": true, "include_prompt": false}')
  with raises(CheckpointError):
    open_hf(folder)
  path.unlink()
  with raises(CheckpointError):
    open_hf(folder)
  (folder / 'modules.json').write_text('[{"type": 3}]')
  with raises(CheckpointError):
    open_hf(folder)
