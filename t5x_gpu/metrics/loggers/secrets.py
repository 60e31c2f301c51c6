"""Removes keys and passwords from text before it is printed."""

import os
import re

_SECRET_NAME = re.compile(r'KEY|TOKEN|PASSWORD|SECRET', re.IGNORECASE)
_LEAST_LENGTH = 6  # shorter values would also remove ordinary words
_IN_URL = re.compile(r'(://)[^/\s@]+@')


def redacted(text: str) -> str:
  """Returns `text` without values of secret environment variables or passwords in URLs."""
  for name, value in os.environ.items():
    if len(value) >= _LEAST_LENGTH and _SECRET_NAME.search(name):
      text = text.replace(value, f'[{name}]')
  return _IN_URL.sub(r'\1[password]@', text)
