"""Other runs hide as much as the compiled step; the run itself keeps its prediction."""

import dataclasses

import jax
import pytest

from t5x_gpu import cli, plan
from t5x_gpu.errors import ConfigError
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.planning import what_if
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.gpu_targets import find_target
from t5x_gpu.tools.planning.prediction import COMPILED, Planner
from tests.helpers_train import TINY_GIN

TOPOLOGY = Topology(1, 4)
PLANNER = Planner(find_target('h100'), Assumptions(), jax.devices())


@pytest.fixture
def configured(tmp_path):
  file = tmp_path / 'tiny.gin'
  file.write_text(TINY_GIN)
  args = cli.parse_args('plan', '', [f'--gin_file={file}'], extra=plan._add_flags)
  return lambda more, gpu=PLANNER.gpu: plan._configured(args, more)


def as_compiled(config, share):
  """Returns the prediction of a run whose schedule hides `share` of all bytes."""
  p = PLANNER.by_formula(config, TOPOLOGY)
  collectives = tuple(
    dataclasses.replace(
      c, hidden_share=share, from_schedule=True, exposed_seconds=c.seconds * (1 - share)
    )
    for c in p.time.collectives
  )
  time = dataclasses.replace(p.time, collectives=collectives)
  return dataclasses.replace(p, time=time, source=COMPILED)


@pytest.mark.parametrize('share', [0.0, 0.3])
def test_other_runs_hide_as_much_as_the_compiled_step(configured, share):
  config, _ = configured(())
  given = as_compiled(config, share)
  got = what_if.scaled(config, TOPOLOGY, PLANNER, given, [2, 4, 8])
  assert got[4] is given
  for number in (2, 8):
    assert [c.hidden_share for c in got[number].time.collectives] == pytest.approx(
      [share] * len(got[number].time.collectives)
    )
  planner = dataclasses.replace(PLANNER, assumed=what_if.with_overlap_of(given, Assumptions()))
  again = planner.by_formula(config, TOPOLOGY)
  assert again.seconds_per_step == pytest.approx(given.seconds_per_step, rel=1e-6)
  assert 'overlap of the compiled step' in what_if.how(given)
  shares = got[8].assumed.effective(PLANNER.gpu)['hidden_shares']
  assert shares.source == "XLA's schedule of the compiled step"
  assert {shares.value[c.axes[0]] for c in given.time.collectives} == {share}


def test_a_value_that_the_run_has_keeps_its_prediction(configured):
  config, _ = configured(())
  given = as_compiled(config, 0.1)
  h100 = find_target('h100')
  for name, values in (('gpu', ['h100', 'b200']), ('BATCH_SIZE', ['8', '16'])):
    runs = what_if.variants(name, values, configured, h100)
    got = what_if.changed(runs, TOPOLOGY, PLANNER, (config, given))
    same = 'h100' if name == 'gpu' else str(config.train_dataset_cfg.batch_size)
    assert got.pop(same) is given
    [other] = got.values()
    assert all(c.hidden_share == pytest.approx(0.1) for c in other.time.collectives)


def test_an_assumption_changes_the_prediction(configured):
  config, assumed = configured(())
  given = as_compiled(config, 0.1)
  name, kept = 'Assumptions.kernel_seconds', str(assumed.kernel_seconds)
  runs = what_if.variants(name, [kept, '0.01'], configured, PLANNER.gpu)
  same, slower = what_if.changed(runs, TOPOLOGY, PLANNER, (config, given)).values()
  assert same is given
  assert slower.seconds_per_step > given.seconds_per_step
  assert all(c.hidden_share == pytest.approx(0.1) for c in slower.time.collectives)


def test_no_bar_is_longer_than_a_whole_one(configured):
  p = PLANNER.by_formula(configured(())[0], TOPOLOGY)
  faster = dataclasses.replace(p, num_gpus=2)
  text = what_if.scale_table({4: p, 2: faster})
  assert '200%' in text and max(line.count('#') for line in text.splitlines()) == 30


@pytest.mark.parametrize(
  'text, expected',
  [
    ('gpu=h100, b200', ['h100', 'b200']),
    ("LENGTHS={'a': 2, 'b': 1},{'a': [1, (2, 3)]}", ["{'a': 2, 'b': 1}", "{'a': [1, (2, 3)]}"]),
    ("NAMES='a,b',[1,2],(3,4)", ["'a,b'", '[1,2]', '(3,4)']),
    ('NAMES="it\'s [", "\\", ["', ['"it\'s ["', '"\\", ["']),
  ],
)
def test_a_value_may_have_commas(text, expected):
  assert what_if.name_and_values(text)[1] == expected


@pytest.mark.parametrize('text', ['BATCH_SIZE', 'BATCH_SIZE=', 'BATCH_SIZE=8,', '=8'])
def test_values_that_are_missing_are_refused(text):
  with pytest.raises(ConfigError, match='is not NAME=VALUE,VALUE'):
    what_if.name_and_values(text)


def test_each_gpu_takes_its_own_assumptions(configured):
  def of_gpu(more, gpu):
    run, assumed = configured(more)
    return run, dataclasses.replace(assumed, gemm_efficiency=0.3 if gpu.name == 'h100' else None)

  runs = what_if.variants('gpu', ['b200', 'h100'], of_gpu, PLANNER.gpu)
  assert [assumed.gemm_efficiency for _, _, assumed in runs.values()] == [None, 0.3]


def test_small_memory_is_not_zero(configured):
  p = PLANNER.by_formula(configured(())[0], TOPOLOGY)
  assert p.memory.needed_bytes < 2**25
  shown = f'{p.memory.needed_bytes / 2**20:.1f} MiB'
  assert shown in what_if.scale_table({4: p}) and shown in what_if.what_if_table('x', {'1': p})
