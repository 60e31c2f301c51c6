"""Tasks that mask parts of a text, over any text source of a language model.

  python_source_span_corruption   T5's objective on the standard library, for encoder-decoders
  python_source_mlm               BERT's objective on the standard library, for encoders
  span_corruption:TEXT, mlm:TEXT  the same over TEXT: python_source, text_files:PATTERN,
                                  text_lines:PATTERN, or files with a column of text (tables.py)

The byte vocabulary gets extra ids for masked parts: 359 ids for span corruption, 260 for `mlm`.
"""

from collections.abc import Callable, Mapping

from t5x_gpu.data.tasks import builtin, chat, objectives, preference, tables
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.errors import did_you_mean, task_error

NUM_SENTINELS = 100  # as in T5
_FILE_TASKS = {**builtin.PATTERN_TASKS, **tables.PATTERN_TASKS}
# Names (without the part after a colon) of tasks that may have one text per example.
TEXTS = (*builtin.TEXTS, *tables.PATTERN_TASKS)


def _source(text: str, *, objective: str) -> seqio.DataSource:
  """Returns the source of {'targets': text} named `text`, such as 'text_files:PATTERN'."""
  kind, colon, pattern = text.partition(':')
  if kind not in TEXTS or bool(colon) == (kind == 'python_source'):
    raise task_error(
      f'{objective}: cannot mask parts of {text!r}.' + did_you_mean(kind, TEXTS),
      fix=f'Set MIXTURE_OR_TASK_NAME to {objective}:python_source, or to {objective}: and '
      'text_files:PATTERN, text_lines:PATTERN, or '
      + ', '.join(name for name in tables.PATTERN_TASKS if name != 'text_pairs')
      + ' with a column of text.',
    )
  task = _FILE_TASKS[kind](pattern) if colon else seqio.TaskRegistry.get(kind)
  if chat.is_chat(task) or preference.has_pairs(task):
    raise task_error(
      f'{text!r} has conversations or pairs, and {objective} masks parts of texts.',
      fix="Give files with the key 'text', or remove the objective to train on them.",
    )
  if 'inputs' in task.output_features:
    raise task_error(
      f"{text!r} has 'inputs' and 'targets'; {objective} makes both from a single text.",
      fix="Give files with the key or column 'text' (or choose one: #text=COLUMN), or remove the "
      'objective to train on the pairs.',
    )
  return task.source


def _make(
  objective: str, preprocessor: Callable[..., tf.data.Dataset], text: str, extra_ids: int, name: str
) -> seqio.Task:
  return builtin.make_task(
    name or f'{objective}.{text.partition(":")[0]}',
    source=_source(text, objective=objective),
    preprocessors=(builtin.TOKENIZE, preprocessor),
    output_features=builtin.features('inputs', 'targets', extra_ids=extra_ids),
  )


def span_corruption(text: str, *, name: str = '') -> seqio.Task:
  """Returns T5's span corruption of the source `text`. Raises DataError if it does not exist."""
  return _make('span_corruption', objectives.span_corruption, text, NUM_SENTINELS, name)


def mlm(text: str, *, name: str = '') -> seqio.Task:
  """Returns BERT's masked language model of the source `text`. Raises DataError if unknown."""
  return _make('mlm', objectives.masked_lm, text, 1, name)


OWN_TASKS = ('python_source_span_corruption', 'python_source_mlm')
for _name, _objective in zip(OWN_TASKS, (span_corruption, mlm)):
  builtin.register(_objective('python_source', name=_name))

PATTERN_TASKS: Mapping[str, Callable[[str], seqio.Task]] = {
  'span_corruption': span_corruption,
  'mlm': mlm,
}
