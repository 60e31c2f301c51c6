"""Run by xla/test_programs as two real processes, which compile a program of all devices."""

import json
import logging
import os
import sys

import jax
import numpy as np

from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster import cluster
from t5x_gpu.runtime.xla import programs


def main(address: str, index: int) -> None:
  warnings = []
  handler = logging.Handler()
  handler.emit = lambda record: warnings.append(record.getMessage())
  logging.getLogger('t5x_gpu').addHandler(handler)
  distributed.join(
    cluster.detect(os.environ, coordinator_address=address, process_count=2, process_index=index)
  )
  programs.start_cache(jax.default_backend(), num_devices=jax.device_count(), environ=os.environ)
  mesh = jax.make_mesh((4,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  x = jax.make_array_from_callback(
    (4,), jax.NamedSharding(mesh, jax.P('data')), lambda rows: np.arange(4.0)[rows]
  )
  total = float(jax.jit(lambda x: x.sum(), out_shardings=jax.NamedSharding(mesh, jax.P()))(x))
  results = {
    'index': index,
    'sum': total,
    'folder': programs.cache_folder(),
    'counts': [programs._counts['cache_hits'], programs._counts['compile_requests_use_cache']],
    'line': programs.cache_line(),
    'warnings': warnings,
  }
  print('RESULT ' + json.dumps(results), flush=True)
  jax.distributed.shutdown()


if __name__ == '__main__':
  main(sys.argv[1], int(sys.argv[2]))
