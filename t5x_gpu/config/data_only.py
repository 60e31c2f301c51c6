"""Reads the gin file of an untrusted folder as data, without running any code.

gin imports modules and calls functions by name, so a gin file is a program. `kept` extracts the
values of a few named arguments. They may contain plain values, macros, and references to the
classes in `ALLOWED`. Everything else in the file is removed before gin sees it.
"""

from collections.abc import Collection, Iterable
from typing import Any

from gin import config_parser

from t5x_gpu.config.statements import Macro, Reference, Statement, instances
from t5x_gpu.errors import ConfigError, Problem

# Constructors of these classes do not import modules, read files or call functions named in gin.
# Modules named in a DatasetConfig are imported when it is opened: see `may_import` in
# data/trust.py.
ALLOWED = frozenset(
  {
    't5x_gpu.data.batches.DatasetConfig',
    't5x_gpu.layers.positions.RotaryEmbedding',
    't5x_gpu.models.config.TransformerConfig',
    't5x_gpu.models.decoder_only.DecoderOnlyModel',
    't5x_gpu.models.decoding.DecodingConfig',
    't5x_gpu.models.encoder.EncoderModel',
    't5x_gpu.models.encoder_decoder.EncoderDecoderModel',
    't5x_gpu.models.lora.LoraModel',
    't5x_gpu.models.preference.dpo.DpoModel',
    't5x_gpu.models.transformer.TransformerLayer',
    't5x_gpu.partitioning.partitioner.Partitioner',
    't5x_gpu.runtime.distributed.DistributedConfig',
  }
)
_TRAIN = 't5x_gpu.train.train'


def kept(found: Iterable[Statement], *, wanted: Collection[str], shown: str) -> list[Statement]:
  """Returns the bindings that `wanted` needs, and the imports for them.

  Args:
    found: the statements of one gin file.
    wanted: names of macros, and of arguments of `train`.
    shown: the file's name in messages.
  Raises:
    ConfigError: `wanted` needs more than plain values and `ALLOWED`; names file:line.
  """
  found = list(found)
  problems: list[Problem] = []
  imports = _imports(found, problems, shown=shown)
  names = {id(s): _name(s, imports) for s in found if _is_binding(s)}
  todo = [
    s
    for s in found
    if _is_binding(s)
    and (s.arg_name if names[id(s)] == _TRAIN else names[id(s)].removeprefix('%')) in wanted
  ]
  needed: set[int] = set()
  used = {_TRAIN}
  while todo:
    statement = todo.pop()
    if id(statement) in needed:
      continue
    needed.add(id(statement))
    leads_to = {f'%{macro.name}' for macro in instances(statement.value, Macro)}
    for reference in instances(statement.value, Reference):
      name = _resolved(reference.scoped_selector.rpartition('/')[2], imports)
      if name in ALLOWED:
        leads_to.add(name)
      else:
        problems.append(
          Problem(
            f'{shown}:{statement.location.line_num} names {reference}, which is not a '
            'model or setting of t5x_gpu and could run any code.'
          )
        )
    used |= leads_to
    todo += [s for s in found if _is_binding(s) and names[id(s)] in leads_to]
  if problems:
    raise ConfigError(
      f'{shown} is more than data',
      problems=problems,
      fix='The gin file of a checkpoint folder is read as data, because the folder may come from '
      'elsewhere.\nIf you trust it, add --trust_gin, which runs the file. Or give your own '
      'gin file: --gin_file=FILE.',
      docs='infer.md#trust',
    )
  return [
    s
    for s in found
    if id(s) in needed
    or isinstance(s, config_parser.ImportStatement)
    and (_is_dynamic(s) or any(name.startswith(f'{s.module}.') for name in used))
  ]


def _is_binding(statement: Statement) -> bool:
  return isinstance(statement, config_parser.BindingStatement)


def _is_dynamic(statement: config_parser.ImportStatement) -> bool:
  return statement.is_from and statement.module == '__gin__.dynamic_registration'


def _imports(found: Iterable[Any], problems: list[Problem], *, shown: str) -> dict[str, str]:
  """Returns imported name -> module; adds unresolvable imports to `problems`.

  Returns {} without dynamic registration, because names then do not come from the file's imports.
  """
  imports: dict[str, str] = {}
  for statement in found:
    place = f'{shown}:{statement.location.line_num}'
    if isinstance(statement, config_parser.IncludeStatement):
      problems.append(Problem(f'{place} includes {statement.filename!r}, another file.'))
    elif isinstance(statement, config_parser.ImportStatement):
      name = statement.bound_name()
      is_whole = statement.is_from or statement.alias
      module = statement.module if is_whole else statement.module.partition('.')[0]
      if imports.setdefault(name, module) != module:
        already = f'which is already {imports[name]}'
        problems.append(Problem(f'{place} imports {module} as {name!r}, {already}.'))
  is_dynamic = any(isinstance(s, config_parser.ImportStatement) and _is_dynamic(s) for s in found)
  return imports if is_dynamic else {}


def _name(statement: config_parser.BindingStatement, imports: dict[str, str]) -> str:
  """Returns '%scope/MACRO', or 'package.module.Class' for any scope."""
  if not statement.arg_name:
    return '%' + '/'.join(filter(None, (statement.scope, statement.selector)))
  return _resolved(statement.selector, imports)


def _resolved(selector: str, imports: dict[str, str]) -> str:
  """Returns 'package.module.Class' for gin's 'module.Class'; '' if it is not imported."""
  first, dot, rest = selector.partition('.')
  return f'{imports[first]}{dot}{rest}' if first in imports else ''
