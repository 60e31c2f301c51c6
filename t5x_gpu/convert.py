"""Convert checkpoints: Hugging Face to t5x_gpu and back, and T5X to t5x_gpu.

`python -m t5x_gpu.convert --from=FOLDER --to=FOLDER`. It converts tensor by tensor, reads every
tensor back, and compares logits before the new folder appears (docs/convert.md).
"""

import argparse
import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import jax

from t5x_gpu import cli
from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.checkpoint.run_files import GIN_FILES
from t5x_gpu.config import gin_loader
from t5x_gpu.conversion.conversion import CHECKS, TOLERANCE, ConversionRequest, has_transformers
from t5x_gpu.conversion.hf.config_json import CONFIG_FAMILIES
from t5x_gpu.conversion.hf.folder import CONFIG
from t5x_gpu.conversion.model_spec import ModelFields, describe, read_model
from t5x_gpu.conversion.safetensors_io import SafetensorsFolder
from t5x_gpu.conversion.t5x_files import is_t5x
from t5x_gpu.conversion.tensor_copy import FLOATS
from t5x_gpu.conversion.to_hf import convert_ours, merge_lora
from t5x_gpu.conversion.to_ours import convert_hf, convert_t5x
from t5x_gpu.conversion.tokenizer import RunText
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.errors import CheckpointError, ConfigError, UserError, first_line
from t5x_gpu.evaluation.infer_jobs import decoding_changes, open_prompt_text
from t5x_gpu.evaluation.infer_request import RUN_SETTINGS, configures_run, read_request
from t5x_gpu.models.dpo import policy_of
from t5x_gpu.models.lora import LoraModel, without_adapters
from t5x_gpu.models.model import encodes_texts
from t5x_gpu.runtime.process_exit import sigterm_raises
from t5x_gpu.storage.paths import local_path
from t5x_gpu.storage.user_paths import expanded_path
from t5x_gpu.terminal import logging_setup, streams
from t5x_gpu.terminal.console import Console
from t5x_gpu.terminal.flag_types import byte_size

EXAMPLES = """examples:
  {prog} --from=Llama-3.2-1B --to=runs/llama
  {prog} --from=runs/llama_tuned --to=my_llama --like=Llama-3.2-1B
  {prog} --from=t5_1_1_small/checkpoint_1000000 --to=runs/t5_small
  {prog} --from=runs/llama_lora --to=runs/llama_merged --format=t5x_gpu

The first example writes runs/llama/checkpoint_0 and runs/llama/model.gin, which a run's gin file
includes.
The last example merges the adapters of a LoRA run into the kernels.
"""
FORMATS = {'hf': 'Hugging Face', 't5x_gpu': 't5x_gpu', 't5x': 'T5X'}


def kind_of(model_dir: ModelDir) -> str:
  """Returns the format of the files in a folder, a key of `FORMATS`.

  Raises:
    CheckpointError: the folder has no checkpoint.
  """
  folder = model_dir.path
  if not folder.is_dir():
    raise CheckpointError(
      f'--from={folder} is not a folder.', fix='Name the folder of a checkpoint.'
    )
  ours = [folder, *map(model_dir.checkpoint, model_dir.steps)]
  if any((path / 'manifest' / 'metadata').is_file() for path in ours):
    return 't5x_gpu'
  if is_t5x(folder):
    return 't5x'
  if not (folder / CONFIG).exists():
    SafetensorsFolder(folder)  # raises an error that names the missing files or the pickle
  return 'hf'


def model_of_gin(files: Sequence[pathlib.Path | str], **options: Any) -> ModelFields:
  """Returns the fields of the model in gin files; arguments as in `object_of_gin`."""
  return describe(without_adapters(policy_of(object_of_gin(files, **options))))


def vocabulary_of_gin(files: Sequence[str], **options: Any) -> Optional[str]:
  """Returns the vocabulary of the run that gin files configure; None if they do not name one."""
  if not files or not configures_run(files):
    return None
  loaded = _load_run(files, RUN_SETTINGS, **options)
  return loaded.arguments(only=('train_dataset_cfg',))['train_dataset_cfg'].vocabulary


def _load_run(
  names: Sequence[str], settings: Sequence[str], *, as_data: bool = False, **options: Any
) -> gin_loader.LoadedConfig:
  read_as_data = dict.fromkeys(names if as_data else (), settings)
  return gin_loader.load(names, read_as_data=read_as_data, **options)


def object_of_gin(
  files: Sequence[pathlib.Path | str],
  *,
  bindings: Sequence[str] = (),
  search_paths: Sequence[str] = (),
  as_data: bool = False,
) -> Any:
  """Returns the model of gin files: files of a run, or a model file, which only sets MODEL.

  Args:
    files: paths of the gin files.
    bindings: bindings from the command line.
    search_paths: more folders to search for gin files.
    as_data: read `files` without running any code that they name.
  """
  names = [str(f) for f in files]
  if configures_run(names):
    loaded = _load_run(
      names, ('model',), as_data=as_data, bindings=bindings, search_paths=search_paths
    )
    return loaded.arguments(only=('model',))['model']
  return read_model(names, as_data=as_data, bindings=bindings, search_paths=search_paths)


