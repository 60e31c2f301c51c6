"""Types of command-line flags for argparse, which turns their errors into messages."""

import argparse
import math
import re

UNITS = {'B': 1, 'KB': 10**3, 'MB': 10**6, 'GB': 10**9, 'KiB': 2**10, 'MiB': 2**20, 'GiB': 2**30}
MIB, GIB = UNITS['MiB'], UNITS['GiB']


def positive_int(text: str) -> int:
  """Returns a whole number of at least 1."""
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'{text!r} is not a whole number of at least 1')
  return int(text)


def whole_number(text: str) -> int:
  """Returns a whole number of at least 0."""
  if not text.isdecimal():
    raise argparse.ArgumentTypeError(f'{text!r} is not a whole number of at least 0')
  return int(text)


def positive_float(text: str) -> float:
  """Returns a finite number above 0."""
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  if not 0 < value < math.inf:
    raise argparse.ArgumentTypeError(f'{text!r} is not a number above 0')
  return value


def byte_size(text: str) -> int:
  """Returns the number of bytes in '2GiB', '500MB' or '1000'."""
  match = re.fullmatch(r'(\d+(?:\.\d+)?)\s*([KMG]I?B)?', text.strip(), re.IGNORECASE)
  if not match or float(match[1]) <= 0:
    raise argparse.ArgumentTypeError(f'{text!r} is not a size such as 2GiB or 500MB')
  units = {unit.upper(): size for unit, size in UNITS.items()}
  return int(float(match[1]) * units[(match[2] or 'B').upper()])
