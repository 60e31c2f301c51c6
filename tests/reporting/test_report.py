"""The report of runs: complete, self-contained, honest about damage; also in a real browser."""

import json
import pathlib

import pytest

from t5x_gpu import report
from t5x_gpu.errors import ConfigError
from t5x_gpu.metrics.goodput import GOODPUT
from t5x_gpu.reporting.run_record import read_run, read_runs
from t5x_gpu.runtime.cluster import interruptions
from t5x_gpu.runtime.cluster.interruptions import Interruption
from tests.messages import raises
from tests.reporting.browser import needs_browser, open_page
from tests.reporting.pages import Page
from tests.reporting.runs import START, write_run

SECTIONS = [
  'Loss',
  'Goodput',
  'Progress and restarts',
  'Speed',
  'Evaluations',
  'Data',
  'Configuration',
  'Samples',
]
GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'from_30213db'


def written(*folders, out) -> Page:
  assert report.main([*map(str, folders), f'--out={out}']) == 0
  page = Page(out.read_text('utf-8'))
  page.check()
  return page


def test_a_report_has_every_section_and_every_number(tmp_path):
  page = written(write_run(tmp_path / 'a'), out=tmp_path / 'a.html')
  assert page.headings == SECTIONS
  for text in (
    'done · 40 of 40 steps · 8 x NVIDIA H100',
    'training loss2.074',
    'goodput43%of 0:15:30',
    'restarts14 steps trained again',
    'tokens/s5,040',
    'goodput 43% of 0:15:30 (2 starts): downtime 32%, compile 13%, init 6%, lost 4%, save 1%.',
    'last checkpoint40',
    '75.0%',
    'LEARNING_RATE0.001my.gin:30.01 (default)',
    "Step 40, prompt '<b>def', temperature 0.7<b>def f(): pass",
    '\ntraining: 2.0743',
    'restart from step 20',
  ):
    assert text in page.text, text


def test_several_runs_show_their_differences_and_origins(tmp_path):
  a = write_run(tmp_path / 'x' / 'a')
  b = write_run(tmp_path / 'x' / 'b', learning_rate='0.5')
  page = written(a, b, out=tmp_path / 'ab.html')
  assert page.headings == ['Comparison', *SECTIONS]
  assert ('i', {'class': 'key dashed b1'}) in page.tags and '.key.dashed{' in page.source
  start = page.text.index('Values that differ')
  table = page.text[start : page.text.index('Overridden values')]
  assert 'LEARNING_RATE0.001my.gin:30.5my.gin:3' in table
  assert 'MODEL_DIR' not in table and 'schedules.factor' not in table
  assert [run.name for run in read_runs([str(a), str(b)])] == ['a', 'b']
  assert 'runs' not in [r.name for r in read_runs([str(a), str(a.parent / '..' / 'x' / 'b')])]


def test_runs_whose_folders_have_the_same_name_are_both_shown(tmp_path):
  folders = [write_run(tmp_path / parent / 'a') for parent in ('x', 'y')]
  page = written(*folders, out=tmp_path / 'ab.html')
  assert [run.name for run in read_runs(list(map(str, folders)))] == ['x/a', 'y/a']
  for name in ('x/a', 'y/a'):
    assert f'{name}done40' in page.text  # the comparison
    assert f'{name}: goodput' in page.text
    assert f'\n{name}, evaluation: 2.1743' in page.text  # a curve


@pytest.mark.parametrize('again', ['runs/a', 'runs/a/', 'runs/b/../a', 'link'])
def test_a_run_that_is_named_twice_is_refused(tmp_path, monkeypatch, again):
  monkeypatch.chdir(tmp_path)
  for name in ('a', 'b'):
    write_run(tmp_path / 'runs' / name)
  (tmp_path / 'link').symlink_to('runs/a')
  with raises(ConfigError) as e:
    report.main(['runs/a', 'runs/b', again, '--out=ab.html'])
  assert e.match('Name each MODEL_DIR once') and e.value.docs == 'report.md'
  assert not (tmp_path / 'ab.html').exists()


def test_a_run_in_object_storage_that_is_named_twice_is_refused():
  with raises(ConfigError):
    read_runs(['s3://b/a', 's3://b/a/'])


def test_the_comparison_counts_devices_which_may_be_cpus(tmp_path):
  folders = [write_run(tmp_path / name) for name in 'ab']
  page = written(*folders, out=tmp_path / 'ab.html')
  assert 'wall timedevices' in page.text and 'GPUs' not in page.text


