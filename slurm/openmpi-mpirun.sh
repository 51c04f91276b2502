#!/usr/bin/env bash
#SBATCH --job-name=rudra
#SBATCH --output=%x-%j.log
# sbatch --ntasks N [more options] slurm/openmpi-mpirun.sh JOB [options of `rudra run`]
#
# Open MPI's mpirun inside the allocation: one rank for each task, N - 2 of them learners.
set -euo pipefail

# The environment that Rudra is installed in; its directory must be visible from every node.
RUDRA_ENV=${RUDRA_ENV:-$SLURM_SUBMIT_DIR/.venv}
PATH=$RUDRA_ENV/bin:$PATH

cd "$SLURM_SUBMIT_DIR"
exec mpirun -n "$SLURM_NTASKS" --bind-to none rudra run "$@"
