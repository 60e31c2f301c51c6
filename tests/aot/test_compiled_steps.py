"""Our training steps, compiled for GPUs that are absent, against recorded figures: make test-aot.

Memory, kernels, traffic, sent bytes and overlap are XLA's own, for each jax of recorded.json: all
cases on the oldest, ON_EACH_VERSION on others. After a change that moves them on purpose: `make
test-aot ARGS=--update_golden`, then read git diff.
"""

import copy
import fcntl
import json
import pathlib

import jax
import pytest

from t5x_gpu.compiled.collectives import inventory, partitioned_hlo
from t5x_gpu.errors import ModelError
from t5x_gpu.models.model import config_of
from t5x_gpu.tools.planning.gpu_compile import CompiledStep
from t5x_gpu.tools.planning.gpu_targets import kernels_for
from t5x_gpu.tools.planning.sharding import gpu_json
from tests.aot.cases import CASES, Case
from tests.aot.marks import MARKS

pytestmark = MARKS

RECORDED = pathlib.Path(__file__).parent / 'recorded.json'
BYTES = 0.02  # relative
FLOPS = 1e-6  # relative
KERNELS = 0.005  # relative, of all kernels; and less than one per layer
SHARE = 0.01  # of the bytes of a kind; XLA's scheduler breaks ties by addresses
# Whose scheduled program is compared with what the partitioner asked for.
SENDS_AS_ASKED = ('decoder_base zero1 h100 1x8', 'decoder_base fsdp h100 1x8')
LEAST_BYTES = 2**20  # less is not worth hiding: sums of the loss, norms of gradients


OLDEST = '0.10.2'
ON_EACH_VERSION = (
  'llama3_8b fsdp h100 1x8 fp8',
  'decoder_base zero1 h100 1x8',
  'decoder_base fsdp h100 1x8',
  'decoder_base fsdp b200 1x8',
  'llama3_2_1b fsdp h100 1x8',
  'llama3_8b fsdp h100 1x8',
  'llama3_8b fsdp h100 1x8 minimal',
  'llama3_8b fsdp h100 1x8 dots',
  'llama3_8b fsdp h100 1x8 fp8, a row per GPU',
  'llama3_8b fsdp h100 1x8 full GPU',
  'qwen3_1_7b fsdp h100 1x8',
  'gemma2_2b fsdp h100 1x8',
  'gpt2_xl fsdp h100 1x8 dots',
)


def recorded() -> dict:
  """Returns version of jax -> name of a case -> its figures."""
  return json.loads(RECORDED.read_text())


def record(name: str, figures: dict) -> None:
  """Replaces the figures of one case; other processes of this session write too."""
  with open(RECORDED) as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    everything = recorded()
    known = {case.name for case in CASES}
    steps = everything.get(jax.__version__, {}) | {name: figures}
    everything[jax.__version__] = {n: steps[n] for n in sorted(steps) if n in known}
    RECORDED.write_text(json.dumps(everything, indent=1) + '\n')


def problems(now: dict, before: dict, *, num_layers: int) -> list[str]:
  """Returns what differs by more than it may.

  Matrix kernels and their FLOPs exactly, all kernels by half a percent and less than one per layer,
  bytes by 2%, overlap downwards.
  """
  found = []

  def compare_bytes(what: str, new: int, old: int) -> None:
    if abs(new - old) > BYTES * max(old, LEAST_BYTES):
      found.append(f'{what}: {new / 2**20:,.1f} MiB, recorded {old / 2**20:,.1f} MiB')

  for part in ('argument_bytes', 'temporary_bytes', 'output_bytes'):
    compare_bytes(part, now[part], before[part])
  for kind, number in before['kernels'].items():
    if now['kernels'].get(kind) != number:
      found.append(f'{kind} kernels: {now["kernels"].get(kind)}, recorded {number}')
  new, old = (figures['traffic']['matmul_flops'] for figures in (now, before))
  if abs(new - old) > FLOPS * old:
    found.append(f'FLOPs of matmuls: {new:.4g}, recorded {old:.4g}')
  for part in ('matmul_bytes', 'other_bytes', 'moved_bytes', 'copied_bytes'):
    compare_bytes(part, now['traffic'][part], before['traffic'][part])
  new, old = (figures['traffic']['kernels'] for figures in (now, before))
  if abs(new - old) > min(KERNELS * old, num_layers - 1):
    found.append(f'all kernels: {new}, recorded {old}')
  nothing = {'bytes': 0, 'hidden_bytes': 0}
  for row in {**before['sent'], **now['sent']}:
    new, old = now['sent'].get(row, nothing), before['sent'].get(row, nothing)
    compare_bytes(f'sent by {row}', new['bytes'], old['bytes'])
    if min(new['bytes'], old['bytes']) >= LEAST_BYTES:
      shares = [sent['hidden_bytes'] / sent['bytes'] for sent in (new, old)]
      if shares[0] < shares[1] - SHARE:
        found.append(f'overlap of {row}: {shares[0]:.0%}, recorded {shares[1]:.0%}')
  return found


