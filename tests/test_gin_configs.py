"""Every shipped gin file loads, meshes and has the shapes that its header promises.

Nothing compiles: programs are built from shapes, on as many fake devices as the header names.
"""

import functools
import json
import math
import pathlib
import re
import shlex
from collections.abc import Sequence
from typing import Any

import jax
import pytest

from t5x_gpu import cli
from t5x_gpu.config import gin_loader
from t5x_gpu.errors import ModelError
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.program import Program, build_program
from t5x_gpu.training.train_step import StepConfig
from tests.messages import raises

ROOT = pathlib.Path(__file__).parents[1]
GIN = ROOT / 'gin_configs'
EXAMPLES = sorted((GIN / 'examples').glob('*.gin'))
PARTS = {kind: sorted((GIN / kind).glob('*.gin')) for kind in ('models', 'parallel', 'runs')}

# On one host; how many devices the headers of the examples speak of.
DEVICES = {'one': 1, 'two': 2, 'four': 4, 'eight': 8, 'sixteen': 16}

# Macro -> (a value to give it, what of train's arguments must then have that value).
MACROS = {
  'MODEL_DIR': ('elsewhere', lambda a: [a['model_dir']]),
  'TRAIN_STEPS': (12_345, lambda a: [a['total_steps']]),
  'BATCH_SIZE': (
    24,
    lambda a: [a['train_dataset_cfg'].batch_size, a['train_eval_dataset_cfg'].batch_size],
  ),
  'NUM_PARTITIONS': (4, lambda a: [a['partitioner'].num_partitions]),
  'RANDOM_SEED': (7, lambda a: [a['random_seed'], a['train_dataset_cfg'].seed]),
  'LOG_PERIOD': (3, lambda a: [a['log_period']]),
  'SAVE_PERIOD': (5, lambda a: [a['checkpoint_cfg'].period]),
  'EVAL_PERIOD': (6, lambda a: [a['eval_period']]),
  'MIXTURE_OR_TASK_NAME': (
    'mine',
    lambda a: [
      a['train_dataset_cfg'].mixture_or_task_name,
      a['train_eval_dataset_cfg'].mixture_or_task_name,
    ],
  ),
  'TASK_FEATURE_LENGTHS': (
    {'targets': 99},
    lambda a: [
      a['train_dataset_cfg'].task_feature_lengths,
      a['train_eval_dataset_cfg'].task_feature_lengths,
    ],
  ),
  'DROPOUT_RATE': (0.25, lambda a: [a['model'].config.dropout_rate]),
  'ATTENTION': ('chunked', lambda a: [a['model'].config.attention]),
}

by_name = functools.partial(
  pytest.mark.parametrize, ids=lambda value: getattr(value, 'stem', value)
)


def pairs(names: str, first: Sequence[Any], second: Sequence[Any]) -> pytest.MarkDecorator:
  """Parametrises with every pair: the first of one with each of the other; the rest are slow."""
  quick = {(a, second[0]) for a in first} | {(first[0], b) for b in second}
  return by_name(
    names,
    [
      pytest.param(a, b, marks=() if (a, b) in quick else pytest.mark.slow)
      for a in first
      for b in second
    ],
  )


def header(path: pathlib.Path) -> str:
  """Returns the comment at the top of a gin file, without its marks."""
  lines = path.read_text(encoding='utf-8').splitlines()
  end = next(i for i, line in enumerate(lines) if not line.startswith('#'))
  return '\n'.join(line.lstrip('#').removeprefix(' ') for line in lines[:end])


def command(path: pathlib.Path) -> list[str]:
  """Returns the arguments of the command that the header of an example gives."""
  lines = iter(header(path).splitlines())
  text = next(line for line in lines if 'python -m t5x_gpu.train ' in line)
  while text.endswith('\\'):
    text = text[:-1] + next(lines)
  return shlex.split(text.split('python -m t5x_gpu.train ')[1])


def hardware(path: pathlib.Path) -> Topology:
  """Returns what the header of an example says: 'one host with eight GPUs', 'two CPU cores'."""
  found = re.search(rf'Hardware: .*?\b({"|".join(DEVICES)}) (GPU|CPU)', header(path), re.DOTALL)
  assert found, 'say: Hardware: one host with four GPUs'
  return Topology(1, DEVICES[found[1]] if found[2] == 'GPU' else 1)


def load(path: pathlib.Path, *overrides: str) -> gin_loader.LoadedConfig:
  """Returns the configuration of an example's own command and further bindings."""
  args = cli.parse_args('python -m t5x_gpu.train', '', command(path))
  return gin_loader.load(args.gin_files, bindings=(*args.bindings, *overrides))


@functools.cache
def example(path: pathlib.Path) -> Program:
  """Returns the program of an example on the hardware of its header."""
  return build(load(path), hardware(path))


def build(loaded: gin_loader.LoadedConfig, topology: Topology) -> Program:
  """Returns the program of train's arguments on fake devices."""
  return build_program(
    gin_loader.configured(loaded, StepConfig),
    topology=topology,
    devices=jax.devices()[: topology.num_devices],
  )


