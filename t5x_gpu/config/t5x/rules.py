"""One rule per parameter of T5X: our parameter that takes its value, or the reason why none does.

`RULES` is the whole table; docs/from_t5x.md prints it. The functions before it map values.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5x_gpu.config import gin_text
from t5x_gpu.config.gin_text import Reference
from t5x_gpu.config.t5x.records import Record, Unset, Value
from t5x_gpu.config.t5x.translator import (
  NAMES,
  NOT_WRITTEN,
  NotKnown,
  ParameterRule,
  Refused,
  Translator,
  canonical,
  spelled,
)
from t5x_gpu.errors import did_you_mean

# (translator, T5X's value) -> ours. Raises Refused.
ToOurs = Callable[[Translator, Any], Any]


def _same(here: str, **fields: Any) -> ParameterRule:
  return ParameterRule('same', here, **fields)


def _mapped(here: str, note: str, value: ToOurs, **fields: Any) -> ParameterRule:
  return ParameterRule('mapped', here, note, value, **fields)


def _no_effect(note: str, **fields: Any) -> ParameterRule:
  return ParameterRule('no effect', '', note, **fields)


def _if_none(value: Any) -> ToOurs:
  return lambda translator, given: value if given is None else given


def _only(*legal: Any, reason: str) -> ToOurs:
  """Returns a rule's `value` for parameters without effect at `legal` values, refused otherwise."""

  def value(translator: Translator, given: Any) -> Any:
    if given not in legal:
      raise Refused(reason)
    return NOT_WRITTEN

  return value


# T5X's class or function -> ours, a name of `NAMES`; '' if its parameters belong to others here.
_COUNTERPARTS = {
  't5x.adafactor.Adafactor': 'Adafactor',
  't5x.decoding.beam_search': '',
  't5x.decoding.temperature_sample': '',
  't5x.models.DecoderOnlyModel': 'DecoderOnlyModel',
  't5x.models.EncoderDecoderModel': 'EncoderDecoderModel',
  't5x.optimizers.chain': 'Optax',
  't5x.optimizers.wrap_optax_optimizer': 'Optax',
  't5x.partitioning.PjitPartitioner': 'Partitioner',
  't5x.partitioning.standard_logical_axis_rules': '',
  't5x.trainer.TerminateOnNanAction': '',
  't5x.trainer.Trainer': '',
  't5x.utils.CheckpointConfig': 'CheckpointConfig',
  't5x.utils.DatasetConfig': 'DatasetConfig',
  't5x.utils.RestoreCheckpointConfig': '',
  't5x.utils.SaveCheckpointConfig': '',
  't5x.utils.create_learning_rate_scheduler': 'factors',
}


def _name(value: Any, *legal: str) -> str:
  """Returns the name of a record; raises Refused unless it is one of `legal`."""
  if not isinstance(value, Record):
    raise Refused(f'{spelled(value)} is not a function or class.')
  name = canonical(value.name)
  if name not in legal:
    short = {n.rpartition('.')[2]: n for n in legal}
    hint = did_you_mean(name.rpartition('.')[2], short, limit=1)
    raise NotKnown(f'{name} is not known here.{hint}')
  return name


def _object(*legal: str) -> ToOurs:
  """Returns a rule's `value` that applies a record of one of these names, and refers to ours."""

  def value(t: Translator, given: Any) -> Any:
    if given is None:
      return None
    ours = _COUNTERPARTS[_name(given, *legal)]
    scope = given.scope if ours == 'DatasetConfig' else ''
    t.apply(given, scope=scope)
    return t.reference(ours, scope=scope) if ours else NOT_WRITTEN

  return value


def _nothing_but(*legal: str) -> ToOurs:
  """Returns a rule's `value` for parameters without effect at None and at records of T5X's."""

  def value(t: Translator, given: Any) -> Any:
    if given is not None:
      _name(given, *legal)
    return NOT_WRITTEN

  return value


_DATASET = _object('t5x.utils.DatasetConfig')


def _evaluated(t: Translator, value: Any) -> Any:
  """Returns the dataset of an evaluation; None if T5X never runs it."""
  given = t.files.call('__main__.train').arguments
  period, before = given.get('eval_period'), given.get('run_eval_before_training')
  if period is None or period.value or before is not None and before.value:
    return _DATASET(t, value)
  for record in gin_text.instances(value, Record):
    t.without_effect(record, 'eval_period = 0: nothing is evaluated.')
  return None if value is None else Value(None, period.origin)


_PARTITIONER = _object('t5x.partitioning.PjitPartitioner')


def _model(t: Translator, value: Any) -> Reference | None:
  """Writes the model and how it decodes, which T5X binds as parameters of its methods."""
  ours = _object('t5x.models.EncoderDecoderModel', 't5x.models.DecoderOnlyModel')(t, value)
  if ours is None:
    return None
  t.apply(t.files.call(f'{value.name}.predict_batch_with_aux'))
  if NAMES['DecodingConfig'] in t.blocks or t.entry == 'InferSetup':
    t.write('DecodingConfig.max_decode_length', None, 'T5X')
    t.write(f'{t.entry}.decoding_cfg', t.reference('DecodingConfig'), 'T5X')
  return ours


_NETWORKS = {
  't5x.examples.t5.network.Transformer': 'joined_heads',
  't5x.examples.decoder_only.network.DecoderWrapper': 'joined_heads',
  't5x.examples.scalable_t5.network.Transformer': 'scanned',
}


def _network(t: Translator, value: Any) -> Reference:
  layers = _NETWORKS[_name(value, *_NETWORKS)]
  config = value.arguments.get('config')
  if config is None or not isinstance(config.value, Record):
    given = spelled(config.value) if config else 'not set'
    raise Refused(f'{value.name}.config is {given}, which is not a configuration.')
  t.layers = layers
  if layers == 'scanned':  # each of its layers has a bias
    t.write('TransformerConfig.relative_bias', 'per_layer', 'T5X')
  t.apply(value)
  t.apply(config.value)
  return t.reference('TransformerConfig')


