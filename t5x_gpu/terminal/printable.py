"""Makes text of files safe for a terminal: no escape sequences or control characters."""

import re

# Excludes line breaks and tabs. U+0080 to U+009F are escape sequences of one character. Surrogates,
# which file names may contain, cannot be printed.
_CONTROL = re.compile(r'[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]')


def printable(text: str) -> str:
  r"""Returns `text` with control characters spelled out: `\x1b` for an escape."""
  return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)
