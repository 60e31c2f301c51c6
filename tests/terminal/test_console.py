"""Times, sizes and numbers in words."""

from t5x_gpu.terminal.console import count, duration, mib, seconds, show


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


def test_sizes_have_the_largest_unit_that_they_reach():
  assert [show(n) for n in (2000 * 2**30, 2**30, 2**30 - 1, 0)] == [
    '2,000.00 GiB',
    '1.00 GiB',
    '1024.0 MiB',
    '0.0 MiB',
  ]
  assert [show(n, GB='.3g', B='.0f') for n in (1.5e9, 1e9 - 1)] == ['1.5 GB', '999999999 B']
  assert mib(1.5 * 2**30) == '1,536.00'
