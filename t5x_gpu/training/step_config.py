"""The settings of a training step: the settings of a run that plan, bench and parity need."""

import dataclasses
from typing import Optional

from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.models.model import Model
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.distributed import DistributedConfig
from t5x_gpu.training.guards.spikes import SpikeConfig
from t5x_gpu.training.optimizers import Optimizer
from t5x_gpu.training.schedules import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
  """Settings of a training step and of the processes that compute it, named as `train.NAME` in gin.

  Attributes:
    model: a model from models/, or a custom model with the same methods.
    train_dataset_cfg: training data; its lengths and batch size are the shapes of the step.
    partitioner: how to split the run over the devices.
    optimizer: from training/optimizers or training/adafactor.
    learning_rate: schedule, a function of the step.
    random_seed: for initialization and dropout; DatasetConfig.seed sets the order of the data.
    num_microbatches: parts of the batch that are computed one after the other, to save memory.
    max_grad_norm: global norm to which gradients are clipped; None for no clipping.
    loss_normalizing_factor: see training/train_step.py; None for the loss per target token.
    learning_rate_scaling: 'linear' or 'sqrt' in the number of replicas; None for no scaling.
    spike_cfg: which steps to skip.
    distributed_cfg: how long the processes wait for each other.
    xla_preset: preset of XLA and NCCL settings (docs/xla_flags.md).
  """

  model: Model
  train_dataset_cfg: DatasetConfig
  partitioner: Partitioner
  optimizer: Optimizer
  learning_rate: Schedule
  random_seed: int = 0
  num_microbatches: int = 1
  max_grad_norm: Optional[float] = None
  loss_normalizing_factor: Optional[float] = None
  learning_rate_scaling: Optional[str] = None
  spike_cfg: SpikeConfig = SpikeConfig()
  distributed_cfg: DistributedConfig = DistributedConfig()
  xla_preset: str = 'default'