def _dtype(t: Translator, value: Any) -> str:
  text = value.name.rpartition('.')[2] if isinstance(value, Record) else value
  if not isinstance(text, str) or text not in ('float32', 'bfloat16'):
    raise Refused(f'{text!r} is not a precision here: float32, bfloat16, fp8 (docs/precision.md).')
  return text


# Optimizers of optax that t5x.optimizers has under the same names.
_OPTAX = (
  'adabelief adagrad adam adamw fromage lamb lars lion noisy_sgd radam rmsprop sgd yogi'
).split()
_OPTIMIZERS = (
  't5x.adafactor.Adafactor',
  't5x.optimizers.chain',
  't5x.optimizers.wrap_optax_optimizer',
)


def _optimizer(t: Translator, value: Any) -> Reference:
  name = value.name if isinstance(value, Record) else ''
  if name.removeprefix('t5x.optimizers.') in _OPTAX:
    return _chain(t, [value])
  ours = _object(*_OPTIMIZERS)(t, value)
  if name == 't5x.adafactor.Adafactor' and t.layers:
    t.write('Adafactor.layers', t.layers, 'T5X')
  return ours


def _chain(t: Translator, value: Any) -> Any:
  """Writes `Optax.transformations`; the learning rate of one of them becomes the run's."""
  if isinstance(value, Record):
    value = [value]
  if not isinstance(value, (list, tuple)):
    raise Refused(f'{spelled(value)} is not a list of transformations.')
  transformations, rates = [], 0
  for record in value:
    name = record.name if isinstance(record, Record) else ''
    own = name.replace('t5x.optimizers.', 'optax.')
    if not own.startswith('optax.'):
      raise Refused(f'{spelled(record)} is not a transformation of optax.')
    rate = record.arguments.get('learning_rate')
    _same_of_optax(t, record, own)
    transformations.append(Reference(own, rate is None))
    if rate is not None:
      rates += 1
      _optax_rate(t, rate, f'{name}.learning_rate')
  if rates != 1:
    raise Refused(
      f'{rates} of the transformations take a learning rate; here one does, such as optax.adamw.'
    )
  t.write('Optax.transformations', transformations, 'T5X')
  return t.reference('Optax')


def _same_of_optax(t: Translator, record: Record, own: str) -> None:
  """Writes the arguments of a function of optax, which is called `own` here, but for its rate."""
  block = t.blocks.setdefault(own, {})
  for parameter, given in record.arguments.items():
    if parameter != 'learning_rate':
      block[parameter] = (given.value, given.origin)
      t.note(f'{record.name}.{parameter}', given, 'same', f'{own}.{parameter}')


def _optax_rate(t: Translator, given: Value, name: str) -> None:
  """Writes `train.learning_rate` from optax's: a number, or a schedule of optax or of T5X."""
  value = given.value
  if not isinstance(value, (Record, Unset)):
    t.write('factors.factors', 'constant', given.origin)
    t.write('factors.base_learning_rate', value, given.origin)
    t.write('factors.min_learning_rate', 0.0, given.origin)
    value = t.reference('factors')
  elif isinstance(value, Record) and canonical(value.name) == _SCHEDULER:
    value = _object(_SCHEDULER)(t, value)
  elif isinstance(value, Record):
    if not value.name.startswith('optax.'):
      raise Refused(f'{spelled(value)} is not a schedule of optax or of T5X.')
    _same_of_optax(t, value, value.name)
    value = Reference(value.name, True)
  t.write('train.learning_rate', value, given.origin)
  note = 'T5X takes the rate of optax and only logs Trainer.learning_rate_fn.'
  t.note(name, given, 'mapped', 'train.learning_rate', note)


_SCHEDULER = 't5x.utils.create_learning_rate_scheduler'


def _schedule(t: Translator, value: Any) -> Any:
  _name(value, _SCHEDULER)
  if t.written('train.learning_rate') is None:
    return _object(_SCHEDULER)(t, value)
  if not t.has_applied(_SCHEDULER):
    t.without_effect(value, 'T5X takes the learning rate of optax, and only logs this.')
  return NOT_WRITTEN


_MICROBATCHES = 'T5X divides each microbatch by its own tokens and adds them up'


def _per_microbatch(t: Translator, number: Any) -> str:
  factor = t.written('train.loss_normalizing_factor', 1.0)
  of_batch = factor is None or isinstance(factor, str)
  return _MICROBATCHES if of_batch and isinstance(number, int) and number > 1 else ''


def _submesh(t: Translator, value: Any) -> Any:
  if value is None:
    return NOT_WRITTEN
  return math.prod(_sizes(value, 4))


def _sizes(value: Any, number: int) -> Sequence[int]:
  if not isinstance(value, (list, tuple)) or len(value) != number:
    raise Refused(f'{spelled(value)} is not {number} sizes.')
  if not all(isinstance(size, int) and size > 0 for size in value):
    raise Refused(f'{spelled(value)} is not {number} sizes.')
  return value


def _split_parameters(t: Translator, value: Any) -> Any:
  if value == 1:
    return NOT_WRITTEN
  t.write('Partitioner.data', 1, 'T5X')
  return -1


def _ici_mesh_shape(t: Translator, value: Any) -> Any:
  t.ici_mesh_shape = None if value is None else _sizes(value, 3)
  return NOT_WRITTEN


def _dcn_mesh_shape(t: Translator, value: Any) -> Any:
  """Writes both shapes, which replace the sizes; T5X ignores one shape without the other."""
  if value is None or t.ici_mesh_shape is None:
    return NOT_WRITTEN
  shapes = {'ici': t.ici_mesh_shape, 'dcn': _sizes(value, 3)}
  partitioner = t.blocks.setdefault(NAMES['Partitioner'], {})
  splits_parameters = 'fsdp' in partitioner
  for name in ('num_partitions', 'data', 'fsdp'):
    partitioner.pop(name, None)
  for side, (replica, data, model) in shapes.items():
    sizes = {'data': replica, 'fsdp': data} if splits_parameters else {'data': replica * data}
    t.write(f'Partitioner.{side}_mesh_shape', {**sizes, 'model': model}, 'T5X')
  return NOT_WRITTEN


_TFEXAMPLES = '__main__.create_task_from_tfexample_file'


