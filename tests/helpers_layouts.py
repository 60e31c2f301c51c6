"""One small model under every layout, compiled once per test session and read by several tests.

Nothing here runs: sizes cost nothing, so that the batch is large enough for what is done once per
replica (the relative bias) to be small.
"""

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import pytest

from t5x_gpu.compiled.collectives import Collective, inventory, partitioned_hlo
from t5x_gpu.layers.moe import capacity
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.partitioning.pipeline_schedules import Timetable
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import Program
from t5x_gpu.training.schedules import constant
from tests.helpers_programs import build_with

# Enough to read a program or its memory; nothing runs.
QUICK = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
# As users compile, regardless of XLA_FLAGS; for programs that run many steps.
OPTIMIZED = {'xla_backend_optimization_level': 3, 'xla_llvm_disable_expensive_passes': False}

# No size equals another that it could be mistaken for.
BATCH, LENGTH = 512, 16
CONFIG = TransformerConfig(
  vocab_size=160, num_layers=4, embed_dim=32, num_heads=8, head_dim=8, mlp_dim=96
)


@dataclasses.dataclass(frozen=True)
class Case:
  """How the model is run on eight devices.

  Attributes:
    partitioner: arguments of Partitioner.
    config: what differs from CONFIG.
    num_microbatches: gradient accumulation.
    num_hosts: that share the devices.
    num_devices: 8, or 1 to compare with.
  """

  partitioner: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  num_microbatches: int = 1
  num_hosts: int = 1
  num_devices: int = 8


_1F1B = dict(stage=2, pipeline_schedule='1f1b')
_HSDP = dict(ici_mesh_shape={'fsdp': -1}, dcn_mesh_shape={'data': -1})
_IN_BFLOAT16 = dict(gradient_dtype='bfloat16')
BFLOAT16 = dict(dtype='bfloat16')
# Just enough room in experts for tokens that are evenly spread.
EXPERTS = dict(num_experts=4, expert_capacity_factor=1.0)
CASES = {
  'one_device': Case(num_devices=1),
  'one_device_experts': Case(config=EXPERTS, num_devices=1),
  'dp': Case(),
  'dp_4_microbatches': Case(num_microbatches=4),
  'dp_gradients_in_bfloat16': Case(_IN_BFLOAT16),
  'fsdp_gradients_in_bfloat16': Case(dict(fsdp=4, **_IN_BFLOAT16)),
  'zero1_gradients_in_bfloat16': Case(dict(fsdp=8, zero_stage=1, **_IN_BFLOAT16), num_hosts=2),
  '3d_gradients_in_bfloat16': Case(dict(_1F1B, num_partitions=2, **_IN_BFLOAT16)),
  'zero1': Case(dict(fsdp=8, zero_stage=1)),
  'zero1_4_microbatches': Case(dict(fsdp=8, zero_stage=1), num_microbatches=4),
  'zero2': Case(dict(fsdp=8, zero_stage=2)),
  'zero2_4_microbatches': Case(dict(fsdp=8, zero_stage=2), num_microbatches=4),
  'fsdp': Case(dict(fsdp=8)),
  'fsdp_4_microbatches': Case(dict(fsdp=8), num_microbatches=4),
  'fsdp_by_4_microbatches': Case(dict(fsdp=8, accumulate_by='microbatch'), num_microbatches=4),
  'fsdp_bfloat16': Case(dict(fsdp=8), BFLOAT16),
  'hsdp': Case(_HSDP, num_hosts=2),
  'tp': Case(dict(num_partitions=8)),
  'tp_bfloat16': Case(dict(num_partitions=8), BFLOAT16),
  'tp_full_remat': Case(dict(num_partitions=8), dict(remat_policy='full')),
  'tp_sp': Case(dict(num_partitions=8, sequence_parallel=True)),
  'tp_grouped': Case(dict(num_partitions=4), dict(num_kv_heads=4)),
  'tp_shared_kv': Case(dict(num_partitions=8), dict(num_kv_heads=2)),
  'cp': Case(dict(context=4)),
  'cp_grouped': Case(dict(context=4), dict(num_kv_heads=2)),
  'cp_gather': Case(dict(context=4, context_attention='gather')),
  'pp': Case(_1F1B),
  'pp_16_microbatches': Case(dict(_1F1B, num_pipeline_microbatches=16)),
  'pp_gpipe': Case(dict(stage=2, pipeline_schedule='gpipe')),
  'pp_circular': Case(dict(stage=2, pipeline_schedule='circular', pipeline_repeats=2)),
  'fsdp_tp': Case(dict(fsdp=4, num_partitions=2)),
  'fsdp_pp': Case(dict(_1F1B, fsdp=4)),
  'fsdp_cp': Case(dict(fsdp=4, context=2)),
  'cp_tp': Case(dict(context=2, num_partitions=2)),
  '3d': Case(dict(_1F1B, num_partitions=2, sequence_parallel=True)),
  'ep': Case(dict(expert=4), EXPERTS),
  'ep_fsdp': Case(dict(data=1, fsdp=4, expert=2), EXPERTS),
}


