"""From T5X's gin files to ours: one rule per parameter of T5X, and the text that the rules write.

`RULES` is the whole table; docs/from_t5x.md prints it. A rule keeps a value, maps it, says that it
has no effect here, or refuses it with the reason. A parameter without a rule is refused by name, so
nothing is dropped in silence.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Optional

from t5x_gpu.config import gin_text
from t5x_gpu.config.gin_text import Macro, Reference
from t5x_gpu.config.t5x import records
from t5x_gpu.config.t5x.records import Record, Unset, Value
from t5x_gpu.errors import ConfigError, Problem

DOCS = 'from_t5x.md'
Status = Literal['same', 'mapped', 'no effect', 'refused']
# The alias of a module in the written file -> the module.
MODULES = {
  'adafactor': 't5x_gpu.training.adafactor',
  'batches': 't5x_gpu.data.batches',
  'checkpointer': 't5x_gpu.checkpoint.checkpointer',
  'config': 't5x_gpu.models.config',
  'decoder_only': 't5x_gpu.models.decoder_only',
  'decoding': 't5x_gpu.models.decoding',
  'encoder_decoder': 't5x_gpu.models.encoder_decoder',
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
  'EncoderDecoderModel': 'encoder_decoder.EncoderDecoderModel',
  'Optax': 'optimizers.Optax',
  'Partitioner': 'partitioner.Partitioner',
  'RestoreConfig': 'initialize.RestoreConfig',
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


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What became of one value of T5X.

  Attributes:
    name: T5X's parameter, 'train/t5x.utils.DatasetConfig.seed'.
    value: T5X's value, as text.
    origin: 'FILE:LINE', '--gin.KEY', or 'T5X' for a default of T5X's.
    status: the rule's.
    here: our parameter; '' if there is none.
    what: how the value maps, why it has no effect, or why it is refused.
    numbers: how the run's numbers differ from T5X's; '' if they do not.
  """

  name: str
  value: str
  origin: str
  status: Status
  here: str = ''
  what: str = ''
  numbers: str = ''


@dataclasses.dataclass(frozen=True)
class Rule:
  """What becomes of one parameter of T5X.

  Attributes:
    here: our parameter, 'DatasetConfig.seed'.
    value: (translator, T5X's value) -> ours; None keeps the value. Raises Refused.
    what: how the value maps, why it has no effect, or why it is refused.
    numbers: T5X's value -> how numbers differ, or ''.
    default: T5X's default where ours is another one, so that it is written; () if there is none.
  """

  status: Status
  here: str = ''
  what: str = ''
  value: Optional[Callable[['Translator', Any], Any]] = None
  numbers: Callable[[Any], str] = lambda value: ''
  default: Any = ()


_NOT_WRITTEN = object()  # what a rule returns that has written its values itself


def _same(here: str, **fields: Any) -> Rule:
  return Rule('same', here, **fields)


def _mapped(here: str, what: str, value: Callable[['Translator', Any], Any], **fields: Any) -> Rule:
  return Rule('mapped', here, what, value, **fields)


def _no_effect(what: str, **fields: Any) -> Rule:
  return Rule('no effect', '', what, **fields)


def _refused(what: str) -> Rule:
  return Rule('refused', '', what)


def _if_none(value: Any) -> Callable[['Translator', Any], Any]:
  return lambda translator, given: value if given is None else given


def _only(*legal: Any, why: str) -> Callable[['Translator', Any], Any]:
  """Returns a rule's `value` for parameters without effect at `legal` values, refused otherwise."""

  def value(translator: 'Translator', given: Any) -> Any:
    if given not in legal:
      raise Refused(why)
    return _NOT_WRITTEN

  return value


