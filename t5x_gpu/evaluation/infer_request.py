"""Builds the request of `python -m t5x_gpu.infer` from its flags and gin files.

A checkpoint folder brings its own gin file, which is read as data unless the user trusts it.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import tempfile
import types
from collections.abc import Sequence
from typing import Optional

from t5x_gpu.checkpoint.run_files import (
  HF_FOLDER,
  carried_ends,
  carried_generation,
  carried_vocabulary,
  on_this_machine,
)
from t5x_gpu.config import gin_loader
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.data_module import has_text
from t5x_gpu.errors import ConfigError
from t5x_gpu.models.decoding import DecodingConfig
from t5x_gpu.models.dpo import policy_of
from t5x_gpu.models.model import Model
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.distributed import DistributedConfig
from t5x_gpu.storage.json_schema import Json
from t5x_gpu.storage.paths import AnyPath, as_path

# Gin file in the folder of a run, and of a converted model.
RUN_GIN, MODEL_GIN = 'config.gin', 'model.gin'
_SETUP = 't5x_gpu.evaluation.infer_request.InferSetup'
_RESULTS_OF = re.compile(r'[^\w.-]+')  # characters of a task's name that file names lack
_SETUP_GIN = """from __gin__ import dynamic_registration
from t5x_gpu.evaluation import infer_request
from t5x_gpu.models import decoding
from t5x_gpu.partitioning import partitioner
infer_request.InferSetup.decoding_cfg = @decoding.DecodingConfig()
"""
_MODEL_GIN = """infer_request.InferSetup.model = %MODEL
infer_request.InferSetup.partitioner = @partitioner.Partitioner()
"""


# The settings of a run that `infer` reads.
RUN_SETTINGS = (
  'model',
  'partitioner',
  'model_dir',
  'train_dataset_cfg',
  'train_eval_dataset_cfg',
  'infer_eval_dataset_cfg',
  'decoding_cfg',
  'distributed_cfg',
  'xla_preset',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferSetup:
  """Settings in gin that only `infer` has. Flags of the command take precedence.

  Attributes:
    decoding_cfg: how to choose tokens, unless the run's gin file sets it.
    model, partitioner: values from a model file; None with the gin file of a run, which sets them.
    dataset_cfg: task, split and lengths of the prompts; None with other gin files. With a dataset,
      gin files configure a job without a run.
    prompts: as --prompts; None for the examples of the task.
    checkpoint: as --checkpoint, or a checkpoint of T5X, which is converted into `output_dir` first.
    output_dir: folder of the results, TASK-predict.jsonl-00000-of-00001; None for --output.
    score: as --score.
    shard_id, num_shards: take each prompt whose number is shard_id modulo num_shards.
  """

  decoding_cfg: DecodingConfig
  model: Optional[Model] = None
  partitioner: Optional[Partitioner] = None
  dataset_cfg: Optional[DatasetConfig] = None
  prompts: Optional[str] = None
  checkpoint: Optional[str] = None
  output_dir: Optional[str] = None
  score: bool = False
  shard_id: int = 0
  num_shards: int = 1

  def __post_init__(self) -> None:
    if not 0 <= self.shard_id < self.num_shards:
      raise ConfigError(
        f'Shard {self.shard_id} of {self.num_shards} does not exist.',
        fix=f'Shards are 0 to num_shards - 1: set num_shards to at least {self.shard_id + 1}.',
        parameters=('InferSetup.shard_id', 'InferSetup.num_shards'),
      )

  @property
  def output(self) -> Optional[str]:
    """The file of the results, named as in T5X."""
    if self.output_dir is None or self.dataset_cfg is None:
      return None
    task = _RESULTS_OF.sub('_', self.dataset_cfg.mixture_or_task_name or 'prompts')
    mode = 'score' if self.score else 'predict'
    shard = f'{self.shard_id:05}-of-{self.num_shards:05}'
    return str(as_path(self.output_dir) / f'{task}-{mode}.jsonl-{shard}')


@dataclasses.dataclass(frozen=True)
class InferRequest:
  """A model, its parameters, and how to use them.

  Attributes:
    model, partitioner: values configured in gin.
    dataset: task and vocabulary of the prompts; only a vocabulary for a model without a task.
    decoding: how to choose tokens.
    checkpoint: MODEL_DIR, one of its checkpoints, or a converted model.
    step: step of the checkpoint; None for the latest.
    ends: ids that end a text according to the files of a converted model.
    sets_start_token: whether gin sets DecodingConfig.start_token.
    is_run: whether the gin file configures a run or a job, not only a model.
    may_import: modules that the task may import in addition to t5x_gpu's; None for any.
    distributed_cfg, xla_preset: how the processes start.
    chat: whether prompts are conversations.
    setup: settings in gin with the values of the flags.
    ignored: generation settings in the files of a converted model, which are not applied.
    notes: remarks on the gin file of a job, to print.
  """

  model: Model
  partitioner: Partitioner
  dataset: DatasetConfig
  decoding: DecodingConfig
  checkpoint: AnyPath
  step: Optional[int]
  ends: tuple[int, ...]
  sets_start_token: bool
  is_run: bool
  may_import: Optional[tuple[str, ...]]
  distributed_cfg: DistributedConfig
  xla_preset: str
  setup: InferSetup
  chat: bool = False
  ignored: Json = dataclasses.field(default_factory=dict)
  notes: tuple[str, ...] = ()


def read_request(
  flags: argparse.Namespace,
  gin_files: Sequence[str],
  *,
  bindings: Sequence[str] = (),
  search_paths: Sequence[str] = (),
) -> InferRequest:
  """Returns the request that flags and gin files describe.

  Args:
    flags: flags of the command.
    gin_files: gin files of the command line; if empty, uses the gin file in `flags.checkpoint`.
    bindings, search_paths: as in `gin_loader.load`.
  Raises:
    ConfigError: the gin files are invalid or incomplete.
  """
  folder = as_path(flags.checkpoint) if flags.checkpoint else None
  run_folder = _folder_of_run(folder)
  files = list(map(str, gin_files)) or [gin_file_of(flags.checkpoint)]
  as_data = not gin_files and not flags.trust_gin
  is_job = bool(gin_files) and gin_loader.configures(files, _SETUP, search_paths=search_paths)
  is_run = not is_job and configures_run(files)
  if is_job:
    loaded = gin_loader.load(files, bindings=bindings, search_paths=search_paths, entry=_SETUP)
  else:
    loaded = _load(files, bindings, search_paths, is_run=is_run, as_data=as_data)
  setup = _with_flags(gin_loader.configured(loaded, InferSetup, entry=_SETUP), flags)
  if is_job:
    run, dataset, ends, ignored = None, _dataset_of_job(setup, flags), (), {}
  elif is_run:
    run = types.SimpleNamespace(**loaded.arguments(only=RUN_SETTINGS))
    dataset = run.infer_eval_dataset_cfg or run.train_eval_dataset_cfg or run.train_dataset_cfg
    if dataset.task_feature_lengths is None:
      lengths = run.train_dataset_cfg.task_feature_lengths
      dataset = dataclasses.replace(dataset, task_feature_lengths=lengths)
    dataset = dataclasses.replace(dataset, split=flags.split or dataset.split)
    ends, ignored = (), {}
  elif folder is None:
    raise ConfigError(
      'This gin file configures a model but no run, so it does not set MODEL_DIR.',
      fix='Add --checkpoint=FOLDER, or pass the gin file of a run.',
      parameters=('MODEL_DIR',),
    )
  else:
    run, dataset = None, DatasetConfig('', {}, '', 1)
    ends, ignored = carried_ends(run_folder), carried_generation(run_folder / HF_FOLDER)
  source = run or setup
  decoding = source.decoding_cfg or setup.decoding_cfg
  if decoding.max_decode_length is None:
    length = dataset.task_feature_lengths.get('targets', DecodingConfig.max_decode_length)
    decoding = dataclasses.replace(decoding, max_decode_length=length)
  return InferRequest(
    model=policy_of(source.model),
    partitioner=source.partitioner,
    dataset=_with_vocabulary(
      dataset, flags, run_folder, has_task=is_run or is_job, as_data=as_data
    ),
    decoding=decoding,
    checkpoint=folder or as_path(run.model_dir if run else setup.checkpoint),
    step=flags.step,
    ends=ends,
    sets_start_token=any(
      setting.key.endswith('DecodingConfig.start_token') for setting in loaded.provenance.settings
    ),
    is_run=is_run or is_job,
    # The user may name a module: --gin.MIXTURE_OR_TASK_MODULE=my_tasks
    may_import=tuple(name for binding in bindings for name in _items(binding.partition('=')[2]))
    if as_data
    else None,
    distributed_cfg=run.distributed_cfg if run else DistributedConfig(),
    xla_preset=run.xla_preset if run else 'default',
    setup=setup,
    chat=flags.chat,
    ignored=ignored,
    notes=loaded.notes if is_job else (),
  )


def _with_flags(setup: InferSetup, flags: argparse.Namespace) -> InferSetup:
  """Returns `setup` with the values of the flags that are given."""
  names = ('checkpoint', 'prompts', 'score', 'shard_id', 'num_shards')
  given = {name: getattr(flags, name, None) for name in names}
  # 0 is a shard, so `in (None, False)` would drop it.
  given = {k: v for k, v in given.items() if v is not None and v is not False}
  return dataclasses.replace(setup, **given)


def _dataset_of_job(setup: InferSetup, flags: argparse.Namespace) -> DatasetConfig:
  """Returns the dataset of a job without a run; raises ConfigError if a setting is missing."""
  dataset = setup.dataset_cfg
  missing = [
    name
    for name in ('model', 'partitioner', 'dataset_cfg', 'checkpoint')
    if getattr(setup, name) is None
  ]
  if missing:
    names = ', '.join(f'InferSetup.{name}' for name in missing)
    raise ConfigError(f'A job without a run needs {names}.', fix='Set it in the gin file.')
  if dataset.task_feature_lengths is None:
    raise ConfigError(
      'DatasetConfig.task_feature_lengths = None: the length of predictions is unknown.',
      fix="Set lengths, as in {'inputs': 512, 'targets': 128}.",
      parameters=('DatasetConfig.task_feature_lengths',),
    )
  return dataclasses.replace(dataset, split=flags.split or dataset.split)


def _items(value: str) -> list[str]:
  """Returns the texts of a gin value: of a text, or of a list or tuple of texts."""
  value = value.strip()
  inside = value[1:-1].split(',') if value[:1] in ('[', '(') else [value]
  return [item.strip(' \'"') for item in inside]


def _with_vocabulary(
  dataset: DatasetConfig,
  flags: argparse.Namespace,
  folder: Optional[AnyPath],
  *,
  has_task: bool,
  as_data: bool,
) -> DatasetConfig:
  """Returns `dataset` with the vocabulary of the flag, or of a converted model."""
  vocabulary = flags.vocabulary
  if vocabulary is None and not has_task:
    vocabulary = carried_vocabulary(folder)
  if vocabulary is None:
    return dataset
  dataset = dataclasses.replace(dataset, vocabulary=vocabulary)
  needs_task = not flags.interactive and flags.prompts is None
  if not needs_task and (as_data or not has_text(dataset)):
    dataset = dataclasses.replace(
      dataset, mixture_or_task_name='', mixture_or_task_module=None, module=DatasetConfig.module
    )
  return dataset


def _folder_of_run(checkpoint: Optional[AnyPath]) -> Optional[AnyPath]:
  """Returns the folder with the gin file: for a checkpoint of a run, the run's folder."""
  is_step = checkpoint is not None and (checkpoint / 'manifest').is_dir()
  return checkpoint.parent if is_step else checkpoint


