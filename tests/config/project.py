"""A small user's project: a module with an entry point, and gin files that configure it."""

import pathlib

TRAIN = """
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Literal, Optional, Union

from t5x_gpu.errors import MeshError


@dataclasses.dataclass(frozen=True)
class Data:
  batch_size: int
  lengths: Mapping[str, int]
  name: str = 'text'
  pack: bool = True


@dataclasses.dataclass(frozen=True)
class AdamW:
  schedule: Callable[..., Any]
  decay: float = 0.0
  betas: tuple[float, float] = (0.9, 0.999)


@dataclasses.dataclass(frozen=True)
class Adafactor:
  decay: float = 0.8


class Partitioner:

  def __init__(self, *, num_partitions: int = 1):
    if num_partitions == 3:
      raise MeshError('8 GPUs cannot be cut into groups of 3.', fix='Set num_partitions = 1.',
                      parameters=('Partitioner.num_partitions',))
    self.num_partitions = num_partitions


def constant(step: int = 0, *, rate: float = 0.1) -> float:
  return rate


def rsqrt(step: int = 0, *, warmup: int = 10) -> float:
  return (step + warmup) ** -0.5


def train(*, model_dir: str, data: Data, eval_data: Optional[Data] = None,
          optimizer: Union[AdamW, Adafactor, None] = None,
          partitioner: Optional[Partitioner] = None, total_steps: int = 100,
          dtype: Literal['float32', 'bfloat16'] = 'float32', layers: Sequence[int] = ()):
  return model_dir


def infer(*, model_dir: str):
  return model_dir
"""

RUN = """# python -m app.train
from __gin__ import dynamic_registration
from app import train as train_script

BATCH_SIZE = 128
LENGTH = 16
MODEL_DIR = %gin.REQUIRED
TRAIN_STEPS = 50

train_script.train:
  model_dir = %MODEL_DIR
  data = @train/train_script.Data()
  eval_data = @eval/train_script.Data()
  optimizer = %OPTIMIZER
  partitioner = @train_script.Partitioner()
  total_steps = %TRAIN_STEPS

train/train_script.Data.batch_size = %BATCH_SIZE
eval/train_script.Data.batch_size = 4
train_script.Data.lengths = {'targets': %LENGTH}

OPTIMIZER = @train_script.AdamW()
train_script.AdamW.schedule = @train_script.rsqrt
train_script.rsqrt.warmup = 20
"""

EXAMPLE = """include 'gin_configs/runs/run.gin'

BATCH_SIZE = 8
"""

ENTRY = 'app.train.train'


def make(folder: pathlib.Path) -> pathlib.Path:
  """Writes the project into `folder`: app/train.py, gin_configs/runs/run.gin and my.gin."""
  write(folder / 'app/__init__.py', '')
  write(folder / 'app/train.py', TRAIN)
  write(folder / 'gin_configs/runs/run.gin', RUN)
  write(folder / 'my.gin', EXAMPLE)
  return folder


def write(path: pathlib.Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)
