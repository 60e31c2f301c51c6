"""lm-evaluation-harness measures our models through its interface `LM`."""

import importlib.util
import json

import flax.traverse_util
import jax
import numpy as np
import pytest

from t5x_gpu.errors import ConfigError, DataError
from tests.helpers_chat import CHATML, talk, write_tokenizer
from tests.helpers_train import TINY_GIN, compiled_kept_in
from tests.messages import raises
from tests.test_infer import write_run

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('lm_eval') is None, reason='lm_eval is not installed: make test-harness'
)
LENGTH = 12


def made_of(folder, gin, **options):
  """Returns a model of the harness with random parameters, and (ids) -> log-probabilities after."""
  from t5x_gpu.checkpoint.params_files import ParamsReader
  from t5x_gpu.evaluation.harness import HarnessModel

  model, _ = write_run(folder, gin)
  reader = ParamsReader(folder)
  flat = {name: reader.read_at(name, ()) for name in reader.shapes}
  params = flax.traverse_util.unflatten_dict(flat, sep='/')

  def after(ids: list[int]) -> np.ndarray:
    row = np.array([ids], np.int32)
    ones = np.ones_like(row)
    batch = {
      'decoder_input_tokens': row,
      'decoder_target_tokens': ones,
      'decoder_loss_weights': ones,
      'decoder_causal_attention': ones,
      'decoder_segment_ids': ones,
    }
    return np.asarray(jax.nn.log_softmax(model.logits(params, batch)[0, -1]))

  return HarnessModel(str(folder), batch_size=4, **options), after


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  """A model of bytes with random parameters, and (text) -> log-probabilities of its next bytes."""
  folder = tmp_path_factory.mktemp('harness') / 'run'
  gin = f'{TINY_GIN}\nconfig.TransformerConfig.max_length = {LENGTH}\n'.replace(
    "'targets': 32", f"'targets': {LENGTH}"
  )
  with compiled_kept_in(folder / 'compiled'):
    lm, after = made_of(folder, gin)

    def next_bytes(text: str, *, starts: bool = True) -> np.ndarray:
      return after([0] * starts + [byte + 3 for byte in text.encode()])

    yield lm, next_bytes


def requests_of(kind, *arguments):
  from lm_eval.api.instance import Instance

  return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def log_probability(next_bytes, context, continuation, **options):
  total = 0.0
  for i, byte in enumerate(continuation.encode()):
    total += next_bytes(context + continuation[:i], **options)[byte + 3]
  return total


def test_continuations_have_the_models_log_probabilities_and_greedy_ones_say_so(made):
  lm, next_bytes = made
  pairs = [('ab', ' c'), ('a', 'bcd'), ('', 'xy'), ('abc ', 'd')]
  best = {c: int(next_bytes(c)[1:].argmax()) + 1 - 3 for c in map(chr, range(32, 127)) if c != ' '}
  context, byte = next((c, b) for c, b in best.items() if 32 < b < 127)
  pairs += [(context, chr(byte)), (context, chr(byte - 1))]
  found = lm.loglikelihood(requests_of('loglikelihood', *pairs))
  for (before, after), (score, _) in zip(pairs, found, strict=True):
    # A space at the end of a context belongs to the continuation.
    after, before = before[len(before.rstrip()) :] + after, before.rstrip()
    assert score == pytest.approx(log_probability(next_bytes, before, after), rel=1e-4)
  assert [greedy for _, greedy in found[-2:]] == [True, False]
  [text] = lm.generate_until(requests_of('generate_until', (context, {'max_gen_toks': 1})))
  assert text == chr(byte)


def test_contexts_lose_their_beginning_and_long_texts_are_scored_in_windows(made):
  lm, next_bytes = made
  long = 'the rest is silence'
  [(score, _)] = lm.loglikelihood(requests_of('loglikelihood', (long, '!?')))
  kept = long[-(LENGTH - 1) :]  # and one byte of the continuation is read
  want = log_probability(next_bytes, kept, '!?', starts=False)
  assert score == pytest.approx(want, rel=1e-4)

  short, whole = lm.loglikelihood_rolling(
    requests_of('loglikelihood_rolling', (long[:LENGTH],), (long,))
  )
  first = log_probability(next_bytes, '', long[:LENGTH])
  rest = log_probability(
    next_bytes, long[len(long) - LENGTH - 1 : LENGTH], long[LENGTH:], starts=False
  )
  assert short == pytest.approx(first, rel=1e-4)
  assert whole == pytest.approx(first + rest, rel=1e-4)


def test_a_text_without_ids_to_score_is_certain(made):
  lm, next_bytes = made
  nothing, (some, _) = lm.loglikelihood(requests_of('loglikelihood', ('ab', ''), ('ab', 'c')))
  assert nothing == (0.0, True)
  assert some == pytest.approx(log_probability(next_bytes, 'ab', 'c'), rel=1e-4)
  assert lm.loglikelihood_rolling(requests_of('loglikelihood_rolling', ('',))) == [0.0]