def gin_file_of(checkpoint: Optional[str]) -> str:
  """Returns the gin file of the run or the model that `checkpoint` belongs to.

  Raises:
    ConfigError: the folder has no gin file, or `checkpoint` is None.
  """
  folder = _folder_of_run(as_path(checkpoint) if checkpoint else None)
  if folder is None:
    raise ConfigError(
      'Neither --checkpoint nor --gin_file is given.',
      fix='Give the MODEL_DIR of a run, as in --checkpoint=runs/demo',
      parameters=('MODEL_DIR',),
    )
  for name in (RUN_GIN, MODEL_GIN):
    if (folder / name).is_file():
      return str(on_this_machine(folder / name))
  if not folder.exists():
    raise ConfigError(
      f'--checkpoint={folder} does not exist (working directory: {os.getcwd()}).',
      fix='Give the MODEL_DIR of a run, or what t5x_gpu.convert wrote.',
      parameters=('MODEL_DIR',),
    )
  raise ConfigError(
    f'{folder} has neither {RUN_GIN} nor {MODEL_GIN}, which would describe the model.',
    fix='Give the MODEL_DIR of a run, or what t5x_gpu.convert wrote, '
    'or --gin_file=... as for the training.',
    parameters=('MODEL_DIR',),
  )


def configures_run(files: Sequence[str]) -> bool:
  """Returns whether gin files configure a run; a model file only sets MODEL."""
  paths = [pathlib.Path(file) for file in files]
  texts = [path.read_text('utf-8', 'replace') if path.is_file() else '' for path in paths]
  return not any(re.search(r'^MODEL\s*=', text, re.MULTILINE) for text in texts) or any(
    re.search(r'\btrain(_script)?\.train\b|^include', text, re.MULTILINE) for text in texts
  )


def _load(
  files: Sequence[str],
  bindings: Sequence[str],
  search_paths: Sequence[str],
  *,
  is_run: bool,
  as_data: bool,
) -> gin_loader.LoadedConfig:
  """Returns the configuration for `InferSetup`, and for `train` if the files configure a run.

  Args:
    files, bindings, search_paths: as in `gin_loader.load`.
    is_run: whether `files` configure a run.
    as_data: do not run any code that `files` name.
  """
  with tempfile.TemporaryDirectory() as temporary:
    setup = pathlib.Path(temporary) / 'infer.gin'
    setup.write_text(_SETUP_GIN if is_run else _SETUP_GIN + _MODEL_GIN, 'utf-8')
    return gin_loader.load(
      [*files, setup],
      bindings=bindings,
      search_paths=search_paths,
      entry=(gin_loader.ENTRY, _SETUP) if is_run else _SETUP,
      read_as_data=dict.fromkeys(files if as_data else (), RUN_SETTINGS if is_run else ('MODEL',)),
    )
