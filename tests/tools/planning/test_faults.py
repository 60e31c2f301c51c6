"""What faults cost: agents replayed on a clock, and goodput by interval and spares."""

import json
import math

import pytest

from t5x_gpu.metrics.goodput import GOODPUT
from t5x_gpu.tools.planning.faults import (
  DAY,
  Machines,
  Saving,
  Stretch,
  best_interval,
  goodput,
  measured_run,
  replay,
)

SAVING = Saving(name='MODEL_DIR', stall_seconds=5, commit_seconds=20)


def machines(num_hosts: int = 8, **changes) -> Machines:
  values = {
    'num_hosts': num_hosts,
    'gpus_per_host': 8,
    'host_counts': tuple(range(1, num_hosts + 1)),
    'faults_per_gpu_day': 5e-3,
    'lost_host_share': 0.5,
    'repair_seconds': DAY / 4,
    'start_seconds': 60,
    'save_seconds': 20,
  }
  return Machines(**{**values, **changes})


def test_durations_of_saves_are_read_from_the_ledger_and_from_the_checkpoints(tmp_path):
  lines = [
    (10, 'save', 0),
    (13, 'productive', 2),
    (20, 'save', 2),
    (20, 'save', 7),  # thirty seconds later
    (20, 'productive', 10),
    (30, 'save', 10),  # killed in this one
    (30, 'save', 11),
  ]
  (tmp_path / GOODPUT).write_text(
    ''.join(
      json.dumps({'run': run, 'at': at, 'step': step, 'phase': phase, 'seconds': {'save': save}})
      + '\n'
      for run, start in (('a', 100), ('b', 200))
      for at, (step, phase, save) in enumerate(lines, start)
    )
  )
  for step, nanoseconds in ((10, 4_500_000_000), (20, 0), (30, None)):
    (tmp_path / f'checkpoint_{step}').mkdir()
    times = {'init_timestamp_nsecs': 9, 'commit_timestamp_nsecs': nanoseconds and 9 + nanoseconds}
    (tmp_path / f'checkpoint_{step}' / '_CHECKPOINT_METADATA').write_text(json.dumps(times))
  run = measured_run(tmp_path)
  assert run.stalls == [2, 8] * 2 and run.commits == [4.5]
  assert run.median('save', run.stalls, assumed=1) == (5, f'the median of 4 saves in {tmp_path}')
  assert run.median('x', (), assumed=1) == (1, f'assumed: not recorded in {tmp_path}')


@pytest.mark.parametrize(
  'length, saved, steps',
  [
    (99, False, 0),  # before the first save
    (124, False, 0),  # a save begins at 100, and can be restored at 120 + 5 of the next steps
    (125, False, 100),
    (300, False, 200),
    (300, True, 290),  # all steps, less two stalls
  ],
)
def test_goodput_counts_the_steps_before_the_last_save_that_can_be_restored(length, saved, steps):
  found = goodput(
    [Stretch(50, 50 + length, 4, saved)],
    seconds=1000,
    num_hosts=8,
    saving=Saving(name='x', stall_seconds=5, commit_seconds=25),
    interval=100,
  )
  assert found == pytest.approx(steps * 4 / 8000)


def test_faults_that_leave_all_hosts_cost_starts_and_repeated_steps():
  calm = machines(lost_host_share=0.0)
  stretches, seconds = replay(calm, spares=0, num_faults=100)
  assert len(stretches) == 100 and {s.num_hosts for s in stretches} == {8}
  trained = sum(s.end - s.start for s in stretches)
  # A second to end processes, a minute to start them.
  assert trained == pytest.approx(seconds - 99 * 61 - 60, abs=30)
  interval, value = best_interval(stretches, seconds=seconds, num_hosts=8, saving=SAVING)
  # Young's formula, which neglects starts.
  young = math.sqrt(2 * SAVING.stall_seconds * seconds / 100)
  assert 0.6 * young < interval < 1.6 * young
  assert value < trained / seconds


@pytest.mark.parametrize('spares', [0, 2])
def test_lost_hosts_leave_fewer_and_come_back(spares):
  stretches, seconds = replay(machines(), spares=spares, num_faults=100)
  hours = {n: sum(s.end - s.start for s in stretches if s.num_hosts == n) for n in range(9)}
  assert sum(hours.values()) / seconds > 0.99  # it hardly ever stands still
  # Half of the faults take a host away for six hours.
  share_of_all = hours[8] / seconds
  assert share_of_all > (0.98 if spares else 0.9) and (spares or share_of_all < 0.99)


def test_a_mesh_that_needs_all_hosts_stands_still_without_spares():
  rigid = machines(host_counts=(8,))
  shares = []
  for spares in (0, 1):
    stretches, seconds = replay(rigid, spares=spares, num_faults=60)
    shares.append(sum(s.end - s.start for s in stretches) / seconds)
  assert shares[0] < 0.97 < 0.98 < shares[1]
