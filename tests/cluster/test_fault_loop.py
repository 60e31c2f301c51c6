"""A run on four hosts in network namespaces: each kind of fault, and two at once."""

import pytest

from benchmarks import faults
from tests.cluster.netlab import NetLabError

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_every_fault_costs_a_restart_and_nothing_else(tmp_path):
  flags = ['--hosts=4', '--devices=1', f'--faults={len(faults.KINDS)}', '--pairs=1']
  try:
    found = faults.main([*flags, f'--folder={tmp_path}', f'--out={tmp_path / "faults.json"}'])
  except NetLabError as e:
    pytest.skip(str(e))
  assert len(found['rows']) == len(faults.KINDS) + 1
  for row in found['rows']:
    assert row['orphans'] == 0 and not row['ended_launches'], row
    # Each part of a local checkpoint is on two hosts.
    assert len(row['faults']) > 1 or row['lost_before_local'] == 0, row
    # Killed with its agent, long before a watchdog would end it.
    assert row['strays_seconds'] < 10, row
  assert found['exit_codes'] == [85] * 4 and found['left'] == 0
  assert found['losses']['missing'] == []
  assert found['losses']['largest_error'] < faults.TOLERANCE, found['losses']
  assert found['ledger']['damaged_lines'] == 0
  assert abs(found['ledger']['seconds_counted_twice']) < 0.1, found['ledger']
  assert found['ledger']['starts_without_a_cause'] == 0, found['ledger']