def read_run_text(
  flags: argparse.Namespace, gin_files: Sequence[str], manifest: Mapping[str, Any], **options: Any
) -> Optional[RunText]:
  """Returns how `infer` reads and ends texts with a checkpoint.

  Returns None for an encoder, and for a converted model that was not trained further: its own files
  define the texts.

  Args:
    flags: flags of this command.
    gin_files: gin files on the command line; if empty, the gin file in the folder is used.
    manifest: manifest of the checkpoint.
    **options: as for `read_request`.
  Raises:
    UserError: the task or its vocabulary cannot be opened.
  """
  asked = argparse.Namespace(
    checkpoint=flags.source,
    step=flags.step,
    trust_gin=flags.trust_gin,
    vocabulary=None,
    split=None,
    prompts='',
    interactive=False,
    chat=False,
  )
  request = read_request(asked, gin_files, **options)
  is_converted = manifest.get('converted_from', {}).get('format') == 'hf'
  if encodes_texts(request.model) or (is_converted and not request.is_run):
    return None
  note, task = '', request.dataset
  try:
    text = open_prompt_text(request)
  except UserError as e:  # the task may be on another machine, or not trusted
    if task.vocabulary is None:
      raise
    note = f'the task cannot be opened, so only its vocabulary counts: {first_line(e)}'
    request = dataclasses.replace(
      request,
      dataset=DatasetConfig(
        '',
        task.task_feature_lengths,
        '',
        1,
        vocabulary=task.vocabulary,
        chat_template_variables=task.chat_template_variables,
      ),
    )
    text = open_prompt_text(request)
  is_chat = getattr(text, 'is_chat', False) or 'chat_template' in manifest.get('data', {})
  request = dataclasses.replace(request, chat=is_chat)
  changes, _ = decoding_changes(request, text, manifest)
  if getattr(text, 'inputs_name', text.name) != text.name:
    raise ConfigError(
      f'inputs and targets have two vocabularies, {text.inputs_name} and {text.name}; a model of '
      'Hugging Face has one.',
      fix='Write the tokenizers of the export by hand.',
    )
  return RunText(
    vocabulary=text.name,
    size=text.size,
    ends=tuple(text.encode_inputs('')),
    encode=text.encode_inputs,
    decoding=dataclasses.replace(request.decoding, **changes),
    is_chat=is_chat,
    note=note,
  )


def _pattern(text: str) -> str:
  try:
    re.compile(text)
  except re.error as e:
    raise argparse.ArgumentTypeError(f'{text!r} is not a regular expression: {e}') from e
  return text


