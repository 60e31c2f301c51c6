"""`plan --search`: the variants that it compares and compiles, and the gin file of the best."""

import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from t5x_gpu import cli, plan
from t5x_gpu.errors import ConfigError
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.devices import topology_of
from t5x_gpu.tools.planning.remedies import SIZES
from t5x_gpu.tools.planning.search import search as search_module
from t5x_gpu.tools.planning.search import variants, workers
from t5x_gpu.tools.planning.search.search import SearchState, gin_text, search_text
from t5x_gpu.tools.planning.search.variants import Variant
from t5x_gpu.tools.planning.search.workers import Compiled, CompiledPart, Score, SearchTask, Worker
from tests.aot.cases import Case
from tests.helpers_train import TINY_GIN
from tests.messages import raises

GIB = 2**30


def parsed(path, *flags):
  return cli.parse_args('plan', '', [f'--gin_file={path}', *flags], extra=plan._add_flags)


@pytest.fixture
def gin_file(tmp_path):
  path = tmp_path / 'tiny.gin'
  path.write_text(TINY_GIN)
  return path


@pytest.fixture
def config(gin_file):
  return plan._configured(parsed(gin_file))[0]


def score(seconds, needed=10, *, least=0.8, dtype='bfloat16', family='a', **more):
  layout = (('data', 1), ('fsdp', len(family)))
  variant = Variant(layout, remat_policy='dots', dtype=dtype, **more)
  return Score(
    variant, layout, seconds, least * seconds, int(needed * GIB), 100 * GIB, (family,), 1e5, 0.4
  )


def compiled_as(seconds, needed=10, **more):
  return Compiled(seconds, int(needed * GIB), 100 * GIB, **more)


def test_layouts_use_all_devices_and_keep_what_talks_most_inside_a_host(config):
  topology = topology_of(gpus=16, gpus_per_host=4)
  found = list(variants.layouts(config, topology))
  assert len(found) == len(set(found))
  assert {dict(layout).get('num_partitions', 1) for layout in found} == {1, 2, 4}
  assert {dict(layout).get('stage', 1) for layout in found} == {1, 2, 4}
  assert not any('context' in dict(layout) for layout in found), 'rows of 32 are too short'
  for layout in found:
    sizes = Variant(layout).applied(config).partitioner.mesh_sizes(topology)
    assert math.prod(sizes.total.values()) == 16
    assert sizes.dcn['model'] == 1


def test_pipelines_split_layers_into_every_number_of_blocks_that_divides_them():
  config = Case(model='llama3_70b', layout='hsdp', batch=(128, 8192)).config()
  found = [dict(layout) for layout in variants.layouts(config, Topology(8, 8))]
  record = dict(stage=8, data=2, num_partitions=4, pipeline_repeats=5)  # Megatron-Bridge's
  assert any(record.items() <= layout.items() for layout in found)
  repeats = {(s['stage'], s.get('pipeline_repeats', 1)) for s in found if 'stage' in s}
  assert sorted(repeats) == [
    *((2, r) for r in (1, 2, 4, 5, 8)),
    *((4, r) for r in (1, 2, 4, 5)),
    *((8, r) for r in (1, 2, 5)),
  ]


def test_larger_chunks_of_the_loss_are_tried_unless_the_run_sets_them():
  case = Case(model='llama3_2_1b', layout='fsdp', batch=(64, 4096))
  assert variants.fewer_chunks(case.config(), 16) == (4, 1)
  assert variants.fewer_chunks(case.config(), 3) == (1,)
  assert variants.fewer_chunks(case.config(), 1) == variants.fewer_chunks(case.config(), 0) == ()
  bindings = ('TransformerConfig.loss_chunks = 8',)
  assert variants.fewer_chunks(dataclasses.replace(case, bindings=bindings).config(), 8) == ()
  changed = Variant((), loss_chunks=4).applied(case.config())
  assert changed.model.config.loss_chunks == 4


