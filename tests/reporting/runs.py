"""Writes the files of a run as training writes them, without training."""

import datetime
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.config import report
from t5x_gpu.config.provenance import Provenance, Setting
from t5x_gpu.metrics.goodput import Goodput
from t5x_gpu.metrics.writers import JsonLinesWriter
from t5x_gpu.runtime import process_exit
from t5x_gpu.runtime.cluster import interruptions
from t5x_gpu.runtime.cluster.interruptions import Interruption

START = 1_790_000_000.0
FACTS = {
  'total_steps': 40,
  'devices': 8,
  'device_kind': 'NVIDIA H100',
  'host': 'node7',
  'job': '81',
}
MANIFEST = {
  'arrays': {'step': [[], 'int32']},
  'next_batch_hash': 'x',
  'data': {'task': 'books_and_code', 'rates': {'books': 3.0, 'code': 1.0}, 'batch_size': 8},
}


class Clock:
  """A clock that the test moves."""

  def __init__(self, seconds: float = START):
    self.seconds = seconds

  def __call__(self) -> float:
    return self.seconds


def provenance(*, learning_rate: str = '0.001', origin: str = 'my.gin:3') -> Provenance:
  settings = (
    Setting('LEARNING_RATE', learning_rate, learning_rate, origin, origin, (('0.01', 'default'),)),
    Setting('MODEL_DIR', "'runs/x'", "'runs/x'", 'my.gin:4', 'my.gin:4'),
    Setting('schedules.factor', '%LEARNING_RATE', learning_rate, 'base.gin:9', origin),
    Setting('train.total_steps', '40', '40', '--gin.TRAIN_STEPS', '--gin.TRAIN_STEPS'),
  )
  config = f'LEARNING_RATE = {learning_rate}\ntrain.total_steps = 40\n'
  return Provenance(settings=settings, defaults=(), config=config)


def write_run(
  folder: pathlib.Path,
  *,
  starts: tuple[tuple[int, int], ...] = ((0, 24), (20, 40)),
  with_ledger: bool = True,
  with_config: bool = True,
  learning_rate: str = '0.001',
  facts: Optional[Mapping[str, Any]] = None,
  interrupted: Sequence[Interruption] = (),
) -> pathlib.Path:
  """Writes a run of 40 steps, killed once; its first process trained 24 steps and saved 20.

  Args:
    folder: MODEL_DIR, made if need be.
    starts: (first step, last step) of each process; all but the last are killed.
    with_ledger, with_config: False for runs without them.
    learning_rate: value of LEARNING_RATE; also changes the losses.
    facts: more facts about each start, for the ledger.
    interrupted: what `launch` knows at each start but the first.
  """
  folder.mkdir(parents=True, exist_ok=True)
  clock = Clock()
  metrics = JsonLinesWriter(folder / 'metrics.jsonl')
  known: dict[str, Any] = {}
  for first_step, last_step in starts:
    metrics.truncate_after(first_step)
    goodput = Goodput(enabled=with_ledger, clock=clock, now=clock, period_seconds=1e6)
    clock.seconds += 30
    with goodput.phase('compile'):
      clock.seconds += 60
    goodput.open(folder, first_step=first_step, facts=FACTS | dict(facts or {}) | known)
    known = interruptions.facts(interruptions.variables('run1', interrupted))
    with goodput.phase('productive'):
      for step in range(first_step + 1, last_step + 1):
        clock.seconds += 10
        goodput.step_done(step)
        loss = 2 + 4 * math.exp(-step / 10) + float(learning_rate)
        values = {'train/loss': loss, 'train/tokens_per_second': 5000.0 + step}
        metrics.write(step, values | ({'eval/loss': loss + 0.1} if step % 20 == 0 else {}))
        if step % 20 == 0:
          with goodput.phase('save'):
            clock.seconds += 5
      goodput.write()
    if (first_step, last_step) == starts[-1]:
      goodput.ends('done')
    if with_ledger:  # killed, or at its end
      process_exit.cancel_before_exit(goodput._left_at_once)
    clock.seconds += 300
  metrics.close()
  if with_config:
    report.write(provenance(learning_rate=learning_rate), folder)
  manifest = folder / 'checkpoint_40' / 'manifest'
  manifest.mkdir(parents=True)
  (manifest / 'metadata').write_text(json.dumps(MANIFEST))
  sample = {'step': 40, 'prompt': '<b>def', 'temperature': 0.7, 'text': '<b>def f(): pass'}
  (folder / 'samples.jsonl').write_text(json.dumps(sample) + '\n')
  (folder / 'eval').mkdir()
  (folder / 'eval' / 'test.jsonl').write_text('{"step": 40, "eval/loss": 2.5}\n')
  return folder


def write_profile(folder: pathlib.Path, *, first_step: int, now: float) -> None:
  """Writes the anatomy.json of a profile of three steps, as a run writes it at `now`."""
  written = datetime.datetime.fromtimestamp(now, datetime.UTC).isoformat(timespec='seconds')
  content = {
    'first_step': first_step,
    'last_step': first_step + 2,
    'reason': 'period',
    'written': written,
    'seconds_per_step': 0.1,
    'parts': {
      'compute': 0.06,
      'exposed_communication': 0.03,
      'idle': 0.01,
      'input_wait': 0.005,
      'save': None,
      'eval': 0.004,
    },
    'operations': [],
    'collectives': [],
  }
  path = folder / 'profiles' / str(first_step) / 'anatomy.json'
  path.parent.mkdir(parents=True)
  path.write_text(json.dumps(content))
