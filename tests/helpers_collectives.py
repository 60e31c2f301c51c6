"""Sums over the collectives of a program."""

from collections.abc import Iterable
from typing import Optional

from t5x_gpu.compiled.collectives import COLLECTIVE_KINDS, Collective


def total_bytes(
  collectives: Iterable[Collective], *, kind: Optional[str] = None, axis: Optional[str] = None
) -> int:
  """Returns the bytes that a device sends in one call, optionally of one kind or over one axis.

  A collective over several axes counts for each of them. One in a branch counts as if it runs.
  """
  return sum(c.bytes_per_call for c in chosen(collectives, kind=kind, axis=axis))


def count(
  collectives: Iterable[Collective],
  *,
  kind: Optional[str] = None,
  axis: Optional[str] = None,
  min_bytes: int = 0,
) -> int:
  """Returns how many collectives run in one call.

  Args:
    collectives: from `inventory`.
    kind, axis: count only these; None counts all.
    min_bytes: ignore collectives that send less per run, such as sums of the loss.
  """
  return sum(
    c.count for c in chosen(collectives, kind=kind, axis=axis) if c.bytes_per_device >= min_bytes
  )


def chosen(
  collectives: Iterable[Collective], *, kind: Optional[str] = None, axis: Optional[str] = None
) -> list[Collective]:
  """Returns the collectives of one kind whose axes include `axis`; None takes all."""
  assert kind is None or kind in COLLECTIVE_KINDS, kind
  return [c for c in collectives if kind in (None, c.kind) and (axis is None or axis in c.axes)]