def test_a_policy_that_does_not_fit_is_tried_with_some_layers_under_full():
  # 'full' leaves 20 bytes, the policy lacks 30: three eighths of the layers do not suffice by
  # formula, which is often larger than the compiled step.
  assert variants.full_layers(80, needed=130, needed_if_full=60, pool=100) == (40, 30, 20)
  assert variants.full_layers(6, needed=130, needed_if_full=60, pool=100) == (3, 2)
  assert variants.full_layers(80, needed=101, needed_if_full=60, pool=100) == (10,)
  assert variants.full_layers(80, needed=100, needed_if_full=60, pool=100) == (), 'it fits'
  assert variants.full_layers(80, needed=130, needed_if_full=101, pool=100) == (), 'nothing fits'
  assert variants.full_layers(6, needed=130, needed_if_full=95, pool=100) == (5, 4), "6 is 'full'"


def test_a_variant_changes_what_it_names_and_nothing_else(config):
  variant = Variant((('data', 2), ('fsdp', 4)), 2, 'minimal', 'bfloat16')
  changed = variant.applied(config)
  assert (changed.partitioner.fsdp, changed.num_microbatches) == (4, 2)
  assert (changed.model.config.remat_policy, changed.model.config.dtype) == ('minimal', 'bfloat16')
  back = dataclasses.replace(
    changed,
    partitioner=config.partitioner,
    num_microbatches=config.num_microbatches,
    model=config.model,
  )
  assert back == config


def test_the_run_as_it_is_is_one_of_its_variants(config):
  topology = topology_of(gpus=4, gpus_per_host=2)
  policy, dtype = config.model.config.remat_policy, config.model.config.dtype
  found = [Variant(layout, 1, policy, dtype) for layout in variants.layouts(config, topology)]

  def same(**changed):
    # dp.gin sets overlap_layers, which the search adds to its layouts later.
    partitioner = dataclasses.replace(config.partitioner, overlap_layers=False, **changed)
    run = dataclasses.replace(config, partitioner=partitioner)
    return [v.layout for v in found if v.is_of(run, topology)]

  assert same() == [(('data', 4), ('fsdp', 1))]
  assert same(fsdp=2) == [(('data', 2), ('fsdp', 2))]
  assert same(fsdp=2, zero_stage=1) == [(('data', 2), ('fsdp', 2), ('zero_stage', 1))]
  by_hand = dict(ici_mesh_shape={'fsdp': -1}, dcn_mesh_shape={'data': -1})  # as hsdp.gin says it
  assert same(data=-1, **by_hand) == [(('data', 2), ('fsdp', 2))]
  assert same(fsdp=2, zero_stage=2) == same(fsdp=3) == []
  assert not any(v.is_of(dataclasses.replace(config, num_microbatches=2), topology) for v in found)


def test_one_variant_of_each_family_is_compiled_then_those_that_promise_more():
  fast, slow = score(1.0, family='a'), score(1.2, family='a', num_microbatches=2)
  other, far = score(1.1, family='bb'), score(1.5, 9, family='bb', num_microbatches=2)
  too_large = score(0.5, 150, family='ccc')
  found = SearchState(scores=[slow, far, fast, other, too_large])
  assert found.next('bfloat16', 4) == [fast, other], 'one of a family; what cannot fit is left out'
  assert found.best('bfloat16') is fast
  # `a` is slower than its formula, `bb` faster: its slower variant is worth a compile, not `slow`.
  found.add(fast, compiled_as(1.4))
  found.add(other, compiled_as(0.99))
  assert found.estimate(slow) == pytest.approx(1.68)
  assert found.estimate(far) == pytest.approx(1.35)
  assert found.next('bfloat16', 4) == []
  assert found.best('bfloat16') is other
  found.add(other, compiled_as(0.99, needed=101))
  assert found.best('bfloat16') is fast, 'the other one does not fit as compiled'
  assert found.next('bfloat16', 4) == [far]
  untried = score(1.9, family='dddd')
  found.scores.append(untried)
  assert untried not in found.next('bfloat16', 4), 'slower than the best even if nothing waits'
  found.scores[-1] = untried = score(1.9, least=0.5, family='dddd')
  assert untried in found.next('bfloat16', 4)