def _task(t: Translator, value: Any) -> str:
  if t.entry == 'InferSetup' and isinstance(value, Record) and value.name == _TFEXAMPLES:
    t.apply(value)
    return ''  # the files are InferSetup.prompts
  if not isinstance(value, str):
    raise Refused(
      f'{spelled(value)} makes a task. Files with inputs and targets are a task here: '
      '"tfrecord:PATTERN" or "jsonl:PATTERN" (docs/tasks.md). Files with inputs alone are prompts: '
      'python -m t5x_gpu.infer --prompts=FILE.jsonl (docs/infer.md).'
    )
  return value


def _record_files(t: Translator, value: Any) -> str:
  """Returns InferSetup.prompts of T5X's files, and of the features in them."""
  paths = [value] if isinstance(value, str) else value
  if not isinstance(paths, (list, tuple)) or len(paths) != 1:
    raise Refused('Prompts are the files of one pattern.')
  given = t.files.call(_TFEXAMPLES).arguments
  names = {name: given.get(f'{name}_key') for name in ('inputs', 'targets')}
  chosen = ','.join(f'{name}={key.value}' for name, key in names.items() if key and key.value)
  return f'tfrecord:{paths[0]}#{chosen}'


def _vocabulary(t: Translator, value: Any) -> Any:
  """Writes DatasetConfig.vocabulary from T5X's, which may be the model's."""
  function = value
  if isinstance(value, Record) and value.name.startswith('t5x.models.get_'):
    t.apply(value)
    model = value.arguments.get('model')
    name = value.name.rpartition('.')[2].removeprefix('get_')  # input_vocabulary
    found = model.value.arguments if model and isinstance(model.value, Record) else {}
    given = found.get(name) or found.get('vocabulary')
    function = given.value if given else None
  if not isinstance(function, Record):
    return NOT_WRITTEN  # the model is not set
  file = function.arguments.get('sentencepiece_model_file')
  ours, origin = 'byte', 'T5X'
  if function.name == 'seqio.SentencePieceVocabulary' and file:
    ours, origin = f'sentencepiece:{file.value}', file.origin
  elif function.name != 'seqio.ByteVocabulary':
    raise Refused(f'{spelled(function)} is not a vocabulary of SeqIO.')
  if t.written('DatasetConfig.vocabulary', ours) != ours:
    raise Refused('Inputs and targets have different vocabularies; here they share one.')
  t.write('DatasetConfig.vocabulary', ours, origin)
  return NOT_WRITTEN


def _features(t: Translator, value: Any) -> Any:
  if not isinstance(value, Mapping) or not all(isinstance(f, Record) for f in value.values()):
    raise Refused(f'{spelled(value)} does not name the features.')
  for feature in value.values():
    t.apply(feature, scope=feature.scope)
  return NOT_WRITTEN


# Packages that T5X's files import, and that register no tasks.
_NOT_OF_TASKS = ('flax', 'flaxformer', 'gin', 'jax', 'optax', 'seqio', 'tensorflow')


def _task_module(t: Translator, value: Any) -> Any:
  """Returns the module with the task: the named one, or all modules that the files import."""
  if value is not None:
    return value
  modules = [m for m in t.files.modules if m.partition('.')[0] not in _NOT_OF_TASKS]
  if not modules:
    return None
  return Value(modules[0] if len(modules) == 1 else modules, t.files.modules[modules[0]])


def _prompts(t: Translator, value: Any) -> Any:
  """Writes the dataset of `infer`, whose batch size is the number of prompts at a time."""
  size = value.arguments.get('batch_size') if isinstance(value, Record) else None
  if size is not None and NAMES['DecodingConfig'] in t.blocks:  # without a model, there is none
    t.write('DecodingConfig.batch_size', size.value, size.origin, macro=size.macro)
  return _DATASET(t, value)


_INFER_MODES = {'predict': False, 'predict_with_aux': False, 'score': True}


def _infer_mode(t: Translator, value: Any) -> bool:
  if value not in _INFER_MODES:
    raise Refused(f'{spelled(value)} is not one of {", ".join(_INFER_MODES)}.')
  return _INFER_MODES[value]


_NEVER = 10**9  # a period beyond every run: the last step alone is saved


def _save(t: Translator, value: Any) -> Any:
  if value is not None:
    return _object('t5x.utils.SaveCheckpointConfig')(t, value)
  t.write('CheckpointConfig.period', _NEVER, 'T5X')
  t.write('CheckpointConfig.keep', 1, 'T5X')
  return NOT_WRITTEN


def _restore(t: Translator, value: Any) -> Any:
  if value is None:
    return NOT_WRITTEN
  _object('t5x.utils.RestoreCheckpointConfig')(t, value)
  if NAMES['RestoreConfig'] not in t.blocks:
    return NOT_WRITTEN
  t.write('RestoreConfig.mode', 'new_data', 'T5X')
  return t.reference('RestoreConfig')


def _restored_path(t: Translator, value: Any) -> Any:
  if isinstance(value, (list, tuple)) and len(value) == 1:
    [value] = value
  if value and not isinstance(value, str):
    raise Refused(
      'Only one checkpoint can be named. For several of a run, name its folder: '
      'python -m t5x_gpu.eval --steps=1000,2000.'
    )
  return value or NOT_WRITTEN


def _restore_mode(t: Translator, value: Any) -> Any:
  if value == 'all' and t.entry == 'EvalSetup':
    t.write('EvalSetup.steps', 'all', 'T5X')
  elif value not in ('specific', 'latest'):
    raise Refused('Only one checkpoint can be named.')
  return NOT_WRITTEN


def _evaluates_each(t: Translator, value: Any) -> Any:
  _name(value, 't5x.utils.get_training_eval_datasets')
  t.apply(value)
  return True if t.written('train.train_eval_dataset_cfg') is not None else NOT_WRITTEN


def _eval_period(t: Translator, value: Any) -> Any:
  if value and t.written('train.infer_eval_dataset_cfg') is not None:
    t.write('train.infer_eval_period', value, 'T5X')
  return value or None


def _total_steps(t: Translator, value: Any) -> Any:
  if value == 0:
    raise Refused('An evaluation without training is python -m t5x_gpu.eval (docs/eval.md).')
  return value


