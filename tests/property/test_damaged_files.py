"""Files with any contents, from anybody, cause only UserErrors."""

import base64
import json
import logging
import math
import pathlib
import re
import struct
import tarfile
import zlib

import numpy as np
import pytest

from t5x_gpu.checkpoint import initialize, run_lock
from t5x_gpu.checkpoint.local.file_format import write_local_file
from t5x_gpu.checkpoint.local.promotion import candidates, find_local_files
from t5x_gpu.checkpoint.local.tier import ensure_run_id, read_run_id
from t5x_gpu.checkpoint.manifest import make_manifest, sealed
from t5x_gpu.checkpoint.model_dir import newest_complete
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.checkpoint.run_files import append_sample
from t5x_gpu.checkpoint.store import StateReader
from t5x_gpu.config import report
from t5x_gpu.config.provenance import Provenance
from t5x_gpu.conversion.hf.folder import open_hf, read_record, write_record
from t5x_gpu.conversion.t5x_files import T5xCheckpoint
from t5x_gpu.conversion.t5x_names import t5x_model, t5x_table
from t5x_gpu.data import features
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.prepared import batches
from t5x_gpu.data.prepared.index import Index, MixtureMember
from t5x_gpu.data.prepared.shard_writer import write_shard
from t5x_gpu.data.sources.source_files import SourceFiles
from t5x_gpu.errors import DataError
from t5x_gpu.metrics.goodput import Goodput, read_ledger
from t5x_gpu.metrics.loggers import RunIds
from t5x_gpu.metrics.writers import JsonLinesWriter, read_json_lines
from t5x_gpu.run.data import check_sources
from t5x_gpu.tools.checkpoints import verify
from tests.checkpoint.test_checkpointer import (
  abstract,
  assert_equal,
  folder_with,
  new_state,
  opened,
)
from tests.conversion.hf_files import CONFIGS, write_model
from tests.helpers_fuzz import (
  BINARY,
  REPLACEMENTS,
  START_FILES,
  Packed,
  Target,
  contents,
  fuzz,
  replace,
  restore,
)

FIXTURES = pathlib.Path(__file__).parents[1] / 'parity' / 'fixtures'
TINY = {'lengths': {'targets': 16}, 'batch': 2, 'vocab': 32}


def safetensors(folder: pathlib.Path) -> Target:
  """A model of Hugging Face in two files, with its index and what a conversion writes down."""
  write_model(folder, CONFIGS['llama'], max_file_bytes=40_000)
  (folder / 'tokenizer.json').write_text(
    json.dumps({'model': {'vocab': {'a': 0, 'b': 1}}, 'added_tokens': [{'id': 2, 'content': 'c'}]})
  )
  (folder / 'hf').mkdir()
  (folder / 'hf' / 'config.json').write_bytes((folder / 'config.json').read_bytes())
  write_record(open_hf(folder), folder / 'hf')

  def use():
    model = open_hf(folder)
    for name in model.weights.tensors.shapes:
      model.weights.tensors.read(name)
    _ = read_record(folder).config

  header = Packed(
    lambda content: content[8 : 8 + int.from_bytes(content[:8], 'little')],
    lambda content, text: (
      len(text).to_bytes(8, 'little') + text + content[8 + int.from_bytes(content[:8], 'little') :]
    ),
  )
  files = {path.name: header for path in folder.glob('*.safetensors')}
  assert len(files) > 1
  return Target(
    folder,
    {
      **files,
      **{
        name: Packed()
        for name in (
          'model.safetensors.index.json',
          'config.json',
          'tokenizer.json',
          'hf/safetensors_headers.json',
        )
      },
    },
    use,
  )


