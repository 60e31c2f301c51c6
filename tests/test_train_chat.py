"""A converted model is trained on conversations, as docs/finetune.md says, and then answers."""

import contextlib
import importlib
import io
import json
import os
import pathlib

import flax.traverse_util
import jax
import numpy as np
import pytest
import rich.console

from t5x_gpu import convert, infer, train
from t5x_gpu.checkpoint.params_files import ParamsReader
from t5x_gpu.config import gin_loader
from t5x_gpu.data import data_module
from t5x_gpu.data.vocabularies.huggingface import HuggingFaceVocabulary
from tests.conversion.hf_files import CONFIGS, write_model
from tests.helpers_chat import CHATML, chatml_by_hand, talk, write_talks, write_tokenizer
from tests.helpers_pages import blocks
from tests.helpers_train import compiled_kept_in, run_here

pytest.importorskip('tokenizers')
pytestmark = [pytest.mark.tf, pytest.mark.slow]
STEPS = 30
TALKS = [talk(f'What is {i}?', 'It is five!') for i in range(60)]
BINDINGS = {
  'MIXTURE_OR_TASK_NAME': "'jsonl:chats.jsonl'",
  'TASK_FEATURE_LENGTHS': {'targets': 64},
  'BATCH_SIZE': 4,
  'TRAIN_STEPS': STEPS,
  'LEARNING_RATE': 1e-2,
  'WARMUP_STEPS': 1,
  'LOG_PERIOD': 1,
  'LOGGERS': "('jsonl',)",
}
ARGV = ['--gin_file=chat.gin', *(f'--gin.{name}={value}' for name, value in BINDINGS.items())]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A converted Llama whose id 0 is a word, and its run on 60 conversations; the current folder."""
  path = tmp_path_factory.mktemp('chat')
  write_model(path / 'hf', {**CONFIGS['llama'], 'vocab_size': 384})
  write_tokenizer(path / 'hf', CHATML, zero_is_a_word=True)
  write_talks(path / 'chats.jsonl', TALKS)
  [text] = blocks('finetune.md', 'gin')
  (path / 'chat.gin').write_text(text)
  with contextlib.chdir(path), compiled_kept_in(path / 'compiled'):
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    assert convert.main(['--from=hf', '--to=runs/llama', '--check=tensors']) == 0
    result = run_here(lambda: train.main(ARGV), num_devices=1)
    assert result.code == 0, result.err
    yield path


def losses(folder):
  lines = map(json.loads, (folder / 'runs/llama_chat/metrics.jsonl').read_text().splitlines())
  return {line['step']: line['train/loss'] for line in lines if 'train/loss' in line}


def test_the_loss_is_that_of_a_mask_made_by_hand(folder):
  found = gin_loader.load(['chat.gin'], bindings=[a.removeprefix('--gin.') for a in ARGV[1:]])
  model, config = (found.arguments()[name] for name in ('model', 'train_dataset_cfg'))
  with contextlib.closing(data_module.batches_for(model, config, repeat=True)) as batches:
    batch = next(batches)
  vocabulary = HuggingFaceVocabulary(folder / 'hf')
  by_hand = {}
  for messages in TALKS:
    ids, loss = chatml_by_hand(vocabulary, messages)
    by_hand[tuple(ids[1:])] = loss[1:]
  weights = np.zeros_like(batch['decoder_loss_weights'])
  for i, segments in enumerate(batch['decoder_segment_ids']):
    for s in range(1, segments.max() + 1):
      targets = batch['decoder_target_tokens'][i][segments == s]
      weights[i][segments == s] = by_hand[tuple(targets.tolist())]
  assert 0 < weights.sum() < (batch['decoder_segment_ids'] > 0).sum() / 2
  reader = ParamsReader(pathlib.Path('runs/llama'), step=None)
  flat = {tuple(name.split('/')): reader.read_at(name, ()) for name in reader.shapes}
  logits = model.logits(flax.traverse_util.unflatten_dict(flat), batch)
  each = jax.nn.log_softmax(logits)
  each = -np.take_along_axis(np.asarray(each), batch['decoder_target_tokens'][..., None], -1)[
    ..., 0
  ]
  assert losses(folder)[1] == pytest.approx((each * weights).sum() / weights.sum(), rel=1e-3)
  everywhere = batch['decoder_segment_ids'] > 0
  assert losses(folder)[1] != pytest.approx((each * everywhere).sum() / everywhere.sum(), rel=3e-3)


def test_the_model_learns_the_answer_and_gives_it_to_a_prompt_of_the_template(folder):
  found = losses(folder)
  assert found[STEPS] < 0.2 * found[1]
  prompts = [{'messages': talk('What is 77?')[:1], 'id': 'a'}]
  pathlib.Path('p.jsonl').write_text(''.join(json.dumps(prompt) + '\n' for prompt in prompts))
  flags = ['--checkpoint=runs/llama_chat', '--gin.DecodingConfig.max_decode_length=16']
  result = run_here(lambda: infer.main([*flags, '--prompts=p.jsonl', '--chat']), num_devices=1)
  assert result.code == 0, result.err
  [record] = map(json.loads, result.out.splitlines())
  assert (record['prediction'], record['is_complete']) == ('It is five!', True)
  assert record['id'] == 'a' and record['inputs'] == 'What is 77?'
  assert 'chat template writes the prompts' in result.err
  result = run_here(lambda: infer.main([*flags, '--prompts=p.jsonl']), num_devices=1)
  assert result.code == 1 and 'Add --chat' in result.err


def test_preview_shows_in_color_where_the_loss_is(folder):
  command = importlib.import_module('t5x_gpu.data_tools')
  result = run_here(lambda: command.main(['preview', *ARGV, '--rows=1']))
  assert result.code == 0, result.err
  assert 'positions, padding' in result.out and ', loss on ' in result.out
  assert '  [1] <|im_start|>user\nWhat is ' in result.out
  assert '\n  It is five!<|im_end|>\n' in result.out
  out = io.StringIO()
  console = rich.console.Console(file=out, force_terminal=True, color_system='standard', width=200)
  args = command.cli.parse_args('data', '', ['preview', *ARGV], extra=command._flags)
  command.preview(command._opened(args), num_rows=1, console=console)
  assert '\x1b[36m  It is five!<|im_end|>' in out.getvalue()  # cyan; the rest is dim
  assert '\x1b[2;36m  [1] <|im_start|>user' in out.getvalue()
