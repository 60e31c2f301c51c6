"""Text from a trained model: `python -m t5x_gpu.infer --checkpoint=runs/demo --prompts=FILE`.

Prompts from a file, standard input or a SeqIO task; continuations, or the probabilities of given
ones, as JSON lines in the same order. A run that was killed goes on where it stopped.
"""

import argparse
import dataclasses
import itertools
import math
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import jax

from t5x_gpu import cli
from t5x_gpu.checkpoint.arrays.params_files import ParamsReader, read_params
from t5x_gpu.checkpoint.run_files import carried_ends, carried_vocabulary, on_this_machine
from t5x_gpu.checkpoint.storage.paths import AnyPath, as_path
from t5x_gpu.config import gin_loader
from t5x_gpu.data.batches import DatasetConfig, open_prompt_text
from t5x_gpu.data.prompts import Prompt, PromptText, parse_prompts, read_prompts
from t5x_gpu.errors import ConfigError, DataError
from t5x_gpu.evaluation.class_job import classifies, open_class_job
from t5x_gpu.evaluation.generated_text import Job, run, say
from t5x_gpu.models.decoding import DecodingConfig, check_writes_text, reads_inputs
from t5x_gpu.models.inference.generation import Generator, by_layer
from t5x_gpu.models.lora import without_adapters
from t5x_gpu.partitioning.axis_rules import split_names
from t5x_gpu.partitioning.layout import Layout
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.run.config import InferConfig
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster import cluster as cluster_lib
from t5x_gpu.runtime.cluster import topology as topology_lib
from t5x_gpu.runtime.cluster.topology import Device, Topology
from t5x_gpu.terminal import logging_setup

EXAMPLES = """examples:
  {prog} --checkpoint=runs/demo --prompts=prompts.txt --output=answers.jsonl
  {prog} --checkpoint=runs/llama --prompts=- --gin.DecodingConfig.num_beams=4
  {prog} --gin_file=my.gin --split=test --output=answers.jsonl
  {prog} --checkpoint=runs/demo --prompts=pairs.jsonl --score
  {prog} --checkpoint=runs/demo --interactive --gin.DecodingConfig.temperature=0.8

--checkpoint takes a MODEL_DIR or what t5x_gpu.convert wrote; its own gin file says what the model
is, unless --gin_file does. It is read as data; nothing in it runs unless you add --trust_gin.
How tokens are chosen: --gin.DecodingConfig.X=VALUE (docs/infer.md).
"""
# What a run has in its folder, and a converted model.
RUN_GIN, MODEL_GIN = 'config.gin', 'model.gin'
TRAIN, SETUP = 't5x_gpu.train.train', 't5x_gpu.infer.setup'
_RUN_NAMES = tuple(field.name for field in dataclasses.fields(InferConfig))


def setup(
  *,
  model: Any = None,
  partitioner: Partitioner = Partitioner(),
  decoding_cfg: DecodingConfig = DecodingConfig(),
) -> None:
  """What gin may set for this command alone; a run's own gin file sets the first two elsewhere.

  Args:
    model: of a model file, which no run includes.
    partitioner: the same.
    decoding_cfg: how to choose tokens.
  """
  del model, partitioner, decoding_cfg