def test_a_run_from_before_the_ledger_has_a_report(tmp_path):
  page = written(GOLDEN / 'prepared_run', out=tmp_path / 'old.html')
  assert [h for h in SECTIONS if h in page.headings] == [
    'Loss', 'Goodput', 'Speed', 'Evaluations', 'Data', 'Configuration'
  ]  # fmt: skip
  assert 'an earlier version of t5x_gpu trained it.' in page.text
  assert "MIXTURE_OR_TASK_NAME'prepared:tokens'prepared.gin:21%gin.REQUIRED" in page.text


def test_damaged_lines_are_skipped_counted_and_named(tmp_path, capsys):
  folder = write_run(tmp_path / 'a')
  with open(folder / 'metrics.jsonl', 'ab') as f:
    f.write(b'\xff\xfe\n{"step": "x"}\n{"step": 41, "train/lo')
  with open(folder / GOODPUT, 'ab') as f:
    f.write(b'{"run": "abc", "at": 17')
  (folder / 'config_origins.txt').write_bytes(b'\xff\xff')
  (folder / 'checkpoint_40' / 'manifest' / 'metadata').write_text('{')
  page = written(folder, out=tmp_path / 'a.html')
  out = capsys.readouterr().out
  lines = len((folder / GOODPUT).read_bytes().splitlines())
  for text in (
    '3 lines of metrics.jsonl are damaged and were skipped: 41-43.',
    f'Line {lines} of goodput.jsonl is damaged and was skipped.',
    'config_origins.txt cannot be read',
    'checkpoint_40 has no readable manifest',
  ):
    assert text in page.text and text in out, text
  assert 'training loss2.074' in page.text


def test_profiles_of_the_run_are_shown(tmp_path):
  folder = write_run(tmp_path / 'a')
  profile = {
    'first_step': 10,
    'last_step': 12,
    'reason': 'PROFILE_STEPS',
    'seconds_per_step': 0.5,
    'parts': {
      'compute': 0.4,
      'exposed_communication': 0.06,
      'idle': 0.04,
      'input_wait': 0.001,
      'save': 0.2,
      'eval': 0.03,
    },
    'operations': [
      {'name': 'fusion.7', 'kind': 'fusion', 'op_name': 'mlp', 'seconds': 0.2, 'share': 0.4}
    ],
    'collectives': [
      {'kind': 'all-reduce', 'axes': ['data'], 'seconds': 0.05, 'bytes': 4e6, 'gb_per_second': 80.0}
    ],
    'ranks': [
      {'rank': r, 'host': f'n{r}', 'compute': c, 'exposed_communication': 0.46 - c, 'idle': 0.04}
      for r, c in ((0, 0.3), (1, 0.4))
    ],
  }
  of_another = {**profile, 'process_index': 1, 'host': 'n1', 'seconds_per_step': 0.6}
  of_another['operations'] = []
  files = {'10': json.dumps(profile), '10_process_1': json.dumps(of_another), '20': '{"first_'}
  for name, text in files.items():
    (folder / 'profiles' / name).mkdir(parents=True)
    (folder / 'profiles' / name / 'anatomy.json').write_text(text)
  page = written(folder, out=tmp_path / 'a.html')
  assert 'Anatomy of a step' in page.headings
  for text in (
    'steps 10-12 (PROFILE_STEPS)500 ms',
    'steps 10-12 (PROFILE_STEPS), process 1 on n1500 ms',
    'Between steps, on average since the start, steps 10-12 (PROFILE_STEPS)',
    'save200.000evaluation30.000',
    'Processes by device time, steps 10-12 (PROFILE_STEPS)',
    '1n1400.00060.00040.0000n0300.000160.00040.000',
    'fusion.7fusion200.00040.0%mlp',
    'all-reducedata50.0004.0080',
    'profiles/20/anatomy.json cannot be read',
  ):
    assert text in page.text, text


def test_a_metric_with_one_evaluation_is_only_in_the_table(tmp_path):
  folder, figures = write_run(tmp_path / 'a'), []
  for step in (20, 40):
    with open(folder / 'metrics.jsonl', 'a') as f:
      f.write(json.dumps({'step': step, 'eval/accuracy': 0.5}) + '\n')
    page = written(folder, out=tmp_path / 'a.html')
    assert 'eval/accuracy' in page.text
    figures.append([tag for tag, _ in page.tags].count('figure'))
  assert figures[1] == figures[0] + 1


