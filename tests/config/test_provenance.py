"""Each value says where it was set and what it overrode, down to the default in the signature."""

import pytest

from t5x_gpu.config import provenance
from tests.config.project import write


def setting(config, key):
  return next(s for s in (*config.provenance.settings, *config.provenance.defaults) if s.key == key)


def test_chain_from_command_line_over_files_to_the_default(project, load):
  write(
    project / 'more.gin',
    'from __gin__ import dynamic_registration\n'
    'from app import train as train_script\ntrain_script.train.total_steps = 7\n',
  )
  found = setting(
    load(['my.gin', 'more.gin'], bindings=['train.total_steps=3']), 'train.total_steps'
  )
  assert (found.value, found.origin) == ('3', '--gin.train.total_steps')
  assert found.overrides == (
    ('7', 'more.gin:3'),
    ('50', 'gin_configs/runs/run.gin:16'),
    ('100', 'default'),
  )
  assert found.overridden == (
    'overrides 7 (more.gin:3), 50 (gin_configs/runs/run.gin:16), 100 (default)'
  )


def test_macros_are_followed_and_both_places_kept(load):
  config = load(['my.gin'])
  found = setting(config, 'train/Data.batch_size')
  assert (found.text, found.value) == ('%BATCH_SIZE', '8')
  assert (found.origin, found.value_origin) == ('gin_configs/runs/run.gin:18', 'my.gin:3')
  assert found.expression == 'train/Data.batch_size = 8 (%BATCH_SIZE)'
  assert setting(config, 'BATCH_SIZE').overrides == (('128', 'gin_configs/runs/run.gin:5'),)
  assert setting(config, 'Data.lengths').value == "{'targets': 16}"


def test_a_scoped_value_overrides_the_unscoped_one(load):
  found = setting(
    load(['my.gin'], bindings=['Data.pack=False', 'eval/Data.pack=True']), 'eval/Data.pack'
  )
  assert found.overrides == (('False', 'Data.pack, --gin.Data.pack'), ('True', 'default'))
  assert found.overridden == 'overrides False (Data.pack, --gin.Data.pack)'


def test_defaults_of_what_the_run_calls_are_listed(load):
  config = load(['my.gin'])
  found = {s.key: s.value for s in config.provenance.defaults}
  assert found['AdamW.betas'] == '(0.9, 0.999)' and found['Partitioner.num_partitions'] == '1'
  assert found['train.dtype'] == "'float32'"
  assert 'Adafactor.decay' not in found and 'rsqrt.warmup' not in found


def test_a_default_without_a_text_is_the_same_in_each_start(project, load):
  write(project / 'own.py', 'def folder(parent=object()):\n  return "runs"\n')
  write(
    project / 'own.gin',
    'from __gin__ import dynamic_registration\nimport own\n'
    'from app import train as train_script\ntrain_script.train.model_dir = @own.folder()\n',
  )
  assert setting(load(['my.gin', 'own.gin']), 'folder.parent').value == '<object>'


def test_origins_for_error_messages(load):
  load(['my.gin'], bindings=['Partitioner.num_partitions=%BATCH_SIZE'])
  assert provenance.origin_sentences('Partitioner.num_partitions') == [
    'Partitioner.num_partitions is set at my.gin:3, through %BATCH_SIZE at '
    '--gin.Partitioner.num_partitions.'
  ]
  assert provenance.origin_sentences('AdamW.decay') == [
    'AdamW.decay is 0.0, its default; nothing sets it.'
  ]
  assert provenance.origin_sentences('train.model_dir') == [
    'train.model_dir is set at gin_configs/runs/run.gin:7, through %MODEL_DIR at '
    'gin_configs/runs/run.gin:11.'
  ]
  assert provenance.origin_sentences('BATCH_SIZE') == ['BATCH_SIZE is set at my.gin:3.']
  assert provenance.origin_sentences('batch') == provenance.origin_sentences('No.thing') == []


def test_a_value_that_one_scope_sets_is_not_called_a_default(load):
  config = load(['my.gin'], bindings=['train/Data.pack=False'])
  assert provenance.origin_sentences('Data.pack') == [
    'train/Data.pack is set at --gin.train/Data.pack.',
    'eval/Data.pack is True, its default; nothing sets it.',
  ]
  assert setting(config, 'eval/Data.pack').value == 'True'
  assert 'Data.pack' not in {s.key for s in config.provenance.defaults}
  assert {'Data.name', 'train.dtype'} <= {s.key for s in config.provenance.defaults}


def test_a_call_without_a_scope_and_one_with_a_scope_have_an_origin_each(load):
  load(['my.gin'], bindings=['train.eval_data=@train_script.Data()', 'train/Data.pack=False',
                             'Data.batch_size=2'])  # fmt: skip
  assert provenance.origin_sentences('Data.pack') == [
    'train/Data.pack is set at --gin.train/Data.pack.',
    'Data.pack is True, its default; only a scope sets it.',
  ]
  assert [line.split(' is set')[0] for line in provenance.origin_sentences('Data.batch_size')] == [
    'Data.batch_size',
    'train/Data.batch_size',
  ]


def test_nothing_loaded_has_no_origins(load):
  load(['my.gin'])
  provenance.forget()
  assert provenance.origin_sentences('BATCH_SIZE') == []


@pytest.mark.parametrize(
  'name, keys',
  [
    ('BATCH_SIZE', ['BATCH_SIZE']),
    ('eval/Data.batch_size', ['eval/Data.batch_size']),
    ('Data.batch_size', ['eval/Data.batch_size', 'train/Data.batch_size']),
    ('warmup', ['rsqrt.warmup']),
    ('train_script.rsqrt.warmup', ['rsqrt.warmup']),
    ('sqrt.warm', ['rsqrt.warmup']),
    ('nothing', []),
  ],
)
def test_names_are_read_as_exactly_as_possible(load, name, keys):
  assert [s.key for s in load(['my.gin']).provenance.find(name)] == keys