def test_of_families_that_could_gain_little_few_are_compiled():
  best = score(1.0)
  little, more = (score(1.1, least=x / 1.1, family='bb') for x in (0.99, 0.97))
  faster = score(0.995, least=1.0, family='bb')
  same_mesh = dataclasses.replace(little, mesh=best.mesh)
  found = SearchState(scores=[best])
  found.add(best, compiled_as(1.0))
  for other, is_tried in ((little, False), (same_mesh, True), (more, True), (faster, True)):
    found.scores = [best, other]
    assert (other in found.next('bfloat16', 3)) == is_tried


def test_overlap_layers_is_compiled_first_and_its_twin_later():
  plain, other = score(1.0, least=0.5), score(1.1, least=0.5, family='bb')
  ahead = dataclasses.replace(plain, variant=score(1.0, num_microbatches=9).variant)
  ahead = dataclasses.replace(ahead, family=('a', 'overlap_layers'))
  found = SearchState(scores=[plain, ahead, other])
  assert found.next('bfloat16', 3) == [ahead, other]
  found.add(ahead, compiled_as(0.9))
  assert found.next('bfloat16', 3) == [plain, other]


def test_overlap_layers_comes_first_also_where_the_formula_calls_it_slower():
  variant = Variant((('fsdp', 8),), dtype='bfloat16')
  plain = dataclasses.replace(score(1.0, least=0.5), variant=variant)
  ahead = dataclasses.replace(
    plain, variant=workers.with_overlap(variant), seconds=1.05, family=('a', 'overlap_layers')
  )
  assert SearchState(scores=[plain, ahead]).next('bfloat16', 3) == [ahead]


def test_a_layout_is_predicted_with_and_without_overlap_layers():
  case = Case(
    model='llama3_2_1b', layout='fsdp', batch=(32, 4096), bindings=("REMAT_POLICY = 'none'",)
  )
  found = [
    s
    for s in worker_of(case).scores((('data', 1), ('fsdp', 8)), 1)
    if (s.variant.remat_policy, s.variant.dtype) == ('none', 'bfloat16')
    and not s.variant.loss_chunks
    and not s.variant.full_remat_layers
  ]
  ahead, plain = sorted(found, key=lambda s: 'overlap_layers' not in s.family)
  assert plain.needed_bytes > 1.3 * ahead.needed_bytes and plain.seconds > ahead.seconds
  assert (*plain.family, 'overlap_layers') == ahead.family
  ahead, plain = (dataclasses.replace(s, few_layers=(2, 4)) for s in (ahead, plain))
  state = SearchState(scores=[ahead, plain])
  state.add(ahead, Compiled(1.0, int(1.1 * ahead.needed_bytes), ahead.pool_bytes, (2, 4)))
  assert state.needed_bytes(plain) == pytest.approx(1.1 * plain.needed_bytes), 'they share a ratio'


def test_only_the_best_is_also_tried_without_overlap_layers():
  fast, twin = score(1.0, least=0.5), score(1.0, least=0.5, num_microbatches=2)
  slow, other = (score(1.1, least=0.5, family='bb', num_microbatches=n) for n in (1, 2))
  fast, slow = (dataclasses.replace(s, family=(*s.family, 'overlap_layers')) for s in (fast, slow))
  found = SearchState(scores=[fast, twin, slow, other])
  assert found.next('bfloat16', 3) == [fast, slow]
  found.add(fast, compiled_as(1.0))
  found.add(slow, compiled_as(1.1))
  assert other in found.scores and found.next('bfloat16', 3) == [twin]


def test_a_layout_that_is_too_large_with_overlap_layers_is_not_tried_without():
  twin, small = score(1.0, 90, least=0.5), score(1.2, 50, least=0.5, num_microbatches=4)
  ahead = dataclasses.replace(twin, variant=score(1.0, num_microbatches=9).variant)
  ahead, small = (dataclasses.replace(s, family=('a', 'overlap_layers')) for s in (ahead, small))
  other = score(1.4, 50, family='bb')
  found = SearchState(scores=[twin, ahead, small, other])
  found.add(other, compiled_as(1.4, needed=50))
  assert found.next('bfloat16', 3) == [ahead]
  found.add(ahead, compiled_as(1.0, needed=126))
  assert found.next('bfloat16', 3) == [small]


