"""Prints the parts of the documentation that follow from tables of the package.

    python scripts/docs_tables.py xla_flags > docs/xla_flags.md
    python scripts/docs_tables.py keys               the section Keys of docs/convert.md

Tests check that the committed pages are current.
"""

import json
import sys
import textwrap
from collections.abc import Sequence

from t5x_gpu.conversion.hf import rotary
from t5x_gpu.conversion.hf.config_json import CONFIG_FAMILIES
from t5x_gpu.runtime.xla import presets
from t5x_gpu.runtime.xla.flags import LEGACY
from t5x_gpu.runtime.xla.presets import LEFT_ALONE, PRESETS

_EXAMPLE = (
  'xla preset: h200 single-host (default), 4 compile options, 1 flag, 4 variables, '
  '1 flag dropped: not in jaxlib 0.10.2'
)
_INTRODUCTION = """\
# XLA, NCCL and memory settings

This page is generated from the table in `t5x_gpu/runtime/xla/presets.py`:

    python scripts/docs_tables.py xla_flags > docs/xla_flags.md

A run is correct without any of these settings. They decide whether communication overlaps with
computation, how much memory XLA takes, and which messages a failure prints.

## Presets

{presets}

The settings of a preset depend on the GPU (A100, H100, H200, B200 and their variants; others get
the rows for every GPU), on whether the run has one host or several, and on the mesh. On a machine
without GPU it sets nothing. Each run prints one line:

    {line}

## Your own flags

- **Your flags win.** A flag in `XLA_FLAGS`, or a variable that is set, replaces the preset's.
- **Unknown flags are dropped, with a warning.** XLA ends the process at an unknown name, and names
  change with every release. A child process tries all flags on the installed jaxlib (0.3 s; the
  answer is cached in `~/.cache/t5x_gpu`, so later starts take a millisecond).
- **Flags of older scripts** are translated or dropped, see [below](#older-flags).
- `XLA_FLAGS='${{XLA_FLAGS}} --xla_...'` in single quotes loses all earlier flags: the shell
  expands nothing in single quotes. Use double quotes.
- `XLA_CLIENT_MEM_FRACTION` and `XLA_PYTHON_CLIENT_MEM_FRACTION` mean the same. jax refuses to start
  with both, so the second, older one is then dropped.

`python -m t5x_gpu.doctor` prints the same line as a run, under `xla flags`.

"""
_NOTES = """\
`one layer` is the size of the gathered parameters of one layer: at least 128 MiB (on one host
30 MiB, XLA's own threshold), at most 1 GiB (2 GiB on a B200). From jax 0.11 on
`xla_gpu_enable_pipelined_*` is spelled `xla_gpu_pipeline_*`; the trainer uses the right name.

The shares of hidden bytes are from the schedules of a training step (FSDP, 12 layers of width 2048,
872 million parameters), compiled by jax 0.10.2 without a GPU. They count the bytes of collectives
with a matmul between their start and end, not time. By that count `max_overlap` is no better than
`default` on these programs, with 8 GPUs or 64.
"""


def xla_flags_page() -> str:
  """Returns docs/xla_flags.md."""
  parts = [
    _INTRODUCTION.format(
      presets='\n'.join(f'- `{name}`: {text}.' for name, text in PRESETS.items()), line=_EXAMPLE
    )
  ]
  for kind, title in presets.KINDS.items():
    rows = [
      [
        '<br>'.join(f'`{name}`' for name in names),
        f'`{presets.shown_setting(row)}`',
        ', '.join(row.presets),
        presets.where_set(row),
        f'{row.reason} [source]({row.source})',
      ]
      for names, row in presets.settings_alike(kind)
    ]
    parts.append(
      f'## {title}\n\n' + _markdown(['setting', 'value', 'presets', 'where', 'why'], rows)
    )
  parts.append(_NOTES)
  parts.append(
    '## Left alone\n\n'
    + _markdown(['setting', 'why'], [[f'`{name}`', reason] for name, reason in LEFT_ALONE.items()])
  )
  parts.append(
    '<a name="older-flags"></a>\n## Older flags\n\nIf the installed jaxlib does not '
    'know one of these, its current replacement is used.\n\n'
    + _markdown(
      ['flag', 'with the value 1', 'why'],
      [
        [
          f'`{name}`',
          ' '.join(f'`{new}`' for new in (legacy.now('1') if legacy.now else ())) or 'dropped',
          legacy.reason,
        ]
        for name, legacy in LEGACY.items()
      ],
    )
  )
  return '\n'.join(parts)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  return (
    '\n'.join('| ' + ' | '.join(cells) + ' |' for cells in [head, ['---'] * len(head), *rows])
    + '\n'
  )


def keys_table() -> str:
  """Returns the section of docs/convert.md that lists the keys of every family."""
  out = []
  for name, family in CONFIG_FAMILIES.items():
    read = sorted(
      {*family.used, *family.defaults, *family.other_names} - {'architectures', 'model_type'}
    )
    repeats = [f'`{key}` (as `{other}`)' for key, other in sorted(family.repeats.items())]
    kinds = (
      ('read', ', '.join(f'`{key}`' for key in read)),
      (
        'only with these values',
        ', '.join(
          [
            *(
              f'`{key}` ({" or ".join(f"`{json.dumps(v)}`" for v in values)})'
              for key, values in sorted(family.fixed.items())
            ),
            *repeats,
          ]
        ),
      ),
      ('without effect', ', '.join(f'`{key}`' for key in sorted(family.no_effect))),
    )
    lines = [f'- {kind}: {text}.' for kind, text in kinds if text]
    out.append('\n'.join([f'**{name}**', '', *(_wrapped(line) for line in lines)]))
  lines = [
    f'- {title}: {", ".join(f"`{key}`" for key in keys)}.'
    for title, keys in (
      ('of all kinds', rotary.KEYS_OF_ALL),
      *((f'of `{kind}`', keys) for kind, keys in rotary.KEYS_OF_KIND.items()),
    )
  ]
  lines.append(
    '- old names: `type` of `rope_type`, and `su` of `longrope`. `finetuned` has no effect if true.'
  )
  lines.append('- without effect: keys of another kind. Other keys are refused.')
  title = '**inside of `rope_scaling` and `rope_parameters`**'
  out.append('\n'.join([title, '', *(_wrapped(line) for line in lines)]))
  return '\n\n'.join(out) + '\n'


def _wrapped(line: str) -> str:
  return textwrap.fill(line, 100, subsequent_indent='  ', break_long_words=False)


if __name__ == '__main__':
  print({'xla_flags': xla_flags_page, 'keys': keys_table}[sys.argv[1]](), end='')