def open_job(args: cli.Args, asked: 'Asked') -> Job:
  """Returns the job: everything checked, parameters restored.

  Raises:
    UserError: of the checkpoint, the vocabulary or the mesh.
  """
  model, config, dataset = asked.model, asked.config, asked.dataset
  if classifies(model):
    reader = ParamsReader(asked.checkpoint, step=args.extra.step)
    layout = _layout(asked.partitioner, model, *topology_lib.discover())
    return open_class_job(
      model,
      dataset,
      reader=reader,
      layout=layout,
      score=args.extra.score,
      may_import=asked.may_import,
      batch_size=1 if args.extra.interactive else config.batch_size,
      read=lambda: (
        None
        if args.dry_run
        else read_params(asked.checkpoint, _abstract_params(model, layout), step=reader.step)
      ),
    )
  check_writes_text(model)
  has_inputs = reads_inputs(model) or 'inputs' in dataset.task_feature_lengths
  text = open_prompt_text(
    dataset,
    feature_converter=model.feature_converter({'inputs': 1, 'targets': 1}),
    model_vocab_size=model.num_outcomes,
    has_inputs=has_inputs,
    may_import=asked.may_import,
  )
  reader = ParamsReader(asked.checkpoint, step=args.extra.step)
  ends = dict.fromkeys([*([] if text.eos_id is None else [text.eos_id]), *asked.ends])
  notes = [
    f'parameters: {reader.path}',
    f'vocabulary: {text.name}, {text.size:,} ids'
    + (f'; {", ".join(map(str, ends))} end{"s" * (len(ends) == 1)} a text' if ends else ''),
  ]
  changes = {
    'stop_tokens': tuple(dict.fromkeys([*config.stop_tokens, *ends])),
    'zero_is_padding': config.zero_is_padding and not text.zero_is_a_word,
  }
  origin = reader.manifest.get('converted_from', {})
  if origin.get('format') == 'hf' and not (asked.sets_start or has_inputs or asked.is_run):
    changes['start_token'] = text.start_id
    notes.append(
      f'DecodingConfig.start_token = {text.start_id}: what the tokenizer puts before a '
      'text, as the model is converted from Hugging Face'
    )
  if args.extra.interactive:
    changes['batch_size'] = 1
  topology, devices = topology_lib.discover()
  layout = _layout(asked.partitioner, model, topology, devices)
  say('\n'.join([layout.table(), *notes]))
  params = None
  if not args.dry_run:
    params = read_params(asked.checkpoint, _abstract_params(model, layout), step=reader.step)
    plain = without_adapters(model)
    if plain is not model:
      shardings = jax.tree.map(lambda a: a.sharding, _abstract_params(plain, layout))
      params = layout.jit(model.merged, out_shardings=shardings)(params)
      model = plain
    params = by_layer(model, params, layout=layout)
  lengths = dataset.task_feature_lengths
  train_length = lengths.get('inputs') if reads_inputs(model) else sum(lengths.values())
  generator = Generator(model, params, layout=layout, config=dataclasses.replace(config, **changes))
  return Job(generator, text, str(reader.path), train_length or None)


