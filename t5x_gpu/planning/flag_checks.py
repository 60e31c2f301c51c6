"""Checks for flags of `plan` that contradict each other, before anything is compiled."""

import argparse

from t5x_gpu.errors import ConfigError

PREDICTION, SHARDING, REMAT = 'prediction', 'sharding', 'remat'
SHOWN = (PREDICTION, SHARDING, REMAT)
# Flags that change or extend a prediction, and have no effect on the output of --show.
_OF_PREDICTIONS = ('scale', 'what_if', 'calibrate', 'html')


def check_flags(extra: argparse.Namespace, *, dry_run: bool) -> None:
  """Raises ConfigError for flags that do not work together."""
  _check_show(extra, dry_run)
  _check_search(extra)


def _given(extra: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
  return [f'--{name}' for name in names if getattr(extra, name)]


def _check_show(extra: argparse.Namespace, dry_run: bool) -> None:
  others = _given(extra, _OF_PREDICTIONS)
  if extra.show != PREDICTION and others:
    raise ConfigError(
      f'--show={extra.show} makes no prediction, so it does not work with {" and ".join(others)}.',
      fix=f'Leave out --show, or {" and ".join(others)}.',
      docs='plan.md#flags',
    )
  if extra.show == REMAT and dry_run and extra.json:
    raise ConfigError(
      '--json has nothing to write with --show=remat --dry_run: the costs of remat policies are '
      'known when they are compiled.',
      fix='Leave out --dry_run or --json.',
      docs='plan.md#remat',
    )


def _check_search(extra: argparse.Namespace) -> None:
  others = _given(extra, ('scale', 'what_if', 'out', 'html'))
  others += [f'--show={extra.show}'] if extra.show != PREDICTION else []
  if extra.search is not None and others:
    raise ConfigError(
      f'--search cannot be combined with {" and ".join(others)}: it looks for another layout.',
      fix='Search with --search=best.gin; then plan with --gin_file=best.gin and these flags.',
      docs='plan.md#search',
    )
  if extra.search_processes is not None and (extra.search is None or extra.search_processes < 1):
    raise ConfigError(
      f'--search_processes={extra.search_processes} must be at least 1 and needs --search: it is '
      'the number of variants predicted at the same time.',
      fix='Write --search=best.gin --search_processes=2, for example.',
      docs='plan.md#search',
    )
