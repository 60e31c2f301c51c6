"""Reads and writes config.json of T5, UMT5, GPT-2 and BERT.

A family has a table of keys that map to a TransformerConfig field unchanged, functions that read
and write the remaining keys, and lists of the known keys. `hf.llama` has the families derived from
Llama.
"""

import dataclasses

from t5x_gpu.conversion.hf.keys import (
  INIT_STDDEV,
  ConfigFamily,
  HasTensor,
  Keys,
  activation,
  divided,
  dtype,
  head_dim,
  read_dropout,
  read_keys,
  their_activation,
  used,
  write_dropout,
  write_keys,
)
from t5x_gpu.conversion.model_spec import ModelFields
from t5x_gpu.errors import CheckpointError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.encoder import MULTI_LABEL, PROBLEMS
from t5x_gpu.storage.json_schema import Json, JsonObject

_T5: Keys = {
  'vocab_size': 'vocab_size',
  'embed_dim': 'd_model',
  'head_dim': 'd_kv',
  'num_heads': 'num_heads',
  'mlp_dim': 'd_ff',
  'num_relpos_buckets': 'relative_attention_num_buckets',
  'max_relpos_distance': 'relative_attention_max_distance',
  'norm_epsilon': 'layer_norm_epsilon',
  'dropout_rate': 'dropout_rate',
}


def _read_t5(config: Json, has_tensor: HasTensor) -> ModelFields:
  """T5 1.0 ties its logits and scales them; T5.1.1, mT5, ByT5 and UMT5 have an output layer.

  transformers 5 writes tie_word_embeddings = True for all of them, so only the tensors show whether
  logits are tied.
  """
  gated, _, act = config['feed_forward_proj'].rpartition('-')
  if gated not in ('', 'gated'):
    raise CheckpointError(
      f'config.json says feed_forward_proj = {config["feed_forward_proj"]!r}.',
      fix="It must be 'relu', 'gated-gelu' or another 'gated-' activation.",
    )
  act = 'gelu_new' if (gated, act) == ('gated', 'gelu') else act
  derived = {'dense_act_fn': act, 'is_gated_act': bool(gated)}
  wrong = [f'{k} = {config[k]!r}' for k, value in derived.items() if config.get(k, value) != value]
  if wrong:
    raise CheckpointError(
      f'config.json says feed_forward_proj = {config["feed_forward_proj"]!r}, but '
      f'{" and ".join(wrong)}, which contradicts it.',
      fix='Use the config.json that came with the weights.',
      docs='convert.md#families',
    )
  tied, per_layer = not has_tensor('lm_head.weight'), config['model_type'] == 'umt5'
  scaled = config['model_type'] in ('t5', 'umt5') and config.get(
    'scale_decoder_outputs', config['tie_word_embeddings']
  )
  if scaled and not tied:
    raise CheckpointError(
      'config.json says that logits are tied to the token table (tie_word_embeddings), but the '
      'files have a separate output layer, lm_head.weight.',
      fix='Set "tie_word_embeddings": false in config.json (T5.1.1, mT5, UMT5, ByT5), or use '
      'the weights that belong to it.',
    )
  decoder = config['num_decoder_layers']
  c = TransformerConfig(
    **read_keys(config, _T5),
    num_layers=config['num_layers'] if decoder is None else decoder,
    mlp_activations=(activation(act), *(('linear',) if gated else ())),
    relative_bias='per_layer' if per_layer else 'shared',
    logits_via_embedding=tied,
    scale_tied_logits=bool(scaled) if tied else True,
    dtype=dtype(config),
  )
  return ModelFields('encoder_decoder', c, {'num_encoder_layers': config['num_layers']})


def _write_t5(model: ModelFields) -> JsonObject:
  c = model.config
  gated = len(c.mlp_activations) > 1
  theirs = 'gelu' if gated and c.mlp_activations[0] == 'gelu' else their_activation(c)
  encoder = model.options.get('num_encoder_layers')
  scaled = c.logits_via_embedding and c.scale_tied_logits
  per_layer = c.relative_bias == 'per_layer'
  return {
    'architectures': [f'{"UM" if per_layer else ""}T5ForConditionalGeneration'],
    'model_type': 'umt5' if per_layer else 't5',
    'is_encoder_decoder': True,
    **write_keys(c, _T5),
    'num_layers': c.num_layers if encoder is None else encoder,
    'num_decoder_layers': c.num_layers,
    'feed_forward_proj': f'gated-{theirs}' if gated else theirs,
    'tie_word_embeddings': scaled,
    'scale_decoder_outputs': scaled,
    'pad_token_id': 0,
    'decoder_start_token_id': 0,
  }


