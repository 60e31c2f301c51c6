"""Records of T5X's gin files are what gin itself passes to functions of the same names."""

import pathlib

import gin
import hypothesis
import hypothesis.strategies as st
import pytest
from gin import config as gin_config

from t5x_gpu.config import gin_text
from t5x_gpu.config.t5x import records
from t5x_gpu.config.t5x.records import Record, Unset
from t5x_gpu.errors import ConfigError

FILES = pathlib.Path(__file__).parent / 'files'
# Full name -> parameters.
NAMES = {
  't5x.main.train': ('model', 'data', 'eval_data', 'steps'),
  't5x.models.Model': ('config', 'loss', 'optimizer'),
  't5x.models.Config': ('size', 'names'),
  't5x.utils.RowsConfig': ('seed', 'name', 'lengths'),
  't5x.optim.Adam': ('rate', 'decay'),
}


class Passed(dict):
  """What a registered function got; `name` is its full name."""

  def __init__(self, name, arguments):
    super().__init__(arguments)
    self.name = name


def register(name, parameters):
  module, _, short = name.rpartition('.')
  arguments = ', '.join(f'{p}=None' for p in parameters)
  body = f'return Passed({name!r}, {{k: v for k, v in locals().items() if v is not None}})'
  space = {'Passed': Passed}
  exec(f'def {short}({arguments}):\n  {body}', space)
  return gin.external_configurable(space[short], name=short, module=module)


@pytest.fixture(scope='module')
def functions():
  before = {s: gin_config._REGISTRY[s] for s, _ in gin_config._REGISTRY.items()}
  made = {name: register(name, parameters) for name, parameters in NAMES.items()}
  yield made
  gin.clear_config()
  for selector, configurable in list(gin_config._REGISTRY.items()):
    if selector not in before:
      gin_config._REGISTRY.pop(selector)
      gin_config._INVERSE_REGISTRY.pop(configurable.wrapped, None)


def plain(value):
  """Returns records, or what gin passed, as nested dicts; functions as their names."""
  if isinstance(value, Record):
    if not value.evaluated:
      return plain(Record(value.name, value.arguments, value.scope))
    given = {k: plain(v.value) for k, v in value.arguments.items()}
    return {'': value.name, **{k: v for k, v in given.items() if v is not None}}
  if isinstance(value, Passed):
    return {'': value.name, **{k: plain(v) for k, v in value.items()}}
  if callable(value):
    return plain(value())
  if isinstance(value, dict):
    return {k: plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(v) for v in value]
  return value


LEVELS = list(NAMES)  # a reference leads to a later name, so there are no circles
MACROS = ('BASE', 'OTHER', 'THIRD')
LITERALS = st.sampled_from(["'text'", '3', '0.5', "{'inputs': 8}", '(1, 2)', '[1]', 'True'])


SCOPES = ('', 'a', 'a/b', 'b', 'BASE')


def value(draw, after):
  """Returns a literal, a macro, or a reference to a name after the given place of LEVELS."""
  kind = draw(st.integers(0, 9))
  if kind < 6 and after + 1 < len(LEVELS):
    name = draw(st.sampled_from(LEVELS[after + 1 :]))
    short = name.rpartition('.')[2] if draw(st.booleans()) else name.removeprefix('t5x.')
    scope = draw(st.sampled_from(('', '', 'a/', 'a/b/', 'b/')))
    return f'@{scope}{short}{draw(st.sampled_from(("()", "()", "")))}'
  if kind == 7:
    return f'[{draw(LITERALS)}, {draw(LITERALS)}]'
  return draw(LITERALS) if kind == 8 else f'%{draw(st.sampled_from(MACROS))}'


@st.composite
def files(draw):
  """Bindings of every parameter in some scopes, in any order; BASE is a reference."""
  lines = [f'OTHER = {draw(LITERALS)}', f'THIRD = {draw(LITERALS)}', 'BASE = @optim.Adam()']
  for place, (name, parameters) in enumerate(NAMES.items()):
    for parameter in parameters:
      for scope in draw(st.lists(st.sampled_from(SCOPES), min_size=1, max_size=3)):
        found = value(draw, place)
        if place == len(LEVELS) - 1:  # BASE leads here
          found = found.replace('%BASE', '%OTHER')
        prefix = f'{scope}/' if scope else ''
        lines.append(f'{prefix}{name.removeprefix("t5x.")}.{parameter} = {found}')
  return '\n'.join(draw(st.permutations(lines))) + '\n'


