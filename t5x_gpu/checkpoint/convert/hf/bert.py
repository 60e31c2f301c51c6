"""Reads and writes BERT's config.json; see `hf.families`."""

from typing import Any

from t5x_gpu.checkpoint.convert.hf.keys import (
  INIT_STDDEV,
  ConfigFamily,
  HasTensor,
  Json,
  Keys,
  activation,
  dtype,
  head_dim,
  read_dropout,
  read_keys,
  their_activation,
  used,
  write_dropout,
  write_keys,
)
from t5x_gpu.checkpoint.convert.model_spec import ModelFields
from t5x_gpu.errors import CheckpointError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.encoding.checks import MULTI_LABEL, PROBLEMS

_BERT: Keys = {
  'vocab_size': 'vocab_size',
  'embed_dim': 'hidden_size',
  'num_layers': 'num_hidden_layers',
  'num_heads': 'num_attention_heads',
  'mlp_dim': 'intermediate_size',
  'num_positions': 'max_position_embeddings',
  'num_token_types': 'type_vocab_size',
  'norm_epsilon': 'layer_norm_eps',
}
_BERT_DROPOUT: Keys = {
  'dropout_rate': 'hidden_dropout_prob',
  'attention_dropout': 'attention_probs_dropout_prob',
  'classifier_dropout': 'classifier_dropout',
}


def _read_bert(config: Json, has_tensor: HasTensor) -> ModelFields:
  del has_tensor
  c = TransformerConfig(
    **read_keys(config, _BERT),
    **read_dropout(config, _BERT_DROPOUT, mlp_dropout=0.0),
    head_dim=head_dim(config),
    query_pre_attn_scalar=head_dim(config),
    mlp_activations=(activation(config['hidden_act']),),
    mlp_bias=True,
    attention_bias='all',
    relative_bias='none',
    norm='layer',
    norm_position='post',
    embedding_norm=True,
    init_stddev=config['initializer_range'],
    dtype=dtype(config),
  )
  if 'BertForMaskedLM' in config['architectures']:
    return ModelFields('encoder', c, {'head_type': 'mlm'})
  if 'BertModel' in config['architectures']:
    return ModelFields('encoder', c, {'head_type': 'embedding', 'pooling': 'mean'})
  tags = 'BertForTokenClassification' in config['architectures']
  classes = config.get('num_labels', len(config.get('id2label') or {}) or 2)
  if config.get('_num_labels', classes) != classes:
    raise CheckpointError(
      f'config.json says _num_labels = {config["_num_labels"]}, and has {classes} labels.',
      fix='Use the config.json that came with the weights.',
      docs='convert.md#families',
    )
  # transformers takes one label without a problem_type for a regression.
  problem = config.get('problem_type') or (REGRESSION if classes == 1 else None)
  problem = None if tags else problem
  if (classes == 1) != (problem == REGRESSION) or not classes:
    raise CheckpointError(
      f'config.json says num_labels = {classes} and problem_type = {problem!r}.',
      fix='A regression has one label, and classification two or more; others cannot be converted.',
      docs='convert.md#families',
    )
  if problem == REGRESSION:
    return ModelFields('encoder', c, {'head_type': 'regression', 'pooling': 'first_token_tanh'})
  if tags:
    names = _class_names(config, classes) or _unnamed(classes)
    options = {'head_type': 'token_classification', 'class_names': names}
    return ModelFields('encoder', c, {**options, 'num_classes': classes})
  options = {'head_type': 'classification', 'num_classes': classes}
  if problem == MULTI_LABEL:
    options['problem_type'] = MULTI_LABEL
  if names := _class_names(config, classes):
    options['class_names'] = names
  return ModelFields('encoder', c, {**options, 'pooling': 'first_token_tanh'})


def _class_names(config: Json, classes: int) -> tuple[str, ...]:
  """Returns the names of the classes; empty unless each has a different name."""
  names = {str(i): str(name) for i, name in (config.get('id2label') or {}).items()}
  found = tuple(names.get(str(i), '') for i in range(classes))
  own = all(found) and found != _unnamed(classes)
  return found if own and len({*found}) == classes == len(names) else ()


REGRESSION = 'regression'  # a problem_type
_BERT_HEADS = {
  'classification': 'BertForSequenceClassification',
  'regression': 'BertForSequenceClassification',
  'token_classification': 'BertForTokenClassification',
  'mlm': 'BertForMaskedLM',
  'embedding': 'BertModel',
}


def _unnamed(classes: int) -> tuple[str, ...]:
  """Returns transformers' names for unnamed classes."""
  return tuple(f'LABEL_{i}' for i in range(classes))


def _write_bert(model: ModelFields) -> dict[str, Any]:
  c = model.config
  out = {
    'model_type': 'bert',
    **write_keys(c, _BERT),
    'hidden_act': their_activation(c),
    **write_dropout(c, _BERT_DROPOUT),
    'initializer_range': c.init_stddev or INIT_STDDEV,
    'pad_token_id': 0,
  }
  head = _BERT_HEADS[model.options.get('head_type', 'classification')]
  out['architectures'] = [head]
  if head in ('BertForMaskedLM', 'BertModel'):
    return out
  names = model.options.get('class_names') or _unnamed(model.options.get('num_classes', 2))
  if model.options.get('problem_type') == MULTI_LABEL:
    out['problem_type'] = MULTI_LABEL
  if model.options.get('head_type') == 'regression':
    names, out['problem_type'] = _unnamed(1), REGRESSION
  return {
    **out,
    'id2label': {str(i): name for i, name in enumerate(names)},
    'label2id': {name: i for i, name in enumerate(names)},
  }


BERT = ConfigFamily(
  tuple(dict.fromkeys(_BERT_HEADS.values())),
  _read_bert,
  _write_bert,
  used(_BERT, 'num_labels', 'id2label'),
  {
    'hidden_act': 'gelu',
    'layer_norm_eps': 1e-12,
    'hidden_dropout_prob': 0.1,
    'attention_probs_dropout_prob': 0.1,
    'classifier_dropout': None,  # hidden_dropout_prob
    'initializer_range': INIT_STDDEV,
  },
  {
    'is_decoder': (False,),
    'add_cross_attention': (False,),
    'position_embedding_type': ('absolute', None),
    'problem_type': (None, *PROBLEMS, REGRESSION),
    'tie_word_embeddings': (True, None),
    'pruned_heads': ({}, None),
  },
  frozenset(
    'directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers '
    'pooler_size_per_head pooler_type'.split()
  ),
)
