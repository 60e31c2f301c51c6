"""Applies rules to records of T5X's gin files: bindings to write, the outcome of each value."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Optional

from t5x_gpu.config import gin_text
from t5x_gpu.config.gin_text import Macro, Reference
from t5x_gpu.config.t5x import records
from t5x_gpu.config.t5x.records import Record, Unset, Value
from t5x_gpu.errors import did_you_mean

Status = Literal['same', 'mapped', 'no effect', 'refused']
# The alias of a module in the written file -> the module.
MODULES = {
  'adafactor': 't5x_gpu.training.adafactor',
  'batches': 't5x_gpu.data.batches',
  'checkpointer': 't5x_gpu.checkpoint.checkpointer',
  'config': 't5x_gpu.models.config',
  'decoder_only': 't5x_gpu.models.decoder_only',
  'decoding': 't5x_gpu.models.decoding',
  'early_stopping': 't5x_gpu.run.early_stopping',
  'encoder_decoder': 't5x_gpu.models.encoder_decoder',
  'logging_config': 't5x_gpu.metrics.logging_config',
  'eval_script': 't5x_gpu.eval',
  'infer_request': 't5x_gpu.evaluation.infer_request',
  'profile_config': 't5x_gpu.run.profile_config',
  'spikes': 't5x_gpu.training.spikes',
  'initialize': 't5x_gpu.checkpoint.initialize',
  'optimizers': 't5x_gpu.training.optimizers',
  'partitioner': 't5x_gpu.partitioning.partitioner',
  'schedules': 't5x_gpu.training.schedules',
  'train_script': 't5x_gpu.train',
}
# Our classes and functions, as the written file names them.
NAMES = {
  'train': 'train_script.train',
  'Adafactor': 'adafactor.Adafactor',
  'CheckpointConfig': 'checkpointer.CheckpointConfig',
  'DatasetConfig': 'batches.DatasetConfig',
  'DecoderOnlyModel': 'decoder_only.DecoderOnlyModel',
  'DecodingConfig': 'decoding.DecodingConfig',
  'EarlyStopping': 'early_stopping.EarlyStopping',
  'EncoderDecoderModel': 'encoder_decoder.EncoderDecoderModel',
  'EvalSetup': 'eval_script.EvalSetup',
  'InferSetup': 'infer_request.InferSetup',
  'LoggingConfig': 'logging_config.LoggingConfig',
  'Optax': 'optimizers.Optax',
  'Partitioner': 'partitioner.Partitioner',
  'ProfileConfig': 'profile_config.ProfileConfig',
  'RestoreConfig': 'initialize.RestoreConfig',
  'SpikeConfig': 'spikes.SpikeConfig',
  'TransformerConfig': 'config.TransformerConfig',
  'factors': 'schedules.factors',
}
# Modules with the same names: the GPU branch's copies, and `t5x.train` where it is not `__main__`.
COPIES = {
  't5x.contrib.gpu.t5.network': 't5x.examples.t5.network',
  't5x.train': '__main__',
  't5x.eval': '__main__',
  't5x.infer': '__main__',
  't5x.contrib.gpu.train': '__main__',
}


class Refused(Exception):
  """A value that this project cannot honour; the message is the reason."""


class NotKnown(Refused):
  """A function or class of T5X, or of a user, without a counterpart here."""


@dataclasses.dataclass(frozen=True)
class ValueOutcome:
  """What became of one value of T5X.

  Attributes:
    name: T5X's parameter, 'train/t5x.utils.DatasetConfig.seed'.
    value: T5X's value, as text.
    origin: 'FILE:LINE', '--gin.KEY', or 'T5X' for a default of T5X's.
    status: the rule's.
    here: our parameter; '' if there is none.
    note: how the value maps, why it has no effect, or why it is refused.
    numbers: how the run's numbers differ from T5X's; '' if they do not.
  """

  name: str
  value: str
  origin: str
  status: Status
  here: str = ''
  note: str = ''
  numbers: str = ''


@dataclasses.dataclass(frozen=True)
class ParameterRule:
  """What becomes of one parameter of T5X.

  Attributes:
    here: our parameter, 'DatasetConfig.seed'.
    value: (translator, T5X's value) -> ours, as a `Value` if another line sets it; None keeps the
      value. Raises Refused.
    note: how the value maps, why it has no effect, or why it is refused.
    numbers: (translator, T5X's value) -> how numbers differ, or ''.
    default: T5X's default where ours is another one, so that it is written; () if there is none.
    setup: in files for `eval` and `infer`, the parameter of EvalSetup or InferSetup in place of
      `here`.
  """

  status: Status
  here: str = ''
  note: str = ''
  value: Optional[Callable[['Translator', Any], Any]] = None
  numbers: Callable[['Translator', Any], str] = lambda translator, value: ''
  default: Any = ()
  setup: str = ''


OURS = 't5x_gpu'  # origin of values that T5X does not have
NOT_WRITTEN = object()  # what a rule returns that has written its values itself
_OF_TRAINING = 'Only training uses it.'


# Parameters before and after the others. The model has the optimizer, which may have the learning
# rate, and whose moments depend on the network; the meaning of num_decodes depends on how the model
# decodes; a submesh wins over num_partitions, and mesh shapes over both; each task is evaluated if
# there is an evaluation; eval_period is also the period of the tasks if they are evaluated.
_ORDER = {
  'model': -1,
  'module': -1,
  'decode_fn': -1,
  'model_parallel_submesh': 1,
  'train_eval_get_dataset_fn': 1,
  'eval_period': 1,
  'dcn_mesh_shape': 2,
}


class Translator:
  """Applies `rules` to the records of T5X's files; collects the text, outcomes and problems.

  Args:
    files: the bindings.
    rules: T5X's parameter -> its rule.
    entry: the name in `NAMES` that the text configures: 'train', 'EvalSetup' or 'InferSetup'.
  """

  def __init__(
    self, files: records.Files, rules: Mapping[str, ParameterRule], *, entry: str = 'train'
  ):
    self.files, self.entry = files, entry
    self._rules: dict[str, dict[str, ParameterRule]] = {}
    for name, rule in rules.items():
      owner, _, parameter = name.rpartition('.')
      self._rules.setdefault(owner, {})[parameter] = rule
    self.outcomes: list[ValueOutcome] = []
    self.blocks: dict[str, dict[str, tuple[Any, str]]] = {}
    self.macros: dict[str, tuple[Any, str]] = {}
    self.layers = ''  # how T5X holds the layers, for Adafactor
    self.decoding = ''  # 'beams', 'sample' or 'greedy', if a file says
    self.ici_mesh_shape: Optional[Sequence[int]] = None  # (replica, data, model)
    self.refused: set[str] = set()  # parameters inside refused values
    self._done: set[tuple[str, str, str]] = set()

  def write(self, here: str, value: Any, origin: str, *, scope: str = '', macro: str = '') -> None:
    """Sets our parameter `here`, 'DatasetConfig.seed', in `scope`; through `macro` if given."""
    name, _, parameter = here.rpartition('.')
    block = f'{scope}/{NAMES.get(name, name)}' if scope else NAMES.get(name, name)
    if macro and not (isinstance(value, Unset) and macro in self.macros):
      self.macros[macro] = (value, self.files.macro_origin(macro) or origin)
    self.blocks.setdefault(block, {})[parameter] = (Macro(macro) if macro else value, origin)

  def written(self, here: str, default: Any = None) -> Any:
    """Returns the value of our parameter `here` without a scope; `default` if it is not set."""
    name, _, parameter = here.rpartition('.')
    return self.blocks.get(NAMES[name], {}).get(parameter, (default, ''))[0]

  def reference(self, name: str, *, scope: str = '') -> Reference:
    """Returns `@scope/name()` of one of our `NAMES`."""
    block = f'{scope}/{NAMES[name]}' if scope else NAMES[name]
    self.blocks.setdefault(block, {})
    return Reference(block, True)

  def apply(self, record: Record, *, scope: str = '') -> None:
    """Applies the rules of every parameter of `record` that is bound or has a default of T5X's."""
    name = canonical(record.name)
    rules = self._rules.get(name, {})
    defaults = {p: Value(r.default, 'T5X') for p, r in rules.items() if r.default != ()}
    arguments = {**defaults, **record.arguments}
    for parameter, given in sorted(arguments.items(), key=lambda item: _ORDER.get(item[0], 0)):
      rule = rules.get(parameter)
      key = (name, scope, parameter)
      if key in self._done:
        continue
      self._done.add(key)
      self._apply(f'{name}.{parameter}', rule, given, scope)

  def has_applied(self, name: str) -> bool:
    """Returns whether a record of this name has been applied."""
    return any(applied == name for applied, _, _ in self._done)

  def unknown(self, name: str) -> str:
    """Returns why T5X's parameter `name`, which has no rule, is refused."""
    owner, _, parameter = name.rpartition('.')
    hint = did_you_mean(parameter, self._rules.get(owner, ()), limit=1)
    reason = f'Nothing here corresponds to {name.removeprefix("__main__.")}.{hint}'
    return _with_protocol(name, reason)

  def note(self, name: str, given: Value, status: Status, here: str, text: str = '') -> None:
    """Adds the outcome of a value without a rule."""
    value = spelled(given.value)
    self.outcomes.append(ValueOutcome(name, value, given.origin, status, here, text))

  def without_effect(self, record: Record, note: str) -> None:
    """Notes that no argument of `record`, and of the records in it, has an effect."""
    for parameter, given in record.arguments.items():
      self.note(f'{canonical(record.name)}.{parameter}', given, 'no effect', '', note)
      for inner in gin_text.instances(given.value, Record):
        self.without_effect(inner, note)

  def _apply(self, name: str, rule: Optional[ParameterRule], given: Value, scope: str) -> None:
    here = rule.here if rule else ''
    if rule is not None and rule.setup and self.entry != 'train':
      here = f'{self.entry}.{rule.setup}'

    def outcome(status: Status, note: str = '', numbers: str = '', here: str = '') -> None:
      if status == 'refused':
        self.refused |= set(_inside(given.value))
      if given.origin != 'T5X' or numbers or status == 'refused':
        text = given.macro and f'%{given.macro}' or spelled(given.value)
        key = f'{scope}/{name}' if scope else name
        self.outcomes.append(ValueOutcome(key, text, given.origin, status, here, note, numbers))

    if rule is None:
      outcome('refused', self.unknown(name))
      return
    if rule.status == 'refused':
      outcome('refused', rule.note)
      return
    if here.startswith('train.') and self.entry != 'train':
      for record in gin_text.instances(given.value, Record):
        self.without_effect(record, _OF_TRAINING)
      outcome('no effect', _OF_TRAINING)
      return
    if isinstance(given.value, Unset):
      if not here and rule.status == 'mapped':  # its value would have been written elsewhere
        outcome('refused', f'{given.value} has no value. {_fix_of(given.value)}')
        return
      if here:
        self.write(here, given.value, given.origin, scope=scope, macro=given.value.macro)
      outcome(rule.status, rule.note, here=here)
      return
    try:
      value = given.value if rule.value is None else rule.value(self, given.value)
    except NotKnown as e:
      outcome('refused', _with_protocol(name, str(e)))
      return
    except Refused as e:
      outcome('refused', str(e))
      return
    if rule.status == 'no effect':
      for record in gin_text.instances(given.value, Record):
        self.apply(record)
    origin = given.origin
    if isinstance(value, Value):
      value, origin = value.value, value.origin
    is_written = here and value is not NOT_WRITTEN
    if is_written:
      kept = given.macro if _is_data(value) and value == given.value else ''
      self.write(here, value, origin, scope=scope, macro=kept)
    is_kept = is_written and value == given.value
    outcome('same' if is_kept else rule.status, rule.note, rule.numbers(self, given.value), here)


def _fix_of(value: Unset) -> str:
  return f'Set it: --gin.{value.macro}=VALUE.' if value.macro else 'Bind the parameter to a value.'


def _inside(value: Any) -> Iterator[str]:
  """Yields the parameters that the records in `value` bind."""
  for record in gin_text.instances(value, Record):
    for parameter, given in record.arguments.items():
      yield f'{canonical(record.name)}.{parameter}'
      yield from _inside(given.value)


def canonical(name: str) -> str:
  """Returns `name` with T5X's copies of a module replaced by the module."""
  for copy, module in COPIES.items():
    if name.startswith(f'{copy}.'):
      return f'{module}{name[len(copy) :]}'
  return name


def _is_data(value: Any) -> bool:
  return not any(True for _ in gin_text.instances(value, Reference))


def spelled(value: Any) -> str:
  """Returns `value` as gin files spell it."""
  if isinstance(value, Record):
    return f'@{value.name}{"()" if value.evaluated else ""}'
  if isinstance(value, (list, tuple)):
    inside = ', '.join(map(spelled, value))
    if isinstance(value, list):
      return f'[{inside}]'
    return f'({inside}{"," if len(value) == 1 else ""})'
  if isinstance(value, Mapping):
    return '{' + ', '.join(f'{spelled(k)}: {spelled(v)}' for k, v in value.items()) + '}'
  return repr(value)


# Parameter -> what to use here instead of a class that has no rule. Users of T5X write most of
# these classes themselves.
PROTOCOLS = {
  'model': 'Your own model is a class with the members of docs/add_a_model.md: train.model.',
  'module': 'Your own network is a layer or a model of docs/add_a_model.md.',
  'optimizer_def': 'An optimizer is a transformation of optax (optimizers.Optax) or your '
  'own class: docs/add_an_optimizer.md.',
  'partitioner': 'The mesh is partitioner.Partitioner (docs/mesh.md), which splits experts, too.',
  'trainer_cls': 'There are no trainer classes: a model defines its loss and metrics '
  '(docs/add_a_model.md).',
  'get_dataset_fn': 'Your own batches come from a data module: docs/add_a_data_source.md.',
  'train_eval_get_dataset_fn': 'Your own batches come from a data module: '
  'docs/add_a_data_source.md.',
  'learning_rate_fn': 'A schedule is a function of the step: train.learning_rate.',
  'checkpointer_cls': 'CheckpointConfig.keep_best and best_metric keep the best checkpoints '
  '(docs/checkpoints.md).',
}


def _with_protocol(name: str, reason: str) -> str:
  return f'{reason} {PROTOCOLS.get(name.rpartition(".")[2], "")}'.rstrip()
