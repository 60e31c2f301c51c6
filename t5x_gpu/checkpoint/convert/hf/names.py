"""Name tables of Hugging Face's models: which of our parameters is which tensor, by family.

Their linear layers store the kernel as [out, in]. GPT-2's store [in, out], with query, key and
value in one tensor. A family also lists which tensors may be duplicates (an output layer tied to
the token table), which are not weights (masks), and how to rename tensors of older files.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from t5x_gpu.checkpoint.convert.model_spec import ModelFields
from t5x_gpu.checkpoint.convert.name_table import Rule


@dataclasses.dataclass(frozen=True)
class Family:
  """The tensor names of one family.

  Attributes:
    rules: (model) -> the name table.
    token_table: name of the tensor with one row per token.
    same: (name, name of the tensor that it duplicates), for duplicates that files may contain.
    nothing: patterns of tensors without weights.
    renamed: (pattern, replacement) for the names in older files.
  """

  rules: Callable[[ModelFields], list[Rule]]
  token_table: str
  same: tuple[tuple[str, str], ...] = ()
  nothing: tuple[str, ...] = ()
  renamed: tuple[tuple[str, str], ...] = ()


def _attention(
  ours: str, theirs: str, names: tuple[str, str, str, str], *, bias: str, stack: str = 'layers'
) -> list[Rule]:
  """Returns the rules for queries, keys, values and output; `bias` as in TransformerConfig."""
  query, key, value, out = (theirs + name for name in names)
  inputs = (('query', query, 'heads'), ('key', key, 'kv_heads'), ('value', value, 'kv_heads'))
  rules = [
    Rule(
      f'{ours}/{name}/kernel',
      f'{tensor}.weight',
      f'{heads}.kv embed -> embed {heads} kv',
      stack=stack,
    )
    for name, tensor, heads in inputs
  ]
  rules.append(
    Rule(f'{ours}/out/kernel', f'{out}.weight', 'embed heads.kv -> heads kv embed', stack=stack)
  )
  if bias != 'none':
    rules += [
      Rule(f'{ours}/{name}/bias', f'{tensor}.bias', f'{heads}.kv -> {heads} kv', stack=stack)
      for name, tensor, heads in inputs
    ]
  if bias == 'all':
    rules.append(Rule(f'{ours}/out/bias', f'{out}.bias', 'embed', stack=stack))
  return rules


def _fused(ours: Sequence[tuple[str, str]], theirs: str) -> list[Rule]:
  """Returns the rules for kernels whose outputs follow each other in one tensor.

  Args:
    ours: path of each kernel, without `/kernel`, and the axes of its outputs joined by '.'.
    theirs: name of the tensor, without `.weight`.
  """
  return [
    Rule(
      f'{path}/kernel',
      f'{theirs}.weight',
      f'{outputs} embed -> embed {outputs.replace(".", " ")}',
      block=block,
    )
    for block, (path, outputs) in enumerate(ours)
  ]


def _linear(ours: str, theirs: str, axes: str, *, bias: bool, stack: str = 'layers') -> list[Rule]:
  """Returns the rules for a kernel 'out in -> in out' and its bias."""
  rules = [Rule(f'{ours}/kernel', f'{theirs}.weight', axes, stack=stack)]
  if bias:
    rules.append(Rule(f'{ours}/bias', f'{theirs}.bias', axes.split()[-1], stack=stack))
  return rules


def _layer_norm(ours: str, theirs: str) -> list[Rule]:
  return [
    Rule(f'{ours}/scale', f'{theirs}.weight', 'embed'),
    Rule(f'{ours}/bias', f'{theirs}.bias', 'embed'),
  ]


def _t5_stack(stack: str, *, gated: bool, is_decoder: bool) -> list[Rule]:
  ours, theirs, layers = f'{stack}/layers', f'{stack}.block.{{}}.layer.', f'{stack}_layers'

  def rule(path: str, name: str, axes: str) -> Rule:
    return Rule(f'{ours}/{path}', theirs + name, axes, stack=layers)

  rules = [
    Rule(
      f'{stack}/relpos_bias/rel_embedding',
      f'{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight',
      'buckets heads -> heads buckets',
    ),
    rule('pre_self_attention_layer_norm/scale', '0.layer_norm.weight', 'embed'),
    *_attention(
      f'{ours}/self_attention',
      f'{theirs}0.SelfAttention.',
      ('q', 'k', 'v', 'o'),
      bias='none',
      stack=layers,
    ),
  ]
  if is_decoder:
    rules += [
      rule('pre_cross_attention_layer_norm/scale', '1.layer_norm.weight', 'embed'),
      *_attention(
        f'{ours}/cross_attention',
        f'{theirs}1.EncDecAttention.',
        ('q', 'k', 'v', 'o'),
        bias='none',
        stack=layers,
      ),
    ]
  mlp = 2 if is_decoder else 1
  rules += [rule('pre_mlp_layer_norm/scale', f'{mlp}.layer_norm.weight', 'embed')]
  rules += [
    rule(f'mlp/{wi}/kernel', f'{mlp}.DenseReluDense.{wi}.weight', 'mlp embed -> embed mlp')
    for wi in (('wi_0', 'wi_1') if gated else ('wi',))
  ]
  return rules + [
    rule('mlp/wo/kernel', f'{mlp}.DenseReluDense.wo.weight', 'embed mlp -> mlp embed'),
    Rule(f'{stack}/{stack}_norm/scale', f'{stack}.final_layer_norm.weight', 'embed'),
  ]


def _t5(model: ModelFields) -> list[Rule]:
  c = model.config
  gated = len(c.mlp_activations) > 1
  rules = [
    Rule('token_embedder/embedding', 'shared.weight', 'vocab embed'),
    *_t5_stack('encoder', gated=gated, is_decoder=False),
    *_t5_stack('decoder', gated=gated, is_decoder=True),
  ]
  if not c.logits_via_embedding:
    rules.append(
      Rule('decoder/logits_dense/projection/kernel', 'lm_head.weight', 'vocab embed -> embed vocab')
    )
  return rules


def _bert(model: ModelFields) -> list[Rule]:
  layer = 'bert.encoder.layer.{}.'
  rules = [
    Rule('token_embedder/embedding', 'bert.embeddings.word_embeddings.weight', 'vocab embed'),
    Rule(
      'position_embedder/embedding', 'bert.embeddings.position_embeddings.weight', 'positions embed'
    ),
    Rule(
      'token_type_embedder/embedding', 'bert.embeddings.token_type_embeddings.weight', 'types embed'
    ),
    *_layer_norm('embedding_norm', 'bert.embeddings.LayerNorm'),
    *_attention(
      'layers/self_attention',
      f'{layer}attention.',
      ('self.query', 'self.key', 'self.value', 'output.dense'),
      bias='all',
    ),
    *_layer_norm('layers/post_self_attention_layer_norm', f'{layer}attention.output.LayerNorm'),
    *_linear('layers/mlp/wi', f'{layer}intermediate.dense', 'mlp embed -> embed mlp', bias=True),
    *_linear('layers/mlp/wo', f'{layer}output.dense', 'embed mlp -> mlp embed', bias=True),
    *_layer_norm('layers/post_mlp_layer_norm', f'{layer}output.LayerNorm'),
  ]
  if model.options['head_type'] == 'classification':
    return rules + [
      *_linear('pooler', 'bert.pooler.dense', 'embed_out embed -> embed embed_out', bias=True),
      *_linear('classifier', 'classifier', 'classes embed -> embed classes', bias=True),
    ]
  return rules + [
    *_linear(
      'mlm_transform',
      'cls.predictions.transform.dense',
      'embed_out embed -> embed embed_out',
      bias=True,
    ),
    *_layer_norm('mlm_norm', 'cls.predictions.transform.LayerNorm'),
    Rule('mlm_bias', 'cls.predictions.bias', 'vocab'),
  ]


def _gpt2(model: ModelFields) -> list[Rule]:
  del model  # all GPT-2 models have the same tensors
  layer, attention = 'transformer.h.{}.', 'transformer.h.{}.attn.'
  rules = [
    Rule('token_embedder/embedding', 'transformer.wte.weight', 'vocab embed'),
    Rule('position_embedder/embedding', 'transformer.wpe.weight', 'positions embed'),
    *_layer_norm('layers/pre_self_attention_layer_norm', f'{layer}ln_1'),
  ]
  for index, name in enumerate(('query', 'key', 'value')):
    ours, part = f'layers/self_attention/{name}', ('qkv', index)
    rules += [
      Rule(
        f'{ours}/kernel',
        f'{attention}c_attn.weight',
        'embed qkv.heads.kv -> embed heads kv',
        part=part,
      ),
      Rule(f'{ours}/bias', f'{attention}c_attn.bias', 'qkv.heads.kv -> heads kv', part=part),
    ]
  return rules + [
    Rule(
      'layers/self_attention/out/kernel',
      f'{attention}c_proj.weight',
      'heads.kv embed -> heads kv embed',
    ),
    Rule('layers/self_attention/out/bias', f'{attention}c_proj.bias', 'embed'),
    *_layer_norm('layers/pre_mlp_layer_norm', f'{layer}ln_2'),
    *_linear('layers/mlp/wi', f'{layer}mlp.c_fc', 'embed mlp', bias=True),
    *_linear('layers/mlp/wo', f'{layer}mlp.c_proj', 'mlp embed', bias=True),
    *_layer_norm('decoder_norm', 'transformer.ln_f'),
  ]


def _llama(model: ModelFields, *, fused: bool = False) -> list[Rule]:
  """Returns the table of Llama's relatives, which differ in norms, biases and tying."""
  c = model.config
  layer = 'model.layers.{}.'
  attention, mlp = 'self_attention_layer_norm', 'mlp_layer_norm'
  after = [
    (f'post_{attention}', 'post_attention_layernorm'),
    (f'post_{mlp}', 'post_feedforward_layernorm'),
  ]
  norms = {
    'pre': [(f'pre_{attention}', 'input_layernorm'), (f'pre_{mlp}', 'post_attention_layernorm')],
    'output': after,
    'sandwich': [
      (f'pre_{attention}', 'input_layernorm'),
      (f'pre_{mlp}', 'pre_feedforward_layernorm'),
      *after,
    ],
  }[c.norm_position]
  inputs = [
    *_attention(
      'layers/self_attention',
      f'{layer}self_attn.',
      ('q_proj', 'k_proj', 'v_proj', 'o_proj'),
      bias=c.attention_bias,
    ),
    *_linear('layers/mlp/wi_0', f'{layer}mlp.gate_proj', 'mlp embed -> embed mlp', bias=c.mlp_bias),
    *_linear('layers/mlp/wi_1', f'{layer}mlp.up_proj', 'mlp embed -> embed mlp', bias=c.mlp_bias),
  ]
  if fused:
    ours = 'layers/self_attention'
    heads = (('query', 'heads.kv'), ('key', 'kv_heads.kv'), ('value', 'kv_heads.kv'))
    inputs = [
      *_fused([(f'{ours}/{name}', axes) for name, axes in heads], f'{layer}self_attn.qkv_proj'),
      Rule(
        f'{ours}/out/kernel', f'{layer}self_attn.o_proj.weight', 'embed heads.kv -> heads kv embed'
      ),
      *_fused([('layers/mlp/wi_0', 'mlp'), ('layers/mlp/wi_1', 'mlp')], f'{layer}mlp.gate_up_proj'),
    ]
  rules = [
    Rule('token_embedder/embedding', 'model.embed_tokens.weight', 'vocab embed'),
    *(Rule(f'layers/{ours}/scale', f'{layer}{theirs}.weight', 'embed') for ours, theirs in norms),
    *inputs,
    *_linear('layers/mlp/wo', f'{layer}mlp.down_proj', 'embed mlp -> mlp embed', bias=c.mlp_bias),
    Rule('decoder_norm/scale', 'model.norm.weight', 'embed'),
  ]
  if c.qk_norm:
    whole = c.qk_norm_kind == 'all_heads'
    rules += [
      Rule(
        f'layers/self_attention/{ours}/scale',
        f'{layer}self_attn.{theirs}.weight',
        f'{heads}.kv -> {heads} kv' if whole else 'kv',
      )
      for ours, theirs, heads in (
        ('query_norm', 'q_norm', 'heads'),
        ('key_norm', 'k_norm', 'kv_heads'),
      )
    ]
  if not c.logits_via_embedding:
    rules.append(
      Rule('logits_dense/projection/kernel', 'lm_head.weight', 'vocab embed -> embed vocab')
    )
  return rules


