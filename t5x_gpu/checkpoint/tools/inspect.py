"""Describes contents and manifest of a checkpoint without reading any array."""

import math
from typing import Any, Optional

from t5x_gpu.checkpoint.arrays.params_files import PARAMS_ONLY
from t5x_gpu.checkpoint.arrays.state_reader import UNSTACKED, Source, StateReader
from t5x_gpu.checkpoint.manifest import STARTED_FROM, WITHOUT_DATA
from t5x_gpu.checkpoint.run_files import GIN_FILES
from t5x_gpu.checkpoint.storage.checksums import recorded
from t5x_gpu.checkpoint.storage.paths import AnyPath, RemotePath

_ORIGINS = (STARTED_FROM, 'converted_from', 'resharded_from')


def describe(source: Source, *, step: Optional[int] = None) -> dict[str, Any]:
  """Returns all facts about a checkpoint, JSON-ready; sizes are in bytes.

  Args:
    source: a checkpoint, MODEL_DIR, or the folder of one checkpoint.
    step: step of the checkpoint; None for the latest.
  Raises:
    CheckpointError: there is no checkpoint, or it cannot be read.
  """
  reader = StateReader(source, step=step, step_setting='--step')
  manifest, folder = reader.manifest, reader.checkpoint.model_dir.path
  checksums = recorded(manifest)
  arrays = {
    name: {
      'shape': list(shape),
      'dtype': str(reader.dtypes[name]),
      'bytes': reader.bytes_of(name),
      'chunk': list(reader.chunk_shape(name)),
      'checksum': checksums.get(name),
    }
    for name, shape in reader.shapes.items()
  }
  parts: dict[str, dict[str, int]] = {}
  for name, array in arrays.items():
    part = parts.setdefault(name.split('/')[0], {'arrays': 0, 'elements': 0, 'bytes': 0})
    part['arrays'] += 1
    part['elements'] += math.prod(array['shape'])
    part['bytes'] += array['bytes']
  return {
    'path': str(reader.path),
    'step': reader.step,
    'written': manifest.get('written'),
    'parts': parts,
    'bytes_on_disk': disk_bytes(reader.path),
    'arrays': arrays,
    'params_only': bool(manifest.get(PARAMS_ONLY)),
    'without_data': bool(manifest.get(WITHOUT_DATA)),
    'unstacked': bool(manifest.get(UNSTACKED)),
    'mesh': manifest.get('mesh'),
    'num_processes': manifest.get('num_processes'),
    'gin': [str(folder / name) for name in GIN_FILES if (folder / name).is_file()],
    'versions': manifest.get('versions'),
    'data': manifest.get('data'),
    'data_state_bytes': len(reader.saved.data_state),
    'next_batch_hash': manifest.get('next_batch_hash'),
    'checksums': f'{len(checksums)} of {len(arrays)} arrays',
    **{key: manifest[key] for key in _ORIGINS if manifest.get(key)},
  }


def disk_bytes(path: AnyPath) -> Optional[int]:
  """Returns the size of all files of a checkpoint; None in object storage."""
  if isinstance(path, RemotePath):
    return None  # TensorStore does not list sizes
  return sum(p.stat().st_size for p in path.rglob('*') if p.is_file())


def description_text(d: dict[str, Any]) -> str:
  """Returns the result of `describe` as text: a line per array, then the other facts."""
  lines = [f'{d["path"]}: step {d["step"]}' + (f', written {d["written"]}' if d['written'] else '')]
  width = max(map(len, d['arrays']), default=0)
  for name, a in d['arrays'].items():
    shape = f'{a["dtype"]}[{", ".join(map(str, a["shape"]))}]'
    lines.append(f'  {name:{width}}  {shape:28} {_size(a["bytes"]):>10}')
  for part, n in d['parts'].items():
    lines.append(f'{part}: {n["arrays"]} arrays, {n["elements"]:,} elements, {_size(n["bytes"])}')
  lines.append(
    f'on disk: {"unknown" if d["bytes_on_disk"] is None else _size(d["bytes_on_disk"])}'
    + ('; one array per layer' if d['unstacked'] else '')
    + ('; parameters only: cannot be resumed' if d['params_only'] else '')
    + ('; no position in the data' if d['without_data'] else '')
  )
  sizes = ' '.join(f'{axis}={n}' for axis, n in (d['mesh'] or {}).items())
  lines.append(
    f'written by: {sizes or "no mesh"}; {d["num_processes"]} processes; '
    + ', '.join(f'{name} {version}' for name, version in (d['versions'] or {}).items())
  )
  data = ', '.join(f'{k}={v}' for k, v in (d['data'] or {}).items())
  lines.append(
    f'data: {data or "none"}; state of {d["data_state_bytes"]} bytes; next batch '
    f'{d["next_batch_hash"] or "unknown"}'
  )
  lines.append(f'gin: {", ".join(d["gin"]) or "none"}')
  lines.append(f'checksums: {d["checksums"]}')
  lines += [f'{key.replace("_", " ")}: {d[key]}' for key in _ORIGINS if key in d]
  return '\n'.join(lines)


def _size(num_bytes: int) -> str:
  for unit, size in (('GiB', 2**30), ('MiB', 2**20), ('KiB', 2**10)):
    if num_bytes >= size:
      return f'{num_bytes / size:.1f} {unit}'
  return f'{num_bytes} B'
