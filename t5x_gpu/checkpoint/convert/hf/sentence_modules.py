"""sentence-transformers' modules around an encoder: how token states become a text's vector.

`modules.json` lists them: the encoder, a pooling with its own config.json, and perhaps a
normalization. Without that file, sentence-transformers takes the mean of the tokens.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, Optional

from t5x_gpu.checkpoint.convert.model_spec import OPTIONS, ModelFields
from t5x_gpu.config.json_schema import Fields, ListOf, read_json
from t5x_gpu.config.set_aside import check_not_refused
from t5x_gpu.errors import CheckpointError

MODULES = 'modules.json'
FILES = (MODULES, 'sentence_bert_config.json', 'config_sentence_transformers.json')
_POOLING, _NORMALIZE = '1_Pooling', '2_Normalize'
_TYPE = 'sentence_transformers.models.'
_MODULES = ListOf(Fields({'type': str, 'path': str}))
# t5x_gpu's names -> sentence-transformers'. Several modes at once, which join vectors there, are
# refused.
_MODES = {'first_token': 'cls_token', 'mean': 'mean_tokens'}


def read_modules(folder: pathlib.Path) -> Optional[dict[str, Any]]:
  """Returns the arguments of `EncoderModel` that modules.json sets; None without that file.

  Raises:
    CheckpointError: a file cannot be read, or names something that is not supported.
  """
  path = folder / MODULES
  if not path.is_file():
    return None
  try:
    modules = [(m['type'].rpartition('.')[2], m['path']) for m in read_json(path, _MODULES)]
    kinds = [kind for kind, _ in modules]
    if kinds not in (['Transformer', 'Pooling'], ['Transformer', 'Pooling', 'Normalize']):
      raise _refused(path, f'lists the modules {", ".join(kinds)}')
    path = folder / modules[1][1] / 'config.json'
    return {'pooling': _pooling(path, read_json(path, dict)), 'normalize': len(kinds) == 3}
  except (ValueError, OSError) as e:
    check_not_refused(e, path)
    raise CheckpointError(f'{path} cannot be read ({e}).', fix='Copy the file again.') from e


def _pooling(path: pathlib.Path, config: Mapping[str, Any]) -> str:
  modes = [name.removeprefix('pooling_mode_') for name, on in config.items() if on is True]
  modes = [mode for mode in modes if f'pooling_mode_{mode}' in config]
  ours = [name for name, theirs in _MODES.items() if modes == [theirs]]
  if not ours:
    raise _refused(path, f'pools by {" and ".join(modes) or "an unknown mode"}')
  if config.get('include_prompt') is False:
    raise _refused(path, 'leaves prompts out of the vector')
  return ours[0]


def _refused(path: pathlib.Path, what: str) -> CheckpointError:
  return CheckpointError(
    f'{path} {what}. Supported: an encoder, then the mean of its tokens (mean_tokens) or its first '
    'token (cls_token), then perhaps a normalization.',
    fix=f'Such a model cannot be converted. To convert the encoder alone, remove {MODULES}.',
    docs='convert.md#families',
  )


def write_modules(model: ModelFields, folder: pathlib.Path, *, is_new: bool) -> None:
  """Writes modules.json and the files that it names, unless `folder` has equivalent files.

  Args:
    model: an embedding model.
    folder: folder of a Hugging Face model.
    is_new: False if the folder reproduces an original model, which may have lacked modules.json.
  """
  options = {**OPTIONS['encoder'], **model.options}
  wanted = {name: options[name] for name in ('pooling', 'normalize')}
  found = read_modules(folder)
  if found == wanted or (found is None and not is_new and wanted['pooling'] == 'mean'):
    return
  names = [('Transformer', ''), ('Pooling', _POOLING)]
  names += [('Normalize', _NORMALIZE)] if wanted['normalize'] else []
  _write(
    folder / MODULES,
    [
      {'idx': i, 'name': str(i), 'path': path, 'type': _TYPE + kind}
      for i, (kind, path) in enumerate(names)
    ],
  )
  modes = {f'pooling_mode_{their}': our == wanted['pooling'] for our, their in _MODES.items()}
  _write(
    folder / _POOLING / 'config.json', {'word_embedding_dimension': model.config.embed_dim, **modes}
  )


def _write(path: pathlib.Path, content: Any) -> None:
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(content, indent=2) + '\n', 'utf-8')