def test_the_memory_of_the_own_family_counts_before_its_twin():
  plain, ahead, more = (score(1.0, 50, num_microbatches=n) for n in (1, 2, 4))
  ahead, more = (dataclasses.replace(s, family=('a', 'overlap_layers')) for s in (ahead, more))
  found = SearchState(scores=[plain, ahead, more])
  found.add(plain, compiled_as(1.0, needed=90))
  assert found.needed_bytes(more) == 90 * GIB
  found.add(ahead, compiled_as(1.0, needed=55))
  assert found.needed_bytes(more) == pytest.approx(55 * GIB)


def test_the_run_as_it_is_is_found_whatever_its_settings_without_effect():
  case = Case(
    model='llama3_2_1b',
    layout='fsdp',  # with overlap_layers
    batch=(64, 4096),
    bindings=('NUM_MICROBATCHES = 4', "REMAT_POLICY = 'dots'"),
  )
  variant = Variant((('data', 1), ('fsdp', 8)), 4, 'full', 'bfloat16')
  assert variant.is_of(case.config(), Topology(1, 8))
  other = (*case.bindings, "Partitioner.accumulate_by = 'microbatch'")
  config = dataclasses.replace(case, bindings=other).config()
  assert not variant.is_of(config, Topology(1, 8))


def test_what_compiled_variants_need_corrects_the_memory_of_others():
  large, same, small = (
    score(seconds, needed, num_microbatches=n)
    for seconds, needed, n in ((1.0, 90, 2), (1.1, 85, 3), (1.2, 50, 4))
  )
  other, larger = score(1.1, 70, family='bb'), score(1.05, 75, family='bb', num_microbatches=2)
  found = SearchState(scores=[large, same, small, larger, other])
  assert found.next('bfloat16', 1) == [large]
  found.add(large, compiled_as(5.0, needed=126))
  assert found.needed_bytes(same) == pytest.approx(85 * 1.4 * GIB)
  assert found.next('bfloat16', 9) == [other, small], (
    'of 100 GiB; the time of one too large is void'
  )
  assert found.best('bfloat16') is other
  found.add(small, compiled_as(1.2, needed=60))
  assert found.needed_bytes(larger) == pytest.approx(75 * 1.2 * GIB), (
    "the precision's smallest ratio"
  )
  assert not found.fits(same), "the family's largest ratio"


def test_of_equally_fast_variants_the_smaller_one_is_best():
  large, small = score(1.0, 90), score(1.004, 40, num_microbatches=2)
  smallest = score(1.02, 5, num_microbatches=4)
  assert SearchState(scores=[large, small, smallest]).best('bfloat16') is small


def test_the_best_is_also_shown_without_its_loop_over_layers(config):
  best, other = score(1.0), score(1.1, num_microbatches=2)
  found = SearchState(scores=[best, other])
  found.add(best, compiled_as(1.2))
  found.scores.append(score(0.95, scan_unroll=32))
  assert found.best('bfloat16') is best  # the other one was not compiled
  assert 'dots, no loop' in search_text(found, '8 x GPU')
  text = gin_text(found, best, given=config, gpus='8 x GPU', files=['a.gin'])
  assert (
    '32: 1.14 s (-5.0%, by formula)' in text and 'config.TransformerConfig.scan_unroll' not in text
  )
  assert SearchState(scores=[found.scores[-1], other]).best('bfloat16') is other


def worker_of(case):
  config = case.config()
  return Worker(
    SearchTask(lambda: (config, Assumptions()), 'h100', Topology(case.hosts, 8), Assumptions())
  )


@pytest.mark.parametrize(
  'bindings, layers',
  [
    ((), (2, 4)),
    (('TransformerConfig.scan_unroll = 32',), (2, 4)),
    (('TransformerConfig.windows = (4096, 0, 0)',), (3, 6)),  # both kinds of layers
    (('TransformerConfig.windows = (4096, 0, 0, 0, 0)',), ()),  # 10 layers would be too many
    (('TransformerConfig.full_remat_layers = 4', 'TransformerConfig.scan_unroll = 32'), ()),
    (('TransformerConfig.scan_unroll = 1',), ()),  # a loop compiles fast
    (("REMAT_POLICY = 'dots'",), ()),  # on several GPUs, it has a loop
    (('NUM_MICROBATCHES = 2',), ()),  # each layer takes all microbatches, in a loop
  ],
)
def test_few_layers_are_compiled_of_many_without_a_loop(bindings, layers):
  case = Case(
    model='llama3_8b',
    layout='fsdp',
    batch=(64, 4096),
    bindings=("REMAT_POLICY = 'none'", *bindings),
  )
  worker = worker_of(case)
  program = worker.planner.program(worker.config, worker.topology)
  assert workers.few_layers(program, worker.config, worker.planner.gpu) == layers


