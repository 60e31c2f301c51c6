"""T5X's gin files become ours: values are kept, mapped, without effect or refused; none is lost."""

import pathlib

import hypothesis
import hypothesis.strategies as st
import pytest

from t5x_gpu.config import gin_loader
from t5x_gpu.config.t5x import records, rules, translation
from t5x_gpu.config.t5x.translator import NAMES
from t5x_gpu.errors import ConfigError

FILES = pathlib.Path(__file__).parent / 'files'
TRANSLATED = sorted(p.stem for p in FILES.glob('*.gin') if p.stem != 'unknown_names')


def translate(name, *bindings):
  return translation.translate([f'{name}.gin'], bindings=bindings, search_paths=[str(FILES)])


@pytest.mark.parametrize('name', TRANSLATED)
def test_translation_is_as_recorded(name, golden):
  golden(f't5x/{name}.gin', translate(name).text)


@pytest.mark.parametrize('name', TRANSLATED)
def test_translation_is_a_configuration_of_ours(name, tmp_path):
  (tmp_path / 'ours.gin').write_text(translate(name, 'MODEL_DIR=x').text)
  unset = ('MIXTURE_OR_TASK_NAME="t"', 'TASK_FEATURE_LENGTHS={"inputs": 8, "targets": 8}')
  macros = (tmp_path / 'ours.gin').read_text()
  bindings = [b for b in (*unset, 'TRAIN_STEPS=5') if f'{b.split("=")[0]} = %gin' in macros]
  loaded = gin_loader.load([tmp_path / 'ours.gin'], bindings=bindings)
  assert loaded.arguments(only=['model'])['model'] is not None


def by_name(outcomes):
  return {o.name: o for o in outcomes}


def test_what_this_project_does_not_have_is_refused_by_name_with_its_line_and_the_way_on():
  problems = [p.what for p in translate('unknown_names').problems]
  assert len(problems) == 6
  for name, way in (
    ('train.trainer_cls', 'docs/add_a_model.md'),
    ('train.get_dataset_fn', 'docs/add_a_data_source.md'),
    ('train.run_eval_before_training', 'before its first step'),
    ('loss_normalizing_factor', 'AVERAGE_PER_SEQUENCE'),
    ('made_up', 'Nothing here corresponds'),
    ('activation_partitioning_dims', 'sequence_parallel'),
  ):
    (found,) = [p for p in problems if name in p]
    assert way in found and 'unknown_names.gin:1' in found


@pytest.mark.parametrize('name', [*TRANSLATED, 'unknown_names'])
def test_every_binding_has_an_outcome_or_is_listed_as_unused(name):
  files = records.read([f'{name}.gin'], search_paths=[str(FILES)], known=translation.known_names())
  found = translate(name)
  named = {o.origin for o in found.outcomes} | {origin for _, origin in found.unused}
  named |= set(found.origins.values())
  refused = [o for o in found.outcomes if o.status == 'refused']
  for b in (b for b in files.final() if b.argument):
    assert b.origin in named or refused and b.selector.startswith('my_research'), b.key


KNOWN = sorted(name for name in rules.RULES)


@st.composite
def bindings(draw):
  """Bindings of T5X's parameters to values of any kind."""
  names = draw(st.lists(st.sampled_from(KNOWN), min_size=1, max_size=5, unique=True))
  some = st.sampled_from(["'text'", '3', '0', '-1.5', 'None', 'True', '[]', '(1, 2)', '%X', '{}'])
  scope = st.sampled_from(('', 'train/', 'MODEL/'))
  return [f'{draw(scope)}{name}={draw(some)}' for name in names]


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(texts=bindings())
def test_any_value_of_a_known_parameter_is_written_or_named(texts):
  found = translate('t5_from_scratch', *texts)
  origins = {o.origin for o in found.outcomes} | {origin for _, origin in found.unused}
  for text in dict(t.split('=', 1)[::-1] for t in texts).values():
    last = f'--gin.{text}'
    name = text.rpartition('/')[2]
    refused = any(name in problem.what for problem in found.problems)
    assert last in origins or last in found.origins.values() or refused, found.outcomes


