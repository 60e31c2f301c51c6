"""Times and numbers in words."""

from t5x_gpu.terminal.console import count, duration, seconds


def test_times_have_one_unit_and_no_exponent():
  assert [seconds(s) for s in (54_200, 99.96, 16, 1.434, 0.9996, 0.0168, 8.03e-6)] == [
    '54,200 s', '100 s', '16 s', '1.43 s', '1 s', '16.8 ms', '8.03 µs',
  ]  # fmt: skip
  assert [duration(d) for d in (3, 0.5, 5e-3, 1e-6)] == [
    '3.0 days',
    '12.0 hours',
    '7.2 minutes',
    '86.4 ms',
  ]
  assert [count(n) for n in (1.5e12, 3.1e6, 12_345, 7)] == ['1.5T', '3.1M', '12,345', '7']