class Translator:
  """Applies `RULES` to the records of T5X's files; collects the text, outcomes and problems."""

  def __init__(self, files: records.Files):
    self.files = files
    self.outcomes: list[Outcome] = []
    self.blocks: dict[str, dict[str, tuple[Any, str]]] = {}
    self.macros: dict[str, tuple[Any, str]] = {}
    self.modules: dict[str, str] = {}
    self.layers = ''  # how T5X holds the layers, for Adafactor
    self.eval_period: Any = None
    self.refused: set[str] = set()  # parameters inside refused values
    self._done: set[tuple[str, str, str]] = set()

  def write(self, here: str, value: Any, origin: str, *, scope: str = '', macro: str = '') -> None:
    """Sets our parameter `here`, 'DatasetConfig.seed', in `scope`; through `macro` if given."""
    name, _, parameter = here.rpartition('.')
    block = f'{scope}/{NAMES.get(name, name)}' if scope else NAMES.get(name, name)
    if macro and not (isinstance(value, Unset) and macro in self.macros):
      self.macros[macro] = (value, self.files.macro_origin(macro) or origin)
    self.blocks.setdefault(block, {})[parameter] = (Macro(macro) if macro else value, origin)

  def reference(self, name: str, *, scope: str = '', call: bool = True) -> Reference:
    """Returns `@scope/name()` of one of our `NAMES`."""
    self.blocks.setdefault(f'{scope}/{NAMES[name]}' if scope else NAMES[name], {})
    return Reference(f'{scope}/{NAMES[name]}' if scope else NAMES[name], call)

  def apply(self, record: Record, *, scope: str = '') -> None:
    """Applies the rules of every parameter of `record` that is bound or has a default of T5X's."""
    name = _canonical(record.name)
    rules = {n.rpartition('.')[2]: r for n, r in RULES.items() if n.rpartition('.')[0] == name}
    defaults = {p: Value(r.default, 'T5X') for p, r in rules.items() if r.default != ()}
    arguments = {**defaults, **record.arguments}
    # The model has the optimizer, which may have the learning rate.
    for parameter, given in sorted(arguments.items(), key=lambda item: item[0] != 'model'):
      rule = rules.get(parameter)
      key = (name, scope, parameter)
      if key in self._done:
        continue
      self._done.add(key)
      self._apply(f'{name}.{parameter}', rule, given, scope)

  def without_effect(self, record: Record, what: str) -> None:
    """Notes that none of the arguments of `record` has an effect."""
    name = _canonical(record.name)
    self.outcomes += [
      Outcome(f'{name}.{parameter}', _text(given.value), given.origin, 'no effect', what=what)
      for parameter, given in record.arguments.items()
    ]

  def _apply(self, name: str, rule: Optional[Rule], given: Value, scope: str) -> None:
    def outcome(status: Status, what: str = '', numbers: str = '', here: str = '') -> None:
      if status == 'refused':
        self.refused |= set(_inside(given.value))
      if given.origin != 'T5X' or numbers or status == 'refused':
        text = given.macro and f'%{given.macro}' or _text(given.value)
        key = f'{scope}/{name}' if scope else name
        self.outcomes.append(Outcome(key, text, given.origin, status, here, what, numbers))

    if rule is None:
      outcome('refused', _unknown(name, given.value))
      return
    if rule.status == 'refused':
      outcome('refused', rule.what)
      return
    if isinstance(given.value, Unset):
      if rule.here:
        self.write(rule.here, given.value, given.origin, scope=scope, macro=given.value.macro)
      outcome(rule.status, rule.what, here=rule.here)
      return
    try:
      value = given.value if rule.value is None else rule.value(self, given.value)
    except Refused as e:
      outcome('refused', str(e))
      return
    if rule.status == 'no effect':
      for record in gin_text.instances(given.value, Record):
        self.apply(record)
    if rule.here and value is not _NOT_WRITTEN:
      kept = given.macro if _is_data(value) and value == given.value else ''
      self.write(rule.here, value, given.origin, scope=scope, macro=kept)
    kept = rule.here and value is not _NOT_WRITTEN and value == given.value
    outcome('same' if kept else rule.status, rule.what, rule.numbers(given.value), rule.here)


def _inside(value: Any) -> Iterator[str]:
  """Yields the parameters that the records in `value` bind."""
  for record in gin_text.instances(value, Record):
    for parameter, given in record.arguments.items():
      yield f'{_canonical(record.name)}.{parameter}'
      yield from _inside(given.value)


def _canonical(name: str) -> str:
  """Returns `name` with T5X's copies of a module replaced by the module."""
  for copy, module in COPIES.items():
    if name.startswith(f'{copy}.'):
      return f'{module}{name[len(copy) :]}'
  return name


def _is_data(value: Any) -> bool:
  return not any(True for _ in gin_text.instances(value, Reference))


def _text(value: Any) -> str:
  if isinstance(value, Record):
    return f'@{value.name}{"()" if value.evaluated else ""}'
  if isinstance(value, (list, tuple)):
    inside = ', '.join(map(_text, value))
    if isinstance(value, list):
      return f'[{inside}]'
    return f'({inside}{"," if len(value) == 1 else ""})'
  if isinstance(value, Mapping):
    return '{' + ', '.join(f'{_text(k)}: {_text(v)}' for k, v in value.items()) + '}'
  return repr(value)


# What stands here for classes that users of T5X write themselves, by the parameter that takes them.
PROTOCOLS = {
  'model': 'A model of yours is a class with the members of docs/add_a_model.md: train.model.',
  'module': 'A network of yours is a layer or a model of docs/add_a_model.md.',
  'optimizer_def': 'An optimizer is a transformation of optax (optimizers.Optax) or a class of '
  'yours: docs/add_an_optimizer.md.',
  'trainer_cls': 'There are no trainer classes: a model defines its loss and metrics '
  '(docs/add_a_model.md).',
  'get_dataset_fn': 'Batches of your own come from a data module: docs/add_a_data_source.md.',
  'learning_rate_fn': 'A schedule is a function of the step: train.learning_rate.',
}


def _unknown(name: str, value: Any) -> str:
  parameter = name.rpartition('.')[2]
  what = f'Nothing here corresponds to {name.removeprefix("__main__.")}.'
  return f'{what} {PROTOCOLS[parameter]}' if parameter in PROTOCOLS else what


def _named(value: Any, table: Mapping[str, str], parameter: str) -> str:
  """Returns the entry of `table` for the record `value`; raises Refused for other names."""
  if not isinstance(value, Record):
    raise Refused(f'{_text(value)} is not a function or class.')
  name = _canonical(value.name)
  if name not in table:
    raise Refused(f'{name} is not known here. {PROTOCOLS.get(parameter, "")}'.rstrip())
  return table[name]


def _model(t: Translator, value: Any) -> Reference:
  name = _named(
    value,
    {
      't5x.models.EncoderDecoderModel': 'EncoderDecoderModel',
      't5x.models.DecoderOnlyModel': 'DecoderOnlyModel',
    },
    'model',
  )
  t.apply(value)
  return t.reference(name)


def _network(t: Translator, value: Any) -> Reference:
  layers = _named(
    value,
    {
      't5x.examples.t5.network.Transformer': 'joined_heads',
      't5x.examples.decoder_only.network.DecoderWrapper': 'joined_heads',
      't5x.examples.scalable_t5.network.Transformer': 'scanned',
    },
    'module',
  )
  config = value.arguments.get('config')
  if config is None or not isinstance(config.value, Record):
    raise Refused(f'{value.name}.config is not set.')
  t.layers = layers
  t.apply(value)
  t.apply(config.value)
  return t.reference('TransformerConfig')


