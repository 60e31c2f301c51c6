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
EVAL, INFER = 't5x_gpu.eval.EvalSetup', 't5x_gpu.evaluation.infer_request.InferSetup'
TRANSLATED = sorted(p.stem for p in FILES.glob('*.gin') if p.stem != 'unknown_names')


SCRIPTS = {'evaluation': 'evaluate', 'predictions': 'infer'}  # of the other files: 'train'


def translate(name, *bindings):
  return translation.translate(
    [f'{name}.gin'], bindings=bindings, search_paths=[str(FILES)], script=SCRIPTS.get(name, 'train')
  )


@pytest.mark.parametrize('name', TRANSLATED)
def test_translation_is_as_recorded(name, golden):
  golden(f't5x/{name}.gin', translate(name).text)


@pytest.mark.parametrize('name', TRANSLATED)
def test_translation_is_a_configuration_of_ours(name, tmp_path):
  (tmp_path / 'ours.gin').write_text(translate(name, 'MODEL_DIR=x').text)
  unset = ('MIXTURE_OR_TASK_NAME="t"', 'TASK_FEATURE_LENGTHS={"inputs": 8, "targets": 8}')
  macros = (tmp_path / 'ours.gin').read_text()
  folders = 'CHECKPOINT_PATH="a"', 'EVAL_OUTPUT_DIR="b"', 'INFER_OUTPUT_DIR="c"'
  bindings = [
    b for b in (*unset, *folders, 'TRAIN_STEPS=5') if f'{b.split("=")[0]} = %gin' in macros
  ]
  entry = {'evaluation': EVAL, 'predictions': INFER}.get(name, gin_loader.ENTRY)
  loaded = gin_loader.load([tmp_path / 'ours.gin'], bindings=bindings, entry=entry)
  assert gin_loader.configures([str(tmp_path / 'ours.gin')], entry)
  assert loaded.arguments()['model'] is not None


def by_name(outcomes):
  return {o.name: o for o in outcomes}