def test_a_stage_is_compiled_with_all_its_layers():
  bindings = ("REMAT_POLICY = 'none'", 'TransformerConfig.scan_unroll = 32')
  case = Case(model='llama3_8b', layout='pp', batch=(64, 4096), bindings=bindings)
  worker = worker_of(case)
  program = worker.planner.program(worker.config, worker.topology)
  assert program.layout.pipeline is not None
  assert workers.few_layers(program, worker.config, worker.planner.gpu) == ()


def test_a_variant_whose_parts_end_together_counts_once():
  few = dataclasses.replace(score(2.0, 50), few_layers=(2, 4))
  parts = [concurrent.futures.Future(), concurrent.futures.Future()]
  for part, layers in zip(parts, (1, 2)):
    part.set_result(CompiledPart(layers, layers * GIB, layers / 2, layers * GIB))
  found = SearchState(scores=[few])
  with search_module._progress() as bar:
    search_module._compile(found, [(few, parts)], bar)
  assert found.compiled == {few.variant: compiled_as(4.0, 50, layers=(2, 4))}
  assert found._ratios == {few.family: [2.0], 'bfloat16': [2.0]}
  assert list(found._memory_ratios.values()) == [[1.0]]


def test_a_refused_part_refuses_the_variant():
  few = dataclasses.replace(score(2.0, 50), few_layers=(2, 4))
  parts = [concurrent.futures.Future(), concurrent.futures.Future()]
  parts[0].set_result(CompiledPart(1.0, GIB, 1.0, GIB))
  parts[1].set_result('with 4 layers: no')
  found = SearchState(scores=[few])
  with search_module._progress() as bar:
    search_module._compile(found, [(few, parts)], bar)
  assert found.refused == {few.variant: 'with 4 layers: no'} and not found.fits(few)


def test_a_variant_without_a_loop_that_does_not_fit_rules_out_its_relatives():
  few = dict(few_layers=(2, 4))
  first, sibling = (
    dataclasses.replace(score(1.0, 80, loss_chunks=chunks), **few) for chunks in (1, 2)
  )
  with_loop = score(1.2, 80)
  found = SearchState(scores=[first, sibling, with_loop])
  found.add(first, compiled_as(1.0, 110, layers=(2, 4)))
  assert found.needed_bytes(sibling) == pytest.approx(110 * GIB) and not found.fits(sibling)
  assert found.next('bfloat16', 3) == [with_loop], 'whose memory is another'


def test_few_layers_are_not_compiled_of_what_does_not_fit_by_formula():
  large = dataclasses.replace(score(1.0, 101), few_layers=(2, 4))
  small, other = (
    dataclasses.replace(score(1.1, 90, num_microbatches=2), few_layers=(2, 4)),
    score(1.0, 101, family='bb'),
  )
  found = SearchState(scores=[large, small, other])
  assert found.next('bfloat16', 3) == [other, small], 'compiled whole, the other one may need less'
  found.add(other, compiled_as(1.05, 50))
  assert (found.needed_bytes(large), found.needed_bytes(small)) == (101 * GIB, 90 * GIB)