def _normalizer(t: Translator, value: Any) -> Any:
  if value is None:
    t.write('train.loss_normalizing_factor', 1.0, 'T5X')
  elif isinstance(value, str) and value.upper() == 'NUM_REAL_TARGET_TOKENS':
    t.write('train.loss_normalizing_factor', None, 'T5X')
  elif isinstance(value, str):
    t.write('train.loss_normalizing_factor', value.upper(), 'T5X')
  elif isinstance(value, (int, float)):
    t.write('train.loss_normalizing_factor', float(value), 'T5X')
  else:
    raise Refused(f'{spelled(value)} is not a number.')
  return NOT_WRITTEN


_NUM_DECODES = _no_effect('T5X passes predict_batch_with_aux.num_decodes, or 1.')


def _by_decode_fn(t: Translator, value: Any) -> Any:
  del t, value  # `_decode` has written it
  return NOT_WRITTEN


def _decode(t: Translator, value: Any) -> Any:
  name = _name(value, 't5x.decoding.temperature_sample', 't5x.decoding.beam_search')
  t.apply(value)
  if name == 't5x.decoding.beam_search':
    t.decoding = 'beams'
    return NOT_WRITTEN
  given = {'temperature': 1.0, 'topk': 1, 'topp': 0.0}
  given |= {p: v.value for p, v in value.arguments.items()}
  if given['topk'] and given['topp']:
    raise Refused('T5X takes topk or topp, not both. topk is 1 unless a file sets it: set it to 0.')
  if given['topk'] == 1:
    t.decoding = 'greedy'
    return NOT_WRITTEN
  t.decoding = 'sample'
  origin = next((v.origin for v in value.arguments.values()), 'T5X')
  t.write('DecodingConfig.temperature', given['temperature'], origin)
  t.write('DecodingConfig.top_k', given['topk'], origin)
  t.write('DecodingConfig.top_p', given['topp'] or 1.0, origin)
  return NOT_WRITTEN


def _num_decodes(t: Translator, value: Any) -> Any:
  name = {'beams': 'num_beams', 'sample': 'num_decodes'}.get(t.decoding)
  if name and value not in (None, 1):  # greedy texts are identical
    t.write(f'DecodingConfig.{name}', value, 'T5X')
  elif t.decoding == 'beams' and _decodes(t):
    t.write('DecodingConfig.beam_search', True, 'T5X')
  return NOT_WRITTEN


def _decodes(t: Translator) -> bool:
  """Returns whether T5X's script writes texts."""
  if t.entry == 'train':
    data = t.files.call('__main__.train').arguments.get('infer_eval_dataset_cfg')
    return data is not None and data.value is not None
  mode = t.files.call('__main__.infer').arguments.get('mode')
  return t.entry == 'EvalSetup' or mode is None or mode.value != 'score'


_VOCABULARY = _no_effect('The task of the data has its vocabulary; the model needs none.')


def _loss_rules(model: str) -> dict[str, ParameterRule]:
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
      'None is the sum, 1.0 here; NUM_REAL_TARGET_TOKENS is None; other names are kept.',
      _normalizer,
      default=None,
    ),
    f'{prefix}.input_vocabulary': _VOCABULARY,
    f'{prefix}.output_vocabulary': _VOCABULARY,
    f'{prefix}.vocabulary': _VOCABULARY,
  }


def _scan(t: Translator, value: Any) -> Any:
  t.layers = 'scanned' if value else 'separate'
  return NOT_WRITTEN


def _network_rules(config: str) -> dict[str, ParameterRule]:
  """Returns the rules of one of T5X's configurations of a network; defaults are T5X's."""
  here = 'TransformerConfig'
  return {
    f'{config}.vocab_size': _same(f'{here}.vocab_size'),
    f'{config}.dtype': _mapped(
      f'{here}.dtype',
      'the name of the dtype',
      _dtype,
      numbers=lambda t, v: 'softmax of attention in float32' if v != 'float32' else '',
    ),
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
    f'{config}.scan_layers': _no_effect(
      'Layers are always scanned; Adafactor.layers keeps which moments are factored.', value=_scan
    ),
  }


def _without(rules: dict[str, ParameterRule], *parameters: str) -> dict[str, ParameterRule]:
  return {name: r for name, r in rules.items() if name.rpartition('.')[2] not in parameters}


_NO_SEED = 'T5X draws a new seed at every start; here 0, so that a restart continues the same run.'


def _scale(t: Translator, value: Any) -> Any:
  if value:  # the size of a head is written by now: arguments with defaults come first
    head_dim, origin = t.blocks[NAMES['TransformerConfig']]['head_dim']
    t.write('TransformerConfig.query_pre_attn_scalar', head_dim, origin)
  return NOT_WRITTEN


def _refuse(reason: str) -> Any:
  raise Refused(reason)


def _actions(t: Translator, value: Any) -> Any:
  if not isinstance(value, (Mapping, type(None))):
    raise Refused(f'{spelled(value)} is not a dictionary of actions.')
  for mode, actions in (value or {}).items():
    for action in actions:
      if isinstance(action, Record) and action.name == _EARLY_STOPPING:
        _stop_early(t, mode, action)
      else:
        _object('t5x.trainer.TerminateOnNanAction')(t, action)
  return NOT_WRITTEN


_EARLY_STOPPING = 't5x.trainer.EarlyStoppingAction'


def _stop_early(t: Translator, mode: str, action: Record) -> None:
  given = action.arguments.get('metric')
  if mode not in ('TRAIN_EVAL', 'INFER_EVAL'):
    raise Refused(f'{mode}: a run stops early by a metric of an evaluation.')
  if t.written('train.early_stopping') is not None:
    raise Refused('One metric can stop a run here, train.early_stopping.')
  if given is None or not isinstance(given.value, (list, tuple)) or len(given.value) != 2:
    raise Refused('EarlyStoppingAction.metric is not a task and its metric.')
  task, metric = given.value
  name = f'infer_eval/{task}/{metric}'
  if mode == 'TRAIN_EVAL':
    name = _metric_of_loss(t, task, metric, action)
  t.write('EarlyStopping.metric', name, given.origin)
  t.apply(action)
  t.write('train.early_stopping', t.reference('EarlyStopping'), given.origin)


