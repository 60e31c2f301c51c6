"""Times conversions of a random model, each in a separate process; writes convert.json.

    python benchmarks/convert.py [--model gin_configs/models/gpt2_medium.gin] [--folder /tmp]

Hugging Face to t5x_gpu and back, without and with the check of logits, from float32 and bfloat16.
Megabytes refer to the safetensors file; peak memory is the process's, imports included.
"""

import argparse
import filecmp
import json
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from t5x_gpu.conversion.hf.config_json import guess_family, to_hf
from t5x_gpu.conversion.hf.names import FAMILIES
from t5x_gpu.conversion.name_table import Table
from t5x_gpu.conversion.safetensors_io import SafetensorsWriter, make_headers
from t5x_gpu.conversion.tensor_copy import FLOATS
from t5x_gpu.convert import model_of_gin

OUT = pathlib.Path(__file__).parent / 'results' / 'convert.json'


def write_model(gin_file: str, folder: pathlib.Path, dtype: str) -> None:
  """Writes a Hugging Face model with random weights."""
  model = model_of_gin([gin_file])
  family = guess_family(model)
  shapes = Table(FAMILIES[family].rules(model), model.sizes()).their_shapes
  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps(to_hf(model, family=family)))
  writer = SafetensorsWriter(
    folder,
    make_headers(
      [(name, FLOATS[dtype], shape) for name, shape in shapes.items()], max_file_bytes=10**12
    ),
  )
  rng = np.random.default_rng(0)
  for name, shape in shapes.items():
    writer.write(name, 0, (rng.standard_normal(shape, np.float32) * 0.02).astype(FLOATS[dtype]))


def run(*flags: str) -> dict[str, Any]:
  """Returns what a conversion printed of its speed, and its peak memory."""
  process = subprocess.Popen(
    [sys.executable, '-m', 't5x_gpu.convert', *flags], stdout=subprocess.PIPE, text=True
  )
  out = process.stdout.read()
  _, status, usage = os.wait4(process.pid, 0)
  assert status == 0, out
  written = re.search(r'written: ([\d,.]+) MB in ([\d.]+) s', out)
  return {
    'megabytes': float(written[1].replace(',', '')),
    'write_seconds': float(written[2]),
    'peak_mib': usage.ru_maxrss // 1024,
    'logits': next((line for line in out.splitlines() if 'logits' in line), ''),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--model', default='gin_configs/models/gpt2_medium.gin')
  parser.add_argument('--folder', help="where to work (default: the system's)")
  args = parser.parse_args()
  rows = []
  with tempfile.TemporaryDirectory(dir=args.folder) as folder:
    base = pathlib.Path(folder)
    for dtype in ('float32', 'bfloat16'):
      theirs = base / dtype
      # Elsewhere: a new process begins with the peak of its parent.
      with multiprocessing.get_context('spawn').Pool(1) as pool:
        pool.apply(write_model, (args.model, theirs, dtype))
      for check in ('tensors', 'auto'):
        ours, back = (base / f'{dtype}_{check}_{kind}' for kind in ('ours', 'back'))
        rows.append(
          {
            'dtype': dtype,
            'check': check,
            'to': 't5x_gpu',
            **run(f'--from={theirs}', f'--to={ours}', f'--check={check}'),
          }
        )
        rows.append(
          {
            'dtype': dtype,
            'check': check,
            'to': 'hf',
            **run(f'--from={ours}', f'--to={back}', f'--check={check}'),
          }
        )
        assert filecmp.cmp(*(f / 'model.safetensors' for f in (theirs, back)), shallow=False)
        for row in rows[-2:]:
          print(
            f'{dtype:9} to {row["to"]:8} check={check:8} {row["megabytes"]:9,.1f} MB '
            f'{row["megabytes"] / max(row["write_seconds"], 0.1):6,.0f} MB/s  '
            f'peak {row["peak_mib"]:,} MiB',
            flush=True,
          )
  OUT.write_text(json.dumps({'model': args.model, 'rows': rows}, indent=1) + '\n')


if __name__ == '__main__':
  main()
