"""24 hosts of eight GPUs: `fsdp` over 24 or 192 of them, although few sizes are multiples of 3."""

import os
import re
import subprocess
import sys

import pytest

from tests.helpers_train import DEADLINE_SECONDS, REPOSITORY

RUN = """
from __gin__ import dynamic_registration
from t5x_gpu.partitioning import partitioner
include 'gin_configs/models/{model}.gin'
include 'gin_configs/runs/pretrain.gin'
MODEL_DIR = 'runs/of_24_hosts'
TRAIN_STEPS = 10
BATCH_SIZE = 384
MIXTURE_OR_TASK_NAME = 'none'
TASK_FEATURE_LENGTHS = {lengths}
"""

BOTH = {'inputs': 512, 'targets': 512}
LENGTHS = {'bert_large': {'inputs': 512}}


def plan(folder, model: str, **partitioner: int) -> subprocess.CompletedProcess:
  """Returns the end of `t5x_gpu.plan --dry_run` on 24 hosts."""
  (folder / 'run.gin').write_text(RUN.format(model=model, lengths=LENGTHS.get(model, BOTH)))
  flags = [f'--gin.Partitioner.{name}={value}' for name, value in partitioner.items()]
  flags += ['--gin.PACK=False'] if model in LENGTHS else []
  return subprocess.run(
    [sys.executable, '-m', 't5x_gpu.plan', '--dry_run', '--devices=192', '--hosts=24']
    + [f'--gin_file={folder / "run.gin"}', *flags],
    cwd=REPOSITORY,
    env={**os.environ, 'PYTHONPATH': str(REPOSITORY)},
    capture_output=True,
    text=True,
    timeout=DEADLINE_SECONDS,
  )


def check(folder, model: str, **partitioner: int) -> str:
  done = plan(folder, model, **partitioner)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.mark.slow
@pytest.mark.process
def test_the_mesh_table_reports_the_padding_of_an_8b_decoder_on_192_devices(tmp_path):
  text = check(tmp_path, 'llama3_8b', fsdp=192)
  assert (
    'fsdp = 192 does not divide embed = 4096: 30 arrays in memory are padded to 4224, 13 MiB per '
    'device more than an even split'
  ) in text
  assert 'data = 3 with fsdp = 64 divides, for 3 times the memory for the state' in text
  assert 'fsdp splits 6 arrays along vocab = 128256, which it divides' in text
  assert '8,030,261,248 parameters' in text


LAYOUTS = {
  'fsdp_24': dict(fsdp=24),
  'fsdp_192': dict(fsdp=192),
  'fsdp_24_model_8': dict(fsdp=24, num_partitions=8),
}
MODELS = ('llama3_8b', 'llama3_70b', 't5_3b', 'bert_large')


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
  'model, layout',
  # The 30522 tokens of BERT do not divide over 8.
  [(m, name) for m in MODELS for name in LAYOUTS if (m, name) != ('bert_large', 'fsdp_24_model_8')],
)
def test_models_fit_24_hosts(tmp_path, model, layout):
  text = check(tmp_path, model, **LAYOUTS[layout])
  assert 'does not divide embed' in text


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
  'model, wrong',
  [('t5_base', 'heads = 12'), ('gpt2_xl', 'heads = 25'), ('bert_large', 'vocab = 30522')],
)
def test_widths_that_do_not_divide_over_model_are_an_error_with_legal_partitions(
  tmp_path, model, wrong
):
  done = plan(tmp_path, model, fsdp=24, num_partitions=8)
  text = done.stdout + done.stderr
  assert done.returncode and f'{wrong} does not divide over model=8' in text
  legal = re.search(r'Set Partitioner.num_partitions = [\d, or]*?(\d+)\.', text)[1]
  check(tmp_path, model, fsdp=24, num_partitions=int(legal))