# T5X's metrics of an evaluation of the loss that have other names here.
_METRICS = {'cross_ent_loss': 'cross_entropy', 'loss_per_nonpadding_target_token': 'loss'}


def _metric_of_loss(t: Translator, task: Any, metric: Any, action: Record) -> str:
  """Returns our name of a task's metric; raises Refused if it means another value here."""
  data = t.files.call('__main__.train').arguments.get('train_eval_dataset_cfg')
  arguments = data.value.arguments if data and isinstance(data.value, Record) else {}
  name = arguments.get('mixture_or_task_name')
  atol = action.arguments.get('atol')
  if metric in ('loss', 'cross_ent_loss') and atol and atol.value != 0:
    raise Refused(
      f"EarlyStoppingAction.atol is {spelled(atol.value)}; T5X's {metric} is the sum over a batch, "
      'and here the mean over tokens. Set rtol, or the metric loss_per_nonpadding_target_token.'
    )
  ours = _METRICS.get(metric, metric)
  is_part = name and isinstance(name.value, str) and task != name.value
  return f'eval/{task}/{ours}' if is_part else f'eval/{ours}'


def _never_triggered(t: Translator, value: Any) -> str:
  concurrent = t.files.call('__main__.train').arguments.get('concurrent_metrics')
  if not str(t.written('EarlyStopping.metric')).startswith('infer_eval/'):
    return ''
  if concurrent is not None and concurrent.value is False:
    return ''
  return "T5X's run continues to its last step unless concurrent_metrics = False"


_ABOUT_IDS = _no_effect('Ids beyond the vocabulary of the model are always an error.')


