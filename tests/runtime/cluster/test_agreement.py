"""Processes compare facts: a digest first, names only where digests differ."""

import importlib.metadata
import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys
import threading
import types

import pytest

from t5x_gpu.runtime.cluster import agreement, members

ROOT = pathlib.Path(__file__).parents[3]


def compare(facts: list[dict], **options) -> tuple[list[str], int]:
  """Returns the lines, which must be the same for all processes, and the bytes that travelled."""
  count = len(facts)
  barrier, values, sent = threading.Barrier(count), [None] * count, []
  lines: list = [None] * count

  def run(index: int) -> None:
    def exchange(value):
      values[index] = json.dumps(value)
      sent.append(len(values[index]))
      barrier.wait(60)
      answer = [json.loads(text) for text in values]
      barrier.wait(60)
      return answer

    lines[index] = agreement.differences(
      facts[index],
      digests=[agreement.digest(f) for f in facts],
      process_index=index,
      hostnames=[f'node{i // 2}' for i in range(count)],
      exchange=exchange,
      **options,
    )

  threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert all(other == lines[0] for other in lines)
  return lines[0], sum(sent)


def fact(value: str) -> tuple[str, str]:
  return value, f'/path ({value})'


def test_equal_facts_send_nothing():
  assert compare([{'a': fact('1')}] * 3) == ([], 0)
  # What is shown is not compared: the same file in another folder.
  assert compare([{'a': ('1', '/x')}, {'a': ('1', '/y')}]) == ([], 0)


def test_the_fact_that_differs_is_named_with_its_hosts():
  facts = [{'a': fact('1'), 'b': fact('2')} for _ in range(4)]
  facts[2] = facts[3] = {'a': fact('1'), 'b': fact('3')}
  lines, _ = compare(facts)
  assert lines == [
    'b: /path (2) on process 0 (node0) and 1 more, /path (3) on process 2 (node1) and 1 more'
  ]


@pytest.mark.parametrize(
  'only_common, expected',
  [(True, []), (False, ['b: /path (2) on process 0 (node0), nothing on process 1 (node0)'])],
)
def test_a_fact_of_some_processes_only(only_common, expected):
  lines, _ = compare([{'a': fact('1'), 'b': fact('2')}, {'a': fact('1')}], only_common=only_common)
  assert lines == expected


def test_facts_that_one_process_lacks_hide_no_difference():
  facts = [{'a': fact(str(i)), **{f'{i}/{n}': fact('1') for n in range(300)}} for i in range(2)]
  lines, _ = compare(facts, only_common=True)
  assert lines == ['a: /path (0) on process 0 (node0), /path (1) on process 1 (node0)']
  facts[1]['a'] = facts[0]['a']
  assert compare(facts, only_common=True)[0] == []


def test_one_of_many_facts_is_found_without_sending_them_all():
  facts = [{f'data/{i:06}.txt': fact('1') for i in range(20_000)} for _ in range(3)]
  facts[1]['data/004711.txt'] = fact('2')
  lines, num_bytes = compare(facts)
  assert len(lines) == 1 and lines[0].startswith('data/004711.txt: ')
  assert num_bytes < 100_000  # all of them are 2 x 800 kB


def test_many_differences_are_cut_short():
  lines, _ = compare([{str(i): fact(str(seed)) for i in range(500)} for seed in range(2)])
  assert len(lines) == 9 and lines[-1] == '... and more.'


def test_facts_of_code_are_sources_modules_and_versions_without_installed_packages():
  facts = members.code_facts()
  assert 't5x_gpu/runtime/cluster/members.py' in facts and 't5x_gpu/train.py' in facts
  assert f'module {__name__}' in facts  # neither installed nor of the standard library
  assert not any(name.startswith(('module jax', 'module json', 'module t5x_gpu')) for name in facts)
  assert facts['version of jax'][0] == importlib.metadata.version('jax')
  has_tokamax = importlib.util.find_spec('tokamax') is not None
  assert (facts['version of tokamax'][0] != 'not installed') == has_tokamax


def test_modules_that_only_a_link_installs_are_compared(tmp_path, monkeypatch):
  for folder in ('mine', 'site-packages/theirs'):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / 'layers.py').write_text('')
  (tmp_path / 'site-packages' / 'linked').symlink_to(tmp_path / 'mine')
  for name in ('theirs', 'linked'):
    module = types.ModuleType(name)
    module.__file__ = str(tmp_path / 'site-packages' / name / 'layers.py')
    monkeypatch.setitem(sys.modules, name, module)
  found = members.user_modules()
  assert 'module theirs' not in found
  assert str(tmp_path / 'mine' / 'layers.py') in found['module linked'][1]


def test_a_changed_source_is_named_and_the_same_sources_elsewhere_are_not(tmp_path):
  def facts_of(root: pathlib.Path) -> dict:
    text = (
      'import json, sys; sys.path.insert(0, sys.argv[1]); '
      'from t5x_gpu.runtime.cluster import members; print(json.dumps(members.code_facts()))'
    )
    done = subprocess.run(
      [sys.executable, '-c', text, str(root)],
      cwd=tmp_path,
      text=True,
      capture_output=True,
      check=True,
      env={'PATH': '/usr/bin:/bin'},
    )
    return json.loads(done.stdout)

  shutil.copytree(ROOT / 't5x_gpu', tmp_path / 't5x_gpu')
  here, there = facts_of(ROOT), facts_of(tmp_path)
  assert compare([here, there], only_common=True) == ([], 0)
  schedules = tmp_path / 't5x_gpu' / 'training' / 'schedules.py'
  schedules.write_text(schedules.read_text().replace('0.5', '0.25', 1) + '\n')
  lines, _ = compare([here, facts_of(tmp_path)], only_common=True)
  (line,) = lines
  assert line.startswith('t5x_gpu/training/schedules.py: ') and str(schedules) in line
