#!/bin/bash
# Train with Open MPI, one process per GPU:
#   scripts/train_mpi.sh 8 my.gin [--gin.X=VALUE ...]
#   HOSTFILE=hosts.txt scripts/train_mpi.sh 16 my.gin        (lines like: node1 slots=8)
# Start it on the first host of the file: process 0 listens there.
[ $# -ge 2 ] || { echo "usage: scripts/train_mpi.sh PROCESSES my.gin [--gin.X=VALUE ...]" >&2; exit 2; }
count=$1 gin_file=$2; shift 2
[ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
# Processes without this secret are rejected. See docs/security.md.
export T5X_GPU_JOB_SECRET="${T5X_GPU_JOB_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
# -x passes variables to other hosts. Without --bind-to none each process would get one core.
exported=()
for name in $(compgen -e | grep -E '^(XLA_|JAX_|NCCL_|CUDA_|T5X_GPU_|TFDS_|LD_LIBRARY_PATH|PYTHONPATH)')
do exported+=(-x "$name"); done
# mpirun makes each process believe that it has a terminal; TERM=dumb keeps progress bars out of
# the log.
exec mpirun -np "$count" ${HOSTFILE:+--hostfile "$HOSTFILE"} --bind-to none -x TERM=dumb "${exported[@]}" \
  "${PYTHON:-python3}" -m t5x_gpu.train --gin_file="$gin_file" "$@"