# Compiled in `make test`; the tests of the others are slow.
QUICK_CASES = ('one_device', 'dp', 'fsdp', 'tp', 'pp')


def by_case(names: Iterable[str]) -> pytest.MarkDecorator:
  """Parametrises a test with `name`, a key of CASES."""
  return pytest.mark.parametrize(
    'name',
    [name if name in QUICK_CASES else pytest.param(name, marks=pytest.mark.slow) for name in names],
  )


def config_of(case: Case) -> TransformerConfig:
  return dataclasses.replace(CONFIG, **case.config)


def slots(config: TransformerConfig) -> int:
  """Returns how many tokens of a row one expert has room for."""
  return capacity(
    LENGTH,
    num_experts=config.num_experts,
    factor=config.expert_capacity_factor,
    experts_per_token=config.num_experts_per_token,
  )


def build(case: Case, **sizes: Any) -> Program:
  """Returns the program of a case; `sizes` are batch_size and task_feature_lengths, if others."""
  sizes = {'batch_size': BATCH, 'task_feature_lengths': {'targets': LENGTH}, **sizes}
  return build_with(
    model=DecoderOnlyModel(config_of(case)),
    optimizer=AdamW(),
    learning_rate=constant(1e-2),
    partitioner=Partitioner(**case.partitioner),
    devices=jax.devices()[: case.num_devices],
    topology=Topology(case.num_hosts, case.num_devices // case.num_hosts),
    pack=False,
    num_microbatches=case.num_microbatches,
    **sizes,
  )


@functools.cache
def program(name: str) -> Program:
  return build(CASES[name])


@functools.cache
def hlo(name: str) -> str:
  """Returns the step of one device, right after XLA's partitioner; one worker compiles it."""
  path = pathlib.Path(os.environ['T5X_GPU_TESTS_SHARE'], f'{name}.hlo')
  if not path.exists():
    p = program(name)
    own = path.with_suffix(f'.{os.getpid()}')
    own.write_text(partitioned_hlo(p.train_step.lower(p.abstract_state, p.abstract_batch)))
    own.replace(path)
  return path.read_text()


@functools.cache
def collectives(name: str) -> list[Collective]:
  """Returns the collectives of the step, without scalars such as sums of the loss, and norms."""
  return [
    c for c in inventory(hlo(name), program(name).layout.mesh.shape) if math.prod(c.shape) > 1
  ]


def timetable(name: str) -> Timetable:
  """Returns the timetable of the pipeline of a case."""
  return program(name).layout.pipeline


def ticks(name: str) -> int:
  """Returns how often a tick of the pipeline runs."""
  return timetable(name).ticks


def busy(name: str) -> float:
  """Returns the share of its ticks in which a stage has work."""
  return timetable(name).busy_share