@dataclasses.dataclass(frozen=True)
class Asked:
  """What command line and gin files ask for.

  Attributes:
    model, partitioner, dataset: as gin has them; without a task, `dataset` is a vocabulary alone.
    config: how to choose tokens.
    ends: ids that end a text by the files of a converted model.
    sets_start: gin sets DecodingConfig.start_token.
    is_run: the gin file is of a run, not of a model alone.
    checkpoint: folder of parameters.
    distributed_cfg, xla_preset: how the processes start.
    may_import: the modules that the task may import besides ours; None for any.
  """

  model: Any
  partitioner: Partitioner
  dataset: DatasetConfig
  config: DecodingConfig
  ends: tuple[int, ...]
  sets_start: bool
  is_run: bool
  checkpoint: AnyPath
  distributed_cfg: distributed.DistributedConfig
  xla_preset: str
  may_import: Optional[tuple[str, ...]]

  @classmethod
  def of(cls, args: cli.Args) -> 'Asked':
    """Returns what `args` ask for; raises ConfigError if gin files are wrong, or say too little."""
    flags, folder, run = args.extra, None, None
    if flags.checkpoint:
      folder = as_path(flags.checkpoint)
    run_folder = folder.parent if folder and (folder / 'manifest').is_dir() else folder
    files = list(map(str, args.gin_files)) or [_own_gin_file(run_folder)]
    as_data = not args.gin_files and not flags.trust_gin
    if flags.trust_gin:  # not `say`: no device may be used yet
      print(cli.trusted(files[0]), file=sys.stderr, flush=True)
    loaded, is_run = _load(files, args, as_data=as_data)
    own: dict[str, Any] = loaded.arguments(SETUP)
    dataset = DatasetConfig('', {}, '', 1)
    if is_run:
      run = gin_loader.configured(loaded, InferConfig)
      dataset = run.dataset
      dataset = dataclasses.replace(dataset, split=flags.split or dataset.split)
      own |= {'model': run.model, 'partitioner': run.partitioner}
      own['decoding_cfg'] = run.decoding_cfg or own['decoding_cfg']
      folder = folder or as_path(run.model_dir)
    elif folder is None:
      raise ConfigError(
        'A model file does not say where the parameters are.',
        fix='Give --checkpoint=FOLDER, or the gin file of a run.',
      )
    vocabulary = flags.vocabulary
    if vocabulary is None and not is_run:
      vocabulary = carried_vocabulary(run_folder)
    if vocabulary is not None:
      dataset = dataclasses.replace(dataset, vocabulary=vocabulary)
      if as_data and (flags.interactive or flags.prompts is not None):  # the task is not needed
        dataset = dataclasses.replace(
          dataset, mixture_or_task_name='', mixture_or_task_module=None, module=DatasetConfig.module
        )
    return cls(
      own['model'],
      own['partitioner'],
      dataset,
      own['decoding_cfg'],
      is_run=is_run,
      ends=() if is_run else carried_ends(run_folder),
      sets_start=any(
        setting.key.endswith('DecodingConfig.start_token') for setting in loaded.provenance.settings
      ),
      checkpoint=folder,
      distributed_cfg=run.distributed_cfg if run else distributed.DistributedConfig(),
      xla_preset=run.xla_preset if run else 'default',
      # The user may name a module: --gin.MIXTURE_OR_TASK_MODULE=my_tasks
      may_import=tuple(binding.partition('=')[2].strip('\'"') for binding in args.bindings)
      if as_data
      else None,
    )


def _own_gin_file(folder: Optional[AnyPath]) -> str:
  if folder is None:
    raise ConfigError(
      'Neither --checkpoint nor --gin_file is given.',
      fix='Give the MODEL_DIR of a run, as in --checkpoint=runs/demo',
    )
  for name in (RUN_GIN, MODEL_GIN):
    if (folder / name).is_file():
      return str(on_this_machine(folder / name))
  if not folder.exists():
    raise ConfigError(
      f'--checkpoint={folder} does not exist (looked from {os.getcwd()}).',
      fix='Give the MODEL_DIR of a run, or what t5x_gpu.convert wrote.',
    )
  raise ConfigError(
    f'{folder} has neither {RUN_GIN} nor {MODEL_GIN}, which would say what the model is.',
    fix='Give the MODEL_DIR of a run, or what t5x_gpu.convert wrote, '
    'or --gin_file=... as for the training.',
  )


def _load(
  files: Sequence[str], args: cli.Args, *, as_data: bool
) -> tuple[gin_loader.LoadedConfig, bool]:
  """Returns the configuration, and whether it is of a run; `setup` gets what it needs.

  Args:
    files: gin files.
    args: the command line.
    as_data: run nothing that `files` name.
  """
  texts = [
    pathlib.Path(f).read_text('utf-8', 'replace') if pathlib.Path(f).is_file() else ''
    for f in files
  ]
  is_run = not any(re.search(r'^MODEL\s*=', text, re.MULTILINE) for text in texts) or any(
    re.search(r'\btrain(_script)?\.train\b|^include', text, re.MULTILINE) for text in texts
  )
  lines = [
    'from __gin__ import dynamic_registration',
    'from t5x_gpu import infer as infer_script',
    'from t5x_gpu.models import decoding',
    'from t5x_gpu.partitioning import partitioner',
    'infer_script.setup.decoding_cfg = @decoding.DecodingConfig()',
  ]
  if not is_run:
    lines += [
      'infer_script.setup.model = %MODEL',
      'infer_script.setup.partitioner = @partitioner.Partitioner()',
    ]
  with tempfile.TemporaryDirectory() as temporary:
    entry = pathlib.Path(temporary) / 'infer.gin'
    entry.write_text('\n'.join(lines) + '\n', 'utf-8')
    loaded = gin_loader.load(
      [*files, entry],
      bindings=args.bindings,
      search_paths=args.gin_search_paths,
      entry=(TRAIN, SETUP) if is_run else SETUP,
      read_as_data=dict.fromkeys(files if as_data else (), _RUN_NAMES if is_run else ('MODEL',)),
    )
  return loaded, is_run


