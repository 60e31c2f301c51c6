"""The words and rows of a plan's screen."""

import dataclasses
import re

import jax
import pytest

from t5x_gpu.config import gin_loader
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.planning import screen
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.formulas import step_memory
from t5x_gpu.tools.planning.gpu_targets import find_target
from t5x_gpu.tools.planning.kernel_parts import PartKernels
from t5x_gpu.tools.planning.prediction import PlanConfig, Planner
from t5x_gpu.tools.planning.sharding import ElementwiseRow

PLANNER = Planner(find_target('h100'), Assumptions(), jax.devices())


@pytest.fixture(scope='module')
def t5():
  parts = ('models/t5_1_1_base', 'parallel/fsdp', 'runs/pretrain')
  files = [f'gin_configs/{part}.gin' for part in parts]
  bindings = [
    "MODEL_DIR = 'unused'", "MIXTURE_OR_TASK_NAME = 'unused'", 'TRAIN_STEPS = 3', 'BATCH_SIZE = 8',
    "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 32}",
  ]  # fmt: skip
  loaded = gin_loader.load(files, bindings=bindings, search_paths=[])
  return PLANNER.by_formula(gin_loader.configured(loaded, PlanConfig), Topology(1, 8))


def test_a_short_run_has_gpu_hours(t5):
  first = screen.first_screen(t5)
  hours = float(re.search(r'([\d.e-]+) GPU hours', first)[1])
  assert hours == pytest.approx(3 * t5.seconds_per_step * 8 / 3600, rel=0.05)
  assert f'{8 * (64 + 32):,} tokens' in first


def test_what_a_gpu_needs_and_has_are_next_to_each_other(t5):
  small = dataclasses.replace(t5.memory, pool_bytes=2**20)
  line = screen.fits_line(small)
  missing = f'{small.needed_bytes / 2**20 - 1:.1f} MiB too much'
  assert line.startswith('DOES NOT FIT: needs ')
  assert f'per GPU, has 1.0 MiB: {missing} (XLA manages' in line
  spare = f'{t5.memory.left_bytes / 2**30:.2f} GiB to spare'
  assert screen.fits_line(t5.memory).startswith('FITS: ') and spare in screen.fits_line(t5.memory)


def test_parameters_outside_of_layers_are_named(t5):
  assert {'encoder/encoder_norm', 'decoder/decoder_norm', 'decoder/logits_dense'} <= set(
    t5.params_by_part
  )
  assert not {'encoder', 'decoder'} & set(t5.params_by_part)
  assert sum(t5.params_by_part.values()) == t5.num_params


def test_what_is_not_there_at_the_peak_is_not_zero(t5):
  parts = dict.fromkeys(t5.memory.components, 2**20)
  parts |= {step_memory.GRADIENTS: 0, step_memory.LAYER: 0, step_memory.STACK: 0}
  rows = {r[0]: r[1] for r in screen.memory_rows(dataclasses.replace(t5.memory, components=parts))}
  assert rows[step_memory.GRADIENTS] == rows[step_memory.LAYER] == screen.NOT_AT_PEAK
  assert step_memory.STACK not in rows and rows[step_memory.LOSS] == '1.0'


def test_the_step_sums_its_parts(t5):
  head, *_, step = screen.time_rows(t5.time)
  flops = sum(part.flops for part in t5.time.parts) / 1e12
  row = dict(zip(head, step))
  assert row['part'] == 'step' and float(row['TFLOP']) == pytest.approx(flops, abs=0.01)
  assert float(row['GB'].replace(',', '')) > 0


def test_hidden_is_the_share_of_the_time(t5):
  c = dataclasses.replace(
    t5.time.collectives[0], seconds=4.91e-3, hidden_share=0.95, exposed_seconds=2.86e-3
  )
  time = dataclasses.replace(t5.time, collectives=(c,))
  head, row = screen.traffic_rows(dataclasses.replace(t5, time=time))
  assert dict(zip(head, row))['hidden'].startswith('42%')


def test_a_rack_of_many_nvlinks_is_a_caveat_of_its_gpu_alone(t5):
  rack = dataclasses.replace(t5, gpu=find_target('gb200'))
  [caveat] = set(screen.caveats(rack)) - set(screen.caveats(t5))
  assert 'hosts of 8 with NVLink inside are assumed' in caveat and 'NVL72' in caveat
  assert caveat in screen.first_screen(rack)
  of_rack = dataclasses.replace(rack, num_gpus=72)
  four = dataclasses.replace(t5, num_gpus=4)
  assert screen.caveats(of_rack) == screen.caveats(four) == screen.caveats(t5)


def test_the_hidden_shares_of_the_mesh_are_shown(t5):
  rows = {row[0]: row[1] for row in screen.assumption_rows(t5)}
  assert rows['hidden_shares'] == 'fsdp 0.8'


def test_what_a_compiled_step_reads_and_writes_is_next_to_the_formula(t5):
  assert screen.elementwise_text(t5) == '', 'not compiled'
  by_formula = sum(part.num_bytes for part in t5.time.parts if part.kind == 'memory')
  assert t5.formula_elementwise_bytes == int(by_formula)
  swiglu = ElementwiseRow('backward Layer/mlp/mul', 'bf16[8 x 16]', 2, 4_000_000_000)
  compiled = dataclasses.replace(
    t5,
    elementwise_bytes=4_500_000_000,
    elementwise_kernels=(PartKernels('norms', 1e9, 4_500_000_000, (swiglu,)),),
  )
  text = screen.elementwise_text(compiled)
  assert '4.5 GB (1.68 ms) as compiled' in text
  assert f'({screen.seconds(by_formula / 0.8 / 3.35232e12)}) by formula' in text
  assert text in screen.tables(compiled)
  assert screen.elementwise_rows(compiled)[1:] == [
    ('norms', '1.00', '4.50', '1.68', 'backward Layer/mlp/mul bf16[8 x 16]: 4.00 GB (1.49 ms)')
  ]