def test_the_wall_time_of_a_short_run_is_in_minutes(tmp_path):
  text = written(write_run(tmp_path / 'a'), out=tmp_path / 'a.html').text
  assert 'minutes' in text and 'hours' not in text
  long = write_run(tmp_path / 'b', starts=((0, 2000),))
  assert 'hours' in written(long, out=tmp_path / 'b.html').text


def test_a_run_that_only_has_a_ledger_or_nothing_yet(tmp_path):
  folder = write_run(tmp_path / 'a')
  (folder / 'metrics.jsonl').unlink()
  page = written(folder, out=tmp_path / 'a.html')
  assert 'Loss' not in page.headings and 'Goodput' in page.headings


def test_a_run_that_lost_its_metrics_says_so_and_has_the_step_of_its_checkpoint(tmp_path, capsys):
  a, b = write_run(tmp_path / 'a'), write_run(tmp_path / 'b', with_ledger=False)
  (b / 'metrics.jsonl').unlink()
  page = written(a, b, out=tmp_path / 'ab.html')
  for text in (page.text, capsys.readouterr().out):
    assert 'b: There is no metrics.jsonl, so losses and speed are not shown.' in text
    assert 'copy it into the folder' in text
  assert 'b40' in page.text  # its row of the comparison: no state, step 40
  assert 'b has no goodput.jsonl: the file was lost' in page.text


@pytest.mark.parametrize(
  'name, fix',
  [
    ('runs/demoo', 'Folders in'),
    ('rnus/demo', 'Folders in'),
    ('runs', 'Its subfolders are runs: .*runs/demo'),
    ('empty', 'a run writes metrics.jsonl there'),
    ('runs/demo/metrics.jsonl', 'Name its folder: .*runs/demo'),
  ],
)
def test_a_folder_without_a_run_is_an_error_that_names_the_runs(tmp_path, name, fix):
  write_run(tmp_path / 'runs' / 'demo', with_config=False)
  (tmp_path / 'empty').mkdir()
  with raises(ConfigError) as e:
    read_run(tmp_path / name)
  assert e.match(fix) and e.value.docs == 'report.md'


def test_the_command_names_what_is_missing(tmp_path):
  with raises(ConfigError):
    report.main([])
  with raises(ConfigError):
    report.main([str(tmp_path), f'--out={tmp_path}/nowhere/a.html'])
  assert not list(tmp_path.iterdir())


@pytest.mark.process
@needs_browser
@pytest.mark.parametrize('width', [390, 1200])
def test_a_browser_shows_it_without_errors_and_without_scrolling_sideways(tmp_path, width):
  page = tmp_path / 'a.html'
  report.main([str(write_run(tmp_path / 'a')), f'--out={page}'])
  shown, curves = open_page(page, width=width, count='svg path.line')
  assert shown <= width and curves >= 4


@needs_browser
def test_a_browser_test_finds_requests(tmp_path):
  page = tmp_path / 'a.html'
  page.write_text('<img src="http://127.0.0.1:9/x.png">')
  with pytest.raises(AssertionError, match='http://127.0.0.1:9/x.png'):
    open_page(page, width=400, count='img')


def test_the_command_and_the_page_show_what_interrupted_a_run_and_its_cost(tmp_path, capsys):
  crash = Interruption(
    1,
    interruptions.CRASHED,
    'process 3 on host 1 (gpu-002) failed (exit code 1)',
    24,
    START + 345,
    START + 335,
    'OSError: no\nspace',
  )
  page = written(write_run(tmp_path / 'a', interrupted=[crash]), out=tmp_path / 'a.html')
  printed = capsys.readouterr().out
  for words in (
    '1 interruption cost 0:07:10 of 0:15:30:',
    '24               4         40.0        10.0      380.0   430.0  46.2%',
    'process 3 on host 1 (gpu-002) failed (exit code 1): OSError: no space',
    'process crashed       1               4   430.0  46.2%',
  ):
    assert words in printed, printed
  assert 'process 3 on host 1 (gpu-002) failed (exit code 1): OSError: no' in page.text
  assert 'Interruptions by kind' in page.text and 'process crashed14430.046.2%' in page.text


def test_a_run_that_nothing_interrupted_has_no_table(tmp_path, capsys):
  page = written(write_run(tmp_path / 'a', starts=((0, 40),)), out=tmp_path / 'a.html')
  assert 'nterruption' not in capsys.readouterr().out + page.text