def _dtype(t: Translator, value: Any) -> str:
  text = value.name.rpartition('.')[2] if isinstance(value, Record) else value
  if text not in ('float32', 'bfloat16'):
    raise Refused(f'{text!r} is not a precision here: float32, bfloat16, fp8 (docs/precision.md).')
  return text


def _optimizer(t: Translator, value: Any) -> Reference:
  if isinstance(value, Record) and value.name == 't5x.adafactor.Adafactor':
    t.apply(value)
    return t.reference('Adafactor')
  if isinstance(value, Record) and value.name in (
    't5x.optimizers.chain',
    't5x.optimizers.wrap_optax_optimizer',
  ):
    t.apply(value)
    return t.reference('Optax')
  if isinstance(value, Record) and value.name.startswith('t5x.'):
    # t5x.optimizers.adamw(...) and its like: optax's functions of the same names.
    parts = value.name.split('.')
    if parts[:2] == ['t5x', 'optimizers']:
      return _chain(t, [dataclasses.replace(value, name=f'optax.{parts[-1]}')])
  raise Refused(f'{_text(value)} is not known here. {PROTOCOLS["optimizer_def"]}')


def _chain(t: Translator, value: Any) -> Any:
  """Writes `Optax.transformations`; the learning rate of the last step becomes the run's."""
  if isinstance(value, Record):
    value = [value]
  transformations = []
  for record in value:
    if not isinstance(record, Record) or not record.name.startswith('optax.'):
      raise Refused(f'{_text(record)} is not a transformation of optax.')
    takes_rate = 'learning_rate' in record.arguments
    for parameter, given in record.arguments.items():
      if parameter != 'learning_rate':
        t.blocks.setdefault(record.name, {})[parameter] = (given.value, given.origin)
        t.outcomes.append(
          Outcome(
            f'{record.name}.{parameter}',
            _text(given.value),
            given.origin,
            'same',
            f'{record.name}.{parameter}',
          )
        )
    t.blocks.setdefault(record.name, {})
    transformations.append(Reference(record.name, not takes_rate))
    if takes_rate:
      _optax_rate(t, record.arguments['learning_rate'], f'{record.name}.learning_rate')
  t.write('Optax.transformations', transformations, 'T5X')
  return t.reference('Optax')


def _optax_rate(t: Translator, given: Value, name: str) -> None:
  """Writes `train.learning_rate` from optax's: a number, or a schedule of optax."""
  value = given.value
  if isinstance(value, Record):
    for parameter, argument in value.arguments.items():
      t.blocks.setdefault(value.name, {})[parameter] = (argument.value, argument.origin)
      t.outcomes.append(
        Outcome(
          f'{value.name}.{parameter}',
          _text(argument.value),
          argument.origin,
          'same',
          f'{value.name}.{parameter}',
        )
      )
    t.write('train.learning_rate', Reference(value.name, True), given.origin)
  elif not isinstance(value, Unset):
    t.write('factors.factors', 'constant', given.origin)
    t.write('factors.base_learning_rate', value, given.origin)
    t.write('factors.min_learning_rate', 0.0, given.origin)
    t.write('train.learning_rate', t.reference('factors'), given.origin)
  t.outcomes.append(
    Outcome(
      name,
      _text(value),
      given.origin,
      'mapped',
      'train.learning_rate',
      'T5X takes the rate of optax and only logs Trainer.learning_rate_fn.',
    )
  )


def _schedule(t: Translator, value: Any) -> Any:
  _named(value, {'t5x.utils.create_learning_rate_scheduler': 'factors'}, 'learning_rate_fn')
  if 'learning_rate' in t.blocks.get(NAMES['train'], {}):
    t.without_effect(value, 'T5X takes the learning rate of optax, and only logs this schedule.')
    return _NOT_WRITTEN
  t.apply(value)
  return t.reference('factors')


def _trainer(t: Translator, value: Any) -> Any:
  _named(value, {'t5x.trainer.Trainer': ''}, 'trainer_cls')
  t.apply(value)
  return _NOT_WRITTEN


def _partitioner(t: Translator, value: Any) -> Reference:
  _named(value, {'t5x.partitioning.PjitPartitioner': ''}, 'partitioner')
  t.apply(value)
  return t.reference('Partitioner')


def _submesh(t: Translator, value: Any) -> Any:
  if value is None:
    return _NOT_WRITTEN
  return math.prod(value)


def _axis_rules(t: Translator, value: Any) -> Any:
  _named(value, {'t5x.partitioning.standard_logical_axis_rules': ''}, 'logical_axis_rules')
  t.apply(value)
  return _NOT_WRITTEN


def _split_parameters(t: Translator, value: Any) -> Any:
  if value == 1:
    return _NOT_WRITTEN
  t.write('Partitioner.data', 1, 'T5X')
  return -1


def _mesh_shape(t: Translator, value: Any) -> Any:
  if value is None:
    return _NOT_WRITTEN
  if len(value) != 3:
    raise Refused(f'{value} is not (replica, data, model).')
  replica, data, model = value
  return {'data': replica * data, 'model': model}


def _dataset(t: Translator, value: Any) -> Any:
  if value is None:
    return None
  _named(value, {'t5x.utils.DatasetConfig': ''}, 'dataset_cfg')
  t.apply(value, scope=value.scope)
  return t.reference('DatasetConfig', scope=value.scope)


def _task(t: Translator, value: Any) -> str:
  if not isinstance(value, str):
    raise Refused(
      f'{_text(value)} makes a task. Here a file is a source of its own, such as '
      '"tfrecord:PATTERN" or "jsonl:PATTERN" (docs/tasks.md).'
    )
  return value


def _checkpoints(t: Translator, value: Any) -> Reference:
  _named(value, {'t5x.utils.CheckpointConfig': ''}, 'checkpoint_cfg')
  t.apply(value)
  return t.reference('CheckpointConfig')


