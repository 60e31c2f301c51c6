"""Plain English in docs, messages, comments and names: a list of idioms that must not come back.

Each idiom has the wording to use instead. A quotation of somebody else's text can be excused in
`QUOTED`.
"""

import functools
import io
import pathlib
import re
import tokenize
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[1]
THIS = pathlib.Path(__file__).resolve()
TEXT_SUFFIXES = {'.md', '.gin', '.sh', '.slurm', '.yaml', '.toml', '.html'}

IDIOMS = {
  r'\b(is|are|was|be) told\b|\btold (of|that|by|as|now)\b': 'reported, printed; knows',
  r'\banew\b': 'again, from scratch',
  r'(?<![Tt]here )\b(is|are|was|were) no (?!(more|longer|less|better|need|point|way)\b)[a-z]': (
    'is not a ..., there is no ...'
  ),
  r"\bof one's own\b|\b(data|model|one|module|task|file)s? of (its|their|your) own\b": (
    'custom, your own, separate'
  ),
  r'\bto the bit\b': 'bit-exactly',
  r'\bto (six|seven|eight|\d) places\b': 'equal to eight digits',
  r'\bplays? no part\b': 'is ignored',
  r'\bbelongs? to no\b': 'unknown, is not in any',
  r'\b(tell|tells|telling|told)\b.{0,25}\bapart\b': 'distinguish; a text classifier',
  r'\b(is|are|was|were) nothing\b(?! (to|but|else)\b)': 'are skipped, is ignored',
  r'\b(is|are|was|were) to (be|[a-z]+)\b(?=[^?]*$)': 'will, must, becomes',
  r'\bsays? (of|which|what)\b': 'names, describes, prints',
  r'\bknows? no\b': 'does not know, does not support',
  r'\b(gives?|needs?|names?|holds?|sees?|takes?) no [a-z]': 'does not give, does not need',
  r'\bbeside(?!s)\b': 'next to, in addition to, with',
  r'\bgoes on\b': 'continues',
  r'\bfor want of\b': 'out of, without',
  r'\bsaid differently\b': 'instead of',
  r'\bother values than\b': 'differs from',
  r'\bof yours\b': 'your own',
  r'\bderived through\b': 'differentiated through',
  r'\bdoes? without\b|\bdo without\b': 'does not need',
  r'\bwithout a word\b': 'silently',
  r'\b(hence|thereof|thereby|therein|whereof|lest|nought|upon)\b': 'so, of it, on',
  r'\bas it (was|is) not\b|\bis not as it\b': 'changed',
  r'\bbe it\b': 'whether',
  r'\bwhat there is to\b': 'everything that can be',
  r'\bplays?\b.{0,12}\b(devices|GPUs)\b|\b(devices|GPUs)\b.{0,30}\bplays?\b': 'simulated',
  r'\bnot any ?more\b|\bno more\b(?= [a-z])(?! than\b)': 'no longer',
  r'\blikeliest\b': 'most probable',
  r'\bcosts? a warning\b': 'warns',
  r'\b(is|are|was|were) gone for\b': 'is down, is lost, is missing',
  r'\bhow far (it|they|he) came\b': 'how far it got',
  r'\b(folder|level)s? of (its|their|your) own\b': 'a subfolder, its own level',
  r'\bmisspelt\b': 'misspelled, unknown',
  r'colour|behaviour|neighbour|favour|\bcentre|(recogni|normali|initiali|optimi|minimi)s[ei]': (
    'American spelling: color, recognize'
  ),
}
# A pronoun phrase in place of a noun. Not in names of tests, which are short.
IDIOMS_IN_PROSE = {
  r'\bof (ours|theirs)\b': 'of t5x_gpu, foreign',
  r'\b(nobody|somebody)\b': 'no process, another user',
  r'\bwhatever\b': 'for any ..., regardless of',
  r'\b(that|those) of\b': 'name the noun: the losses of, equals',
  r'\bthose (that|which|in|from)\b': 'name the noun: rows that, files in',
  r'\bthe ones? (that|which|of|in|whose)\b': 'name the noun: the file that',
  r'\bwhat (it|they) (is|are|has|have|had|holds?|needs?|gets?|takes?|knows?|found|stores?)\b': (
    'name the noun: its size, their state'
  ),
  r'\bsays? nothing\b': 'is unrelated to, does not apply to',
  r'(?<=# )Of (a|an|the|its|this|all|each|every)\b': 'name the noun: Number of, Size of',
  r'^\s+\w+: of (a|an|the|its|this|all|each|every|these|those)\b': (
    'name the noun: `folder: folder of the run`'
  ),
}
NAMES = {
  '_say': '_log',
  '_tell': '_publish',
  '_hear': '_wait_for',
  'told': 'reported',
  'why': 'reason',
  'made_from': 'source_config',
  'text_of': 'text_config',
}
# In names of tests only. In prose these words are often right.
IDIOMS_IN_TEST_NAMES = {
  r'\b(told|tells?)\b': 'reported, printed, distinguished',
  r'\bof (its|their) own\b': 'separate, independent',
}
# (file, words): what someone else wrote.
QUOTED: set[tuple[str, str]] = set()