def _layout(
  partitioner: Partitioner, model: Any, topology: Topology, devices: list[Device]
) -> Layout:
  """Returns the layout to write text on: no batch or length of a training must divide."""
  partitioner = dataclasses.replace(
    partitioner,
    sequence_parallel=False,
    pipeline_schedule='gpipe',
    pipeline_repeats=1,
    num_pipeline_microbatches=1,
  )
  sizes = partitioner.mesh_sizes(topology).total
  parts = math.prod(sizes[axis] for axis in partitioner.rules().activations['batch'])
  return partitioner.lay_out(
    topology,
    devices,
    logical_sizes={**model.logical_sizes(), 'batch': parts, 'length': 2 * sizes['context']},
  ).for_decoding


def _abstract_params(model: Any, layout: Layout) -> Any:
  lengths = {'inputs': 8} if classifies(model) else {'inputs': 8, 'targets': 8}
  spec = model.batch_spec(lengths, batch_size=1, pack=False)
  shapes, names = split_names(jax.eval_shape(lambda: model.init(jax.random.key(0), spec)))
  return jax.tree.map(
    lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
    shapes,
    layout.shardings(shapes, names),
  )


def prompts_of(args: argparse.Namespace, text: PromptText) -> list[Prompt]:
  """Returns the prompts of the command line, the same on every process."""
  if args.prompts is None:
    if not args.score:
      prompts = _with_inputs(text.examples())
    else:
      prompts = text.examples()
    return list(itertools.islice(prompts, args.examples))
  records = None
  if distributed.is_main_process():
    try:
      if args.prompts == '-':
        found = parse_prompts(sys.stdin.buffer.readlines(), name='standard input', is_json=None)
      else:
        found = read_prompts(args.prompts)
      records = [dataclasses.asdict(prompt) for prompt in found]
    except DataError as e:
      if distributed.process_count() == 1:
        raise
      records = {'what': e.what, 'fix': e.fix}
  records = distributed.broadcast_json(records)
  if isinstance(records, dict):  # on every process: the others wait for prompts
    raise DataError(records['what'], fix=records['fix'])
  return [Prompt(**record) for record in records][: args.examples]


def _with_inputs(prompts: Iterator[Prompt]) -> Iterator[Prompt]:
  for prompt in prompts:
    if not prompt.tokens:
      raise DataError(
        f"{prompt.where} has no 'inputs' to continue: the task has texts alone.",
        fix='Give prompts (--prompts=FILE), or --score the texts.',
        parameters=('DatasetConfig.mixture_or_task_name',),
      )
    yield prompt


def talk(job: Job) -> None:
  """Continues what is typed, line by line, until the end of input."""
  if distributed.process_count() > 1:
    raise ConfigError(
      '--interactive reads from one terminal; this run has '
      f'{distributed.process_count()} processes.',
      fix='Start one process, or give --prompts=FILE.',
    )
  say('Write a prompt and press Enter; Ctrl-D ends.')
  for number in itertools.count():
    try:
      line = input('> ' if sys.stdin.isatty() else '')
    except EOFError:
      return
    if line.strip():
      try:
        tokens = job.tokens(Prompt('This prompt', line))
        job.generator.check_prompt(len(tokens), where='This prompt')
        [found] = job.generator.generate([tokens], numbers=[number])
        found = found if job.class_names is None else [found]
      except DataError as e:  # the next one may do
        say(str(e))
        continue
      for generated in found:
        print(job.text_of(generated), flush=True)