@hypothesis.settings(max_examples=60, deadline=None, phases=(hypothesis.Phase.generate,))
@hypothesis.given(text=files())
def test_records_are_what_gin_passes(functions, tmp_path_factory, text):
  path = tmp_path_factory.mktemp('gin') / 'a.gin'
  path.write_text(text)
  gin.clear_config()
  gin.parse_config(text)
  found = records.read([str(path)], known=NAMES).call(LEVELS[0])
  assert plain(found) == plain(functions[LEVELS[0]]())


def test_last_of_two_bindings_wins():
  found = records.read([str(FILES / 'finetune_with_beams.gin')], search_paths=[str(FILES)])
  assert found.call('__main__.train').arguments['eval_period'].value == 200


def test_value_knows_its_file_line_and_macro():
  found = records.read([str(FILES / 't5_from_scratch.gin')], search_paths=[str(FILES)])
  steps = found.call('__main__.train').arguments['total_steps']
  assert (steps.value, steps.macro) == (20, 'TRAIN_STEPS')
  assert steps.origin.endswith('runs/pretrain.gin:28')
  assert found.macro_origin('TRAIN_STEPS').endswith('t5_from_scratch.gin:6')


def test_macro_that_nothing_sets_is_unset():
  found = records.read([str(FILES / 'runs/pretrain.gin')], search_paths=[str(FILES)])
  run = found.call('__main__.train')
  assert run.arguments['model'].value == Unset('MODEL')
  assert run.arguments['model_dir'].value == Unset('MODEL_DIR')


def test_circle_of_macros_is_named(tmp_path):
  path = tmp_path / 'a.gin'
  path.write_text('A = %B\nB = %A\nt5x.main.train.steps = %A\n')
  with pytest.raises(ConfigError) as e:
    records.read([str(path)], known=NAMES).call('t5x.main.train')
  assert 'leads to itself' in e.value.what


def test_circle_of_includes_is_named(tmp_path):
  (tmp_path / 'a.gin').write_text("include 'b.gin'\n")
  (tmp_path / 'b.gin').write_text("include 'a.gin'\n")
  with pytest.raises(ConfigError) as e:
    records.read([str(tmp_path / 'a.gin')])
  assert 'circle' in e.value.what


def test_short_name_with_two_meanings_is_refused(tmp_path):
  path = tmp_path / 'a.gin'
  path.write_text(
    'from __gin__ import dynamic_registration\n'
    'from t5x.one import network\nfrom t5x.two import network as other\n'
    "network.Config.size = 1\nother.Config.size = 2\ninclude 'b.gin'\n"
  )
  (tmp_path / 'b.gin').write_text('Config.size = 3\n')
  with pytest.raises(ConfigError) as e:
    records.read([str(path)])
  assert 't5x.one.network.Config or t5x.two.network.Config' in e.value.problems[0].what


def test_command_line_binds_names_of_the_files_and_leaves_ours():
  found = records.read(
    [str(FILES / 't5_from_scratch.gin')],
    search_paths=[str(FILES)],
    bindings=['TRAIN_STEPS=7', 'DatasetConfig.pack=False', 'WatchdogConfig.x=1', 'NO_MACRO=2'],
  )
  assert found.call('__main__.train').arguments['total_steps'].value == 7
  assert found.call('t5x.utils.DatasetConfig').arguments['pack'].value is False
  assert found.ours == ('WatchdogConfig.x=1', 'NO_MACRO=2')


def test_statements_that_gin_refuses_name_the_line(tmp_path):
  path = tmp_path / 'a.gin'
  path.write_text('A = 1\nB = not gin\n')
  with pytest.raises(ConfigError) as e:
    records.read([str(path)])
  assert ':2 is not gin' in e.value.what
  assert not list(gin_text.instances(e.value.what, Record))