def test_seconds_follow_few_layers_and_memory_is_at_least_the_formula():
  whole = dataclasses.replace(score(9.5, 60), few_layers=(2, 4))
  parts = [
    CompiledPart(1.35, 12 * GIB, 1.25, 12 * GIB),
    CompiledPart(1.89, 16 * GIB, 1.75, 16 * GIB),
  ]
  found = workers.joined(parts, whole)
  assert found.seconds == pytest.approx(1.89 + (9.5 - 1.75) * (1.89 - 1.35) / (1.75 - 1.25))
  assert (found.needed_bytes, found.layers) == (60 * GIB, (2, 4))
  for needed, expected, reason in (
    ((14, 15), 60, 'few layers need less than the loss'),
    ((13, 19), 85, 'a layer needs more than by formula'),
  ):
    parts = [dataclasses.replace(part, needed_bytes=gib * GIB) for part, gib in zip(parts, needed)]
    assert workers.joined(parts, whole).needed_bytes == expected * GIB, reason
  assert not workers.joined(parts, dataclasses.replace(whole, pool_bytes=84 * GIB)).fits
  assert workers.joined([compiled_as(2.0, 40)], score(9.5, 60)) == compiled_as(2.0, 40)
  finished = compiled_as(2.0, 40, layers=(2, 4))
  assert workers.joined([finished], whole) == finished, "the run's own variant"


@pytest.mark.parametrize('dtype, is_faster', [('fp8', True), ('bfloat16', False)])
def test_a_loop_is_left_out_where_the_formula_gains(dtype, is_faster):
  case = Case(model='llama3_2_1b', layout='fsdp', batch=(64, 4096))
  worker = worker_of(case)
  layout = (('data', 1), ('fsdp', 8))
  plain = next(
    s
    for s in worker.scores(layout, 1)
    if (s.variant.remat_policy, s.variant.dtype) == ('dots' if is_faster else 'none', dtype)
  )
  found = worker.without_loop(plain)
  assert (found is not None) == is_faster
  if found is not None:
    assert found.variant == dataclasses.replace(plain.variant, scan_unroll=16)
    assert found.seconds < 0.97 * plain.seconds and found.needed_bytes <= plain.needed_bytes


def test_fp8_is_shown_and_not_chosen(config):
  own, fp8 = score(1.0), score(0.7, dtype='fp8')
  found = SearchState(scores=[own, fp8])
  found.add(own, compiled_as(1.0))
  assert found.best('bfloat16') is own
  found.add(fp8, compiled_as(0.8))
  text = search_text(found, '8 x GPU')
  assert "PRECISION = 'fp8'" in text and '1.25x as fast' in text
  text = gin_text(found, own, given=config, gpus='8 x GPU', files=['a.gin'])
  assert "'fp8'" not in text and 'learning_rate_scaling' not in text
  scaled = dataclasses.replace(config, learning_rate_scaling='linear')
  assert 'learning_rate_scaling' in gin_text(found, own, given=scaled, gpus='', files=[])


def test_the_gin_file_keeps_the_precision_of_gradients(config):
  best = score(1.0)
  narrow = dataclasses.replace(config.partitioner, gradient_dtype='bfloat16')
  given = dataclasses.replace(config, partitioner=narrow)
  text = gin_text(SearchState(scores=[best]), best, given=given, gpus='', files=[])
  assert "gradient_dtype = 'bfloat16'" in text, 'as the variant was predicted'


LAYOUTS = [
  dict(data=1, fsdp=64),
  dict(data=1, fsdp=64, zero_stage=1),
  dict(data=2, fsdp=32),
  dict(data=64, fsdp=1),
  dict(data=1, fsdp=8, num_partitions=8, sequence_parallel=True),
  dict(data=1, fsdp=16, context=4),
  dict(data=4, fsdp=8, expert=2),
  dict(stage=2, data=1, fsdp=32),
  dict(stage=2, data=4, fsdp=8),
]


@pytest.mark.parametrize('layout', LAYOUTS, ids=str)
@pytest.mark.parametrize('given', ['dp', 'fsdp', 'hsdp', 'ep', '3d'])
def test_the_gin_file_means_the_same_here_and_works_on_more_and_fewer_hosts(layout, given):
  case = Case(model='llama3_2_1b', layout=given, batch=(64, 4096))
  best = dataclasses.replace(score(1.0), variant=Variant(tuple(layout.items())), mesh=())
  config = case.config()
  text = gin_text(SearchState(scores=[best]), best, given=config, gpus='', files=[])
  settings = re.findall(r'^  (\w+ = .+)$', text, re.MULTILINE)
  bindings = tuple(f'Partitioner.{setting}' for setting in settings)
  written = dataclasses.replace(case, bindings=bindings).config().partitioner
  promised = best.variant.applied(config).partitioner
  assert written.mesh_sizes(Topology(8, 8)) == promised.mesh_sizes(Topology(8, 8))
  assert (
    dataclasses.replace(written, **{name: getattr(promised, name) for name in SIZES}) == promised
  )
  for hosts in (4, 16):
    sizes = written.mesh_sizes(Topology(hosts, 8)).total
    assert sizes['fsdp'] * sizes['data'] == layout['fsdp'] * layout['data'] * hosts // 8
    kept = {axis: size for axis, size in layout.items() if axis in ('stage', 'context', 'expert')}
    assert kept.items() <= sizes.items()