def test_sum_of_the_loss_is_t5xs_none():
  assert 'loss_normalizing_factor = 1.0 ' in translate('t5_from_scratch').text
  assert 'loss_normalizing_factor = None ' in translate('microbatches').text
  assert 'loss_normalizing_factor = 233472.0 ' in translate('finetune_with_beams').text


def test_what_differs_in_numbers_is_noted():
  notes = translate('no_evaluation').notes
  assert any('dropout masks' in note and 'use_hardware_rng = True' in note for note in notes)
  assert any('another seed' in note for note in notes)


def test_module_of_a_task_is_the_module_that_the_file_imports():
  text = translate('finetune_with_beams').text
  assert text.count("mixture_or_task_module = 'my_tasks'") == 3


def test_a_submesh_wins_over_num_partitions():
  found = by_name(translate('submesh_and_parameters').outcomes)
  assert 'num_partitions = 4' in translate('submesh_and_parameters').text
  assert found['t5x.partitioning.PjitPartitioner.model_parallel_submesh'].status == 'mapped'


def test_our_files_given_with_t5xs_are_read_as_ours(tmp_path):
  (tmp_path / 'mine.gin').write_text(
    'from __gin__ import dynamic_registration\n'
    'from t5x_gpu.partitioning import partitioner\npartitioner.Partitioner.fsdp = -1\n'
    'partitioner.Partitioner.data = 1\n'
  )
  loaded = gin_loader.load(
    ['t5_from_scratch.gin', str(tmp_path / 'mine.gin')],
    bindings=['MODEL_DIR=x', 'LoggingConfig.loggers=("jsonl",)'],
    search_paths=[str(FILES)],
  )
  arguments = loaded.arguments()
  assert arguments['partitioner'].fsdp == -1
  assert arguments['total_steps'] == 20
  assert arguments['logging_cfg'].loggers == ('jsonl',)


def test_origins_of_values_are_t5xs_lines():
  loaded = gin_loader.load(
    ['t5_from_scratch.gin'], bindings=['MODEL_DIR=x'], search_paths=[str(FILES)]
  )
  (setting,) = loaded.provenance.find('TransformerConfig.embed_dim')
  assert setting.origin.endswith('models/encoder_decoder.gin:36')


def test_files_without_a_run_say_so():
  with pytest.raises(ConfigError) as e:
    translate('models/encoder_decoder')
  assert "T5X's train is not configured" in e.value.what


def test_every_rule_names_a_parameter_of_ours():
  loaded = gin_loader.load(
    ['finetune_with_beams.gin'], bindings=['MODEL_DIR=x'], search_paths=[str(FILES)]
  )
  assert loaded
  for name, rule in rules.RULES.items():
    if rule.here:
      owner, _, parameter = rule.here.rpartition('.')
      assert owner in NAMES, name
      assert parameter.isidentifier()


def test_page_has_every_rule(request):
  page = pathlib.Path(__file__).parents[3] / 'docs' / 'from_t5x.md'
  lines = ['| T5X | here | |', '|---|---|---|']
  for name, rule in rules.RULES.items():
    here = f'`{rule.here}`' if rule.here else '' if rule.status == 'mapped' else rule.status
    lines.append(f'| `{name.removeprefix("__main__.")}` | {here} | {rule.note} |')
  text, mark, table = page.read_text().partition('<!-- rules -->\n')
  if request.config.getoption('update_golden'):
    page.write_text(text + mark + '\n'.join(lines) + '\n')
  else:
    assert table.splitlines() == lines


@pytest.mark.parametrize(
  'script, command', [('evaluate', 't5x_gpu.eval'), ('infer', 't5x_gpu.infer')]
)
def test_files_of_t5xs_other_scripts_name_the_command(script, command, tmp_path):
  (tmp_path / 'other.gin').write_text(
    'from __gin__ import dynamic_registration\nimport __main__ as script\n'
    f"script.{script}.output_dir = 'x'\n"
  )
  with pytest.raises(ConfigError) as e:
    translation.translate([str(tmp_path / 'other.gin')])
  assert f'its {script} is' in e.value.what
  assert command in e.value.fix
