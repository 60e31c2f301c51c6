"""docs/add_a_model.md, done word for word by a user with an empty folder."""

import textwrap

import pytest

from tests.helpers_pages import blocks, run

pytestmark = [pytest.mark.slow, pytest.mark.process]
PAGE = 'add_a_model.md'


def code(language: str, number: int = 0) -> str:
  """Returns a block of code: the layer has number 0, the model has the last."""
  return blocks(PAGE, language)[number]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A folder with the two files of the page, in which its two commands that train were run."""
  path = tmp_path_factory.mktemp('user')
  (path / 'my_model.py').write_text(code('python'))
  (path / 'my_model.gin').write_text(code('gin'))
  for number, command in enumerate(code('sh').splitlines()[:2]):
    (path / f'output_{number}').write_text(run(path, command))
  return path


def test_the_model_trains_saves_and_decodes(folder):
  output = (folder / 'output_0').read_text()
  assert (folder / 'runs/my_model/checkpoint_4').is_dir()
  assert "Sample (temperature 0.7, prompt 'def ')" in output


def test_it_continues_from_its_checkpoint_on_another_mesh(folder):
  output = (folder / 'output_1').read_text()
  assert 'checkpoint_4' in output
  assert (folder / 'runs/my_model/checkpoint_6').is_dir()


def test_it_equals_one_device_layer_by_layer_also_with_a_change_inside_attention(folder):
  text, call = code('python'), '    attended, own = MultiHeadAttention'
  for old, new in {
    'import flax.linen as nn': 'import flax.linen as nn\nimport jax.numpy as jnp',
    'import shard': 'import shard, with_axes',
    '      shared.attention,': '      attention,',
    call: textwrap.indent(code('python', 1), '    ') + call,
  }.items():
    text = text.replace(old, new)
  (folder / 'my_model.py').write_text(text)
  output = run(folder, code('sh').splitlines()[2])
  assert 'layers/1' in output and 'layers/temperature' in output


def test_a_model_of_four_members_trains_on_one_device_and_equals_it_on_a_mesh(tmp_path):
  (tmp_path / 'my_bigram.py').write_text(code('python', -1))
  (tmp_path / 'my_bigram.gin').write_text(code('gin', 1))
  run(tmp_path, 'python -m t5x_gpu.train --gin_file=my_bigram.gin')
  assert (tmp_path / 'runs/my_bigram/checkpoint_4').is_dir()
  command = 'python -m t5x_gpu.parity --gin_file=my_bigram.gin --gin.NUM_PARTITIONS=2 --devices=4'
  assert 'parity: ok' in run(tmp_path, command)