def parts(folder: pathlib.Path, *files: pathlib.Path) -> str:
  """Returns a gin file in `folder` that includes `files` and sets what a run requires."""
  path = folder / 'mine.gin'
  start = ["INITIALIZE_FROM = 'unused'"] if any(f.stem == 'finetune' for f in files) else []
  path.write_text(
    '\n'.join(
      [
        *(f"include '{file.relative_to(ROOT)}'" for file in files),
        "MODEL_DIR = 'unused'",
        "MIXTURE_OR_TASK_NAME = 'unused'",
        'TRAIN_STEPS = 1000',
        'BATCH_SIZE = 16',
        "TASK_FEATURE_LENGTHS = {'targets': 64}",
        *start,
      ]
    )
  )
  return str(path)


def shardings(program: Program, *, with_state: bool = False) -> str:
  """Returns JSON: the mesh, then one line per parameter: shape, axis names, what splits them.

  Args:
    program: program of a run.
    with_state: say as well what splits the first moment of AdamW, where that is something else.
  """
  flat, _ = jax.tree_util.tree_flatten_with_path(program.abstract_state.params)
  names = jax.tree.leaves(program.names.params)
  moments = (
    jax.tree.leaves(program.abstract_state.opt_state[0].mu)
    if with_state
    else [array for _, array in flat]
  )
  rows = []
  for (path, array), axes, moment in zip(flat, names, moments, strict=True):
    row = {'shape': array.shape, 'axes': axes.names, 'split': tuple(array.sharding.spec)}
    if moment.sharding.spec != array.sharding.spec:
      row['state'] = tuple(moment.sharding.spec)
    rows.append(
      json.dumps(jax.tree_util.keystr(path, simple=True, separator='/')) + ': ' + json.dumps(row)
    )
  mesh = {axis: size for axis, size in program.layout.mesh.shape.items() if size > 1}
  return '{"mesh": ' + json.dumps(mesh) + ',\n "parameters": {\n  ' + ',\n  '.join(rows) + '\n }}\n'


@by_name('path', [p for paths in PARTS.values() for p in paths])
def test_model_parallel_and_run_files_include_nothing_and_name_their_kind(path):
  assert not re.search(r'^\s*include\b', path.read_text(), re.MULTILINE)
  assert header(path)


@by_name('path', EXAMPLES)
def test_examples_include_one_model_one_parallel_and_one_run_file(path):
  included = re.findall(r"^include '(.+)'$", path.read_text(), re.MULTILINE)
  assert [pathlib.PurePath(name).parent.as_posix() for name in included] == [
    'gin_configs/models',
    'gin_configs/parallel',
    'gin_configs/runs',
  ]
  assert all((ROOT / name).is_file() for name in included)


@by_name('path', EXAMPLES)
def test_examples_begin_with_their_command_and_hardware(path):
  assert f'--gin_file=gin_configs/examples/{path.name}' in command(path)
  assert hardware(path).num_devices <= 8


@pytest.mark.quick_cases(
  'base_wmt_from_scratch', 'd*', 'encoder_demo', 'span_corruption_demo', 'tiny_gpu_single'
)
@by_name('path', EXAMPLES)
def test_examples_build_on_the_hardware_of_their_header(path):
  program = example(path)
  program.train_step.lower(program.abstract_state, program.abstract_batch)
  stated = re.findall(r'([\d,]{7,})[- ]parameter', header(path))
  assert [f'{program.num_params:,}'] * len(stated) == stated


def test_tiny_gpu_4x_is_two_replicas_of_two_gpus_each():
  program = build(load(GIN / 'examples/tiny_gpu_4x.gin'), Topology(1, 4))
  shape = program.layout.mesh.shape
  assert (shape['data'], shape['model'], math.prod(shape.values())) == (2, 2, 4)


def test_tiny_gpu_examples_differ_only_in_batch_and_mesh():
  one, four = (load(GIN / f'examples/tiny_gpu_{name}.gin').provenance for name in ('single', '4x'))
  values = [{s.key: s.value for s in p.settings if s.text == s.value} for p in (one, four)]
  assert {k for k in values[0] | values[1] if values[0].get(k) != values[1].get(k)} == {
    'BATCH_SIZE',
    'MODEL_DIR',
    'NUM_PARTITIONS',
  }


@pairs('path, macro', EXAMPLES, list(MACROS))
def test_examples_honour_the_macros_that_people_type(path, macro):
  value, used = MACROS[macro]
  assert all(v != value for v in used(load(path).arguments()))
  assert all(v == value for v in used(load(path, f'{macro}={value}').arguments()))


def test_every_model_file_has_the_attention_macro_and_an_unknown_value_suggests_one():
  for path in PARTS['models']:
    text = path.read_text(encoding='utf-8')
    assert "\nATTENTION = 'auto'\n" in text and '  attention = %ATTENTION\n' in text, path
  with raises(ModelError):
    load(EXAMPLES[0], 'ATTENTION=tokamx').arguments()


