"""Reads the user's XLA_FLAGS and adapts them to the installed jaxlib."""

import pathlib
import re
from collections.abc import Sequence
from typing import Optional

from t5x_gpu.errors import did_you_mean
from t5x_gpu.runtime.xla import probe as xla_probe
from t5x_gpu.runtime.xla.legacy import LEGACY
from t5x_gpu.runtime.xla.table import TABLE

_TOKEN = re.compile(r"""--?[A-Za-z_]\w*(?:=(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\S*))?(?=\s|$)""")
_PIPELINE = re.compile(r'xla_gpu_pipeline_(all_gather|all_reduce|reduce_scatter)')


def read_flags(text: str) -> tuple[list[str], list[str]]:
  """Returns the flags in XLA_FLAGS, one each, and a sentence for each word that is not a flag.

  XLA reads a value that does not begin with '-' as a file name, and aborts if that file is missing.
  Otherwise it silently stops reading at the first word that is not a flag.

  Args:
    text: the value of XLA_FLAGS.
  """
  warnings = []
  text = text.strip()
  if text and not text.startswith('-'):
    try:
      text = pathlib.Path(text).read_text(encoding='utf-8').strip()
    except (OSError, ValueError):
      pass  # Not a file name: read it word by word, below.
  flags, position = [], 0
  while position < len(text):
    if text[position].isspace():
      position += 1
    elif match := _TOKEN.match(text, position):
      flags.append(match.group())
      position = match.end()
    else:
      word = text[position:].split(maxsplit=1)[0]
      position += len(word)
      warnings.append(
        f'XLA_FLAGS contains the literal {word}: in single quotes the shell does not expand it, so '
        'your earlier flags are lost. Use double quotes, "${XLA_FLAGS} --xla_..."'
        if '$' in word
        else f'XLA_FLAGS contains {word!r}, which is not a flag: dropped. XLA would have ignored '
        'everything after it, or read it as a file name.'
      )
  return flags, warnings


def known_flags(
  flags: Sequence[str], system: xla_probe.Installed
) -> tuple[list[str], dict[str, str], list[str]]:
  """Returns the flags to set, dropped flag -> reason, and a sentence for each change."""
  refused = xla_probe.refused_flags(flags, system=system)
  now = {
    flag: list(legacy.now(_value(flag)) if legacy.now else ())
    for flag in refused
    if (legacy := LEGACY.get(xla_probe.flag_name(flag)))
  }
  translated = [new for news in now.values() for new in news]
  unusable = xla_probe.refused_flags(translated, system=system)
  known, dropped, notes = [], {}, []
  for flag in flags:
    name = xla_probe.flag_name(flag)
    if flag not in refused:
      known.append(flag)
    elif flag in now:
      news = [new for new in now[flag] if new not in unusable]
      known += news
      reason = LEGACY[name].reason
      if not news:
        dropped[name] = refused[flag]
      notes.append(
        f'{flag} is {"replaced by " + " ".join(news) if news else "dropped"}: '
        f'{refused[flag]}; {reason}.'
      )
    else:
      dropped[name] = refused[flag]
      notes.append(
        f'{flag} is dropped: {refused[flag].rstrip(".")}.'
        + did_you_mean(name, {row.name for row in TABLE} | set(LEGACY))
      )
  return known, dropped, notes


def _value(flag: str) -> Optional[str]:
  return flag.split('=', 1)[1].strip('"\'') if '=' in flag else None


def canonical(name: str) -> str:
  match = _PIPELINE.fullmatch(name)
  return f'xla_gpu_enable_pipelined_{match[1]}' if match else name