def checkpoints(folder: pathlib.Path) -> Target:
  """Two checkpoints, of which the newer one is damaged."""
  folder = folder_with(folder, 3, 7)
  target = abstract(new_state())

  def use():
    saved = newest_complete(folder, target=target)
    assert saved.step in (3, 7)
    reader = StateReader(folder, step=7)
    verify(reader, advance=lambda num_bytes: None, num_threads=1)
    initialize._open(initialize.RestoreConfig(str(folder)))

  def seal(content: bytes, text: bytes) -> bytes:
    try:
      manifest = json.loads(text)
      data = json.loads((folder / 'checkpoint_7/data/metadata').read_bytes())
      if zlib.crc32(text) % 4 and isinstance(manifest, dict):  # else it remains unsealed
        return json.dumps(sealed(manifest, data=data)).encode()
    except (ValueError, RecursionError):
      pass
    return text

  newest = folder / 'checkpoint_7'
  files = {
    path.relative_to(folder).as_posix(): BINARY for path in newest.rglob('*') if path.is_file()
  }
  small = {
    'checkpoint_7/data/metadata': Packed(),
    'checkpoint_7/state/_METADATA': Packed(),
    'checkpoint_7/manifest/metadata': Packed(pack=seal),
  }
  assert files.keys() >= small.keys()
  return Target(folder, {**files, **small}, use)


def restored(folder: pathlib.Path) -> Target:
  """The same checkpoints, restored by Orbax as a run does it."""
  target, like = checkpoints(folder), abstract(new_state())

  def use():
    with opened(folder / 'model', keep=Keep()) as checkpointer:
      state = checkpointer.restore_latest(like).state
    step = int(state.step)
    assert_equal(state, new_state(step, seed=step))

  return Target(target.folder, target.files, use)


def local_checkpoints(folder: pathlib.Path) -> Target:
  """A file of a local step, its checksum mended or not."""
  values = np.arange(12, dtype=np.float32).reshape(3, 4)
  manifest = make_manifest(
    {'params': {'kernel': values}}, mesh_shape={}, data={}, next_batch_hash=''
  )
  write_local_file(
    folder / 'step_7.process_0',
    parts=[('params/kernel', (3, 4), (0, 0), values)],
    facts={
      'run': 'ab',
      'attempt': 'cd',
      'step': 7,
      'process': 0,
      'hosts': ['here'],
      'data_state': base64.b64encode(b'state').decode(),
      'manifest': manifest,
    },
  )
  prelude = struct.Struct('<8sQI')

  def use():
    found = find_local_files(folder, run='ab', newer_than=-1)
    assert len(found.files) + len(found.damaged) <= 1
    candidates(found)
    for file in found.files:
      for part in file.parts:
        try:
          file.read(part, tuple(file.facts['manifest']['arrays'][part.name][0]))
        except (OSError, ValueError):  # which is what a promotion expects
          pass

  def pack(content: bytes, text: bytes) -> bytes:
    magic, length, _ = prelude.unpack(content[: prelude.size])
    return (
      prelude.pack(magic, len(text), zlib.crc32(text)) + text + content[prelude.size + length :]
    )

  return Target(
    folder,
    {
      'step_7.process_0': Packed(
        lambda content: content[
          prelude.size : prelude.size + prelude.unpack(content[: prelude.size])[1]
        ],
        pack,
      )
    },
    use,
  )