def _save(t: Translator, value: Any) -> Any:
  if value is not None:
    t.apply(value)
    return _NOT_WRITTEN
  # A period beyond every run: the last step alone is saved.
  t.write('CheckpointConfig.period', 10**9, 'T5X')
  t.write('CheckpointConfig.keep', 1, 'T5X')
  return _NOT_WRITTEN


def _restore(t: Translator, value: Any) -> Any:
  if value is None:
    return _NOT_WRITTEN
  t.apply(value)
  if NAMES['RestoreConfig'] not in t.blocks:
    return _NOT_WRITTEN
  t.write('RestoreConfig.mode', 'new_data', 'T5X')
  return t.reference('RestoreConfig')


def _eval_period(t: Translator, value: Any) -> Any:
  t.eval_period = value
  return value or None


def _factors(t: Translator, value: Any) -> Any:
  return value


def _normalizer(t: Translator, value: Any) -> Any:
  if value is None:
    t.write('train.loss_normalizing_factor', 1.0, 'T5X')
  elif value == 'NUM_REAL_TARGET_TOKENS':
    t.write('train.loss_normalizing_factor', None, 'T5X')
  elif isinstance(value, str):
    raise Refused(f'{value!r}: a loss here is divided by a number, or by its target tokens.')
  else:
    t.write('train.loss_normalizing_factor', float(value), 'T5X')
  return _NOT_WRITTEN


_VOCABULARY = _no_effect('The task of the data has its vocabulary; the model needs none.')


def _loss_rules(model: str) -> dict[str, Rule]:
  """Returns the rules that both of T5X's models have."""
  prefix = f't5x.models.{model}'
  return {
    f'{prefix}.module': _mapped(f'{model}.config', 'the sizes of the network', _network),
    f'{prefix}.optimizer_def': _mapped(
      'train.optimizer', "the optimizer is the run's, not the model's", _optimizer
    ),
    f'{prefix}.z_loss': _same(f'{model}.z_loss'),
    f'{prefix}.label_smoothing': _same(f'{model}.label_smoothing'),
    f'{prefix}.loss_normalizing_factor': _mapped(
      'train.loss_normalizing_factor',
      "T5X's None is the sum, 1.0 here; NUM_REAL_TARGET_TOKENS is None here.",
      _normalizer,
      default=None,
    ),
    f'{prefix}.input_vocabulary': _VOCABULARY,
    f'{prefix}.output_vocabulary': _VOCABULARY,
    f'{prefix}.vocabulary': _VOCABULARY,
  }


def _network_rules(config: str) -> dict[str, Rule]:
  """Returns the rules of one of T5X's configurations of a network; defaults are T5X's."""
  here = 'TransformerConfig'
  return {
    f'{config}.vocab_size': _same(f'{here}.vocab_size'),
    f'{config}.dtype': _mapped(f'{here}.dtype', 'the name of the dtype', _dtype),
    f'{config}.emb_dim': _same(f'{here}.embed_dim', default=512),
    f'{config}.num_heads': _same(f'{here}.num_heads', default=8),
    f'{config}.num_layers': _same(f'{here}.num_layers', default=6),
    f'{config}.num_decoder_layers': _same(f'{here}.num_layers', default=6),
    f'{config}.num_encoder_layers': _same('EncoderDecoderModel.num_encoder_layers', default=6),
    f'{config}.head_dim': _same(f'{here}.head_dim', default=64),
    f'{config}.mlp_dim': _same(f'{here}.mlp_dim', default=2048),
    f'{config}.mlp_activations': _same(f'{here}.mlp_activations', default=('relu',)),
    f'{config}.dropout_rate': _same(f'{here}.dropout_rate', default=0.1),
    f'{config}.logits_via_embedding': _same(f'{here}.logits_via_embedding'),
    f'{config}.float32_attention_logits': _no_effect('The softmax is always float32.'),
    f'{config}.remat_policy': _same(f'{here}.remat_policy'),
    f'{config}.scan_layers': _no_effect('Layers are always scanned.'),
  }


def _without(rules: dict[str, Rule], *parameters: str) -> dict[str, Rule]:
  return {name: r for name, r in rules.items() if name.rpartition('.')[2] not in parameters}