_LLAMA = Family(
  _llama,
  'model.embed_tokens.weight',
  same=(('lm_head.weight', 'model.embed_tokens.weight'),),
  nothing=(r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq',),
)

_LLAMAS = ('llama', 'mistral', 'qwen2', 'qwen3', 'gemma2', 'gemma3_text', 'smollm3', 'olmo2')
FAMILIES: dict[str, Family] = {
  't5': Family(
    _t5,
    'shared.weight',
    same=(
      ('encoder.embed_tokens.weight', 'shared.weight'),
      ('decoder.embed_tokens.weight', 'shared.weight'),
      ('lm_head.weight', 'shared.weight'),
    ),
    # The T5 1.0 files on the Hub contain it, but no model ever read it.
    nothing=(
      r'decoder\.block\.0\.layer\.1\.EncDecAttention'
      r'\.relative_attention_bias\.weight',
    ),
  ),
  'bert': Family(
    _bert,
    'bert.embeddings.word_embeddings.weight',
    same=(
      ('cls.predictions.decoder.weight', 'bert.embeddings.word_embeddings.weight'),
      ('cls.predictions.decoder.bias', 'cls.predictions.bias'),
    ),
    nothing=(r'bert\.embeddings\.position_ids',),
    renamed=((r'(?<=LayerNorm\.)gamma$', 'weight'), (r'(?<=LayerNorm\.)beta$', 'bias')),
  ),
  'gpt2': Family(
    _gpt2,
    'transformer.wte.weight',
    same=(('lm_head.weight', 'transformer.wte.weight'),),
    nothing=(r'transformer\.h\.\d+\.attn\.(masked_)?bias',),
    renamed=((r'^(?=(h\.\d+|wte|wpe|ln_f)\.)', 'transformer.'),),
  ),
  **dict.fromkeys(_LLAMAS, _LLAMA),
  'phi3': dataclasses.replace(_LLAMA, rules=functools.partial(_llama, fused=True)),
}