@pairs('parallel, run', PARTS['parallel'], PARTS['runs'])
def test_parallel_and_run_files_go_together(tmp_path, parallel, run):
  model = 'decoder_moe_demo' if parallel.stem == 'ep' else 'decoder_demo'
  loaded = gin_loader.load(
    [parts(tmp_path, GIN / f'models/{model}.gin', parallel, run)], bindings=['NUM_PARTITIONS=2']
  )
  program = build(loaded, Topology(1, 8))
  assert program.layout.mesh.shape['model'] == 2


# Sizes of published models are in tests/models/test_published_sizes.py.
@by_name('model', [path for path in PARTS['models'] if path.stem.startswith('decoder')])
def test_model_files_state_their_parameter_count(tmp_path, model):
  loaded = gin_loader.load(
    [parts(tmp_path, model, GIN / 'parallel/dp.gin', GIN / 'runs/pretrain.gin')]
  )
  count = re.search(r'([\d,]{6,}) parameters', header(model))
  assert count and count[1] == f'{build(loaded, Topology(1, 8)).num_params:,}'


@pytest.mark.parametrize(
  'overrides, count',
  [
    ([], 134_307_072),
    (['TIED_LOGITS=True'], 109_632_768),
    (['TIED_LOGITS=True', 'RELATIVE_BIAS=shared'], 109_628_544),
  ],
)
def test_decoder_base_has_the_three_published_parameter_counts(overrides, count):
  loaded = load(GIN / 'examples/tiny_gpu_single.gin', *overrides)
  assert build(loaded, Topology(1, 1)).num_params == count
  assert f'{count:,}' in header(GIN / 'models/decoder_base.gin')
  assert all(macro.split('=')[0] in header(GIN / 'models/decoder_base.gin') for macro in overrides)


@by_name('path', EXAMPLES)
def test_resolved_configuration_of_examples_is_the_golden_one(path, golden):
  golden(f'configs/{path.stem}.gin', load(path).provenance.config)


@by_name('path', EXAMPLES)
def test_golden_configurations_give_the_same_run(path):
  loaded = load(path)
  again = gin_loader.load([str(ROOT / f'tests/golden/configs/{path.stem}.gin')])
  assert again.provenance.config == loaded.provenance.config


@by_name('path', EXAMPLES)
def test_shardings_of_examples_are_the_golden_ones(path, golden):
  golden(f'shardings/{path.stem}.json', shardings(example(path)))


def test_shardings_of_decoder_base_over_fsdp_and_model_are_the_golden_ones(tmp_path, golden):
  loaded = gin_loader.load(
    [
      parts(
        tmp_path,
        GIN / 'models/decoder_base.gin',
        GIN / 'parallel/fsdp.gin',
        GIN / 'runs/pretrain.gin',
      )
    ],
    bindings=['NUM_PARTITIONS=2'],
  )
  golden('shardings/decoder_base.fsdp4_model2.json', shardings(build(loaded, Topology(1, 8))))


# Layouts by what they split.
LAYOUTS = [path.stem for path in PARTS['parallel'] if path.stem != 'ep']
OF_FAMILY = {
  'bert_base': ['VOCAB_SIZE=30720', "TASK_FEATURE_LENGTHS={'inputs': 64}", 'PACK=False'],
  'gpt2_small': ['VOCAB_SIZE=50304'],
  't5_1_1_small': ["TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 64}"],
}


# The first model under every layout, and every model under the first layout, are in `make test`.
MODELS = [
  't5_1_1_small',
  'decoder_base',
  'decoder_demo',
  'bert_base',
  'gpt2_small',
  'llama3_2_1b',
  'gemma2_2b',
  'qwen3_0_6b',
]


def test_shardings_of_experts_are_the_golden_ones(tmp_path, golden):
  check_shardings(tmp_path, golden, 'decoder_moe_demo', 'ep')


@pairs('model, parallel', MODELS, LAYOUTS)
def test_shardings_of_models_under_every_layout_are_the_golden_ones(
  tmp_path, golden, model, parallel
):
  check_shardings(tmp_path, golden, model, parallel)


def check_shardings(tmp_path, golden, model, parallel):
  model, parallel = GIN / f'models/{model}.gin', GIN / f'parallel/{parallel}.gin'
  more = list(OF_FAMILY.get(model.stem, ()))
  if parallel.stem in ('tp', 'tp_sp'):
    more += [f'NUM_PARTITIONS={2 if model.stem == "t5_1_1_small" else 4}']  # of 4, 6, 12 heads
  if parallel.stem in ('pp', '3d') and model.stem == 't5_1_1_small':
    more += ["Partitioner.pipeline_schedule='gpipe'"]  # 1f1b takes one stack of layers
  loaded = gin_loader.load(
    [parts(tmp_path, model, parallel, GIN / 'runs/pretrain.gin')], bindings=more
  )
  topology = Topology(2, 4) if parallel.stem == 'hsdp' else Topology(1, 8)
  program = build(loaded, topology)
  golden(f'shardings/{model.stem}.{parallel.stem}.json', shardings(program, with_state=True))