def prepared_rows(folder: pathlib.Path) -> Target:
  """The index of prepared rows; three batches are read by it."""
  config = DatasetConfig(f'prepared:{folder}', TINY['lengths'], 'train', TINY['batch'], pack=False)
  spec = features.batch_spec(
    'lm',
    task_feature_lengths=TINY['lengths'],
    batch_size=TINY['batch'],
    pack=False,
    vocab_size=TINY['vocab'],
  )
  rng = np.random.default_rng(0)
  rows = [
    {
      name: rng.integers(1, 2 if 'weights' in name else 9, shape[1:])
      for name, shape in spec.shapes.items()
    }
    for _ in range(5)
  ]
  shard = write_shard(
    rows,
    split=folder / 'train',
    task='task',
    part=0,
    num_parts=1,
    names=tuple(spec.shapes),
    report=lambda rows, tokens: None,
  )
  index = Index(
    source_config={
      'mixture_or_task_name': 'task',
      'mixture_or_task_module': None,
      'vocabulary': 'bytes',
      'use_cached': False,
      'module': 't5x_gpu.data.seqio_batches',
    },
    split='train',
    feature_converter='lm',
    task_feature_lengths=TINY['lengths'],
    pack=False,
    loss_on_targets_only=config.loss_on_targets_only,
    features={name: shape[1] for name, shape in spec.shapes.items()},
    vocabularies={
      'targets': {'name': 'bytes', 'by_name': True, 'size': TINY['vocab'], 'fingerprint': 'x'}
    },
    class_names=None,
    packing={'shuffle': True, 'seed': 0},
    members={'task': MixtureMember(rate=1.0, source={'files': 3}, num_shards=1, shards=(shard,))},
    versions={'numpy': '2'},
  )
  (folder / 'train' / 'index.json').write_text(index.to_json())

  def use():
    opened = batches.open_batches(config, spec=spec, feature_converter='lm')
    try:
      for _ in range(3):
        spec.check({name: np.asarray(x) for name, x in next(opened).items()})
      opened.set_state(opened.get_state())
      batches.text_config(config)
      batches.source_config(config)
      batches.class_names(config)
    finally:
      opened.close()

  return Target(folder, {'train/index.json': Packed()}, use)


def small_files(folder: pathlib.Path) -> Target:
  """Files in MODEL_DIR that a start reads, without checkpoints: damage never stops it."""
  provenance = Provenance((), (), 'train.total_steps = 5\n')
  for config in ('train.total_steps = 3\n', 'train.total_steps = 4\n'):
    report.write(Provenance((), (), config), folder)
  name = ensure_run_id(folder)
  writer = JsonLinesWriter(folder / 'metrics.jsonl')
  for step in range(4):
    writer.write(step, {'train/loss': 1.5, 'train/rate': float('nan')})
  writer.close()
  lock = run_lock.RunLock(folder)
  held = (folder / run_lock.LOCK).read_bytes()
  lock.release()
  (folder / run_lock.LOCK).write_bytes(held)
  RunIds(folder).keep('wandb', 'ab12')
  append_sample(folder, 4, prompt='a', temperature=1.0, text='ab')
  with Goodput(enabled=True) as goodput:
    goodput.open(folder, first_step=0, facts={'total_steps': 4})
    goodput.step_done(4)
  text = folder.with_name('text.txt')
  text.write_bytes(b'text ' * 20_000)  # too large to be hashed at the start
  sources = {'task': [str(text)]}
  with SourceFiles(sources).kept_in(folder):
    pass

  def use():
    assert re.fullmatch('[0-9a-f]{16}', read_run_id(folder) or name)
    try:
      run_lock.check_lock(folder)
      lock = run_lock.RunLock(folder)
    except run_lock.CheckpointError as e:  # it reads as a lock of another host
      assert 'belongs to another run' in str(e)
    else:
      lock.release()
    assert len(ensure_run_id(folder)) == 16
    report.write(provenance, folder)
    assert (folder / 'config.gin').read_text() == provenance.config
    writer = JsonLinesWriter(folder / 'metrics.jsonl')
    writer.truncate_after(2)
    writer.write(3, {'train/loss': 1.25})
    writer.close()
    assert read_json_lines(folder / 'metrics.jsonl')[-1] == {'step': 3, 'train/loss': 1.25}
    ids = RunIds(folder)
    ids.keep('wandb', ids.get('wandb') or 'cd34')
    assert RunIds(folder).get('wandb')
    append_sample(folder, 4, prompt='a', temperature=1.0, text='the last')
    assert (
      json.loads((folder / 'samples.jsonl').read_bytes().splitlines()[-1])['text'] == 'the last'
    )
    with Goodput(enabled=True) as goodput:
      goodput.open(folder, first_step=4, facts={'total_steps': 8})
      goodput.interruption(), goodput.summary()
    runs = read_ledger(folder / 'goodput.jsonl').runs  # a damaged time may be after today
    assert 4 in [run.first_step for run in runs]
    files = SourceFiles(sources)
    try:
      check_sources(files, folder)
    except DataError as e:  # it reads as the record of other files
      assert 'text.txt' in str(e)
    with files.kept_in(folder):
      pass
    SourceFiles(sources).check((folder / 'source_files.json').read_bytes(), where='')

  lines = Packed(
    lambda content: content.splitlines()[1],
    lambda content, text: content.replace(content.splitlines()[1], text, 1),
  )
  files = {
    'config.gin': BINARY,
    'config_origins.txt': BINARY,
    'config_1.gin': BINARY,
    'goodput.jsonl': lines,
    'loggers.json': Packed(),
    'run.id': Packed(),
    'run.lock': Packed(),
    'metrics.jsonl': lines,
    'samples.jsonl': BINARY,
    'source_files.json': Packed(),
  }
  assert files.keys() >= START_FILES
  return Target(folder, files, use, errors=())


