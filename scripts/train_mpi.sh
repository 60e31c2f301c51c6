#!/bin/bash
# Train with Open MPI, one process per GPU:
#   scripts/train_mpi.sh 8 my.gin [--gin.X=VALUE ...]
#   HOSTFILE=hosts.txt scripts/train_mpi.sh 16 my.gin        (lines like: node1 slots=8)
#   RESTARTS=20 HOSTFILE=hosts.txt scripts/train_mpi.sh 16 my.gin    (again after a crash)
# Start it on the first host of the file: process 0 listens there.
[ $# -ge 2 ] || { echo "usage: scripts/train_mpi.sh PROCESSES my.gin [--gin.X=VALUE ...]" >&2; exit 2; }
count=$1 gin_file=$2; shift 2
[ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
# Processes without this secret are rejected. See docs/security.md.
export T5X_GPU_JOB_SECRET="${T5X_GPU_JOB_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
# RESTARTS=N: one launch per host starts its share of the processes, again after a crash
# (docs/never_down.md). mpirun itself ends the run if it loses a host.
start=(-np "$count") module=(t5x_gpu.train)
if [ "${RESTARTS:-0}" -gt 0 ]; then
  hosts=1
  [ -z "${HOSTFILE:-}" ] || hosts=$(awk '$1 && $1 !~ /^#/ {print $1}' "$HOSTFILE" | sort -u | wc -l)
  [ $((count % hosts)) -eq 0 ] || { echo "$count processes on $hosts hosts: not as many on each" >&2; exit 2; }
  start=(-np "$hosts" --map-by ppr:1:node)
  module=(t5x_gpu.launch --restarts="$RESTARTS" --nproc=$((count / hosts)) --)
fi
# -x passes variables to other hosts. Without --bind-to none each process would get one core.
exported=()
for name in $(compgen -e | grep -E '^(XLA_|JAX_|NCCL_|CUDA_|T5X_GPU_|TFDS_|LD_LIBRARY_PATH|PYTHONPATH)')
do exported+=(-x "$name"); done
# mpirun makes each process believe that it has a terminal; TERM=dumb keeps progress bars out of
# the log.
exec mpirun "${start[@]}" ${HOSTFILE:+--hostfile "$HOSTFILE"} --bind-to none -x TERM=dumb "${exported[@]}" \
  "${PYTHON:-python3}" -m "${module[@]}" --gin_file="$gin_file" "$@"
