"""Checks that all processes have the same facts: exchanges digests, and names if digests differ.

Facts are `name -> (identity, shown)`: identities are compared, `shown` appears in the error.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

from t5x_gpu.storage.json_schema import JsonValue

Facts = Mapping[str, tuple[str, str]]

# Send the facts of at most 4 of 64 differing buckets: megabytes for a million files.
_BUCKETS, _SENT_BUCKETS = 64, 4
_SHOWN_LINES, _SHOWN_VARIANTS = 8, 4


def digest(facts: Facts) -> str:
  """Returns 16 hex digits, equal if names and identities are equal."""
  pairs = sorted((name, identity) for name, (identity, _) in facts.items())
  return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]


def differences(
  facts: Facts,
  *,
  digests: Sequence[str],
  hostnames: Sequence[str],
  process_index: int,
  exchange: Callable[[JsonValue], list[JsonValue]],
  only_common: bool = False,
) -> list[str]:
  """Returns a line per fact that differs between processes; the same lines on all processes.

  Args:
    facts: facts of this process.
    digests: `digest(facts)` of each process.
    hostnames: host of each process.
    process_index: index of this process.
    exchange: takes a JSON value; returns the values of all processes.
    only_common: ignore facts that only some processes have; for a few thousand facts.
  """
  if len(set(digests)) == 1:
    return []
  first = {value: digests.index(value) for value in digests}  # one process per variant
  parts = _buckets(facts)
  is_first = process_index in first.values()
  reported = exchange([digest(part) for part in parts] if is_first else None)
  differing = [i for i in range(_BUCKETS) if len({reported[p][i] for p in first.values()}) > 1]
  # A bucket may differ only in facts that some processes lack, so look at all buckets.
  limit = _BUCKETS if only_common else _SENT_BUCKETS
  sent = {name: fact for i in differing[:limit] for name, fact in parts[i].items()}
  reported = exchange(sent if is_first else None)
  lines = []
  for name in sorted(set().union(*(reported[p] for p in first.values()))):
    variants: dict[object, tuple[str, list[int]]] = {}
    for value, process in first.items():
      identity, shown = reported[process].get(name, (None, 'nothing'))
      if identity is not None or not only_common:
        who = [i for i, other in enumerate(digests) if other == value]
        variants.setdefault(identity, (shown, []))[1].extend(who)
    if len(variants) > 1:
      shown_variants = list(variants.values())[:_SHOWN_VARIANTS]
      lines.append(
        f'{name}: '
        + ', '.join(
          f'{shown} on {who_text(sorted(who), hostnames)}' for shown, who in shown_variants
        )
      )
  if len(differing) > limit or len(lines) > _SHOWN_LINES:
    lines[_SHOWN_LINES:] = ['... and more.']
  return lines


def who_text(processes: Sequence[int], hostnames: Sequence[str]) -> str:
  """Returns 'process 3 (gpu-002)', or 'process 3 (gpu-002) and 4 more'."""
  first = processes[0]
  host = f' ({hostnames[first]})' if hostnames else ''
  more = f' and {len(processes) - 1} more' if len(processes) > 1 else ''
  return f'process {first}{host}{more}'


def _buckets(facts: Facts) -> list[dict[str, tuple[str, str]]]:
  """Returns the facts in buckets, chosen by the fact's name alone."""
  parts: list[dict[str, tuple[str, str]]] = [{} for _ in range(_BUCKETS)]
  for name, fact in facts.items():
    parts[hashlib.sha256(name.encode()).digest()[0] % _BUCKETS][name] = fact
  return parts
