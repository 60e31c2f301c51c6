"""Writes the same rows as a file in every format that a task reads."""

import csv
import json

import pyarrow as pa
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import parquet

from t5x_gpu.data.tf_runtime import tf

ROWS_PER_GROUP = 100  # no multiple of the reader's blocks


def _csv(path, rows):
  with open(path, 'w', encoding='utf-8', newline='') as f:
    writer = csv.DictWriter(f, ['id', *rows[0]])
    writer.writeheader()
    writer.writerows({'id': i, **row} for i, row in enumerate(rows))


def _tsv(path, rows):
  lines = ['\t'.join(rows[0]), *('\t'.join(row.values()) for row in rows)]
  path.write_text('\n'.join(lines) + '\n', 'utf-8')


def _jsonl(path, rows):
  text = ''.join(json.dumps(row) + '\n' for row in rows).encode()
  codec = {'.gz': 'gzip', '.zst': 'zstd'}.get(path.suffix)
  with pa.output_stream(str(path), compression=codec) as f:
    f.write(text)


def _parquet(path, rows):
  parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=ROWS_PER_GROUP)


def _arrow(path, rows):
  table = pa.Table.from_pylist(rows)
  with pa.OSFile(str(path), 'wb') as f, pa.ipc.new_stream(f, table.schema) as writer:
    writer.write_table(table, max_chunksize=ROWS_PER_GROUP)


def example(row):
  return tf.train.Example(
    features=tf.train.Features(
      feature={
        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
        for name, text in row.items()
      }
    )
  ).SerializeToString()


def _tfrecord(path, rows):
  with tf.io.TFRecordWriter(str(path)) as writer:
    for row in rows:
      writer.write(example(row))


def _arrayrecord(path, rows):
  writer = ArrayRecordWriter(str(path), 'group_size:1')
  for row in rows:
    writer.write(example(row))
  writer.close()


# Name of the task -> (ending, what writes it).
FORMS = {
  'csv': ('.csv', _csv),
  'tsv': ('.tsv', _tsv),
  'jsonl': ('.jsonl', _jsonl),
  'parquet': ('.parquet', _parquet),
  'hf_dataset': ('.arrow', _arrow),
  'tfrecord': ('.tfrecord', _tfrecord),
  'arrayrecord': ('.arrayrecord', _arrayrecord),
}


def write_form(form, folder, rows, *, name='part', ending=''):
  """Writes `rows` under `folder`; returns the name of the task that reads `form`."""
  folder.mkdir(exist_ok=True)
  own, write = FORMS[form]
  write(folder / f'{name}{own}{ending}', rows)
  return f'{form}:{folder}' if form == 'hf_dataset' else f'{form}:{folder}/*{own}{ending}'