_NO_SEED = 'T5X draws a new seed at every start; here 0, so that a restart continues the same run.'
RULES: dict[str, Rule] = {
  # The run.
  '__main__.train.model': _mapped('train.model', 'the class of the same name', _model),
  '__main__.train.model_dir': _same('train.model_dir'),
  '__main__.train.train_dataset_cfg': _mapped('train.train_dataset_cfg', '', _dataset),
  '__main__.train.train_eval_dataset_cfg': _mapped('train.train_eval_dataset_cfg', '', _dataset),
  '__main__.train.infer_eval_dataset_cfg': _mapped('train.infer_eval_dataset_cfg', '', _dataset),
  '__main__.train.checkpoint_cfg': _mapped('train.checkpoint_cfg', '', _checkpoints),
  '__main__.train.partitioner': _mapped('train.partitioner', '', _partitioner),
  '__main__.train.trainer_cls': _mapped('', 'its parameters are those of train', _trainer),
  '__main__.train.total_steps': _same('train.total_steps'),
  '__main__.train.eval_steps': _same('train.eval_steps'),
  '__main__.train.eval_period': _mapped(
    'train.eval_period', 'also of train.infer_eval_period; 0 is None', _eval_period
  ),
  '__main__.train.stats_period': _mapped('train.log_period', '', lambda t, v: v or _NOT_WRITTEN),
  '__main__.train.random_seed': _mapped(
    'train.random_seed',
    _NO_SEED,
    _if_none(0),
    numbers=lambda v: 'another seed' if v is None else '',
  ),
  '__main__.train.relative_steps': _no_effect(
    'None counts steps from 0, as total_steps does.',
    value=_only(None, 0, why='Set total_steps to the step at which the run ends.'),
  ),
  '__main__.train.use_hardware_rng': _no_effect(
    'Keys are always threefry.',
    numbers=lambda v: 'other dropout masks and initial values (T5X: rbg)' if v else '',
  ),
  '__main__.train.summarize_config_fn': _no_effect('config.gin is always written.'),
  '__main__.train.inference_evaluator_cls': _no_effect(
    'Metrics of tasks are computed where infer_eval_dataset_cfg is set.'
  ),
  '__main__.train.use_jax_array': _no_effect('Arrays are always jax.Array.'),
  '__main__.train.use_orbax': _no_effect('Checkpoints are always written with Orbax.'),
  '__main__.train.gc_period': _no_effect('The garbage collector needs no steps of the run.'),
  '__main__.train.concurrent_metrics': _no_effect('Metrics are computed after decoding.'),
  '__main__.train.run_eval_before_training': _no_effect(
    'False is what a run here does.',
    value=_only(False, why='No run here evaluates before its first step.'),
  ),
  '__main__.train.train_eval_get_dataset_fn': _no_effect(
    'Each task of a mixture is evaluated by itself with python -m t5x_gpu.eval.'
  ),
  '__main__.train.actions': _no_effect(
    'A loss that is not finite always ends the run.', value=lambda t, v: _actions(t, v)
  ),
  't5x.trainer.TerminateOnNanAction.task': _no_effect('The loss of every step is checked.'),
  # Its trainer.
  't5x.trainer.Trainer.num_microbatches': _mapped(
    'train.num_microbatches', 'None and 0 are 1', lambda t, v: v or 1
  ),
  't5x.trainer.Trainer.learning_rate_fn': _mapped('train.learning_rate', '', _schedule),
  't5x.utils.create_learning_rate_scheduler.factors': _same(
    'factors.factors', default='constant * linear_warmup * rsqrt_decay'
  ),
  't5x.utils.create_learning_rate_scheduler.base_learning_rate': _same(
    'factors.base_learning_rate', default=0.5
  ),
  't5x.utils.create_learning_rate_scheduler.warmup_steps': _same(
    'factors.warmup_steps', default=1000
  ),
  't5x.utils.create_learning_rate_scheduler.decay_factor': _same('factors.decay_factor'),
  't5x.utils.create_learning_rate_scheduler.steps_per_decay': _same('factors.steps_per_decay'),
  't5x.utils.create_learning_rate_scheduler.steps_per_cycle': _same('factors.steps_per_cycle'),
  't5x.utils.create_learning_rate_scheduler.step_offset': _same('factors.step_offset'),
  't5x.utils.create_learning_rate_scheduler.min_learning_rate': _same('factors.min_learning_rate'),
  # Its data.
  't5x.utils.DatasetConfig.mixture_or_task_name': _mapped(
    'DatasetConfig.mixture_or_task_name', '', _task
  ),
  't5x.utils.DatasetConfig.task_feature_lengths': _same('DatasetConfig.task_feature_lengths'),
  't5x.utils.DatasetConfig.split': _same('DatasetConfig.split'),
  't5x.utils.DatasetConfig.batch_size': _same('DatasetConfig.batch_size'),
  't5x.utils.DatasetConfig.shuffle': _same('DatasetConfig.shuffle'),
  't5x.utils.DatasetConfig.seed': _mapped(
    'DatasetConfig.seed',
    _NO_SEED,
    _if_none(0),
    numbers=lambda v: 'another order of the data' if v is None else '',
  ),
  't5x.utils.DatasetConfig.use_cached': _same('DatasetConfig.use_cached'),
  't5x.utils.DatasetConfig.pack': _same('DatasetConfig.pack', default=False),
  't5x.utils.DatasetConfig.module': _mapped(
    'DatasetConfig.mixture_or_task_module', 'module is something else here', lambda t, v: v
  ),
  't5x.utils.DatasetConfig.use_custom_packing_ops': _no_effect('Rows are packed without them.'),
  't5x.utils.DatasetConfig.use_memory_cache': _no_effect('Only the speed of SeqIO differs.'),
  # Its checkpoints.
  't5x.utils.CheckpointConfig.save': _mapped(
    '', 'None saves the last step alone, and the step at which a signal stops the run', _save
  ),
  't5x.utils.CheckpointConfig.restore': _mapped('train.initialize_from', '', _restore),
  't5x.utils.SaveCheckpointConfig.period': _same('CheckpointConfig.period'),
  't5x.utils.SaveCheckpointConfig.keep': _same('CheckpointConfig.keep', default=None),
  't5x.utils.SaveCheckpointConfig.dtype': _no_effect(
    'Parameters are saved as they are, in float32.',
    value=_only('float32', why='A checkpoint holds the parameters exactly, in float32.'),
  ),
  't5x.utils.SaveCheckpointConfig.save_dataset': _no_effect(
    'The position in the data is always saved.'
  ),
  't5x.utils.SaveCheckpointConfig.keep_dataset_checkpoints': _no_effect(
    'The position in the data is part of the checkpoint.'
  ),
  't5x.utils.SaveCheckpointConfig.checkpointer_cls': _no_effect('Orbax writes checkpoints.'),
  't5x.utils.RestoreCheckpointConfig.path': _mapped(
    'RestoreConfig.path',
    'None and [] start from the seed',
    lambda t, v: (
      v
      if isinstance(v, str)
      else _NOT_WRITTEN
      if not v
      else _refuse('Only one checkpoint can be named.')
    ),
  ),
  't5x.utils.RestoreCheckpointConfig.mode': _no_effect(
    "The path names the checkpoint; total_steps counts its step, as T5X's does.",
    value=_only('specific', 'latest', why='Only one checkpoint can be named.'),
  ),
  't5x.utils.RestoreCheckpointConfig.dtype': _no_effect('Parameters are always float32.'),
  't5x.utils.RestoreCheckpointConfig.use_gda': _no_effect('Arrays are always jax.Array.'),
  't5x.utils.RestoreCheckpointConfig.checkpointer_cls': _no_effect(
    'Orbax reads checkpoints.',
    value=lambda t, v: _named(v, {'t5x.checkpoints.Checkpointer': ''}, '') or _NOT_WRITTEN,
  ),
  # The mesh.
  't5x.partitioning.PjitPartitioner.num_partitions': _same('Partitioner.num_partitions'),
  't5x.partitioning.PjitPartitioner.model_parallel_submesh': _mapped(
    'Partitioner.num_partitions', 'the product; it wins over num_partitions, as in T5X', _submesh
  ),
  't5x.partitioning.PjitPartitioner.ici_mesh_shape': _mapped(
    'Partitioner.ici_mesh_shape', '(replica, data, model) -> data, model', _mesh_shape
  ),
  't5x.partitioning.PjitPartitioner.dcn_mesh_shape': _mapped(
    'Partitioner.dcn_mesh_shape', '(replica, data, model) -> data, model', _mesh_shape
  ),
  't5x.partitioning.PjitPartitioner.logical_axis_rules': _mapped(
    '', 'each kind of parallelism has its rules', _axis_rules
  ),
  't5x.partitioning.PjitPartitioner.params_on_devices': _no_effect('Always True.'),
  't5x.partitioning.PjitPartitioner.backend': _no_effect("The backend is the machine's."),
  't5x.partitioning.standard_logical_axis_rules.parameter_partitioning_dims': _mapped(
    'Partitioner.fsdp', '2 splits parameters over all data-parallel devices', _split_parameters
  ),
  't5x.partitioning.standard_logical_axis_rules.activation_partitioning_dims': _no_effect(
    '1 is what a run here does.',
    value=_only(
      1,
      why='Activations are not split by embed here. The nearest is '
      'Partitioner.sequence_parallel = True, which splits them by position.',
    ),
  ),
  # The optimizer.
  't5x.adafactor.Adafactor.decay_rate': _same('Adafactor.decay_rate'),
  't5x.adafactor.Adafactor.clipping_threshold': _same('Adafactor.clipping_threshold'),
  't5x.adafactor.Adafactor.multiply_by_parameter_scale': _mapped(
    'Adafactor.multiply_by_parameter_scale',
    '',
    lambda t, v: v if isinstance(v, bool) else _refuse('One value applies to all parameters.'),
  ),
  't5x.adafactor.Adafactor.min_dim_size_to_factor': _same('Adafactor.min_dim_size_to_factor'),
  't5x.adafactor.Adafactor.epsilon1': _same('Adafactor.epsilon1'),
  't5x.adafactor.Adafactor.epsilon2': _same('Adafactor.epsilon2'),
  't5x.adafactor.Adafactor.global_norm_clip_threshold': _same('train.max_grad_norm'),
  't5x.adafactor.Adafactor.step_offset': _no_effect(
    '0 is what a run here does.',
    value=_only(0, why='The second moment decays with the step of the run.'),
  ),
  't5x.adafactor.Adafactor.beta1': _no_effect(
    'None is what a run here does.', value=_only(None, why='Adafactor here has no momentum.')
  ),
  't5x.adafactor.Adafactor.weight_decay_rate': _no_effect(
    'None is what a run here does.', value=_only(None, why='Adafactor here has no weight decay.')
  ),
  't5x.adafactor.Adafactor.factored': _no_effect(
    'True is what a run here does.',
    value=_only(True, why='Set Adafactor.logical_factor_rules: an axis with role "none".'),
  ),
  't5x.adafactor.Adafactor.logical_factor_rules': _no_effect(
    'The standard rules are the default.',
    value=lambda t, v: (
      _named(v, {'t5x.adafactor.standard_logical_factor_rules': ''}, '') or _NOT_WRITTEN
    ),
  ),
  't5x.optimizers.chain.transformations': _mapped('train.optimizer', 'optax itself', _chain),
  't5x.optimizers.wrap_optax_optimizer.optax_optimizer': _mapped('train.optimizer', '', _chain),
  # SeqIO's objects, which are real here; the rules are for what surrounds them.
  'seqio.Evaluator.logger_cls': _no_effect('train.logging_cfg says where metrics go.'),
  'seqio.Evaluator.num_examples': _no_effect(
    'None evaluates all examples.',
    value=_only(None, why='Metrics of tasks are computed of all examples of the split.'),
  ),
  'seqio.Evaluator.use_memory_cache': _no_effect('Examples are always kept in memory.'),
  'seqio.Evaluator.log_dir': _no_effect('Metrics go to MODEL_DIR.'),
  'seqio.JSONLogger.write_n_results': _no_effect(
    'python -m t5x_gpu.infer writes predictions; a run writes their metrics.'
  ),
  'seqio.SentencePieceVocabulary.sentencepiece_model_file': _VOCABULARY,
  'seqio.SentencePieceVocabulary.extra_ids': _VOCABULARY,
  'seqio.ByteVocabulary.extra_ids': _VOCABULARY,
  # Models.
  **_without(_loss_rules('EncoderDecoderModel'), 'vocabulary'),
  **_without(_loss_rules('DecoderOnlyModel'), 'input_vocabulary', 'output_vocabulary'),
  't5x.models.DecoderOnlyModel.inputs_bidirectional_attention': _same(
    'DecoderOnlyModel.inputs_bidirectional_attention'
  ),
  't5x.models.EncoderDecoderModel.predict_batch_with_aux.num_decodes': _same(
    'DecodingConfig.num_beams'
  ),
  't5x.models.EncoderDecoderModel.predict_batch_with_aux.return_all_decodes': _no_effect(
    'False is what metrics use.', value=_only(False, None, why='Metrics use the best beam.')
  ),
  't5x.models.DecoderOnlyModel.predict_batch_with_aux.num_decodes': _same(
    'DecodingConfig.num_decodes'
  ),
  't5x.models.DecoderOnlyModel.decode_fn': _mapped(
    '', 'its parameters', lambda t, v: _decode(t, v)
  ),
  't5x.models.EncoderDecoderModel.decode_fn': _mapped(
    '', 'its parameters', lambda t, v: _decode(t, v)
  ),
  't5x.decoding.temperature_sample.temperature': _same('DecodingConfig.temperature'),
  't5x.decoding.temperature_sample.topk': _same('DecodingConfig.top_k'),
  't5x.decoding.temperature_sample.topp': _mapped(
    'DecodingConfig.top_p', '0 is 1.0, all tokens', lambda t, v: v or 1.0
  ),
  't5x.decoding.temperature_sample.num_decodes': _same('DecodingConfig.num_decodes'),
  't5x.decoding.beam_search.num_decodes': _same('DecodingConfig.num_beams'),
  't5x.decoding.beam_search.alpha': _same('DecodingConfig.length_penalty'),
  't5x.examples.t5.network.Transformer.config': _mapped('', '', lambda t, v: _NOT_WRITTEN),
  't5x.examples.scalable_t5.network.Transformer.config': _mapped('', '', lambda t, v: _NOT_WRITTEN),
  't5x.examples.decoder_only.network.DecoderWrapper.config': _mapped(
    '', '', lambda t, v: _NOT_WRITTEN
  ),
  **_without(_network_rules('t5x.examples.t5.network.T5Config'), 'num_layers', 'scan_layers'),
  **_without(_network_rules('t5x.examples.scalable_t5.network.T5Config'), 'num_layers'),
  **_without(
    _network_rules('t5x.examples.decoder_only.network.TransformerConfig'),
    'num_decoder_layers',
    'num_encoder_layers',
    'scan_layers',
  ),
  't5x.examples.t5.network.T5Config.scale_attn_logits': _mapped(
    '', 'True is TransformerConfig.query_pre_attn_scalar = head_dim', lambda t, v: _scale(t, v)
  ),
}


