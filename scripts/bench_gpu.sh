#!/usr/bin/env bash
# Times t5x_gpu on one GPU, on several where there are some, and PyTorch where it is installed:
# ceilings of the card, training steps, attention, the loss, and what a plan predicts for the steps.
# Needs jax with CUDA, flax, optax, and tokamax for the attention kernels: without it, rows are
# marked NO KERNEL. Needs neither data, a network nor TensorFlow. Ends within 9 minutes; run it again
# for the remaining parts.
#   scripts/bench_gpu.sh [--out FOLDER] [--parts ceilings,loss] [--again] [--small]      (or --help)
#   PYTHON=python3.12 scripts/bench_gpu.sh
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c '
import importlib.util, sys
absent = [n for n in ("jax", "flax", "optax") if importlib.util.find_spec(n) is None]
if absent:
  sys.exit(f"{sys.executable} has no {absent[0]}. Name the Python of your environment: "
           "PYTHON=/path/to/python scripts/bench_gpu.sh")
if sys.version_info < (3, 11):
  sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}; t5x_gpu takes 3.11 or newer.")
'
# Folders in flags are relative to where the command is typed.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m benchmarks.gpu "$@"