def _positive(text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'{text!r} is no whole number of at least 1')
  return int(text)


def _add_flags(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('text')
  group.add_argument(
    '--checkpoint',
    metavar='FOLDER',
    help=("MODEL_DIR, one of its checkpoints, or a converted model (default: the gin file's)"),
  )
  group.add_argument('--step', type=int, metavar='N', help='which checkpoint (default: the latest)')
  group.add_argument(
    '--prompts',
    metavar='FILE',
    help=(
      '.txt with a prompt per line, .jsonl with {"inputs": ...}, or - for standard input (default: '
      "the task's examples)"
    ),
  )
  group.add_argument('--split', metavar='SPLIT', help="of the task (default: the gin file's)")
  group.add_argument('--examples', type=_positive, metavar='N', help='only the first N prompts')
  group.add_argument(
    '--vocabulary',
    metavar='NAME',
    help=(
      "huggingface:FOLDER, sentencepiece:FILE, byte (default: the task's; the converted model's)"
    ),
  )
  group.add_argument(
    '--output',
    metavar='FILE',
    help=('.jsonl; results that it has already are not computed again (default: standard output)'),
  )
  group.add_argument('--overwrite', action='store_true', help='begin --output anew')
  group.add_argument(
    '--score',
    action='store_true',
    help="log-probabilities of the prompts' targets, in place of new text",
  )
  group.add_argument('--interactive', action='store_true', help='continue what is typed')
  cli.add_trust_flag(group)
  cluster_lib.add_flags(parser)


def _check_flags(flags: argparse.Namespace) -> None:
  without = [
    name
    for name in ('prompts', 'output', 'score', 'examples', 'split')
    if flags.interactive and getattr(flags, name)
  ]
  without += ['split'] if flags.prompts is not None and flags.split else []
  if without:
    other = '--interactive' if flags.interactive else '--prompts'
    raise ConfigError(
      f'{other} leaves nothing for ' + ', '.join(f'--{n}' for n in without) + '.',
      fix='Leave one of them out.',
    )
  if flags.overwrite and not flags.output:
    raise ConfigError('--overwrite without --output.', fix='Give --output=FILE.')


def main(argv: Optional[Sequence[str]] = None) -> int:
  """Parses flags and gin files, then writes."""
  logging_setup.quiet_environment()
  args = cli.parse_args(
    'python -m t5x_gpu.infer',
    __doc__.splitlines()[0],
    sys.argv[1:] if argv is None else argv,
    extra=_add_flags,
    gin_file_required=False,
    examples=EXAMPLES,
  )
  _check_flags(args.extra)
  cli.check_trust_flag(args)
  cluster = cluster_lib.detect_here(args.extra)
  if args.tfds_data_dir:
    os.environ['TFDS_DATA_DIR'] = args.tfds_data_dir
  asked = Asked.of(args)
  distributed.start(cluster, asked.distributed_cfg, xla_preset=asked.xla_preset)
  logging_setup.setup(process_index=jax.process_index(), process_count=jax.process_count())
  job = open_job(args, asked)
  if args.extra.interactive:
    if not args.dry_run:
      talk(job)
    return 0
  flags = args.extra
  prompts = prompts_of(flags, job.text)
  new = run(
    job,
    prompts,
    output=flags.output,
    score=flags.score,
    overwrite=flags.overwrite,
    dry_run=args.dry_run,
  )
  if flags.output and not args.dry_run:
    say(f'{len(prompts)} results in {flags.output}, {new} of them new.')
  return 0


if __name__ == '__main__':
  # Under its own name: gin files import t5x_gpu.infer, and there must be one of each module.
  from t5x_gpu.infer import main as main_

  cli.run_main(main_)