def test_what_this_project_does_not_have_is_refused_by_name_with_its_line_and_the_way_on():
  problems = [p.what for p in translate('unknown_names').problems]
  assert len(problems) == 4
  for name, way in (
    ('train.trainer_cls', 'docs/add_a_model.md'),
    ('train.get_dataset_fn', 'docs/add_a_data_source.md'),
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
@hypothesis.example(['__main__.train.model=None'])
@hypothesis.example(['__main__.train.optimizer_def=None', '__main__.train.trainer_cls=None'])
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


def test_modules_of_tasks_are_all_modules_that_the_files_import(tmp_path):
  (tmp_path / 'two.gin').write_text(
    'import other_project.tasks\n' + (FILES / 'finetune_with_beams.gin').read_text()
  )
  text = translation.translate(
    ['two.gin'], bindings=(), search_paths=[str(tmp_path), str(FILES)], script='train'
  ).text
  assert text.count("mixture_or_task_module = ['other_project.tasks', 'my_tasks']") == 3


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
  file = tmp_path / 'other.gin'
  file.write_text(
    'from __gin__ import dynamic_registration\nimport __main__ as script\n'
    f"script.{script}.output_dir = 'x'\n"
  )
  with pytest.raises(ConfigError) as e:
    translation.translate([str(file)])
  assert f'its {script} is' in e.value.what
  assert f'{command} --gin_file={file}' in e.value.fix


def test_files_that_compile_or_export_name_what_to_do_instead(tmp_path):
  for text, fix in (
    ("import __main__ as script\nscript.precompile.model_dir = 'x'\n", '--precompile'),
    ("from t5x import export_lib\nexport_lib.save.output_dir = 'x'\n", 't5x_gpu.infer'),
  ):
    (tmp_path / 'other.gin').write_text(f'from __gin__ import dynamic_registration\n{text}')
    with pytest.raises(ConfigError) as e:
      translation.translate([str(tmp_path / 'other.gin')])
    assert fix in e.value.fix


def test_what_only_training_uses_has_no_effect_in_an_evaluation():
  found = by_name(translate('evaluation').outcomes)
  for name in (
    't5x.models.EncoderDecoderModel.optimizer_def',
    't5x.adafactor.Adafactor.decay_rate',
    't5x.models.EncoderDecoderModel.loss_normalizing_factor',
  ):
    assert found[name].status == 'no effect' and 'training' in found[name].note


def test_every_checkpoint_of_a_folder_can_be_evaluated():
  path = 'utils.RestoreCheckpointConfig.mode="all"'
  assert "steps = 'all'" in translate('evaluation', path).text
  assert len(translate('predictions', path).problems) == 1


@pytest.mark.parametrize(
  'mode, score', [('predict', False), ('predict_with_aux', False), ('score', True)]
)
def test_modes_of_infer_are_predictions_or_scores(mode, score):
  assert f'score = {score} ' in translate('predictions', f'infer_script.infer.mode={mode}').text


HEADER = """
from __gin__ import dynamic_registration
import __main__ as train_script
import optax
from t5x import adafactor
from t5x import decoding
from t5x import models
from t5x import optimizers
from t5x import partitioning
from t5x import trainer
from t5x import utils
include 'runs/finetune.gin'
include 'models/encoder_decoder.gin'
TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 48}
"""


def lines_of(tmp_path, text, *bindings):
  """Returns the assignments that a file with `text` is translated to, and its problems."""
  (tmp_path / 'a.gin').write_text(HEADER + text)
  found = translation.translate(
    [str(tmp_path / 'a.gin')], bindings=bindings, search_paths=[str(FILES)]
  )
  lines = [line.partition('  #')[0].strip() for line in found.text.splitlines()]
  return lines, [problem.what for problem in found.problems], found


STOP_EARLY = "train_script.train.actions = {'TRAIN_EVAL': [@trainer.EarlyStoppingAction()]}\n"
METRIC = "MIXTURE_OR_TASK_NAME = 'mine'\ntrainer.EarlyStoppingAction.metric = ('mine', '{}')\n"
SAMPLE = 'models.EncoderDecoderModel.decode_fn = @decoding.temperature_sample\n'
NUM_DECODES = 'models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4\n'
SUBMESH = 'partitioning.PjitPartitioner.model_parallel_submesh = (1, 1, 1, 4)\n'
SHAPES = (
  'partitioning.PjitPartitioner.ici_mesh_shape = (1, 4, 2)\n'
  'partitioning.PjitPartitioner.dcn_mesh_shape = (2, 1, 1)\n'
)
SCHEDULED = (
  'OPTIMIZER = @optimizers.chain()\noptimizers.chain.transformations = [@optax.lion()]\n'
  'optax.lion.learning_rate = @utils.create_learning_rate_scheduler()\n'
)


@pytest.mark.parametrize(
  'text, written, absent',
  [
    # T5X samples among one token unless topk says otherwise.
    (SAMPLE + 'decoding.temperature_sample.temperature = 0.7\n', [], ['temperature = 0.7']),
    (
      SAMPLE + 'decoding.temperature_sample.topk = 40\n' + NUM_DECODES,
      ['temperature = 1.0', 'top_k = 40', 'num_decodes = 4', 'max_decode_length = None'],
      ['num_beams = 4'],
    ),
    (NUM_DECODES.replace('4', 'None'), [], ['num_beams', 'num_decodes']),
    (NUM_DECODES, ['num_beams = 4', 'max_decode_length = None'], ['num_decodes = 4']),
    (
      SUBMESH + 'partitioning.PjitPartitioner.num_partitions = 2\n',
      ['num_partitions = 4'],
      ['num_partitions = 2'],
    ),
    (SHAPES[: SHAPES.index('\n') + 1], ['num_partitions = 1'], ['ici_mesh_shape']),
    (
      SHAPES,
      ["ici_mesh_shape = {'data': 4, 'model': 2}", "dcn_mesh_shape = {'data': 2, 'model': 1}"],
      ['num_partitions = 1'],
    ),
    (
      SHAPES + 'partitioning.standard_logical_axis_rules.parameter_partitioning_dims = 2\n',
      ["ici_mesh_shape = {'data': 1, 'fsdp': 4, 'model': 2}"],
      ['fsdp = -1', 'data = 1'],
    ),
    (
      "LOSS_NORMALIZING_FACTOR = 'average_per_sequence'\n",
      ["loss_normalizing_factor = 'AVERAGE_PER_SEQUENCE'"],
      [],
    ),
    (
      'utils.SaveCheckpointConfig.period = None\n'
      'utils.SaveCheckpointConfig.checkpoint_steps = [10, 20]\n',
      ['period = 1000000000', 'checkpoint_steps = [10, 20]'],
      [],
    ),
    (
      "train_script.train.actions = {'TRAIN_EVAL': [@trainer.EarlyStoppingAction()]}\n"
      "trainer.EarlyStoppingAction.metric = ('any_task', 'cross_ent_loss')\n"
      "trainer.EarlyStoppingAction.mode = 'min'\n",
      [
        "metric = 'eval/cross_entropy'",
        "best_is = 'min'",
        'early_stopping = @early_stopping.EarlyStopping()',
      ],
      [],
    ),
    (STOP_EARLY + METRIC.format('loss_per_nonpadding_target_token'), ["metric = 'eval/loss'"], []),
    (
      STOP_EARLY + METRIC.format('accuracy').replace("('mine'", "('part'"),
      ["metric = 'eval/part/accuracy'", 'eval_each_task = True'],
      [],
    ),
    ('train_script.train.train_eval_dataset_cfg = None\n', [], ['eval_each_task = True']),
    ('adafactor.Adafactor.global_norm_clip_threshold = 0.0\n', ['max_grad_norm = None'], []),
    (
      SCHEDULED,
      ['learning_rate = @schedules.factors()', 'warmup_steps = 1000'],
      ['learning_rate = @t5x.utils.create_learning_rate_scheduler()'],
    ),
    (
      'OPTIMIZER = @optimizers.adamw()\noptimizers.adamw.learning_rate = 0.5\n'
      'optimizers.adamw.b2 = 0.9\n',
      ['transformations = [@optax.adamw]', 'b2 = 0.9', 'base_learning_rate = 0.5'],
      [],
    ),
    ("utils.RestoreCheckpointConfig.path = ['a']\n", ["path = 'a'"], []),
    (
      'train_script.train.eval_period = 0\n',
      ['train_eval_dataset_cfg = None', 'infer_eval_dataset_cfg = None'],
      [],
    ),
    (
      'train_script.train.eval_period = 0\ntrain_script.train.run_eval_before_training = True\n',
      [
        'eval_period = None',
        'train_eval_dataset_cfg = @train_eval/batches.DatasetConfig()',
        'infer_eval_dataset_cfg = @infer_eval/batches.DatasetConfig()',
      ],
      ['infer_eval_period = 0'],
    ),
  ],
)
def test_values_mean_what_they_mean_to_t5x(text, written, absent, tmp_path):
  lines, problems, found = lines_of(tmp_path, text)
  assert not problems
  assert all(line in lines for line in written), lines
  assert not any(line.startswith(tuple(absent)) for line in lines if absent)
  (tmp_path / 'ours.gin').write_text(found.text)
  unset = [line.partition(' =')[0] for line in lines if line.endswith('= %gin.REQUIRED')]
  values = [f'{name}={1 if name == "TRAIN_STEPS" else "x"}' for name in unset]
  assert gin_loader.load([tmp_path / 'ours.gin'], bindings=values)


@pytest.mark.parametrize(
  'text, named',
  [
    ('OPTIMIZER = @optimizers.MultiOptimizer()\n', 'MultiOptimizer'),
    (
      'OPTIMIZER = @optimizers.chain()\n'
      'optimizers.chain.transformations = [@optax.scale_by_adam(), @optax.scale()]\n',
      '0 of the transformations',
    ),
    ('train_script.train.inference_evaluator_cls = @optax.lion\n', 'inference_evaluator_cls'),
    ('train_script.train.train_eval_get_dataset_fn = @optax.lion\n', 'get_dataset_fn'),
    ("utils.RestoreCheckpointConfig.path = ['a', 'b']\n", '--steps=1000,2000'),
    ('utils.RestoreCheckpointConfig.strict = False\n', 'strict'),
    ('utils.RestoreCheckpointConfig.fallback_to_scratch = True\n', "mode = 'partial'"),
    (
      "utils.RestoreCheckpointConfig.assignment_map = [('encoder/(.*)', None)]\n",
      'RestoreConfig.assignment_map',
    ),
    ('train_script.train.total_steps = 0\n', 'python -m t5x_gpu.eval'),
    (
      'from t5x import checkpoints\n'
      'utils.SaveCheckpointConfig.checkpointer_cls = @checkpoints.SaveBestCheckpointer\n'
      "checkpoints.SaveBestCheckpointer.metric_name_to_monitor = 'train/accuracy'\n",
      'CheckpointConfig.keep_best',
    ),
    (
      STOP_EARLY + METRIC.format('loss') + 'trainer.EarlyStoppingAction.atol = 0.1\n',
      'sum over a batch',
    ),
    ('adafactor.Adafactor.beta_1 = 0.9\n', "Did you mean 'beta1'?"),
    ('train_script.train.partitioner = @partitioning.PjitPartitoner()\n', "'PjitPartitioner'?"),
    ('partitioning.PjitPartitoner.num_partitions = 2\n', "Did you mean 'PjitPartitioner'?"),
    (SAMPLE + 'decoding.temperature_sample.temperature = %HOT\n', '--gin.HOT=VALUE'),
    (NUM_DECODES.replace('4', '%MANY'), '--gin.MANY=VALUE'),
    (SAMPLE + 'decoding.temperature_sample.topp = 0.9\n', 'topk or topp'),
  ],
)
def test_what_t5x_would_do_otherwise_is_refused(text, named, tmp_path):
  _, problems, _ = lines_of(tmp_path, text)
  assert len(problems) == 1 and named in problems[0]


def test_differences_in_numbers_are_named(tmp_path):
  text = (
    "models.EncoderDecoderModel.loss_normalizing_factor = 'NUM_REAL_TARGET_TOKENS'\n"
    'trainer.Trainer.num_microbatches = 2\n'
  )
  _, _, found = lines_of(tmp_path, text)
  notes = '\n'.join(found.notes)
  assert 'divides each microbatch by its own tokens' in notes


def test_actions_that_t5x_never_runs_are_noted(tmp_path):
  text = STOP_EARLY.replace('TRAIN', 'INFER') + METRIC.format('bleu')
  _, problems, found = lines_of(tmp_path, text)
  assert not problems and 'continues to its last step' in '\n'.join(found.notes)
  text += 'train_script.train.concurrent_metrics = False\n'
  _, _, found = lines_of(tmp_path, text)
  assert 'continues to its last step' not in '\n'.join(found.notes)


def test_encoder_decoder_searches_with_one_beam_only_where_texts_are_evaluated(tmp_path):
  assert 'beam_search = True' in lines_of(tmp_path, NUM_DECODES.replace('4', '1'))[0]
  without = 'train_script.train.infer_eval_dataset_cfg = None\n'
  for text in (NUM_DECODES, SAMPLE, without):
    assert 'beam_search = True' not in lines_of(tmp_path, text)[0]


def test_files_of_tf_examples_are_prompts_in_the_vocabulary_of_the_model(tmp_path):
  (tmp_path / 'a.gin').write_text(
    "include 'predictions.gin'\n"
    'import __main__ as infer_script\nimport seqio\nfrom t5x import models\n'
    'from t5x import utils\n'
    'MIXTURE_OR_TASK_NAME = @infer_script.create_task_from_tfexample_file()\n'
    'utils.DatasetConfig.mixture_or_task_name = %MIXTURE_OR_TASK_NAME\n'
    'infer_script.create_task_from_tfexample_file:\n'
    "  paths = ['data/*.tfrecord']\n"
    "  file_type = 'tfrecord'\n"
    "  inputs_key = 'question'\n"
    '  targets_key = None\n'
    "  features = {'inputs': @asked/seqio.Feature(), 'targets': @written/seqio.Feature()}\n"
    'asked/seqio.Feature.vocabulary = @models.get_input_vocabulary()\n'
    'written/seqio.Feature.vocabulary = @models.get_output_vocabulary()\n'
    'models.get_input_vocabulary.model = %MODEL\n'
    'models.get_output_vocabulary.model = %MODEL\n'
    'models.EncoderDecoderModel.input_vocabulary = @seqio.ByteVocabulary()\n'
    'models.EncoderDecoderModel.output_vocabulary = @seqio.ByteVocabulary()\n'
  )
  found = translation.translate(
    [str(tmp_path / 'a.gin')], search_paths=[str(FILES)], script='infer'
  )
  assert not found.problems
  for line in (
    "prompts = 'tfrecord:data/*.tfrecord#inputs=question'",
    "vocabulary = 'byte'",
    "mixture_or_task_name = ''",
  ):
    assert f'  {line}  #' in found.text


def test_scores_of_a_decoder_are_of_the_distribution_that_t5x_draws_from_by_default(tmp_path):
  for name in ('decoder_from_scratch.gin', 'models/decoder_only.gin'):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    text = (FILES / name).read_text()
    (tmp_path / name).write_text(text.replace('  decode_fn = @decoding.temperature_sample\n', ''))
  paths = [str(tmp_path), str(FILES)]
  found = translation.translate(['decoder_from_scratch.gin'], search_paths=paths)
  assert 'rescale_log_probs = True  # T5X' in found.text and 'temperature =' not in found.text


def test_misspelled_flags_are_refused_and_name_what_they_resemble(tmp_path):
  for flag, hint in (
    ('train/utils.DatasetConfig.batchsize=5', "'batch_size'"),
    ('partitioning.PjitPartitioner.num_partition=2', "'num_partitions'"),
  ):
    _, problems, _ = lines_of(tmp_path, '', flag)
    assert len(problems) == 1 and hint in problems[0]


@pytest.mark.parametrize(
  'flag', ['decoding.DecodingConfig.temperature=0.5', 'adafactor.Adafactor.layers="scanned"']
)
def test_parameters_that_only_this_project_has_are_its_own_also_in_modules_of_t5xs_names(
  flag, tmp_path
):
  assert lines_of(tmp_path, '', flag)[2].ours == (flag,)


def test_predictions_without_a_model_require_one(tmp_path):
  text = (FILES / 'predictions.gin').read_text().replace("include 'models/", "# include 'models/")
  (tmp_path / 'a.gin').write_text(text)
  loaded = gin_loader.load([str(tmp_path / 'a.gin')], search_paths=[str(FILES)], entry=INFER)
  with pytest.raises(ConfigError) as e:
    loaded.arguments()
  assert 'MODEL is required' in '\n'.join(p.what for p in e.value.problems)


def test_flags_name_parameters_as_the_files_do_and_ours(tmp_path):
  lines, _, found = lines_of(
    tmp_path, '', 'train_script.train.eval_period=7', 'train.stats_period=5', 'train.log_period=3'
  )
  assert 'eval_period = 7' in lines and 'infer_eval_period = 7' in lines
  assert 'log_period = 5' in lines
  assert found.ours == ('train.log_period=3',)