def test_the_gin_file_leaves_data_open_where_no_replica_is_split(config):
  layout = (('stage', 2), ('num_partitions', 8), ('data', 1), ('fsdp', 1))
  best = dataclasses.replace(score(1.0), variant=Variant(layout), mesh=())
  text = gin_text(SearchState(scores=[best]), best, given=config, gpus='', files=[])
  assert re.findall(r'(\w+) = -1', text) == ['data']


@pytest.mark.process
@pytest.mark.slow
def test_the_gin_file_of_the_best_gives_the_step_that_the_search_promised(gin_file, tmp_path):
  best, out, again = (tmp_path / name for name in ('best.gin', 'search.json', 'plan.json'))
  where = ['--gpus=4', '--gpus_per_host=2', '--gpu=h200', '--dry_run']
  flags = [f'--gin_file={gin_file}', '--gin.Partitioner.fsdp=2', *where]
  got = subprocess.run(
    [sys.executable, '-m', 't5x_gpu.plan', *flags, f'--search={best}', f'--json={out}'],
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert got.returncode == 0, got.stderr
  assert 'by formula' in got.stdout and best.read_text() in got.stdout
  found = json.loads(out.read_text())
  assert found['is_complete'] and found['num_compiled'] == 0
  seconds = [v['seconds_per_step'] for v in found['variants']]
  assert seconds == sorted(seconds)
  flags.insert(1, f'--gin_file={best}')
  assert plan.main([f for f in flags if 'fsdp' not in f] + [f'--json={again}']) == 0
  # Of variants within 0.5%, the best variant needs the least memory.
  assert json.loads(again.read_text())['seconds_per_step'] <= 1.005 * seconds[0]


def test_flags_that_do_not_go_with_a_search_are_refused(gin_file):
  for more in (
    ['--search', '--show=sharding'],
    ['--search_processes=2'],
    ['--search', '--search_processes=0'],
  ):
    with raises(ConfigError):
      plan.main([f'--gin_file={gin_file}', '--gpus=2', *more])


def started(gin_file, *flags):
  flags = [f'--gin_file={gin_file}', '--gpus=4', '--gpu=h200', '--search', *flags]
  return subprocess.Popen(
    [sys.executable, '-m', 't5x_gpu.plan', *flags],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )


@pytest.mark.slow
@pytest.mark.process
def test_the_best_is_compiled_also_without_the_gpu_compiler(gin_file):
  out, err = started(gin_file, '--search_processes=1').communicate(timeout=400)
  first = next(line for line in out.splitlines() if line.startswith(('data', 'fsdp', 'one')))
  assert first.endswith('as compiled'), out + err
  assert 'The current run takes' in out


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize('whom', ['all', 'parent'])
def test_ctrl_c_prints_what_was_found_and_leaves_no_process(gin_file, whom):
  process = started(gin_file)
  for line in process.stderr:
    if 'predicted by formula' in line:
      break
  children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()
  assert children, 'processes that predict'
  (os.killpg if whom == 'all' else os.kill)(process.pid, signal.SIGINT)
  out, err = process.communicate(timeout=60)
  assert process.returncode == 130, err
  assert 'The search was interrupted' in out and 'partitioner.Partitioner:' in out
  assert 'Traceback' not in err
  deadline = time.monotonic() + 30
  while left := [pid for pid in children if pathlib.Path(f'/proc/{pid}').exists()]:
    assert time.monotonic() < deadline, left
    time.sleep(0.1)