_GPT2: Keys = {
  'vocab_size': 'vocab_size',
  'embed_dim': 'n_embd',
  'num_layers': 'n_layer',
  'num_heads': 'n_head',
  'norm_epsilon': 'layer_norm_epsilon',
}
_GPT2_DROPOUT: Keys = {
  'dropout_rate': 'resid_pdrop',
  'embedding_dropout': 'embd_pdrop',
  'attention_dropout': 'attn_pdrop',
}


def _read_gpt2(config: Json, has_tensor: HasTensor) -> ModelFields:
  del has_tensor
  features = divided(config, 'n_embd', 'n_head')
  c = TransformerConfig(
    **read_keys(config, _GPT2),
    **read_dropout(config, _GPT2_DROPOUT, mlp_dropout=0.0, output_dropout=0.0),
    head_dim=features,
    query_pre_attn_scalar=features,
    mlp_dim=config['n_inner'] or 4 * config['n_embd'],
    mlp_bias=True,
    attention_bias='all',
    mlp_activations=(activation(config['activation_function']),),
    relative_bias='none',
    num_positions=config.get('n_positions', config['n_ctx']),
    norm='layer',
    logits_via_embedding=True,
    scale_tied_logits=False,
    init_stddev=config['initializer_range'],
    dtype=dtype(config),
  )
  return ModelFields('decoder_only', c)


def _write_gpt2(model: ModelFields) -> JsonObject:
  c = model.config
  return {
    'architectures': ['GPT2LMHeadModel'],
    'model_type': 'gpt2',
    **write_keys(c, _GPT2),
    'n_inner': None if c.mlp_dim == 4 * c.embed_dim else c.mlp_dim,
    'activation_function': their_activation(c),
    'n_positions': c.num_positions,
    'initializer_range': c.init_stddev or INIT_STDDEV,
    **write_dropout(c, _GPT2_DROPOUT),
  }


T5 = ConfigFamily(
  ('T5ForConditionalGeneration', 'MT5ForConditionalGeneration', 'T5WithLMHeadModel'),
  _read_t5,
  _write_t5,
  used(_T5, 'num_layers', 'scale_decoder_outputs', 'dense_act_fn', 'is_gated_act'),
  {
    'num_decoder_layers': None,  # as many as num_layers
    'feed_forward_proj': 'relu',
    'relative_attention_num_buckets': 32,
    'relative_attention_max_distance': 128,
    'layer_norm_epsilon': 1e-6,
    'dropout_rate': 0.1,
    'tie_word_embeddings': True,
  },
  # The decoders of t5x_gpu start with id 0, as T5, mT5 and ByT5 do.
  {'is_decoder': (False,), 'decoder_start_token_id': (0, None), 'pruned_heads': ({}, None)},
  no_effect=frozenset({'n_positions', 'classifier_dropout', 'id2label', 'problem_type'}),
)
UMT5 = dataclasses.replace(
  T5,
  architectures=('UMT5ForConditionalGeneration',),
  defaults={**T5.defaults, 'feed_forward_proj': 'gated-gelu'},
  # Left by the conversion from T5X: how its layers were stored.
  no_effect=T5.no_effect | {'scalable_attention'},
)
GPT2 = ConfigFamily(
  ('GPT2LMHeadModel',),
  _read_gpt2,
  _write_gpt2,
  used(_GPT2, 'n_positions'),
  {
    'n_inner': None,  # 4 * n_embd
    'n_ctx': 1024,  # the name of n_positions in old files
    'activation_function': 'gelu_new',
    'layer_norm_epsilon': 1e-5,
    'resid_pdrop': 0.1,
    'embd_pdrop': 0.1,
    'attn_pdrop': 0.1,
    'initializer_range': INIT_STDDEV,
  },
  {
    'scale_attn_weights': (True,),
    'add_cross_attention': (False,),
    'scale_attn_by_inverse_layer_idx': (False,),
    'tie_word_embeddings': (True, None),
    'is_decoder': (False, True),
    'pruned_heads': ({}, None),
  },
  frozenset(
    'reorder_and_upcast_attn summary_activation summary_first_dropout summary_proj_to_labels '
    'summary_type summary_use_proj predict_special_tokens id2label problem_type'.split()
  ),
)


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


def _write_bert(model: ModelFields) -> JsonObject:
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