RULES: dict[str, ParameterRule] = {
  # The run.
  '__main__.train.model': _mapped('train.model', 'the class of the same name', _model),
  '__main__.train.model_dir': _same('train.model_dir'),
  '__main__.train.train_dataset_cfg': _mapped('train.train_dataset_cfg', '', _DATASET),
  '__main__.train.train_eval_dataset_cfg': _mapped('train.train_eval_dataset_cfg', '', _evaluated),
  '__main__.train.infer_eval_dataset_cfg': _mapped('train.infer_eval_dataset_cfg', '', _evaluated),
  '__main__.train.checkpoint_cfg': _mapped(
    'train.checkpoint_cfg', '', _object('t5x.utils.CheckpointConfig')
  ),
  '__main__.train.partitioner': _mapped('train.partitioner', '', _PARTITIONER),
  '__main__.train.trainer_cls': _mapped(
    '', 'its parameters are parameters of train', _object('t5x.trainer.Trainer')
  ),
  '__main__.train.total_steps': _mapped('train.total_steps', '', _total_steps),
  '__main__.train.eval_steps': _same('train.eval_steps'),
  '__main__.train.eval_period': _mapped(
    'train.eval_period',
    'also of train.infer_eval_period; 0 evaluates nothing, or with run_eval_before_training at the '
    'start and at the end',
    _eval_period,
  ),
  '__main__.train.stats_period': _mapped('train.log_period', '', lambda t, v: v or NOT_WRITTEN),
  '__main__.train.random_seed': _mapped(
    'train.random_seed',
    _NO_SEED,
    _if_none(0),
    numbers=lambda t, v: 'another seed' if v is None else '',
  ),
  '__main__.train.relative_steps': _no_effect(
    'None counts steps from 0, as total_steps does.',
    value=_only(None, 0, reason='Set total_steps to the step at which the run ends.'),
  ),
  '__main__.train.use_hardware_rng': _no_effect(
    'Keys are always threefry.',
    numbers=lambda t, v: 'other dropout masks and initial values (T5X: rbg)' if v else '',
  ),
  '__main__.train.summarize_config_fn': _no_effect('config.gin is always written.'),
  '__main__.train.inference_evaluator_cls': _no_effect(
    'Metrics of tasks are computed where infer_eval_dataset_cfg is set.',
    value=_nothing_but('seqio.Evaluator'),
  ),
  '__main__.train.use_jax_array': _no_effect('Arrays are always jax.Array.'),
  '__main__.train.use_orbax': _no_effect('Checkpoints are always written with Orbax.'),
  '__main__.train.gc_period': _no_effect('The garbage collector runs by itself.'),
  '__main__.train.concurrent_metrics': _no_effect('Metrics are computed after decoding.'),
  '__main__.train.verify_matching_vocabs_fn': _ABOUT_IDS,
  '__main__.train.get_dataset_fn': _no_effect(
    'SeqIO reads the task.', value=_nothing_but('t5x.utils.get_dataset')
  ),
  '__main__.train.run_eval_before_training': _same('train.run_eval_before_training'),
  '__main__.train.train_eval_get_dataset_fn': _mapped(
    'train.eval_each_task',
    "True: of a mixture, each task's loss is also evaluated; metrics are eval/TASK/METRIC",
    _evaluates_each,
    default=Record('t5x.utils.get_training_eval_datasets', {}, evaluated=False),
  ),
  't5x.utils.get_training_eval_datasets.deterministic': _no_effect(
    'The data of evaluations are always in the same order.'
  ),
  '__main__.train.actions': _mapped(
    '',
    'EarlyStoppingAction is train.early_stopping; a loss that is not finite always ends the run.',
    lambda t, v: _actions(t, v),
  ),
  f'{_EARLY_STOPPING}.metric': _mapped(
    'EarlyStopping.metric',
    "'eval/METRIC', 'eval/TASK/METRIC' or 'infer_eval/TASK/METRIC'",
    lambda t, v: NOT_WRITTEN,
    numbers=_never_triggered,
  ),
  f'{_EARLY_STOPPING}.mode': _same('EarlyStopping.best_is'),
  f'{_EARLY_STOPPING}.patience': _same('EarlyStopping.patience'),
  f'{_EARLY_STOPPING}.atol': _same('EarlyStopping.atol'),
  f'{_EARLY_STOPPING}.rtol': _same('EarlyStopping.rtol'),
  't5x.trainer.TerminateOnNanAction.task': _no_effect('The loss of every step is checked.'),
  # Evaluation of checkpoints.
  '__main__.evaluate.model': _mapped('EvalSetup.model', 'the class of the same name', _model),
  '__main__.evaluate.dataset_cfg': _mapped('EvalSetup.dataset_cfg', '', _DATASET),
  '__main__.evaluate.partitioner': _mapped('EvalSetup.partitioner', '', _PARTITIONER),
  '__main__.evaluate.restore_checkpoint_cfg': _mapped('', '', _restore),
  '__main__.evaluate.output_dir': _same('EvalSetup.output_dir'),
  '__main__.evaluate.inference_evaluator_cls': _no_effect(
    'Metrics of tasks are always computed.', value=_nothing_but('seqio.Evaluator')
  ),
  '__main__.evaluate.train_eval_get_dataset_fn': _no_effect(
    'Each task of a mixture is evaluated.',
    value=_nothing_but('t5x.utils.get_training_eval_datasets'),
  ),
  '__main__.evaluate.training_evaluator_cls': _no_effect(
    'None as in every evaluation here.',
    value=_only(None, reason='python -m t5x_gpu.eval --metrics=all computes the loss, too.'),
  ),
  # Predictions.
  '__main__.infer.model': _mapped('InferSetup.model', 'the class of the same name', _model),
  '__main__.infer.dataset_cfg': _mapped(
    'InferSetup.dataset_cfg', 'also DecodingConfig.batch_size', _prompts
  ),
  f'{_TFEXAMPLES}.paths': _mapped(
    'InferSetup.prompts', "'tfrecord:PATTERN#inputs=FEATURE'", _record_files
  ),
  f'{_TFEXAMPLES}.file_type': _no_effect(
    'The files are TFRecords.', value=_only('tfrecord', reason='Only TFRecords are read.')
  ),
  f'{_TFEXAMPLES}.inputs_key': _mapped('', 'InferSetup.prompts', lambda t, v: NOT_WRITTEN),
  f'{_TFEXAMPLES}.targets_key': _mapped('', 'InferSetup.prompts', lambda t, v: NOT_WRITTEN),
  f'{_TFEXAMPLES}.features': _mapped('', 'DatasetConfig.vocabulary', _features),
  'seqio.Feature.vocabulary': _mapped('', 'DatasetConfig.vocabulary', _vocabulary),
  't5x.models.get_input_vocabulary.model': _no_effect(
    'DatasetConfig.vocabulary is the vocabulary of its model.'
  ),
  't5x.models.get_output_vocabulary.model': _no_effect(
    'DatasetConfig.vocabulary is the vocabulary of its model.'
  ),
  '__main__.infer.partitioner': _mapped('InferSetup.partitioner', '', _PARTITIONER),
  '__main__.infer.restore_checkpoint_cfg': _mapped('', '', _restore),
  '__main__.infer.output_dir': _same('InferSetup.output_dir'),
  '__main__.infer.mode': _mapped(
    'InferSetup.score', 'every prediction has its score: predict_with_aux is predict', _infer_mode
  ),
  '__main__.infer.shard_id': _same('InferSetup.shard_id'),
  '__main__.infer.num_shards': _same('InferSetup.num_shards'),
  '__main__.infer.checkpoint_period': _no_effect('Every batch is saved at once.'),
  '__main__.infer.checkpoint_ds_iter': _no_effect('A restart skips the prompts with results.'),
  '__main__.infer.merge_chunked_results': _no_effect('Results are in one file per shard.'),
  '__main__.infer.output_vocab_feature_name': _no_effect(
    'Texts are written by the vocabulary of the targets.',
    value=_only('targets', reason='Texts are always written by the vocabulary of the targets.'),
  ),
  '__main__.infer.file_extension': _no_effect(
    'Results are JSON lines.', value=_only('jsonl', reason='Results are always JSON lines.')
  ),
  '__main__.infer.keep_aux_as_numpy': _no_effect('Scores are numbers in JSON.'),
  '__main__.infer.verify_matching_vocabs_fn': _ABOUT_IDS,
  '__main__.infer.write_fn': _no_effect(
    'Results are JSON lines.', value=_nothing_but('__main__.write_inferences_to_file')
  ),
  '__main__.infer.merge_fn': _no_effect(
    'Results are in one file per shard.', value=_nothing_but('__main__.merge_chunks_to_file')
  ),
  **{
    f'__main__.{script}.{name}': rule
    for script in ('train', 'evaluate', 'infer')
    for name, rule in {
      'train_state_initializer_cls': _no_effect(
        'Parameters come from the seed or from the checkpoint.',
        value=_nothing_but('t5x.utils.TrainStateInitializer'),
      ),
      'use_gda': _no_effect('Arrays are always jax.Array.'),
    }.items()
  },
  **{
    f'__main__.{script}.{name}': rule
    for script in ('evaluate', 'infer')
    for name, rule in {
      'summarize_config_fn': _no_effect('A file next to the results names what they depend on.'),
      'use_orbax': _no_effect('Checkpoints are always read with Orbax.'),
      'fallback_init_rng': _no_effect(
        'A missing checkpoint is an error.',
        value=_only(None, reason='A missing checkpoint is always an error.'),
      ),
    }.items()
  },
  # Its trainer.
  't5x.trainer.Trainer.num_microbatches': _mapped(
    'train.num_microbatches', 'None and 0 are 1', lambda t, v: v or 1, numbers=_per_microbatch
  ),
  't5x.trainer.Trainer.learning_rate_fn': _mapped('train.learning_rate', '', _schedule),
  't5x.trainer.Trainer.weight_metrics_computer': _no_effect(
    "The logs have the gradients' norm, and no norms of parameters.",
    value=_nothing_but('t5x.trainer.WeightMetricsComputer'),
  ),
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
    numbers=lambda t, v: 'another order of the data' if v is None else '',
  ),
  't5x.utils.DatasetConfig.use_cached': _same('DatasetConfig.use_cached'),
  't5x.utils.DatasetConfig.pack': _same('DatasetConfig.pack', default=False),
  't5x.utils.DatasetConfig.module': _mapped(
    'DatasetConfig.mixture_or_task_module',
    'without it, the modules that the files import',
    _task_module,
    default=None,
  ),
  't5x.utils.DatasetConfig.use_custom_packing_ops': _no_effect('Rows are packed without them.'),
  't5x.utils.DatasetConfig.trim_output_features': _no_effect(
    'Features are cut to their lengths.',
    value=_only(True, reason='Features are always cut to their lengths.'),
  ),
  **{
    f't5x.utils.DatasetConfig.{name}': _no_effect('Only the speed of SeqIO differs.')
    for name in ('use_memory_cache', 'num_prefetch_threads', 'num_workers')
  },
  't5x.utils.DatasetConfig.runtime_preprocessors': _no_effect(
    'The task has all preprocessors.',
    value=_only(None, (), [], reason='Add them to the preprocessors of the task.'),
  ),
  # Its checkpoints.
  't5x.utils.CheckpointConfig.save': _mapped(
    '',
    'None saves the last step alone, and the step at which a signal stops the run',
    _save,
    default=None,
  ),
  't5x.utils.CheckpointConfig.restore': _mapped('train.initialize_from', '', _restore),
  't5x.utils.SaveCheckpointConfig.keep': _same('CheckpointConfig.keep', default=None),
  't5x.utils.SaveCheckpointConfig.period': _mapped(
    'CheckpointConfig.period',
    'None saves the last step alone, and checkpoint_steps',
    lambda t, v: v or _NEVER,
    default=None,
  ),
  't5x.utils.SaveCheckpointConfig.checkpoint_steps': _mapped(
    'CheckpointConfig.checkpoint_steps', 'None is ()', _if_none(())
  ),
  't5x.utils.SaveCheckpointConfig.dtype': _no_effect(
    'Parameters are saved as they are, in float32.',
    value=_only(None, 'float32', reason='A checkpoint holds the parameters exactly, in float32.'),
  ),
  't5x.utils.SaveCheckpointConfig.save_dataset': _no_effect(
    'The position in the data is always saved.'
  ),
  't5x.utils.SaveCheckpointConfig.keep_dataset_checkpoints': _no_effect(
    'The position in the data is part of the checkpoint.'
  ),
  't5x.utils.SaveCheckpointConfig.checkpointer_cls': _no_effect(
    'Orbax writes checkpoints.', value=_nothing_but('t5x.checkpoints.Checkpointer')
  ),
  **{
    f't5x.utils.{kind}CheckpointConfig.{name}': rule
    for kind in ('Save', 'Restore')
    for name, rule in {
      'checkpoint_manager_cls': _no_effect(
        'Orbax writes and reads checkpoints.',
        value=_nothing_but('t5x.checkpoints.OrbaxCheckpointManagerInterface'),
      ),
      'state_transformation_fns': _no_effect(
        'Checkpoints have the parameters of the model.',
        value=_only(
          None, (), [], reason="RestoreConfig.mode = 'partial' takes some of the parameters."
        ),
      ),
    }.items()
  },
  't5x.utils.RestoreCheckpointConfig.path': _mapped(
    'RestoreConfig.path',
    'None and [] start from the seed; eval and infer: checkpoint',
    _restored_path,
    setup='checkpoint',
  ),
  't5x.utils.RestoreCheckpointConfig.mode': _no_effect(
    "The path names the checkpoint; total_steps counts its step, as T5X's does. eval: 'all' is "
    'EvalSetup.steps.',
    value=_restore_mode,
  ),
  't5x.utils.RestoreCheckpointConfig.dtype': _no_effect(
    'Parameters are always float32.',
    numbers=lambda t, v: 'T5X rounds the restored state' if v not in (None, 'float32') else '',
  ),
  't5x.utils.RestoreCheckpointConfig.strict': _no_effect(
    'A checkpoint must have every parameter.',
    value=_only(True, reason="Take some of the parameters with RestoreConfig.mode = 'partial'."),
  ),
  't5x.utils.RestoreCheckpointConfig.fallback_to_scratch': _no_effect(
    'A checkpoint must have every parameter.',
    value=_only(
      False,
      reason="RestoreConfig.mode = 'partial' initializes what its pattern leaves out "
      '(docs/finetune.md).',
    ),
  ),
  't5x.utils.RestoreCheckpointConfig.assignment_map': _no_effect(
    'Parameters are found by their names.',
    value=_only(
      None,
      reason='Parameters have other names here: RestoreConfig.assignment_map (docs/finetune.md).',
    ),
  ),
  't5x.utils.RestoreCheckpointConfig.restore_dataset': _no_effect(
    'A new run reads its data from the start.',
    value=_only(False, reason="Continue in the data of T5X's run is not possible."),
  ),
  't5x.utils.RestoreCheckpointConfig.use_gda': _no_effect('Arrays are always jax.Array.'),
  't5x.utils.RestoreCheckpointConfig.checkpointer_cls': _no_effect(
    'Orbax reads checkpoints.', value=_nothing_but('t5x.checkpoints.Checkpointer')
  ),
  # The mesh.
  't5x.partitioning.PjitPartitioner.num_partitions': _same('Partitioner.num_partitions'),
  't5x.partitioning.PjitPartitioner.model_parallel_submesh': _mapped(
    'Partitioner.num_partitions', 'the product; it wins over num_partitions, as in T5X', _submesh
  ),
  't5x.partitioning.PjitPartitioner.ici_mesh_shape': _mapped(
    '', 'with dcn_mesh_shape: sizes of data and model, or of data, fsdp and model', _ici_mesh_shape
  ),
  't5x.partitioning.PjitPartitioner.dcn_mesh_shape': _mapped(
    '', 'as ici_mesh_shape; T5X uses them together, and ignores one alone', _dcn_mesh_shape
  ),
  't5x.partitioning.PjitPartitioner.logical_axis_rules': _mapped(
    '',
    'each kind of parallelism has its rules',
    _object('t5x.partitioning.standard_logical_axis_rules'),
  ),
  't5x.partitioning.PjitPartitioner.params_on_devices': _no_effect('Always True.'),
  't5x.partitioning.PjitPartitioner.backend': _no_effect("The backend is the machine's."),
  't5x.partitioning.standard_logical_axis_rules.parameter_partitioning_dims': _mapped(
    'Partitioner.fsdp', '2 splits parameters over all data-parallel devices', _split_parameters
  ),
  't5x.partitioning.standard_logical_axis_rules.activation_partitioning_dims': _no_effect(
    '1 as in every run here.',
    value=_only(
      1,
      reason='Activations are not split by embed here. The nearest is '
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
  't5x.adafactor.Adafactor.global_norm_clip_threshold': _mapped(
    'train.max_grad_norm', '0 is None', lambda t, v: v or None
  ),
  't5x.adafactor.Adafactor.skip_nan_updates': _no_effect(
    'A loss that is not finite ends the run; train.spike_cfg skips steps.',
    value=_only(False, reason='Set train.spike_cfg, which skips such steps.'),
  ),
  't5x.adafactor.Adafactor.max_parameter_scale': _no_effect(
    'None as in every run here.', value=_only(None, reason='The scale of a parameter has no limit.')
  ),
  't5x.adafactor.Adafactor.dtype_momentum': _no_effect(
    'Momentum is float32.',
    value=lambda t, v: (
      NOT_WRITTEN if _dtype(t, v) == 'float32' else _refuse('Momentum here is float32.')
    ),
  ),
  't5x.adafactor.Adafactor.step_offset': _same('Adafactor.step_offset'),
  't5x.adafactor.Adafactor.beta1': _same('Adafactor.beta1'),
  't5x.adafactor.Adafactor.weight_decay_rate': _same('Adafactor.weight_decay_rate'),
  't5x.adafactor.Adafactor.factored': _same('Adafactor.factored'),
  't5x.adafactor.Adafactor.logical_factor_rules': _no_effect(
    'Axis names always decide what is factored.',
    value=_nothing_but('t5x.adafactor.standard_logical_factor_rules'),
  ),
  't5x.optimizers.chain.transformations': _mapped('train.optimizer', 'optax itself', _chain),
  't5x.optimizers.wrap_optax_optimizer.optax_optimizer': _mapped('train.optimizer', '', _chain),
  # SeqIO's objects, which are real here; the rules are for what surrounds them.
  'seqio.Evaluator.logger_cls': _no_effect('train.logging_cfg says where metrics go.'),
  'seqio.Evaluator.num_examples': _no_effect(
    'None evaluates all examples.',
    value=_only(None, reason='Metrics of tasks are computed of all examples of the split.'),
  ),
  'seqio.Evaluator.use_memory_cache': _no_effect('Examples are always kept in memory.'),
  'seqio.Evaluator.log_dir': _no_effect('Metrics go to MODEL_DIR.'),
  'seqio.JSONLogger.write_n_results': _same('train.num_predictions', default=None),
  'seqio.SentencePieceVocabulary.sentencepiece_model_file': _VOCABULARY,
  'seqio.SentencePieceVocabulary.extra_ids': _VOCABULARY,
  'seqio.ByteVocabulary.extra_ids': _VOCABULARY,
  # Models.
  **_without(_loss_rules('EncoderDecoderModel'), 'vocabulary'),
  **_without(_loss_rules('DecoderOnlyModel'), 'input_vocabulary', 'output_vocabulary'),
  't5x.models.EncoderDecoderModel.feature_converter_cls': _no_effect(
    'Its class decides how it reads examples.', value=_nothing_but('seqio.EncDecFeatureConverter')
  ),
  't5x.models.DecoderOnlyModel.feature_converter_cls': _no_effect(
    'Examples with inputs are read as prefix and continuation, as with DecoderFeatureConverter.',
    value=_nothing_but('seqio.DecoderFeatureConverter'),
  ),
  't5x.models.DecoderOnlyModel.inputs_bidirectional_attention': _same(
    'DecoderOnlyModel.inputs_bidirectional_attention'
  ),
  **{
    f't5x.models.{model}.{name}': rule
    for model, decode_fn in (
      ('EncoderDecoderModel', 't5x.decoding.beam_search'),
      ('DecoderOnlyModel', 't5x.decoding.temperature_sample'),
    )
    for name, rule in {
      'predict_batch_with_aux.num_decodes': _mapped(
        '',
        'a beam search: DecodingConfig.num_beams, for one beam beam_search; else num_decodes',
        _num_decodes,
        default=1,
      ),
      'predict_batch_with_aux.return_all_decodes': _no_effect('Metrics use the best text.'),
      'decode_fn': _mapped('', 'its parameters', _decode, default=Record(decode_fn, {})),
    }.items()
  },
  't5x.decoding.temperature_sample.temperature': _mapped(
    '', 'DecodingConfig.temperature; 0 if topk = 1, which is the default of T5X', _by_decode_fn
  ),
  't5x.decoding.temperature_sample.topk': _mapped('', 'DecodingConfig.top_k', _by_decode_fn),
  't5x.decoding.temperature_sample.topp': _mapped(
    '', 'DecodingConfig.top_p; 0 is 1.0, all tokens', _by_decode_fn
  ),
  't5x.decoding.temperature_sample.rescale_log_probs': _same(
    'DecodingConfig.rescale_log_probs', default=True
  ),
  't5x.decoding.temperature_sample.num_decodes': _NUM_DECODES,
  't5x.decoding.beam_search.num_decodes': _NUM_DECODES,
  't5x.decoding.beam_search.alpha': _same('DecodingConfig.length_penalty'),
  't5x.examples.t5.network.Transformer.config': _mapped('', '', lambda t, v: NOT_WRITTEN),
  't5x.examples.scalable_t5.network.Transformer.config': _mapped('', '', lambda t, v: NOT_WRITTEN),
  't5x.examples.decoder_only.network.DecoderWrapper.config': _mapped(
    '', '', lambda t, v: NOT_WRITTEN
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
    '',
    'True is TransformerConfig.query_pre_attn_scalar = head_dim',
    lambda t, v: _scale(t, v),
    numbers=lambda t, v: 'initial query kernels are sqrt(head_dim) times larger' if v else '',
  ),
}
