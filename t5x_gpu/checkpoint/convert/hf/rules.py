"""Name table rules that several Hugging Face families share: attention, MLPs, experts."""

from collections.abc import Sequence

from t5x_gpu.checkpoint.convert.name_table import Rule


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


def linear_rules(
  ours: str, theirs: str, axes: str, *, bias: bool, stack: str = 'layers'
) -> list[Rule]:
  """Returns the rules for a kernel 'out in -> in out' and its bias."""
  rules = [Rule(f'{ours}/kernel', f'{theirs}.weight', axes, stack=stack)]
  if bias:
    rules.append(Rule(f'{ours}/bias', f'{theirs}.bias', axes.split()[-1], stack=stack))
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
