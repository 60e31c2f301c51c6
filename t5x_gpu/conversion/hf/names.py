"""Name tables of Hugging Face models: which parameter is which tensor, by family.

The rules at the top (attention, MLPs, experts) are shared by several families. Hugging Face's
linear layers store the kernel as [out, in]. GPT-2 stores [in, out], with query, key and value in
one tensor. A family also lists tensors that may be duplicates (an output layer tied to the token
table), tensors that are not weights (masks), and how to rename tensors of older files.
"""

import dataclasses
import functools
from collections.abc import Callable, Container, Sequence
from typing import Optional

from t5x_gpu.conversion.model_spec import ModelFields
from t5x_gpu.conversion.name_table import Rule
from t5x_gpu.models.config import TransformerConfig


def attention_rules(
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


def fused_rules(ours: Sequence[tuple[str, str]], theirs: str) -> list[Rule]:
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


def linear_rules(ours: str, theirs: str, axes: str, *, bias: bool) -> list[Rule]:
  """Returns the rules for a kernel 'out in -> in out' and its bias."""
  rules = [Rule(f'{ours}/kernel', f'{theirs}.weight', axes)]
  if bias:
    rules.append(Rule(f'{ours}/bias', f'{theirs}.bias', axes.split()[-1]))
  return rules


def layer_norm_rules(ours: str, theirs: str) -> list[Rule]:
  return [
    Rule(f'{ours}/scale', f'{theirs}.weight', 'embed'),
    Rule(f'{ours}/bias', f'{theirs}.bias', 'embed'),
  ]


def _router(ours: str, theirs: str) -> Rule:
  return Rule(f'{ours}/router/kernel', f'{theirs}gate.weight', 'experts embed -> embed experts')


def expert_rules(ours: str, theirs: str, names: tuple[str, str, str]) -> list[Rule]:
  """Returns the rules for a router and gated experts, each expert with its own tensors.

  Args:
    ours: path of the router and the experts.
    theirs: prefix of the Hugging Face tensor names.
    names: names of the activated branch, the other branch and the output.
  """
  kernels = (('wi_0', 'mlp embed'), ('wi_1', 'mlp embed'), ('wo', 'embed mlp'))
  return [
    _router(ours, theirs),
    *(
      Rule(
        f'{ours}/{path}/kernel',
        f'{theirs}experts.{{}}.{name}.weight',
        f'{axes} -> {" ".join(reversed(axes.split()))}',
        stack='layers experts',
      )
      for (path, axes), name in zip(kernels, names, strict=True)
    ),
  ]


def joined_expert_rules(ours: str, theirs: str) -> list[Rule]:
  """Returns the rules for a router and gated experts whose kernels are two tensors per layer.

  transformers 5 writes them with `save_original_format=False`. Arguments as in `expert_rules`.
  """
  return [
    _router(ours, theirs),
    *(
      Rule(
        f'{ours}/wi_{branch}/kernel',
        f'{theirs}experts.gate_up_proj',
        'experts branches.mlp embed -> experts embed mlp',
        part=('branches', branch),
      )
      for branch in (0, 1)
    ),
    Rule(
      f'{ours}/wo/kernel', f'{theirs}experts.down_proj', 'experts embed mlp -> experts mlp embed'
    ),
  ]


# Files with this tensor store the kernels of all experts of a layer in one tensor.
JOINED = 'model.layers.0.mlp.experts.gate_up_proj'


@dataclasses.dataclass(frozen=True)
class Family:
  """The tensor names of one family.

  Attributes:
    rules: (model) -> the name table.
    token_table: name of the tensor with one row per token.
    same: (name, name of the tensor that it duplicates), for duplicates that files may contain.
    nothing: patterns of tensors that are not weights.
    renamed: (pattern, replacement) for the names in older files.
    joined: (model) -> the table for files with the `JOINED` tensors; None if the family has none.
  """

  rules: Callable[[ModelFields], list[Rule]]
  token_table: str
  same: tuple[tuple[str, str], ...] = ()
  nothing: tuple[str, ...] = ()
  renamed: tuple[tuple[str, str], ...] = ()
  joined: Optional[Callable[[ModelFields], list[Rule]]] = None

  def rules_of(self, model: ModelFields, names: Container[str]) -> list[Rule]:
    """Returns the name table of `model` in files with tensors of these names."""
    rules = self.joined if self.joined is not None and JOINED in names else self.rules
    return rules(model)


def _t5_stack(stack: str, c: TransformerConfig, *, is_decoder: bool) -> list[Rule]:
  ours, theirs, layers = f'{stack}/layers', f'{stack}.block.{{}}.layer.', f'{stack}_layers'

  def rule(path: str, name: str, axes: str) -> Rule:
    return Rule(f'{ours}/{path}', theirs + name, axes, stack=layers)

  bias = 'SelfAttention.relative_attention_bias.weight', 'buckets heads -> heads buckets'
  rules = [
    rule('relpos_bias/rel_embedding', f'0.{bias[0]}', bias[1])
    if c.relative_bias == 'per_layer'
    else Rule(f'{stack}/relpos_bias/rel_embedding', f'{stack}.block.0.layer.0.{bias[0]}', bias[1]),
    rule('pre_self_attention_layer_norm/scale', '0.layer_norm.weight', 'embed'),
    *attention_rules(
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
      *attention_rules(
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
    for wi in (('wi_0', 'wi_1') if len(c.mlp_activations) > 1 else ('wi',))
  ]
  return rules + [
    rule('mlp/wo/kernel', f'{mlp}.DenseReluDense.wo.weight', 'embed mlp -> mlp embed'),
    Rule(f'{stack}/{stack}_norm/scale', f'{stack}.final_layer_norm.weight', 'embed'),
  ]


def _t5(model: ModelFields) -> list[Rule]:
  c = model.config
  rules = [
    Rule('token_embedder/embedding', 'shared.weight', 'vocab embed'),
    *_t5_stack('encoder', c, is_decoder=False),
    *_t5_stack('decoder', c, is_decoder=True),
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
    *layer_norm_rules('embedding_norm', 'bert.embeddings.LayerNorm'),
    *attention_rules(
      'layers/self_attention',
      f'{layer}attention.',
      ('self.query', 'self.key', 'self.value', 'output.dense'),
      bias='all',
    ),
    *layer_norm_rules(
      'layers/post_self_attention_layer_norm', f'{layer}attention.output.LayerNorm'
    ),
    *linear_rules(
      'layers/mlp/wi', f'{layer}intermediate.dense', 'mlp embed -> embed mlp', bias=True
    ),
    *linear_rules('layers/mlp/wo', f'{layer}output.dense', 'embed mlp -> mlp embed', bias=True),
    *layer_norm_rules('layers/post_mlp_layer_norm', f'{layer}output.LayerNorm'),
  ]
  if model.options['head_type'] == 'embedding':
    return rules
  if model.options['head_type'] != 'mlm':
    classes = linear_rules('classifier', 'classifier', 'classes embed -> embed classes', bias=True)
    pooler = linear_rules(
      'pooler', 'bert.pooler.dense', 'embed_out embed -> embed embed_out', bias=True
    )
    of_words = model.options['head_type'] == 'token_classification'
    return [*rules, *([] if of_words else pooler), *classes]
  return rules + [
    *linear_rules(
      'mlm_transform',
      'cls.predictions.transform.dense',
      'embed_out embed -> embed embed_out',
      bias=True,
    ),
    *layer_norm_rules('mlm_norm', 'cls.predictions.transform.LayerNorm'),
    Rule('mlm_bias', 'cls.predictions.bias', 'vocab'),
  ]


def _gpt2(model: ModelFields) -> list[Rule]:
  del model  # all GPT-2 models have the same tensors
  layer, attention = 'transformer.h.{}.', 'transformer.h.{}.attn.'
  rules = [
    Rule('token_embedder/embedding', 'transformer.wte.weight', 'vocab embed'),
    Rule('position_embedder/embedding', 'transformer.wpe.weight', 'positions embed'),
    *layer_norm_rules('layers/pre_self_attention_layer_norm', f'{layer}ln_1'),
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
    *layer_norm_rules('layers/pre_mlp_layer_norm', f'{layer}ln_2'),
    *linear_rules('layers/mlp/wi', f'{layer}mlp.c_fc', 'embed mlp', bias=True),
    *linear_rules('layers/mlp/wo', f'{layer}mlp.c_proj', 'mlp embed', bias=True),
    *layer_norm_rules('decoder_norm', 'transformer.ln_f'),
  ]


_LAYER = 'model.layers.{}.'


def _llama_attention(c: TransformerConfig) -> list[Rule]:
  names = ('q_proj', 'k_proj', 'v_proj', 'o_proj')
  return attention_rules(
    'layers/self_attention', f'{_LAYER}self_attn.', names, bias=c.attention_bias
  )


def _llama_blocks(c: TransformerConfig) -> list[Rule]:
  """Returns the rules of attention and MLP."""
  ours, theirs, wi = 'layers/mlp', f'{_LAYER}mlp.', 'mlp embed -> embed mlp'
  return [
    *_llama_attention(c),
    *linear_rules(f'{ours}/wi_0', f'{theirs}gate_proj', wi, bias=c.mlp_bias),
    *linear_rules(f'{ours}/wi_1', f'{theirs}up_proj', wi, bias=c.mlp_bias),
    *linear_rules(f'{ours}/wo', f'{theirs}down_proj', 'embed mlp -> mlp embed', bias=c.mlp_bias),
  ]


def _fused_blocks(c: TransformerConfig) -> list[Rule]:
  """Returns the rules where queries, keys and values are one tensor, and the MLP's inputs too."""
  del c  # no biases
  ours, theirs = 'layers/self_attention', f'{_LAYER}self_attn.'
  heads = (('query', 'heads.kv'), ('key', 'kv_heads.kv'), ('value', 'kv_heads.kv'))
  gates = [('layers/mlp/wi_0', 'mlp'), ('layers/mlp/wi_1', 'mlp')]
  down = f'{_LAYER}mlp.down_proj'
  return [
    *fused_rules([(f'{ours}/{name}', axes) for name, axes in heads], f'{theirs}qkv_proj'),
    Rule(f'{ours}/out/kernel', f'{theirs}o_proj.weight', 'embed heads.kv -> heads kv embed'),
    *fused_rules(gates, f'{_LAYER}mlp.gate_up_proj'),
    *linear_rules('layers/mlp/wo', down, 'embed mlp -> mlp embed', bias=False),
  ]


def _expert_blocks(c: TransformerConfig, *, experts: Sequence[Rule]) -> list[Rule]:
  return [*_llama_attention(c), *experts]


def _llama(
  model: ModelFields, *, blocks: Callable[[TransformerConfig], list[Rule]] = _llama_blocks
) -> list[Rule]:
  """Returns the table of Llama-like models, which differ in norms, biases and tying.

  Args:
    model: the model.
    blocks: (TransformerConfig) -> the rules of attention and MLP.
  """
  c = model.config
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
  rules = [
    Rule('token_embedder/embedding', 'model.embed_tokens.weight', 'vocab embed'),
    *(Rule(f'layers/{ours}/scale', f'{_LAYER}{theirs}.weight', 'embed') for ours, theirs in norms),
    *blocks(c),
    Rule('decoder_norm/scale', 'model.norm.weight', 'embed'),
  ]
  if c.qk_norm:
    whole = c.qk_norm_kind == 'all_heads'
    rules += [
      Rule(
        f'layers/self_attention/{ours}/scale',
        f'{_LAYER}self_attn.{theirs}.weight',
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


def _mixture(layer: str, names: tuple[str, str, str]) -> Family:
  """Returns the family whose layers have experts at `layer`; `names` as in `expert_rules`."""
  own, joined = (
    functools.partial(_llama, blocks=functools.partial(_expert_blocks, experts=experts))
    for experts in (
      expert_rules('layers/moe', layer, names),
      joined_expert_rules('layers/moe', f'{_LAYER}mlp.'),
    )
  )
  return dataclasses.replace(_LLAMA, rules=own, joined=joined)


_LLAMAS = ('llama', 'mistral', 'qwen2', 'qwen3', 'gemma2', 'gemma3_text', 'smollm3', 'olmo2')
_T5 = Family(
  _t5,
  'shared.weight',
  same=(
    ('encoder.embed_tokens.weight', 'shared.weight'),
    ('decoder.embed_tokens.weight', 'shared.weight'),
    ('lm_head.weight', 'shared.weight'),
  ),
  # The T5 1.0 files on the Hub contain this tensor, but no model ever read it.
  nothing=(r'decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight',),
)
FAMILIES: dict[str, Family] = {
  't5': _T5,
  'umt5': _T5,
  'bert': Family(
    _bert,
    'bert.embeddings.word_embeddings.weight',
    same=(
      ('cls.predictions.decoder.weight', 'bert.embeddings.word_embeddings.weight'),
      ('cls.predictions.decoder.bias', 'cls.predictions.bias'),
    ),
    # BertModel's names do not start with 'bert.'; embeddings do not use its pooler.
    nothing=(r'bert\.embeddings\.position_ids', r'pooler\.dense\.(weight|bias)'),
    renamed=(
      (r'^(?=(embeddings|encoder)\.)', 'bert.'),
      (r'(?<=LayerNorm\.)gamma$', 'weight'),
      (r'(?<=LayerNorm\.)beta$', 'bias'),
    ),
  ),
  'gpt2': Family(
    _gpt2,
    'transformer.wte.weight',
    same=(('lm_head.weight', 'transformer.wte.weight'),),
    nothing=(r'transformer\.h\.\d+\.attn\.(masked_)?bias',),
    renamed=((r'^(?=(h\.\d+|wte|wpe|ln_f)\.)', 'transformer.'),),
  ),
  **dict.fromkeys(_LLAMAS, _LLAMA),
  'phi3': dataclasses.replace(_LLAMA, rules=functools.partial(_llama, blocks=_fused_blocks)),
  'mixtral': _mixture(f'{_LAYER}block_sparse_moe.', ('w1', 'w3', 'w2')),
  'qwen3_moe': _mixture(f'{_LAYER}mlp.', ('gate_proj', 'up_proj', 'down_proj')),
}