def test_inputs_of_an_encoder_lose_their_beginning(tmp_path):
  from t5x_gpu.evaluation.harness import HarnessModel

  gin = TINY_GIN.replace('models/decoder_demo.gin', 'models/encoder_decoder_demo.gin')
  gin = gin.replace("{'targets': 32}", "{'inputs': 8, 'targets': 8}")
  write_run(tmp_path / 'run', f'{gin}\nconfig.TransformerConfig.max_length = 8\n')
  with compiled_kept_in(tmp_path / 'compiled'):
    lm = HarnessModel(str(tmp_path / 'run'), batch_size=4, vocabulary='byte')
    (long, _), (kept, _), (other, _) = lm.loglikelihood(
      requests_of('loglikelihood', ('to be or not', 'ab'), (' or not', 'ab'), ('or', 'ab'))
    )
  assert long == pytest.approx(kept, rel=1e-5) and long != pytest.approx(other, rel=1e-5)


def test_a_text_ends_before_its_first_stop_and_unknown_settings_are_errors(made):
  lm, _ = made
  settings = {'max_gen_toks': 6, 'do_sample': True, 'temperature': 1.5, 'top_k': 40}
  free, cut = lm.generate_until(
    requests_of('generate_until', ('ab', settings), ('ab', {**settings, 'until': 'no such text'}))
  )
  assert isinstance(free, str) and isinstance(cut, str)
  contexts = [chr(byte) for byte in range(97, 123)]
  found = lm.generate_until(
    requests_of('generate_until', *((context, {'max_gen_toks': 6}) for context in contexts))
  )
  context, greedy = max(zip(contexts, found), key=lambda pair: len(set(pair[1])))
  end = greedy[-1]
  [cut] = lm.generate_until(
    requests_of('generate_until', (context, {'max_gen_toks': 6, 'until': [end]}))
  )
  assert greedy and cut == greedy[: greedy.index(end)]
  for bad in ({'num_beams': 4}, {'max_gen_toks': LENGTH}):
    with raises(ConfigError):
      lm.generate_until(requests_of('generate_until', ('ab', bad)))


@pytest.mark.tf
def test_the_chat_template_writes_contexts_and_ends_answers(tmp_path):
  from t5x_gpu.data.vocabularies.chat_template import ChatTemplate
  from t5x_gpu.data.vocabularies.huggingface import HuggingFaceVocabulary

  folder = write_tokenizer(tmp_path / 'tokenizer', CHATML)
  gin = TINY_GIN.replace('vocab_size = 264', 'vocab_size = 320')
  gin = gin.replace("'targets': 32", "'targets': 64")
  lm, after = made_of(tmp_path / 'run', gin, vocabulary=f'huggingface:{folder}')
  vocabulary = HuggingFaceVocabulary(folder)
  messages = talk('Name a river!', 'The Nile', 'And')[:3]
  context = lm.apply_chat_template(messages)
  assert context.endswith('And<|im_end|>\n<|im_start|>assistant\n')
  [(score, _)] = lm.loglikelihood(requests_of('loglikelihood', (context, 'five')))
  assert vocabulary.encode(context) == ChatTemplate(vocabulary).prompt(messages, where='here')
  # Spaces at the end of a context belong to the continuation, and so does a line break.
  before, whole = (vocabulary.encode(text) for text in (context.rstrip(), f'{context}five'))
  total = sum(after(whole[:i])[whole[i]] for i in range(len(before), len(whole)))
  assert whole[: len(before)] == before and score == pytest.approx(total, rel=1e-4)

  started = [*messages, {'role': 'assistant', 'content': 'It is '}]
  assert lm.apply_chat_template(started, add_generation_prompt=False) == f'{context}It is'
  assert lm.tokenizer_name and lm.chat_template(True) and not lm.chat_template(False)
  with raises(ConfigError):
    lm.chat_template('rag')


@pytest.mark.tf
def test_a_model_of_bytes_has_no_chat_template(made):
  lm, _ = made
  with raises(DataError):
    lm.apply_chat_template([{'role': 'user', 'content': 'ab'}])


def test_lm_eval_evaluates_a_task_of_multiple_choice(made, tmp_path):
  import lm_eval

  lm, next_bytes = made
  rows = [
    {'question': question, 'choices': choices, 'answer': 0}
    for question, choices in (('ab', ['c', 'd']), ('x', ['y', 'z']), ('q', ['u', 'v']))
  ]
  data = tmp_path / 'made.jsonl'
  data.write_text('\n'.join(map(json.dumps, rows)))
  task = {
    'task': 'made',
    'dataset_path': 'json',
    'dataset_kwargs': {'data_files': {'test': str(data)}, 'cache_dir': str(tmp_path / 'cache')},
    'test_split': 'test',
    'output_type': 'multiple_choice',
    'doc_to_text': '{{question}}',
    'doc_to_choice': '{{choices}}',
    'doc_to_target': '{{answer}}',
    'target_delimiter': '',
    'metric_list': [{'metric': 'acc'}],
  }
  found = lm_eval.simple_evaluate(lm, tasks=[task], bootstrap_iters=0)
  right = [
    next_bytes(r['question'])[ord(r['choices'][0]) + 3]
    > next_bytes(r['question'])[ord(r['choices'][1]) + 3]
    for r in rows
  ]
  assert found['results']['made']['acc,none'] == pytest.approx(np.mean(right))
