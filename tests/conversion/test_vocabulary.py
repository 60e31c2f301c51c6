"""Whatever is made of a run has its vocabulary, or convert says why not."""

import pytest

from t5x_gpu.checkpoint.run_files import carried_vocabulary
from t5x_gpu.conversion.tokenizer import carry_vocabulary, export_vocabulary


@pytest.mark.parametrize(
  'name, files, found',
  [
    ('byte', [], 'byte'),
    ('words:8192', [], 'words:8192'),
    ('sentencepiece:{}/my.model', ['my.model'], 'sentencepiece:{}/merged/hf/spiece.model'),
    (
      'huggingface:{}/own',
      [
        'own/tokenizer.json',
        'own/chat_template.jinja',
        'own/additional_chat_templates/tool_use.jinja',
        'own/generation_config.json',
      ],
      'huggingface:{}/merged/hf',
    ),
    ('huggingface:{}/own/tokenizer.json', ['own/tokenizer.json'], 'huggingface:{}/merged/hf'),
    ('sentencepiece:{}/gone.model', [], None),
    (None, [], None),
  ],
)
def test_a_merged_model_carries_the_vocabulary_of_its_run(tmp_path, name, files, found):
  (tmp_path / 'own').mkdir()
  for file in files:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text('{}')
  target = tmp_path / 'merged'
  target.mkdir()
  said = carry_vocabulary(name and name.format(tmp_path), target)
  assert carried_vocabulary(target) == (found and found.format(tmp_path))
  if found is None:
    assert 'left out' in said and '--vocabulary=NAME' in said
  else:
    assert said == name.format(tmp_path)
  carried = [path for path in files if path.startswith('own/')]
  assert all((target / 'hf' / path.removeprefix('own/')).is_file() for path in carried)


def test_a_tokenizer_that_came_with_the_weights_stays(tmp_path):
  (tmp_path / 'hf').mkdir()
  (tmp_path / 'hf' / 'tokenizer.json').write_text('{"first": 1}')
  (tmp_path / 'tokenizer.json').write_text('{}')
  carry_vocabulary(f'huggingface:{tmp_path}', tmp_path)
  assert (tmp_path / 'hf' / 'tokenizer.json').read_text() == '{"first": 1}'


@pytest.mark.parametrize(
  'name, is_t5, file',
  [
    ('sentencepiece:{}/my.model', True, 'spiece.model'),
    ('sentencepiece:{}/my.model', False, 'tokenizer.model'),
    ('huggingface:{}', False, 'tokenizer.json'),
    ('byte', True, None),
    (None, True, None),
  ],
)
def test_an_exported_model_has_the_vocabulary_under_the_name_of_its_family(
  tmp_path, name, is_t5, file
):
  for own in ('my.model', 'tokenizer.json'):
    (tmp_path / own).write_text('{}')
  target = tmp_path / 'theirs'
  target.mkdir()
  said = export_vocabulary(name and name.format(tmp_path), target, is_t5=is_t5)
  assert (target / file).is_file() if file else ('left out' in said and not [*target.iterdir()])