def files() -> list[pathlib.Path]:
  folders = ('t5x_gpu', 'tests', 'docs', 'gin_configs', 'scripts', 'benchmarks')
  found = [path for folder in folders for path in (ROOT / folder).rglob('*')]
  found += [path for path in ROOT.iterdir() if path.is_file()]
  return [
    path
    for path in sorted(found)
    if path.suffix in {'.py', *TEXT_SUFFIXES}
    and path.resolve() != THIS
    and 'golden' not in path.parts
    and 'results' not in path.parts
  ]


def words_of(tokens: Iterable[tokenize.TokenInfo]) -> list[tuple[int, str, bool]]:
  """Returns (line, text, whether it is a name) of all that a person reads in a Python file."""
  found = []
  kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, 'FSTRING_MIDDLE', -1)}
  for token in tokens:
    if token.type in kinds:
      lines = token.string.splitlines()
      found += [(token.start[0] + i, line, False) for i, line in enumerate(lines)]
    elif token.type == tokenize.NAME:
      found.append((token.start[0], token.string, True))
  return found


def names_in_tests(tokens: Iterable[tokenize.TokenInfo]) -> list[tuple[int, str]]:
  """Returns (line, name) of the test functions of a file, and of its strings that are one name.

  The strings are mostly ids of parametrized cases.
  """
  found = []
  for token in tokens:
    is_test = token.type == tokenize.NAME and token.string.startswith('test_')
    is_id = token.type == tokenize.STRING and re.fullmatch(r"'\w+'", token.string)
    if is_test or is_id:
      found.append((token.start[0], token.string.strip("'")))
  return found


@functools.cache
def idioms() -> re.Pattern[str]:
  return re.compile('|'.join(f'(?:{idiom})' for idiom in {**IDIOMS, **IDIOMS_IN_PROSE}))


@functools.cache
def idioms_in_test_names() -> re.Pattern[str]:
  return re.compile('|'.join(f'(?:{idiom})' for idiom in {**IDIOMS, **IDIOMS_IN_TEST_NAMES}))


def idiom_in_test_name(name: str) -> re.Match[str] | None:
  return idioms_in_test_names().search(name.replace('_', ' '))


def better(words: str) -> str:
  rows = {**IDIOMS, **IDIOMS_IN_PROSE, **IDIOMS_IN_TEST_NAMES}.items()
  return next(text for idiom, text in rows if re.search(idiom, words))


def problems(path: pathlib.Path) -> list[str]:
  name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding='utf-8')
  found = []
  words = [(number, line, False) for number, line in enumerate(text.splitlines(), 1)]
  names = []
  if path.suffix == '.py':
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    words = words_of(tokens)
    if path.is_relative_to(ROOT / 'tests'):
      names = [(1, path.stem), *names_in_tests(tokens)]
  for line, text, is_name in words:
    if is_name:
      if text in NAMES:
        found.append(f'{name}:{line}: the name {text!r}; better: {NAMES[text]}')
      continue
    for match in idioms().finditer(text):
      if (name, match[0]) not in QUOTED:
        found.append(f'{name}:{line}: {match[0]!r}; better: {better(text)}')
  for line, words in names:
    if match := idiom_in_test_name(words):
      found.append(f'{name}:{line}: {words!r}; better: {better(match[0])}')
  return found


def test_no_idiom_comes_back():
  found = [problem for path in files() for problem in problems(path)]
  assert not found, '\n'.join(found)


def test_an_idiom_is_found(tmp_path):
  for text in ('x = 1  # y is told of it', 'raise ValueError("x is no y")', '"""Made anew."""'):
    assert idioms().search(text), text
  for text in ('that of a run', '  folder: of the run.', '# Of a run', 'what it needs', 'of ours'):
    assert idioms().search(text), text
  for text in ('there is no GPU', 'as told in the docs', 'no longer', 'is no longer', 'beside'):
    assert bool(idioms().search(text)) == (text == 'beside'), text


def test_an_idiom_in_the_name_of_a_test_is_found():
  for name in ('test_x_is_no_y', 'test_resumes_to_the_bit', 'test_it_tells_all', 'test_x_told'):
    assert idiom_in_test_name(name), name
  assert not idiom_in_test_name('test_there_is_no_gpu_and_a_row_is_not_read')