def test_one_more_kernel_per_layer_is_a_difference():
  before = recorded()[OLDEST]['llama3_8b fsdp h100 1x8']
  now = copy.deepcopy(before)
  kernels = before['traffic']['kernels']
  now['traffic']['kernels'] += 32
  assert problems(now, before, num_layers=32) == [
    f'all kernels: {kernels + 32}, recorded {kernels}'
  ]


def check_sends_what_the_partitioner_asked_for(step: CompiledStep) -> None:
  mesh_shape = step.program.layout.mesh.shape
  with kernels_for(step.gpus.target):
    lowered = step.program.train_step.lower(
      step.program.abstract_state, step.program.abstract_batch
    )
  asked, sent = {}, {}
  for found, collectives in (
    (asked, inventory(partitioned_hlo(lowered), mesh_shape)),
    (sent, step.collectives),
  ):
    for c in collectives:
      found[c.axes] = found.get(c.axes, 0) + c.bytes_per_call
  assert sent == pytest.approx(asked, rel=BYTES, abs=LEAST_BYTES)


@pytest.mark.parametrize(
  'case',
  [c for c in CASES if jax.__version__ == OLDEST or c.name in ON_EACH_VERSION],
  ids=lambda case: case.name,
)
def test_a_step_needs_calls_and_sends_what_was_recorded(case, request):
  step = case.compiled()
  if case.name in SENDS_AS_ASKED:
    check_sends_what_the_partitioner_asked_for(step)
  now = gpu_json(step)
  if request.config.getoption('update_golden'):
    record(case.name, now)
    return
  before = recorded().get(jax.__version__, {})
  assert case.name in before, (
    f'it compiles, but jax {jax.__version__} has no figures: run again with --update_golden'
  )
  num_layers = config_of(case.config().model).num_layers
  assert problems(now, before[case.name], num_layers=num_layers) == []


@pytest.mark.skipif(
  jax.__version__ != OLDEST, reason='later XLA multiplies in bfloat16: docs/precision.md#mxfp8'
)
@pytest.mark.parametrize('gpus', [1, 8])
def test_every_matmul_of_mxfp8_is_a_kernel_for_blackwell(gpus):
  layers = 2
  step = Case(
    model='decoder_base',
    layout='fsdp',
    batch=(8 * gpus, 512),
    gpu='b200',
    gpus_per_host=gpus,
    bindings=(
      *("PRECISION = 'fp8'", "TransformerConfig.fp8_scaling = 'mxfp8'"),
      f'TransformerConfig.num_layers = {layers}',
    ),
  ).compiled()
  # Queries, keys, values, the projection back, and three of the MLP; forward and both gradients.
  assert step.kernels['fp8_gemm'].runs == 7 * 3 * layers


def test_a_step_that_xla_cannot_compile_is_an_error_for_users():
  if jax.__version__ != OLDEST:
    pytest.skip('another XLA may tile it')
  case = Case(
    model='t5_1_1_base',
    layout='fsdp',
    batch=(64, 512),
    bindings=(
      "DTYPE = 'bfloat16'",
      "TASK_FEATURE_LENGTHS = {'inputs': 512, 'targets': 114}",  # 912 targets per GPU
      'TransformerConfig.scan_unroll = 1',  # without a loop it compiles
    ),
  )
  with pytest.raises(ModelError, match='cannot be compiled for NVIDIA H100.*tile'):
    case.compiled()
