#!/usr/bin/env bash
# Times t5x_gpu on one GPU, on several where there are some, and PyTorch where it is installed:
# ceilings of the card, training steps, attention, the loss, and what a plan predicts for the steps.
# Needs jax with CUDA, flax, optax, and tokamax for the attention kernels: without it, rows are
# marked NO KERNEL. Needs neither data, a network nor TensorFlow. Ends within 9 minutes; run it again
# for the remaining parts.
#   scripts/bench_gpu.sh [--out FOLDER] [--parts ceilings,loss] [--again] [--small]      (or --help)
#   PYTHON=python3.12 scripts/bench_gpu.sh
set -euo pipefail
# Folders in flags are relative to where the command is typed.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
