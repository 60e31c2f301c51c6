"""A tokenizer with chat templates in the style of published ones, and conversations."""

import json

CHATML = (
  "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + "
  "'<|im_end|>\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
  '{{- bos_token }}{% for message in messages %}'
  "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' "
  "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
  "{% if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
  '{% endif %}'
)
GEMMA = (
  "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
  "{{ raise_exception('System role not supported') }}{% endif %}"
  '{% for message in messages %}'
  "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
  "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
  '{% endfor %}'
  "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
# Empty thoughts in an answer to the last question alone, as in Qwen 3.
THINKING = (
  "{% set last = namespace(user=0) %}{% for message in messages if message.role == 'user' %}"
  '{% set last.user = loop.index %}{% endfor %}{% set count = namespace(user=0) %}'
  '{% for message in messages %}'
  "{% if message.role == 'user' %}{% set count.user = count.user + 1 %}{% endif %}"
  "{{ '<|im_start|>' + message.role + '\\n' }}"
  "{% if message.role == 'assistant' and count.user == last.user %}"
  "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
  "{{ message.content + '<|im_end|>\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The end of the whole text after the last answer, as in Phi 3.
TEXT_END = (
  "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + "
  "'<|im_end|>\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
  '{% else %}{{ eos_token }}{% endif %}'
)
# `{% generation %}` around what the assistant writes, the end of its turn included.
GENERATION = """
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {{- '<|im_start|>assistant\\n' }}
    {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {{- '\\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
SPECIAL = (
  '<|pad|>',
  '<bos>',
  '<eos>',
  '<|im_start|>',
  '<|im_end|>',
  '<|start_header_id|>',
  '<|end_header_id|>',
  '<|eot_id|>',
  '<start_of_turn>',
  '<end_of_turn>',
)
TEXTS = (
  'What is 2 plus 3? It is five.',
  'system user assistant model tool\n',
  'You are brief. Name a river! The Nile \u00e9 \U0001f600',
)


def talk(*texts, system=None):
  """Returns alternating messages of the user and the assistant."""
  roles = ('user', 'assistant') * len(texts)
  first = [] if system is None else [{'role': 'system', 'content': system}]
  return first + [{'role': role, 'content': text} for role, text in zip(roles, texts)]


TALKS = (
  talk('What is 2 plus 3?', 'It is five.'),
  talk('Name a river!', 'The Nile \U0001f600', 'And a longer one?', '  None is.\n'),
  talk('Hi', 'Hello! What is it?', system='You are brief.'),
)


def write_tokenizer(folder, template, *, zero_is_a_word=False, config=None):
  """Writes a byte-level tokenizer of 300 ids and its template; returns the folder."""
  import tokenizers

  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300 - zero_is_a_word * len(SPECIAL),
    show_progress=False,
    special_tokens=[] if zero_is_a_word else list(SPECIAL),
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
  )
  tokenizer.train_from_iterator(TEXTS * 4, trainer)
  tokenizer.add_special_tokens(list(SPECIAL))
  folder.mkdir(exist_ok=True)
  tokenizer.save(str(folder / 'tokenizer.json'))
  names = {'bos_token': '<bos>', 'eos_token': '<eos>', 'pad_token': '<|pad|>'}
  content = {'tokenizer_class': 'PreTrainedTokenizerFast', **names, **(config or {})}
  if template is not None:
    content['chat_template'] = template
  (folder / 'tokenizer_config.json').write_text(json.dumps(content))
  return folder


def write_talks(path, talks, *, key='messages', **fields):
  """Writes conversations as JSON lines; returns the path."""
  path.write_text(''.join(json.dumps({key: talk, **fields}) + '\n' for talk in talks))
  return path


def chatml_by_hand(vocabulary, messages):
  """Returns the model's ids of messages in CHATML, and 1 where the assistant writes, else 0."""
  ids, loss = [], []
  for message in messages:
    for text, has_loss in (
      (f'<|im_start|>{message["role"]}\n', False),
      (f'{message["content"]}<|im_end|>', message['role'] == 'assistant'),
      ('\n', False),
    ):
      piece = vocabulary.encode(text)
      ids += piece
      loss += [int(has_loss)] * len(piece)
  return ids, loss
