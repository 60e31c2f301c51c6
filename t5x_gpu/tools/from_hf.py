"""Writes the gin file of a fine-tuning run: a Hugging Face model, data, and GPUs decide its values.

`write_run` opens the model, measures the data, takes learning rate and batch of the published
method that fits both, and the layout that a plan says fits on the GPUs. It opens the data as the
run will, converts the model, and writes the file, in which a comment names the source of each
value.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import pathlib
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from typing import Optional

import jax
import numpy as np

from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.checkpoint.params_files import ParamsReader
from t5x_gpu.checkpoint.run_files import HF_FOLDER, MODEL_GIN, SENTENCEPIECE
from t5x_gpu.checkpoint.store import CheckpointAddress
from t5x_gpu.config import gin_loader
from t5x_gpu.conversion.conversion import ConversionRequest
from t5x_gpu.conversion.hf.folder import HfModel, changed_files, open_hf
from t5x_gpu.conversion.model_spec import ModelFields, describe, gin_text, read_model
from t5x_gpu.conversion.tensor_copy import compare_with_ours
from t5x_gpu.conversion.to_ours import convert_hf
from t5x_gpu.data.batches import BatchIterator, DatasetConfig
from t5x_gpu.data.data_module import Survey, batches_for, open_class_names, open_survey
from t5x_gpu.data.features import LOSS_MASK, PAIR_PLACES
from t5x_gpu.errors import CheckpointError, ConfigError, NoExamplesError
from t5x_gpu.models.encoder import MULTI_LABEL, SINGLE_LABEL
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.storage.files import write_atomically
from t5x_gpu.storage.paths import as_path, local_path
from t5x_gpu.storage.user_paths import expanded_path, user_path
from t5x_gpu.terminal import logging_setup
from t5x_gpu.terminal.console import Console, show
from t5x_gpu.tools.planning.assumptions import Assumptions, calibrated
from t5x_gpu.tools.planning.devices import simulated_devices, topology_of
from t5x_gpu.tools.planning.gpu_targets import GpuTarget, find_target
from t5x_gpu.tools.planning.prediction import PlanConfig, Planner, Prediction
from t5x_gpu.tools.planning.remedies import ALMOST, nothing_fits, remedies

# Examples that are tokenized to choose the length of a row.
_MEASURED = 2000
_PERCENT = 99  # of the examples fit into a row; longer ones are cut
_MULTIPLE = 64  # of the length of a row
_TEXT_LENGTH = 2048  # of rows of plain text, whose documents are cut into pieces
_ALL = 1000  # layouts, more than there are
_ANY_GPUS = 8  # without --gpus, a batch that 1, 2, 4 or 8 GPUs divide
_EVALUATIONS, _EVAL_ROWS = 10, 2000  # of a run, and of one evaluation

TEXT, PAIRS, CHAT, PREFERENCES = 'texts', 'inputs with targets', 'conversations', 'preferences'
MASKED = 'texts with masked tokens'
# Feature of the labels -> the kind of data.
_LABELS = {
  'label': 'texts with a class',
  'labels': 'texts with several classes',
  'score': 'texts with a number',
  'tags': 'words with tags',
}
_KINDS = {
  'decoder_only': (TEXT, PAIRS, CHAT, PREFERENCES),
  'encoder_decoder': (PAIRS,),
  'encoder': (MASKED, *_LABELS.values()),
}
_MODELS = {
  'decoder_only': 'a decoder-only model',
  'encoder_decoder': 'an encoder-decoder',
  'encoder': 'an encoder',
}
# Class in a `Change` of a plan -> the name in gin, and its module.
_GIN_NAMES = {
  'Partitioner': ('partitioner.Partitioner', 't5x_gpu.partitioning'),
  'TransformerConfig': ('config.TransformerConfig', 't5x_gpu.models'),
  'AdamW': ('optimizers.AdamW', 't5x_gpu.training'),
  'train': ('train_script.train', ''),
}


@dataclasses.dataclass(frozen=True)
class RunRequest:
  """What to write.

  Attributes:
    folder: folder of the Hugging Face model.
    task: the data, as MIXTURE_OR_TASK_NAME.
    output: the gin file to write; None only in a dry run.
    converted: folder of the converted model; None for runs/<name of the folder>.
    model_dir: MODEL_DIR; None for runs/<name of the output>.
    lora: train adapters.
    export: folder to which the run exports its model at the end; None for no export.
    topology: the GPUs; None for any number, which no plan then checks.
    gpu: kind of the GPUs.
    dry_run: print the file, convert and write nothing.
  """

  folder: pathlib.Path
  task: str
  output: Optional[pathlib.Path]
  converted: Optional[str]
  model_dir: Optional[str]
  lora: bool
  export: Optional[str]
  topology: Optional[Topology]
  gpu: GpuTarget
  dry_run: bool = False

  @property
  def name(self) -> str:
    return self.folder.resolve().name

  @property
  def to(self) -> str:
    """The folder of the converted model, as gin names it."""
    return self.converted or f'runs/{self.name}'

  @property
  def run(self) -> str:
    """MODEL_DIR."""
    stem = self.output.stem if self.output else f'{self.name}_tuned'
    same = user_path(f'runs/{stem}') == user_path(self.to)
    return self.model_dir or (f'runs/{stem}_tuned' if same else f'runs/{stem}')


@dataclasses.dataclass(frozen=True)
class Method:
  """Numbers of a published way to fine-tune.

  Attributes:
    learning_rate: its peak.
    batch: examples of a step.
    epochs: passes over the data.
    warmup: share of the steps in which the learning rate rises.
    source: where the numbers come from.
    rate_source: where the learning rate comes from; '' for `source`.
    epochs_source: where the epochs come from; '' for `source`.
    batch_unit: what `source` counts in `batch`, if not single examples.
    optimizer: the class of the optimizer, 'AdamW' or 'Adafactor'.
    is_constant: the learning rate stays at its peak; else it falls linearly to 0.
    weight_decay, b2: of AdamW; None for our default.
  """

  learning_rate: float
  batch: int
  epochs: int
  warmup: float
  source: str
  rate_source: str = ''
  epochs_source: str = ''
  batch_unit: str = ''
  optimizer: str = 'AdamW'
  is_constant: bool = False
  weight_decay: float = 0.0
  b2: Optional[float] = None


_OWN = 'our choice'
# finetune_with_accelerate.sh of allenai/open-instruct at 0770613; the rate of 70B is the paper's.
_FULL = Method(2e-5, 128, 2, 0.03, 'Tulu 2 (Ivison et al. 2023)')
_FULL_LARGE = dataclasses.replace(_FULL, learning_rate=1e-5, source=f'{_FULL.source}, 70B')
# dpo_train_with_accelerate.sh of allenai/open-instruct at 1dbcb5c.
_DPO = Method(5e-7, 32, 3, 0.1, 'DPO of Tulu 2 (Ivison et al. 2023)')
# finetune_guanaco_7b.sh and finetune_guanaco_65b.sh of artidoro/qlora at 0b46ca8.
_LORA = Method(
  2e-4,
  16,
  3,
  0.0,  # its scripts set warmup_ratio = 0.03, which transformers' constant schedule ignores
  'QLoRA (Dettmers et al. 2023), 7B and 13B',
  epochs_source=_OWN,
  is_constant=True,
  b2=0.999,
)
_LORA_LARGE = dataclasses.replace(
  _LORA, learning_rate=1e-4, source='QLoRA (Dettmers et al. 2023), 33B and 65B'
)
# Parameters from which a large model's method is used: between the published sizes.
_LARGE, _LORA_FROM = 50e9, 20e9
_LORA_DPO = dataclasses.replace(
  _DPO,
  learning_rate=10 * _DPO.learning_rate,
  rate_source=f'{_DPO.source}, times 10 for adapters (Schulman et al. 2025)',
)
# t5x/configs/runs/finetune.gin of google-research/t5x at cc342d4. Its 128 rows are packed; they are
# 128 examples here, because most data for fine-tuning would fill only a few such steps.
_T5 = Method(
  1e-3,
  128,
  3,
  0.0,
  'T5 (Raffel et al. 2020)',
  epochs_source=_OWN,
  batch_unit=' packed rows',
  optimizer='Adafactor',
  is_constant=True,
)
# run_classifier.py of google-research/bert, and the examples of its page.
_BERT = Method(2e-5, 32, 3, 0.1, 'BERT (Devlin et al. 2019)', weight_decay=0.01, b2=0.999)
# Rank and alpha of the adapters, and the kernels that have them, by whether the model has experts.
_RANK, _ALPHA = 64, 16.0
_ALL_KERNELS, _NO_EXPERTS = r'.*/kernel', r'.*attention/.*/kernel'


@dataclasses.dataclass(frozen=True)
class _Data:
  """The measured data.

  Attributes:
    kind: a value of `_KINDS`.
    train: size of the training split.
    validation: number of examples of the validation split.
    lengths: TASK_FEATURE_LENGTHS.
    reason: the reason for `lengths`.
    per_row: examples of a packed row, on average; 1 if rows are not packed. Below 1 for texts that
      are cut into pieces; each piece fills a row.
    packed: whether rows are packed.
    class_names: names of the classes; () without.
  """

  kind: str
  train: Survey
  validation: int
  lengths: Mapping[str, int]
  reason: str
  per_row: float
  packed: bool
  class_names: tuple[str, ...]


def write_run(request: RunRequest, console: Console) -> None:
  """Writes the gin file, and the converted model that it starts from.

  Raises:
    UserError: the model cannot be converted, the data do not fit it, the run does not fit on the
      GPUs, or a file exists.
  """
  jax.config.update('jax_platforms', 'cpu')  # never takes a GPU from a run
  if request.output and request.output.exists():
    raise ConfigError(f'{request.output} exists.', fix='Give a new file: --output=FILE')
  if request.export and local_path(request.export, what='--export').exists():
    raise ConfigError(f'--export={request.export} exists.', fix='Give a new folder.')
  if as_path(request.run) == local_path(request.to, what='--converted'):
    raise ConfigError(
      f'--model_dir and --converted are the same folder, {request.to}.',
      fix='Name two folders: the run starts from the converted model.',
    )
  hf = open_hf(request.folder)
  console.say(f'model: {request.folder}: {hf.family}, {hf.model.kind}')
  data = _measured(request, hf.model)
  console.say(
    f'data: {data.train.num_examples:,} {data.kind} to train on, {data.validation:,} to evaluate; '
    f'{data.reason}'
  )
  draft = _Draft(request, hf, data)
  with tempfile.TemporaryDirectory() as folder:
    trial = pathlib.Path(folder)
    (trial / MODEL_GIN).write_text(gin_text(hf.model, title=request.name), 'utf-8')
    config = draft.configured(trial)
    if request.topology is not None:
      draft = dataclasses.replace(draft, layout=_layout(config, request, kind=hf.model.kind))
      config = draft.configured(trial)
  console.say(f'layout: {draft.layout.reason}')
  if note := draft.large_batch():
    console.say(note)
  with contextlib.closing(_open(config)):  # every error of the data comes before the conversion
    pass
  text = draft.text(include=f'{request.to}/{MODEL_GIN}', vocabulary=draft.vocabulary())
  if request.dry_run:
    print(text, end='')
    return
  _convert(request, hf, console)
  write_atomically(request.output, text)
  console.say(f'written: {request.output}')
  print(draft.next_steps(), flush=True)


def _own_vocabulary(folder: pathlib.Path, *, copied_to: str = '') -> str:
  """Returns the tokenizer in a folder, as a value of VOCABULARY.

  Args:
    folder: the folder.
    copied_to: the folder to name, which will have the same tokenizer; '' for `folder`.
  Raises:
    ConfigError: it has none that can be read.
  """
  named = copied_to or folder
  if (folder / 'tokenizer.json').is_file():
    return f'huggingface:{named}'
  for name in SENTENCEPIECE:
    if (folder / name).is_file():
      return f'sentencepiece:{named}/{name}'
  raise ConfigError(
    f'{folder} has no tokenizer.',
    fix=f'Copy tokenizer.json, or {" or ".join(SENTENCEPIECE)}, from the source of the weights.',
    docs='from_huggingface.md',
  )


# Task that cuts texts into examples -> TASK_FEATURE_LENGTHS, their source, and the tokens of
# `inputs` for each token of the text (0.85 of them stay, and 0.05 are sentinels).
_OBJECTIVES = {
  'mlm': ({'inputs': 512, 'targets': 512}, "BERT's rows", 1.0),
  'span_corruption': ({'inputs': 512, 'targets': 114}, "T5's rows", 0.9),
}


def _measured(request: RunRequest, model: ModelFields) -> _Data:
  """Returns the sizes of the data.

  Raises:
    ConfigError, DataError: the data cannot be read, or do not fit the model.
  """
  objective, _, text = request.task.partition(':')
  fixed, of_objective, share = _OBJECTIVES.get(objective, (None, '', 1.0))
  config = DatasetConfig(
    request.task, fixed, 'train', 1, pack=False, vocabulary=_own_vocabulary(request.folder)
  )
  train = open_survey(config, num_measured=1 if fixed else _MEASURED)
  kind = MASKED if objective == 'mlm' else _kind(train.features)
  if kind not in _KINDS[model.kind]:
    raise ConfigError(
      f'{request.task} has {kind}; {request.folder} is {_MODELS[model.kind]}.',
      fix=f'{_MODELS[model.kind].capitalize()} learns from {", ".join(_KINDS[model.kind])}.',
      docs='tasks.md',
    )
  if request.lora and model.kind == 'encoder':
    raise ConfigError(
      f'--lora: {request.folder} is an encoder, which is small enough to be trained as a whole.',
      fix='Leave --lora out.',
      docs='finetune.md#lora',
    )
  try:
    validation = dataclasses.replace(config, split='validation')
    held_out = open_survey(validation, num_measured=0).num_examples
  except NoExamplesError:
    held_out = 0
  packed, is_cut_up = kind not in _LABELS.values(), bool(fixed) or kind == TEXT
  if fixed:  # the measured examples would be the pieces
    texts = dataclasses.replace(config, mixture_or_task_name=text, task_feature_lengths=None)
    train = open_survey(texts, num_measured=_MEASURED)
    sizes = {'inputs': share * train.lengths['targets']}
  else:
    sizes = {name: train.lengths[name] for name in _token_features(kind, model)}
  limit = model.config.length_limit
  if fixed:
    lengths = {name: min(length, limit or length) for name, length in fixed.items()}
    reason = f'{of_objective} of {" and ".join(map(str, dict.fromkeys(lengths.values())))} tokens'
  elif kind == TEXT:
    lengths = {'targets': min(_TEXT_LENGTH, limit or _TEXT_LENGTH)}
    reason = f'texts are cut into pieces of {lengths["targets"]:,} tokens'
  else:
    lengths, reason = _lengths(sizes, limit, of_row=model.kind == 'decoder_only')
  if model.kind == 'decoder_only' and not fixed:  # a row holds all features
    per_row = sum(lengths.values()) / float(np.mean(sum(sizes.values())))
  else:
    per_row = min(lengths[name] / float(np.mean(found)) for name, found in sizes.items())
  if not is_cut_up:
    per_row = max(1.0, per_row) if packed else 1.0
  has_classes = kind in _LABELS.values() and kind != _LABELS['score']
  names = open_class_names(config) or () if has_classes else ()
  return _Data(kind, train, held_out, lengths, reason, per_row, packed, names)


def _kind(features: Sequence[str]) -> str:
  """Returns the kind of data with these features, a value of `_KINDS` or another description."""
  if PAIR_PLACES in features:
    return PREFERENCES
  if LOSS_MASK in features:
    return CHAT
  if 'segments' in features:
    return 'sets of texts'
  for label, kind in _LABELS.items():
    if label in features:
      return kind
  return {('inputs', 'targets'): PAIRS, ('targets',): TEXT}.get(
    tuple(sorted(features)), f'the features {", ".join(sorted(features))}'
  )


def _token_features(kind: str, model: ModelFields) -> tuple[str, ...]:
  """Returns the task features with tokens, whose lengths a run sets."""
  if model.kind == 'encoder':
    return ('inputs', 'targets') if kind == MASKED else ('inputs',)
  return ('inputs', 'targets') if kind == PAIRS else ('targets',)


def _lengths(
  sizes: Mapping[str, np.ndarray], limit: Optional[int], *, of_row: bool
) -> tuple[dict[str, int], str]:
  """Returns lengths that most examples fit into, and the reason.

  Args:
    sizes: feature -> tokens of each example.
    limit: maximum length of a row, or None.
    of_row: whether all features share a row.
  """
  room = None if limit is None else limit // (len(sizes) if of_row else 1)
  lengths, reasons = {}, []
  for name, found in sizes.items():
    most = int(np.percentile(found, _PERCENT, method='higher'))
    rounded = -(-most // _MULTIPLE) * _MULTIPLE
    lengths[name] = rounded if room is None else min(rounded, room)
    cut = float(np.mean(found > lengths[name]))
    reasons.append(
      f'{_PERCENT}% of {name} have at most {most:,} tokens, the longest {int(found.max()):,}'
      + (f'; {cut:.1%} are cut' if cut else '')
    )
  number = len(next(iter(sizes.values())))
  return lengths, f'of {number:,} measured: {"; ".join(reasons)}'


def _method(model: ModelFields, data: _Data, *, lora: bool) -> Method:
  if model.kind == 'encoder':
    return _BERT
  if data.kind == PREFERENCES:
    return _LORA_DPO if lora else _DPO
  size = sum(map(math.prod, model.abstract_shapes().values()))
  if lora:
    return _LORA_LARGE if size >= _LORA_FROM else _LORA
  if model.kind == 'encoder_decoder':
    return _T5
  full = _FULL_LARGE if size >= _LARGE else _FULL
  if data.kind == TEXT:
    return dataclasses.replace(full, epochs=1, epochs_source=_OWN)
  return full


@dataclasses.dataclass(frozen=True)
class _Layout:
  """How the run is split over the GPUs.

  Attributes:
    settings: 'Partitioner.NAME = VALUE' and the like, in addition to fsdp.gin.
    reason: the reason.
  """

  settings: tuple[str, ...] = ()
  reason: str = (
    'parameters, gradients and optimizer state are split over all GPUs; --gpus=8 --gpu=h100 '
    'checks that they fit'
  )


def _layout(config: PlanConfig, request: RunRequest, *, kind: str) -> _Layout:
  """Returns fsdp, or the fastest layout that fits if fsdp does not or is 10% slower.

  By formula, with room for its error. Moments in bfloat16 are the last resort.

  Args:
    config: the run.
    request: the GPUs.
    kind: the kind of the model.
  Raises:
    ConfigError: none fits.
  """
  topology, gpu = request.topology, request.gpu
  devices = simulated_devices(topology.num_devices)
  planner = Planner(gpu, calibrated(None, gpu, Assumptions()), devices)

  def is_safe(prediction: Prediction) -> bool:
    return prediction.memory.needed_bytes * ALMOST <= prediction.memory.pool_bytes

  given = planner.by_formula(config, topology)
  found = remedies(config, topology, by_formula=planner.by_formula, compiled=None, number=_ALL)
  safe = [r for r in found if is_safe(r.prediction)]
  exact = [r for r in safe if r.change.keeps_precision]
  fitting = [(r.change.settings, r.prediction) for r in exact or safe]
  fastest = min((p.seconds_per_step for _, p in fitting), default=math.inf)
  if is_safe(given) and given.seconds_per_step <= ALMOST * fastest:
    fitting = [((), given)]
  gpus = f'{topology.num_devices} x {gpu.device_kind}'
  if not fitting:
    can_adapt = not request.lora and kind != 'encoder'
    raise ConfigError(
      f'{request.name} does not fit on {gpus}: '
      + nothing_fits(config, topology, by_formula=planner.by_formula),
      fix='Give more GPUs' + (', or add --lora, which trains adapters.' if can_adapt else '.'),
      docs='plan.md',
    )
  settings, prediction = fitting[0]
  memory = prediction.memory
  if not any('mesh_shape' in setting for setting in settings):  # fsdp takes the other GPUs: -1
    settings = tuple(s for s in settings if not s.startswith('Partitioner.fsdp = '))
  return _Layout(
    settings,
    f'by the formulas of plan, {show(memory.needed_bytes)} of {show(memory.pool_bytes)} on each of '
    f'{gpus}',
  )


@dataclasses.dataclass(frozen=True)
class _Draft:
  """The gin file, before it is written.

  Attributes:
    request: the request.
    hf: the opened model.
    data: the measured data.
    layout: the layout of the run.
  """

  request: RunRequest
  hf: HfModel
  data: _Data
  layout: _Layout = _Layout()

  @functools.cached_property
  def method(self) -> Method:
    return _method(self.hf.model, self.data, lora=self.request.lora)

  @property
  def num_parts(self) -> int:
    """Number that BATCH_SIZE is a multiple of."""
    topology = self.request.topology
    return topology.num_devices if topology else _ANY_GPUS

  @property
  def rows(self) -> int:
    """BATCH_SIZE: rows that hold about the method's batch, and that the GPUs divide."""
    parts = self.num_parts
    return max(1, round(self.method.batch / max(1.0, self.data.per_row) / parts)) * parts

  @property
  def steps(self) -> int:
    examples = self.method.epochs * self.data.train.num_examples
    return max(1, math.ceil(examples / self.examples_per_step))

  @property
  def examples_per_step(self) -> float:
    return self.rows * self.data.per_row

  def large_batch(self) -> str:
    """Returns a note if a step has over twice as many examples as the method; else ''."""
    method, per_row = self.method, max(1.0, self.data.per_row)
    found = self.rows * per_row
    if found <= 2 * method.batch:
      return ''
    parts = self.num_parts
    fix = 'Fewer GPUs (--gpus=N)' if parts > 1 else f'PACK = False with BATCH_SIZE = {method.batch}'
    return (
      f'batch: a step has about {found:,.0f} examples, {method.batch} in {method.source}, since '
      f'BATCH_SIZE is a multiple of {parts} GPUs. {fix} would come closer.'
    )

  def vocabulary(self) -> str:
    """Returns VOCABULARY: the tokenizer that the converted model carries."""
    return _own_vocabulary(self.request.folder, copied_to=f'{self.request.to}/{HF_FOLDER}')

  def configured(self, trial: pathlib.Path) -> PlanConfig:
    """Returns the run, with the files in `trial` in place of the converted model."""
    text = self.text(
      include=str(trial / MODEL_GIN), vocabulary=_own_vocabulary(self.request.folder)
    )
    (trial / 'draft.gin').write_text(text, 'utf-8')
    return gin_loader.configured(gin_loader.load([trial / 'draft.gin']), PlanConfig)

  def next_steps(self) -> str:
    """Returns the commands that follow."""
    r = self.request
    return '\n'.join(
      [
        'Next:',
        f'  look     python -m t5x_gpu.data preview --gin_file={_quoted(r.output)}',
        f'  train    python -m t5x_gpu.train --gin_file={_quoted(r.output)}',
        f'  export   at the end of the run, to {r.export}'
        if r.export
        else f'  export   {self._export()}',
      ]
    )

  def _export(self) -> str:
    r = self.request
    to = r.export or f'{r.run}_hf'
    return (
      f'python -m t5x_gpu.convert --from={_quoted(r.run)} --to={_quoted(to)} '
      f'--like={_quoted(r.folder)}'
    )

  def text(self, *, include: str, vocabulary: str) -> str:
    """Returns the gin file; `include` is the gin file of the model."""
    sections = [
      self._head(),
      self._imports(),
      self._includes(include),
      self._names(vocabulary),
      self._sizes(),
      self._optimizer(),
      self._times(),
      self._export_lines(),
      self._model(),
      self._layout_lines(),
    ]
    return '\n\n'.join('\n'.join(lines) for lines in sections if lines) + '\n'

  def _head(self) -> list[str]:
    r = self.request
    return [
      f'# Fine-tunes {r.name} on {r.task}; written by python -m t5x_gpu.config from_hf.',
      f'# Train:  python -m t5x_gpu.train --gin_file={_quoted(r.output or "FILE")}',
      f'# Export: {self._export()}',
    ]

  def _imports(self) -> list[str]:
    names = [_GIN_NAMES[setting.partition('.')[0]] for setting in self.layout.settings]
    modules = [f'{package} import {name.partition(".")[0]}' for name, package in names if package]
    modules += ['t5x_gpu.training import optimizers']
    modules += ['t5x_gpu.training import adafactor'] if self.method.optimizer == 'Adafactor' else []
    modules += ['t5x_gpu.training import schedules'] if self.method.is_constant else []
    modules += ['t5x_gpu.models import lora'] if self.request.lora else []
    modules += ['t5x_gpu.models import dpo'] if self.data.kind == PREFERENCES else []
    modules += ['t5x_gpu.models import encoder'] if self._new_head() else []
    modules += ['t5x_gpu.run import export'] if self.request.export else []
    return [
      'from __gin__ import dynamic_registration  # names are imported Python modules',
      'from t5x_gpu import train as train_script  # the run',
      *(f'from {module}  # {_IMPORTED[module.split()[-1]]}' for module in sorted(set(modules))),
    ]

  def _includes(self, include: str) -> list[str]:
    c = self.hf.model.config
    return [
      f'include {include!r}  # the model, from {self.request.name}/config.json: {self.hf.family}, '
      f'{c.num_layers} layers of {c.embed_dim}',
      "include 'gin_configs/parallel/fsdp.gin'  # layout: " + self.layout.reason,
      "include 'gin_configs/runs/finetune.gin'  # all that is not set here",
    ]

  def _names(self, vocabulary: str) -> list[str]:
    r, data = self.request, self.data
    head = self._new_head()
    start = 'the converted weights'
    lines = [
      _line('INITIALIZE_FROM', r.to, f'{start} of {r.name}'),
      _line('MODEL_DIR', r.run, 'checkpoints, metrics and logs of this run'),
      _line('VOCABULARY', vocabulary, f'the tokenizer of {r.name}{self._template()}'),
      _line('MIXTURE_OR_TASK_NAME', r.task, f'--task: {data.train.num_examples:,} {data.kind}'),
    ]
    if head:
      lines[1:1] = [
        _line('INITIALIZE_MODE', 'partial', 'the head is new: it fits the labels of the data'),
        _line('INITIALIZE_PATTERN', head[1], 'all parameters but the new head'),
      ]
    return lines

  def _template(self) -> str:
    if self.data.kind not in (CHAT, PREFERENCES):
      return ''
    return ', and its chat template'

  def _sizes(self) -> list[str]:
    data, method = self.data, self.method
    held, packing = f'{self.rows} examples', 'a row has one label'
    if data.packed and data.per_row >= 1:
      held = f'about {self.examples_per_step:,.0f} examples'
      packing = f'{data.per_row:.1f} examples share a row'
    elif data.packed:
      held, packing = f'{self.rows} pieces of texts', f'a text fills {1 / data.per_row:.1f} rows'
    rounded = 'the GPUs' if self.request.topology else f'{_ANY_GPUS} GPUs'
    return [
      _line('TASK_FEATURE_LENGTHS', dict(data.lengths), data.reason),
      _line('PACK', data.packed, packing),
      _line(
        'BATCH_SIZE',
        self.rows,
        f'rows of a step, {held}; {method.batch}{method.batch_unit} in {method.source}; '
        f'a multiple of {rounded}',
      ),
    ]

  def _optimizer(self) -> list[str]:
    method = self.method
    lines = [_line('LEARNING_RATE', method.learning_rate, method.rate_source or method.source)]
    if method.warmup:
      steps, share = math.ceil(method.warmup * self.steps), f'{method.warmup:.0%} of the steps'
      lines.append(_line('WARMUP_STEPS', steps, f'{share}; {method.source}'))
    if method.is_constant:
      lines += [
        f'train_script.train.learning_rate = @schedules.constant()  # {method.source}',
        'schedules.constant.learning_rate = %LEARNING_RATE  # as above',
      ]
    if method.is_constant and method.warmup:
      lines.append('schedules.constant.warmup_steps = %WARMUP_STEPS  # as above')
    if method.optimizer == 'Adafactor':
      return [*lines, f'OPTIMIZER = @adafactor.Adafactor()  # {method.source}']
    lines.append(f'optimizers.AdamW.weight_decay = {method.weight_decay}  # {method.source}')
    if method.b2 is not None:
      lines.append(f'optimizers.AdamW.b2 = {method.b2}  # {method.source}')
    return lines

  def _times(self) -> list[str]:
    data, method, steps = self.data, self.method, self.steps
    per_step = self.examples_per_step
    lines = [
      _line(
        'TRAIN_STEPS',
        steps,
        f'{method.epochs} epoch{"s" if method.epochs > 1 else ""} '
        f'({method.epochs_source or method.source}) of {data.train.num_examples:,} examples, '
        f'{per_step:,.{0 if per_step >= 10 else 2}f} per step',
      ),
      _line('SAVE_PERIOD', max(1, steps // 4), 'a quarter of the run'),
      _line('LOG_PERIOD', min(10, max(1, steps // 10)), 'steps between two lines of the log'),
    ]
    if not data.validation:
      return [*lines, _line('EVAL_PERIOD', None, 'the data have no validation split')]
    taken = min(data.validation, _EVAL_ROWS * min(1.0, data.per_row))
    return [
      *lines,
      _line('EVAL_PERIOD', max(1, steps // _EVALUATIONS), 'a tenth of the run'),
      _line(
        'EVAL_STEPS',
        max(1, math.ceil(taken / per_step)),
        f'batches of the split validation, which has {data.validation:,} examples',
      ),
    ]

  def _export_lines(self) -> list[str]:
    r = self.request
    if not r.export:
      return []
    return [
      'train_script.train.export_cfg = @export.ExportConfig()  # --export',
      f'export.ExportConfig.to = {r.export!r}  # the fine-tuned model, once the run has ended',
      f'export.ExportConfig.like = {str(r.folder)!r}  # names, dtypes, config.json and tokenizer',
    ]

  def _model(self) -> list[str]:
    head, lora, prefers = self._new_head(), self.request.lora, self.data.kind == PREFERENCES
    if head:
      return [
        f'encoder.EncoderModel.{name} = {value!r}  # the labels of the data'
        for name, value in head[0].items()
      ]
    lines = []
    if prefers:
      inner = '@lora.LoraModel()' if lora else '%MODEL'
      lines += [
        'train_script.train.model = @dpo.DpoModel()  # the data are preferences',
        f'dpo.DpoModel.model = {inner}  # what learns',
        f'dpo.DpoModel.beta = 0.1  # {_DPO.source}',
      ]
    if lora:
      experts = self.hf.model.config.num_experts
      pattern = _NO_EXPERTS if experts else _ALL_KERNELS
      which = 'attention; experts cannot have adapters' if experts else 'all kernels'
      lines += [] if prefers else ['train_script.train.model = @lora.LoraModel()  # --lora']
      lines += [
        'lora.LoraModel.model = %MODEL  # the frozen model',
        f'lora.LoraModel.rank = {_RANK}  # {_LORA.source}',
        f'lora.LoraModel.alpha = {_ALPHA}  # {_LORA.source}',
        f'lora.LoraModel.pattern = {pattern!r}  # {which}; {_LORA.source}',
      ]
    return lines

  def _new_head(self) -> Optional[tuple[dict[str, object], str]]:
    """Returns the arguments of a new head, and INITIALIZE_PATTERN; None to keep the head."""
    model, data = self.hf.model, self.data
    if model.kind != 'encoder' or data.kind == MASKED:
      return None
    wanted: dict[str, object] = {
      _LABELS['label']: {'head_type': 'classification', 'problem_type': SINGLE_LABEL},
      _LABELS['labels']: {'head_type': 'classification', 'problem_type': MULTI_LABEL},
      _LABELS['score']: {'head_type': 'regression'},
      _LABELS['tags']: {'head_type': 'token_classification'},
    }[data.kind]
    if data.class_names:
      wanted |= {'num_classes': len(data.class_names), 'class_names': tuple(data.class_names)}
    built = model.build()
    has = {name: getattr(built, name) for name in wanted}
    if set(data.class_names) <= set(built.class_names):  # its own numbers of these classes stay
      has = {
        name: value for name, value in has.items() if name not in ('num_classes', 'class_names')
      }
    if all(wanted[name] == value for name, value in has.items()):
      return None
    options = {k: v for k, v in model.options.items() if k not in ('class_names', 'num_classes')}
    old = model.abstract_shapes()
    new = dataclasses.replace(model, options={**options, **wanted}).abstract_shapes()
    parts = sorted(
      {path.split('/')[0] for path, shape in new.items() if old.get(path) != shape} | {'classifier'}
    )
    return wanted, rf'(?!({"|".join(parts)})/).*'

  def _layout_lines(self) -> list[str]:
    return [
      f'{_GIN_NAMES[setting.partition(".")[0]][0]}.{setting.partition(".")[2]}  # the fastest '
      'that fits, by the formulas of plan'
      for setting in self.layout.settings
    ]


_IMPORTED = {
  'adafactor': "T5's optimizer",
  'config': 'settings of the model',
  'dpo': 'preferences',
  'encoder': 'the head',
  'export': 'the model for Hugging Face',
  'lora': 'adapters',
  'optimizers': 'AdamW',
  'partitioner': 'the layout',
  'schedules': 'the learning rate',
}


def _line(name: str, value: object, comment: str) -> str:
  return f'{name} = {value!r}  # {comment}'


def _quoted(text: object) -> str:
  return shlex.quote(str(text))


def _open(config: PlanConfig) -> BatchIterator:
  """Returns the training batches of the run."""
  return batches_for(config.model, config.train_dataset_cfg, repeat=True)


def _convert(request: RunRequest, hf: HfModel, console: Console) -> None:
  """Converts the model, or checks that its folder has the same files from an earlier call.

  Raises:
    ConfigError: the folder has other weights, another configuration or another tokenizer.
    CheckpointError: see `convert_hf`.
  """
  target = expanded_path(request.to)
  if not target.is_dir() or not any(target.iterdir()):
    convert_hf(
      ConversionRequest(
        source=request.folder,
        model_dir=ModelDir(request.folder),
        target=target,
        read_gin=lambda path: describe(read_model([path], as_data=True)),
      ),
      console,
    )
    return
  try:
    reader = ParamsReader(CheckpointAddress(ModelDir(target), 0))
    if dict(reader.shapes) != dict(hf.weights.table.our_shapes):
      raise CheckpointError(f'{reader.path} has other parameters.')
    with console.progress('compared', hf.weights.num_bytes) as advance:
      compare_with_ours(hf.weights.our_pieces(), reader, advance=advance)
    if changed := changed_files(request.folder, target / HF_FOLDER):
      raise CheckpointError(f'{", ".join(changed)} in {target / HF_FOLDER} differ.')
  except CheckpointError as e:
    raise ConfigError(
      f'{target} exists, and is not {request.folder} converted: {e.what}',
      fix='Name a new folder for the converted model: --converted=FOLDER',
      docs='from_huggingface.md',
    ) from e
  console.say(f'{target} has the same weights, converted before')


def main(folders: Sequence[str], flags: argparse.Namespace, *, dry_run: bool) -> None:
  """Writes the run that the flags of `python -m t5x_gpu.config from_hf` describe.

  Args:
    folders: the model; one.
    flags: the values of the flags.
    dry_run: check everything, print the file, and write nothing.
  Raises:
    ConfigError: flags are missing or contradict each other; see also `write_run`.
  """
  usage = (
    "python -m t5x_gpu.config from_hf FOLDER --task='jsonl:chat/*.jsonl' --output=my.gin; "
    'docs/from_huggingface.md explains it.'
  )
  if len(folders) != 1:
    raise ConfigError(f'from_hf takes one folder, got {len(folders)}.', fix=usage)
  if not flags.task:
    raise ConfigError('--task is missing: it names the data.', fix=usage)
  if not flags.output and not dry_run:
    raise ConfigError('--output is missing: it names the file to write.', fix=usage)
  if flags.gpus is None and (flags.gpu or flags.gpus_per_host):
    raise ConfigError('--gpu and --gpus_per_host need --gpus.', fix='Give --gpus=N, too.')
  local_path(folders[0], what='from_hf')  # object storage is refused
  output = None
  if flags.output:
    output = expanded_path(flags.output)
    if not output.parent.is_dir():
      raise ConfigError(
        f'--output={flags.output}: the folder {output.parent} does not exist.',
        fix=f'Create it first: mkdir -p {_quoted(output.parent)}',
      )
  logging_setup.quiet_environment()
  logging_setup.setup()
  topology = None
  if flags.gpus is not None:
    topology = topology_of(gpus=flags.gpus, gpus_per_host=flags.gpus_per_host)
  write_run(
    RunRequest(
      folder=expanded_path(folders[0]),
      task=flags.task,
      output=output,
      converted=flags.converted,
      model_dir=flags.model_dir,
      lora=flags.lora,
      export=flags.export,
      topology=topology,
      gpu=find_target(flags.gpu or 'h100'),
      dry_run=dry_run,
    ),
    Console(),
  )