def _scale(t: Translator, value: Any) -> Any:
  if value:  # the size of a head is written by now: arguments with defaults come first
    head_dim, origin = t.blocks[NAMES['TransformerConfig']]['head_dim']
    t.write('TransformerConfig.query_pre_attn_scalar', head_dim, origin)
  return _NOT_WRITTEN


def _refuse(why: str) -> Any:
  raise Refused(why)


def _actions(t: Translator, value: Any) -> Any:
  for action in [a for actions in (value or {}).values() for a in actions]:
    _named(action, {'t5x.trainer.TerminateOnNanAction': ''}, 'actions')
    t.apply(action)
  return _NOT_WRITTEN


def _decode(t: Translator, value: Any) -> Any:
  _named(
    value, {'t5x.decoding.temperature_sample': '', 't5x.decoding.beam_search': ''}, 'decode_fn'
  )
  t.apply(value)
  return _NOT_WRITTEN


@dataclasses.dataclass(frozen=True)
class Translation:
  """Our configuration, and what became of each of T5X's values.

  Attributes:
    text: a gin file of ours; each line ends with the origin of its value.
    outcomes: one per value that the run uses.
    origins: line of `text` -> origin of the value on it.
    unused: the bindings that nothing uses, with their origins.
    ours: bindings of the command line ('KEY=VALUE') that name nothing of T5X's files.
  """

  text: str
  outcomes: tuple[Outcome, ...]
  origins: Mapping[int, str]
  unused: tuple[tuple[str, str], ...]
  ours: tuple[str, ...]

  @property
  def problems(self) -> list[Problem]:
    """The values that are refused."""
    return [
      Problem(f'{o.origin}: {_short(o.name)} = {o.value}: {o.what}')
      for o in self.outcomes
      if o.status == 'refused'
    ]

  @property
  def notes(self) -> list[str]:
    """What a user should know before the first step."""
    count = {s: sum(o.status == s for o in self.outcomes) for s in ('same', 'mapped', 'no effect')}
    notes = [
      f"T5X's gin files are translated: {count['same']} values kept, {count['mapped']} mapped, "
      f'{count["no effect"]} without effect here. `python -m t5x_gpu.config from_t5x` lists them.'
    ]
    notes += [
      f"numbers differ from T5X's: {o.numbers}. {_short(o.name)} = {o.value} ({o.origin}): {o.what}"
      for o in self.outcomes
      if o.numbers
    ]
    if self.unused:
      names = ', '.join(f'{_short(key)} ({origin})' for key, origin in self.unused[:_MOST_NAMES])
      rest = len(self.unused) - _MOST_NAMES
      notes.append(f'nothing uses {names}{f" and {rest} more" if rest > 0 else ""}')
    return notes