def _add_flags(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('convert')
  group.add_argument(
    '--from',
    dest='source',
    metavar='FOLDER',
    help=(
      'what to convert: a Hugging Face model, a MODEL_DIR or one of its checkpoints, or a T5X '
      'checkpoint'
    ),
  )
  group.add_argument('--to', metavar='FOLDER', help='new folder')
  group.add_argument(
    '--format',
    choices=('t5x_gpu', 'hf'),
    help='format of the new folder (default: t5x_gpu, or hf from t5x_gpu). t5x_gpu from t5x_gpu '
    'merges the adapters of a run',
  )
  group.add_argument(
    '--family',
    choices=tuple(CONFIG_FAMILIES),
    help='Hugging Face family (default: detected from the files)',
  )
  group.add_argument(
    '--like',
    metavar='FOLDER',
    help='to hf: take names, dtypes, config.json and tokenizer from this Hugging Face model',
  )
  group.add_argument(
    '--dtype',
    choices=tuple(FLOATS),
    help='to hf: dtype of the tensors (default: as in --like, else float32)',
  )
  group.add_argument(
    '--step', type=int, metavar='N', help='from t5x_gpu: which checkpoint (default: the latest)'
  )
  group.add_argument(
    '--drop',
    action='append',
    default=[],
    type=_pattern,
    metavar='PATTERN',
    help='from hf: leave out tensors whose names match (regular expression; may be repeated)',
  )
  group.add_argument(
    '--max_shard_size',
    type=byte_size,
    default='5GB',
    metavar='SIZE',
    help='to hf: maximum size of one file (default: 5GB)',
  )
  group.add_argument(
    '--check',
    choices=CHECKS,
    default='auto',
    help=(
      'reference for the logits: transformers; own: our model with the other '
      "files' tensors; tensors: compare no logits; auto: transformers if installed, else own "
      '(default: auto)'
    ),
  )
  group.add_argument(
    '--tolerance',
    type=float,
    default=TOLERANCE,
    metavar='X',
    help=f'largest difference of logits, relative to the largest logit (default: {TOLERANCE:g})',
  )
  cli.add_trust_flag(group)


def main(argv: Optional[Sequence[str]] = None) -> int:
  """Parses flags and converts."""
  logging_setup.quiet_environment()
  jax.config.update('jax_platforms', 'cpu')  # never takes a GPU from a run
  args = cli.parse_args(
    'python -m t5x_gpu.convert',
    __doc__.splitlines()[0],
    argv,
    extra=_add_flags,
    gin_file_required=False,
    examples=EXAMPLES,
  )
  extra = args.extra
  usage = 'python -m t5x_gpu.convert --from=FOLDER --to=NEW_FOLDER'
  cli.check_given(usage, **{'from': extra.source, 'to': extra.to})
  if not args.dry_run:
    streams.outlive()  # the command writes files, so it continues without standard output
  source = local_path(extra.source, what='convert --from')
  model_dir = ModelDir(source)
  kind = kind_of(model_dir)
  _check_flags(extra, kind)
  cli.check_trust_flag(args)
  gin_files = list(map(str, args.gin_files))
  request_options: dict[str, Any] = {
    'bindings': args.bindings,
    'search_paths': args.gin_search_paths,
  }
  options: dict[str, Any] = dict(request_options)
  if not gin_files and kind == 't5x_gpu':
    folder = source.parent if (source / 'manifest').is_dir() else source
    gin_files = [str(folder / name) for name in GIN_FILES if (folder / name).is_file()][:1]
    options['as_data'] = not extra.trust_gin
    if gin_files and extra.trust_gin:
      print(cli.trusted(gin_files[0]), flush=True)
  built = policy_of(object_of_gin(gin_files, **options)) if gin_files else None
  lora = built if isinstance(built, LoraModel) else None
  merges = kind == 't5x_gpu' and extra.format == 't5x_gpu'
  if merges and lora is None:
    raise ConfigError(
      f'{source} has no adapters to merge: its model is not a LoraModel.',
      fix='To convert it to a Hugging Face model, leave --format=t5x_gpu out.',
      docs='finetune.md#merge',
    )
  logging_setup.setup()
  request = ConversionRequest(
    source=source,
    model_dir=model_dir,
    target=local_path(extra.to, what='convert --to'),
    family=extra.family,
    lora=lora,
    vocabulary=vocabulary_of_gin(gin_files, **options) if kind == 't5x_gpu' else None,
    model=None if built is None else describe(without_adapters(built)),
    read_gin=lambda path: model_of_gin([path], as_data=True),
    read_text=functools.partial(read_run_text, extra, args.gin_files, **request_options),
    drop=tuple(extra.drop),
    step=extra.step,
    like=expanded_path(extra.like) if extra.like else None,
    dtype=extra.dtype,
    max_file_bytes=extra.max_shard_size,
    check=extra.check,
    tolerance=extra.tolerance,
  )
  convert = {
    'hf': convert_hf,
    't5x': convert_t5x,
    't5x_gpu': merge_lora if merges else convert_ours,
  }[kind]
  with sigterm_raises():
    convert(request, Console())
  return 0


def _check_flags(extra: argparse.Namespace, kind: str) -> None:
  """Raises ConfigError for flags that do not apply to this conversion."""
  target = 'hf' if kind == 't5x_gpu' and extra.format != 't5x_gpu' else 't5x_gpu'
  if extra.format not in (None, target):
    raise ConfigError(
      f'{extra.source} is a {FORMATS[kind]} checkpoint: it cannot be converted to '
      f'--format={extra.format}.',
      fix='Hugging Face converts to t5x_gpu, t5x_gpu to Hugging Face, and T5X to t5x_gpu. '
      'From T5X to Hugging Face takes two steps.',
    )
  if extra.check == 'transformers' and (kind == 't5x' or not has_transformers()):
    raise ConfigError(
      '--check=transformers '
      + (
        'does not apply to T5X.'
        if kind == 't5x'
        else 'needs transformers and torch; at least one is not installed.'
      ),
      fix='Set --check=own' + ('.' if kind == 't5x' else ", or pip install 't5x_gpu[hf]' torch."),
      docs='convert.md#the-check',
    )
  only = {
    'hf': ('drop', 'family'),
    't5x': (),
    't5x_gpu': (('like', 'dtype', 'step', 'family') if target == 'hf' else ('step',))
    + ('trust_gin',),
  }
  useless = [
    f'--{name}'
    for name in ('drop', 'family', 'like', 'dtype', 'step', 'trust_gin')
    if getattr(extra, name) not in (None, []) and name not in only[kind]
  ]
  if useless:
    raise ConfigError(
      f'{", ".join(useless)} cannot be used to convert {FORMATS[kind]} to {FORMATS[target]}.',
      fix='Leave it out; --help explains each flag.',
    )


if __name__ == '__main__':
  cli.run_main(main)
