"""The page of a plan: complete, self-contained, with the numbers of the prediction."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from t5x_gpu import plan
from t5x_gpu.config import gin_loader
from t5x_gpu.partitioning.mesh_sizes import resolve_mesh_sizes
from t5x_gpu.reporting.page import Section, page
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.planning import screen
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.formulas import step_time
from t5x_gpu.tools.planning.gpu_compile import CompiledMemory
from t5x_gpu.tools.planning.gpu_targets import find_target
from t5x_gpu.tools.planning.page import (
  _MEMORY_COLORS,
  _TIME_COLORS,
  MOST_HOSTS,
  mesh_drawing,
  plan_page,
)
from t5x_gpu.tools.planning.prediction import PlanConfig, predict
from t5x_gpu.training.program import build_program
from tests.helpers_train import TINY_GIN
from tests.reporting.browser import needs_browser, open_page
from tests.reporting.pages import Page

SECTIONS = ['What bounds a step', 'Memory', 'Parameters', 'Mesh', 'Traffic', 'Time', 'Assumptions']


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  """Returns (prediction, layout) of a run on two hosts with four GPUs: data 2, fsdp 2, model 2."""
  file = tmp_path_factory.mktemp('gin') / 'tiny.gin'
  file.write_text(TINY_GIN)
  sizes = ['Partitioner.fsdp = 2', 'NUM_PARTITIONS = 2']
  config = gin_loader.configured(gin_loader.load([str(file)], bindings=sizes), PlanConfig)
  program = build_program(config, topology=Topology(2, 4), devices=jax.devices()[:8])
  p = predict(program, config, gpu=find_target('h100'), assumed=Assumptions())
  return p, program.layout


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """Returns (the page of a plan of two hosts, its file, what --json wrote)."""
  folder = tmp_path_factory.mktemp('plan')
  (folder / 'tiny.gin').write_text(TINY_GIN)
  out, numbers = folder / 'plan.html', folder / 'plan.json'
  flags = [
    f'--gin_file={folder / "tiny.gin"}', '--gin.Partitioner.fsdp=2', '--gin.NUM_PARTITIONS=2',
    '--hosts=2', '--dry_run', f'--html={out}',
    f'--json={numbers}',
  ]  # fmt: skip
  assert plan.main(flags) == 0
  found = Page(out.read_text('utf-8'))
  found.check()
  return found, out, json.loads(numbers.read_text())


def test_a_page_has_every_section_and_every_number(written):
  found, _, got = written
  assert found.headings == SECTIONS
  for text in (
    'Plan of tiny.gin',
    'memoryfits',
    f'per step{screen.seconds(got["seconds_per_step"])}',
    f'tokens/s{got["tokens_per_second"]:,.0f}',
    f'MFU{got["mfu"]:.1%}',
    f'to the end{screen.duration(got["days"])}',
    got['bottleneck'],
    'Nothing was compiled',
    'gradients',
    *(f'{part}{number:,}' for part, number in got['params_by_part'].items()),
    'waiting for collectives',
    step_time.NETWORK,
    *(source['source'] for source in got['assumptions'].values()),
  ):
    assert text in found.text, text


def test_bars_show_every_part_and_memory_has_the_scale_of_the_gpu(written):
  found, _, got = written
  bars = [a for t, a in found.tags if t == 'span' and a.get('title', '').startswith('parameters:')]
  share = 100 * got['memory']['components']['parameters'] / got['memory']['gpu_bytes']
  assert bars[0]['style'] == f'width:{share:.3f}%'
  parts = got['memory']['components'].items()
  for name, size in (*parts, *((t['part'], t['seconds']) for t in got['time']['parts'])):
    assert not size or any(a.get('title', '').startswith(f'{name}: ') for _, a in found.tags), name
  [line] = [a['style'] for t, a in found.tags if t == 'span' and a.get('class') == 'limit']
  pool = 100 * got['memory']['pool_bytes'] / got['memory']['gpu_bytes']
  assert line == f'left:{pool:.3f}%'


def drawn(layout):
  found = Page(page('mesh', [Section('mesh', 'Mesh', mesh_drawing(layout, ()))]))
  found.check()
  return found


@pytest.mark.parametrize('colors', [_MEMORY_COLORS, _TIME_COLORS])
def test_no_two_parts_of_a_bar_look_the_same(colors):
  assert len(set(colors.values())) == len(colors)


def test_the_mesh_shows_which_gpus_exchange_data(made):
  _, layout = made
  found = drawn(layout)
  axes = [axis for axis, size in layout.sizes.total.items() if size > 1]
  assert axes == ['data', 'fsdp', 'model']
  labels = [a['aria-label'] for t, a in found.tags if t == 'svg']
  assert len(labels) == 2 * len(axes) and labels[0].startswith('host 0: GPU 0: ')
  for place, device in np.ndenumerate(layout.mesh.devices):
    named = zip(layout.mesh.axis_names, place)
    words = ', '.join(f'{axis} {n}' for axis, n in named if axis in axes)
    host = f'host {device.id // 4}: '
    assert sum(f'GPU {device.id}: {words}' in x and x.startswith(host) for x in labels) == 3
  # Along data, which crosses the hosts, the four GPUs of a host are in four groups; along the
  # other axes, in two.
  cells = [a['class'] for t, a in found.tags if t == 'rect' and a['class'] != 'case']
  assert [len(set(cells[i : i + 4])) for i in range(0, 24, 4)] == [4, 4, 2, 2, 2, 2]
  assert cells[:4] == cells[4:8] and not set(cells[8:12]) & set(cells[12:16])
  wires = [a['class'] == 'wire used' for t, a in found.tags if 'wire' in a.get('class', '')]
  assert wires == [False, True] * 2 + [True, False] * 4, 'NVLink, network'


def test_many_hosts_are_drawn_in_part(made):
  _, layout = made
  hosts = MOST_HOSTS + 4
  sizes = resolve_mesh_sizes(Topology(hosts, 8), fsdp=8)
  found = drawn(dataclasses.replace(layout, sizes=sizes, topology=Topology(hosts, 8)))
  assert '4 more hosts continue the pattern.' in found.text
  assert sum(t == 'svg' for t, _ in found.tags) == 2 * MOST_HOSTS


def test_one_gpu_has_a_page(made):
  p, layout = made
  time = dataclasses.replace(p.time, collectives=())
  sizes = resolve_mesh_sizes(Topology(1, 1))
  found = Page(
    plan_page(
      dataclasses.replace(p, time=time, mesh={}, num_gpus=1, num_hosts=1),
      dataclasses.replace(layout, sizes=sizes, topology=Topology(1, 1)),
      title='x',
    )
  )
  found.check()
  assert found.headings == SECTIONS and screen.NO_TRAFFIC in found.text


def test_a_plan_that_does_not_fit_says_by_how_much_and_what_to_do(made):
  p, layout = made
  compiled = CompiledMemory(argument_bytes=2**30, output_bytes=0, temporary_bytes=200 * 2**30)
  p = dataclasses.replace(p, memory=dataclasses.replace(p.memory, compiled=compiled))
  found = Page(plan_page(p, layout, title='x', advice='1. Take <less>'))
  found.check()
  assert 'memorydoes not fit' in found.text and '1. Take <less>' in found.text
  assert 'DOES NOT FIT' in found.text and 'as compiled201.00 GiB' in found.text


@pytest.mark.process
@needs_browser
@pytest.mark.parametrize('width', [390, 1200])
def test_a_browser_shows_it_without_errors_and_without_scrolling_sideways(written, width):
  _, out, _ = written
  shown, hosts = open_page(out, width=width, count='svg.host')
  assert shown <= width and hosts == 2 * 3  # of two hosts, along data, fsdp and model