_MOST_NAMES = 10  # unused names in a note


def _short(name: str) -> str:
  """Returns T5X's parameter with its class, 'DatasetConfig.seed'; a macro as it is."""
  scope, slash, name = name.rpartition('/')
  return f'{scope}{slash}{".".join(name.split(".")[-2:])}'


def translate(
  gin_files: Sequence[str], *, bindings: Sequence[str] = (), search_paths: Sequence[str] = ()
) -> Translation:
  """Returns the configuration of `train` that T5X's `gin_files` and `bindings` describe.

  Raises:
    ConfigError: a file cannot be read; the files do not configure `train`.
  """
  files = records.read(
    gin_files, bindings=bindings, search_paths=search_paths, known=_known_names()
  )
  t = Translator(files)
  run = files.call('__main__.train')
  if not run.arguments:
    raise ConfigError("The files bind nothing of T5X's train.", docs=DOCS)
  t.apply(run)
  _finish(t, run)
  _refuse_forgotten(t)
  unused = tuple((b.key, b.origin) for b in files.final() if b.key not in files.used)
  text, origins = _render(t, gin_files)
  return Translation(text, tuple(t.outcomes), origins, unused, files.ours)


_GROUPS = {
  'same': 'kept',
  'mapped': 'mapped',
  'no effect': 'without effect here',
  'refused': 'refused',
}