def t5x(folder: pathlib.Path) -> Target:
  """A checkpoint of T5X in its older form: one file of msgpack, and arrays next to it."""
  with tarfile.open(FIXTURES / 't5x_encoder_decoder' / 'checkpoint_legacy.tar.xz') as archive:
    archive.extractall(folder, filter='data')
  files = {
    path.relative_to(folder).as_posix(): Packed() if path.name == '.zarray' else BINARY
    for path in sorted(folder.rglob('*'))
    if path.is_file()
  }

  def use():
    checkpoint = T5xCheckpoint(folder / 'checkpoint_legacy')
    t5x_table(t5x_model(checkpoint.shapes), checkpoint.shapes)
    for name, shape in checkpoint.shapes.items():
      if math.prod(shape) < 2**20:  # else it does not fit on the disk
        checkpoint.read(name)

  return Target(folder, files, use)


TARGETS = (safetensors, t5x, checkpoints, local_checkpoints, prepared_rows, small_files)
# Mutations of each in `make test`, and in `make test-all`; small files take the longest.
QUICK = 60
MANY = dict.fromkeys(TARGETS, 1800) | {t5x: 700, small_files: 400, restored: 300}


def tried(make, folder, *, count: int, seed: int):
  logging.disable(logging.WARNING)
  try:
    outcomes = fuzz(make(folder), count=count, seed=seed)
  finally:
    logging.disable(logging.NOTSET)
  return outcomes


@pytest.mark.parametrize('make', TARGETS, ids=lambda make: make.__name__)
def test_a_damaged_file_raises_nothing_but_errors_of_ours(make, tmp_path):
  outcomes = tried(make, tmp_path, count=QUICK, seed=0)
  assert outcomes.total() == QUICK
  if make in (safetensors, prepared_rows):
    assert outcomes.total() - outcomes[''] > QUICK // 2, 'hardly anything was damaged'


@pytest.mark.slow
@pytest.mark.parametrize(
  'make, count', MANY.items(), ids=lambda value: getattr(value, '__name__', '')
)
def test_thousands_of_damaged_files_raise_nothing_but_errors_of_ours(make, count, tmp_path):
  assert tried(make, tmp_path, count=count, seed=1).total() == count


def test_nothing_in_the_place_of_a_small_file_stops_a_start(tmp_path):
  """Each file and each replacement, where the mutations above are a sample."""
  target = small_files(tmp_path / 'model')
  before = contents(target.folder)
  logging.disable(logging.WARNING)
  try:
    for name in sorted(START_FILES):
      for kind in REPLACEMENTS:
        replace(target.folder / name, kind)
        target.use()
        restore(target.folder, before)
  finally:
    logging.disable(logging.NOTSET)
