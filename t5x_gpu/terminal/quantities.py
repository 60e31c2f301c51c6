"""Formats times and large numbers."""


def seconds(value: float) -> str:
  """Returns '54,200 s', '1.23 s', '45.6 ms' or '8.03 µs'."""
  if value >= 99.95:
    return f'{value:,.0f} s'
  for size, unit in ((1, 's'), (1e-3, 'ms')):
    if value >= 0.9995 * size:  # rounded to three digits, 999.6 would have an exponent
      return f'{value / size:.3g} {unit}'
  return f'{value * 1e6:.3g} µs'


def duration(days: float) -> str:
  """Returns '12.3 days', '4.5 hours', '6.7 minutes' or '8.9 s'."""
  if days >= 2:
    return f'{days:,.1f} days'
  minutes = days * 24 * 60
  if minutes >= 60:
    return f'{minutes / 60:.1f} hours'
  return f'{minutes:.1f} minutes' if minutes >= 1 else seconds(minutes * 60)


def count(number: float) -> str:
  """Returns '1.5T', '26.2B', '3.1M', '12,345' or '0.0123'."""
  for size, letter in ((1e12, 'T'), (1e9, 'B'), (1e6, 'M')):
    if number >= size:
      return f'{number / size:.3g}{letter}'
  return f'{number:,.0f}' if number >= 10 or number == int(number) else f'{number:.2g}'