def table(outcomes: Sequence[Outcome]) -> list[str]:
  """Returns lines that list the outcomes, grouped by status."""
  lines = []
  for status, heading in _GROUPS.items():
    found = [o for o in outcomes if o.status == status]
    lines += [f'{heading}: {len(found)}'] if found else []
    for o in found:
      here = f' -> {o.here}' if o.here else ''
      lines.append(f'  {_short(o.name)} = {o.value}{here}  ({o.origin})')
      lines += [f'    {text}' for text in (o.what,) if text and status != 'same']
      lines += [f"    numbers differ from T5X's: {o.numbers}"] if o.numbers else []
  return lines


def of_t5x(gin_files: Sequence[str], *, search_paths: Sequence[str] = ()) -> list[str]:
  """Returns the files that T5X reads: all but ours, if one of them or an include imports T5X."""
  modules = {name: set(records.imports([name], search_paths=search_paths)) for name in gin_files}
  if not any(records.names_t5x(module) for found in modules.values() for module in found):
    return []
  return [
    name
    for name, found in modules.items()
    if not any(module.partition('.')[0] == 't5x_gpu' for module in found)
  ]


def _known_names() -> set[str]:
  return {name.rpartition('.')[0] for name in RULES}


def _finish(t: Translator, run: Record) -> None:
  """Writes what follows from several of T5X's values."""
  train = t.blocks.setdefault(NAMES['train'], {})
  if NAMES['Adafactor'] in t.blocks and t.layers:
    t.write('Adafactor.layers', t.layers, 'T5X')
  model = run.arguments.get('model')
  if isinstance(model and model.value, Record):
    t.apply(t.files.call(f'{model.value.name}.predict_batch_with_aux'))
  if NAMES['DecodingConfig'] in t.blocks:
    t.write('train.decoding_cfg', t.reference('DecodingConfig'), 'T5X')
  if train.get('infer_eval_dataset_cfg', (None, ''))[0] is not None and t.eval_period:
    t.write('train.infer_eval_period', t.eval_period, 'T5X')
  if 'log_period' not in train:
    periods = [
      value
      for value in (
        train.get('eval_period', (None, ''))[0],
        t.blocks.get(NAMES['CheckpointConfig'], {}).get('period', (None, ''))[0],
      )
      if isinstance(value, int)
    ]
    t.write('train.log_period', min([100, *periods]), 'T5X')
  modules = [m for m in t.files.modules if m.split('.')[0] not in ('seqio', 'optax', 'gin')]
  for block, parameters in t.blocks.items():
    if block.endswith(NAMES['DatasetConfig']) and len(modules) == 1:
      value, _ = parameters.get('mixture_or_task_module', (None, ''))
      unset = value is None or isinstance(value, Macro) and t.macros[value.name][0] is None
      if unset:
        parameters['mixture_or_task_module'] = (modules[0], t.files.modules[modules[0]])


def _refuse_forgotten(t: Translator) -> None:
  """Refuses the bindings that the run uses and that no rule has looked at."""
  seen = {outcome.name.rpartition('/')[2] for outcome in t.outcomes} | t.refused
  for b in t.files.final():
    name = f'{_canonical(b.selector)}.{b.argument}'
    if b.argument and b.key in t.files.used and name not in seen:
      t.outcomes.append(
        Outcome(name, repr(b.value), b.origin, 'refused', what=_unknown(name, b.value))
      )


def _render(t: Translator, gin_files: Sequence[str]) -> tuple[str, dict[int, str]]:
  """Returns the text, and line -> origin."""
  lines = [
    f"# Written from T5X's {', '.join(gin_files)}. Each line names the origin of its value; T5X is",
    "# a default of T5X's, or a value that follows from several.",
    'from __gin__ import dynamic_registration',
  ]
  origins: dict[int, str] = {}

  def add(text: str, origin: str) -> None:
    lines.append(f'{text}  # {origin}')
    origins[len(lines)] = origin

  names = [block.rpartition('/')[2] for block in t.blocks]
  for alias in sorted({name.partition('.')[0] for name in names}):
    if alias in MODULES:
      package, _, module = MODULES[alias].rpartition('.')
      renamed = f' as {alias}' if module != alias else ''
      lines.append(f'from {package} import {module}{renamed}')
    else:
      lines.append(f'import {alias}')
  lines.append('')
  values = [value for parameters in t.blocks.values() for value, _ in parameters.values()]
  used = {macro.name for macro in gin_text.instances(values, Macro)}
  for name in sorted(used & t.macros.keys()):
    value, origin = t.macros[name]
    add(f'{name} = {Unset() if isinstance(value, Unset) else _text(value)}', origin)
  for block, parameters in t.blocks.items():
    if parameters:
      lines += ['', f'{block}:']
      for parameter, (value, origin) in parameters.items():
        add(f'  {parameter} = {_text(value)}', origin)
  return '\n'.join(lines) + '\n', origins
