"""Sessions of flows in worlds, and the combinations of worlds that the tests try.

`make test` combines a world of each kind: each flow once, and training in each world. In
`make test-all` each combination has all flows that its worlds can reach (table.py says why).
"""

import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.helpers_train import HELD_DATA
from tests.helpers_warm import WarmStart
from tests.worlds.flows import FLOWS, GIN, RUN_FIRST, Failed, Place
from tests.worlds.table import KINDS, TEXTS, TOKENIZERS, WORLDS, World

# Flows that are part of others: of train_and_resume, and of convert_there_and_back.
PARTS = ('train', 'infer')
PLAIN = {world.name: (world,) for world in TOKENIZERS if not world.refused}


def plain(flow: str) -> tuple[World, ...]:
  """Returns the tokenizer, with nothing else changed, with which `make test` tries a flow."""
  return PLAIN['sp_default' if flow == 'prepare_and_train' else 'unigram_begin_first']


class Session:
  """The flows in one place, each at most once.

  Args:
    warm: forks the commands.
    worlds: what changes the place, one after the other.
  """

  def __init__(self, warm: WarmStart, worlds: Sequence[World] = ()):
    base = pathlib.Path(tempfile.mkdtemp(prefix='t5x_gpu_world_'))  # other users may pass /tmp
    base.chmod(0o755)
    (base / 'world.gin').write_text(GIN)
    (base / 'held_data.py').write_text(HELD_DATA)
    (base / 'texts.jsonl').write_text(''.join(json.dumps({'text': t}) + '\n' for t in TEXTS))
    cwd = base / 'cwd'
    cwd.mkdir()
    self.place = Place(
      warm=warm,
      base=base,
      cwd=cwd,
      runs='runs',
      data=f'jsonl:{base / "texts.jsonl"}',
      gin_file=str(base / 'world.gin'),
    )
    for world in worlds:
      world.change(self.place)
    self._found: dict[str, Any] = {}

  def close(self) -> None:
    shutil.rmtree(self.place.base)

  def numbers(self, flow: str) -> Any:
    if flow not in self._found:
      self.place.real('.').mkdir(exist_ok=True)
      if flow in RUN_FIRST:
        self.numbers('train_and_resume')
      self._found[flow] = FLOWS[flow](self.place)
    return self._found[flow]

  def counted(self) -> tuple[int, int]:
    """Returns how many texts and tokens the data have by the tokenizer's library, with ends."""
    tokenizer = self.place.tokenizer
    encode = tokenizer.encode if tokenizer else str.encode
    return len(TEXTS), sum(len(encode(text)) + 1 for text in TEXTS)


def combined(flows: Sequence[str]) -> Iterator[Any]:
  """Yields (worlds of all kinds, one of `flows`); each accepted world is in some worlds."""
  kinds = [[w for w in WORLDS if w.kind == kind and not w.refused] for kind in KINDS]
  quick = [flow for flow in FLOWS if flow not in (*PARTS, 'launch_two')]
  for i in range(max(map(len, kinds))):
    worlds = tuple(kind[i % len(kind)] for kind in kinds)
    in_turn = quick[i] if i < len(quick) else 'train'
    for flow in flows:
      is_slow = flow != in_turn
      if is_slow and (flow in PARTS or flow == 'launch_two' and i % 7):
        continue
      yield pytest.param(
        (*(w for w in worlds if flow not in w.changes), *plain(flow)),
        flow,
        marks=[pytest.mark.slow] * is_slow,
      )


def name(value: Any) -> str:
  return ' + '.join(w.name for w in value) if isinstance(value, tuple) else str(value)


def check_together(
  sessions: Callable[[tuple[World, ...]], Session],
  warm: WarmStart,
  worlds: tuple[World, ...],
  flow: str,
) -> None:
  """Fails if a number differs from the plain world, and names the worlds that alone do that."""
  want = sessions(plain(flow)).numbers(flow)
  if problem := difference(sessions(worlds), flow, want):
    alone = {
      w.name: difference(Session(warm, (w, *plain(flow))), flow, want)
      for w in worlds
      if w.kind in KINDS
    }
    pytest.fail(f'{problem}\nEach world alone:\n{json.dumps(alone, indent=1)}')


def difference(session: Session, flow: str, want: Any) -> str:
  """Returns how the flow failed or what it gave in place of `want`, or nothing."""
  try:
    got = session.numbers(flow)
  except Failed as e:
    return str(e)
  return '' if got == want else f'{got}, not {want}'
