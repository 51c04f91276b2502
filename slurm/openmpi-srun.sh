#!/usr/bin/env bash
# digits by srun: 1 parameter server, 1 statistics server, 4 learners
# Made by: rudra slurm digits --ntasks 6 --time 30 --launcher srun --mpi pmix --environment .venv --script slurm/openmpi-srun.sh
# Edit it as you like, and submit it where it was made: sbatch slurm/openmpi-srun.sh
#SBATCH --job-name=digits
#SBATCH --ntasks=6
#SBATCH --time=30
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# The environment that Rudra is installed in; every node must see it. If the MPI is the cluster's own, load its module.
PATH=$PWD/.venv/bin:$PATH
# How often the job may queue itself again, to go on after a time limit.
max_restarts=10

results=digits.h5
run=(rudra run digits --output "$results" --resume)

# SLURM tells the ranks themselves that the time ends. They save a checkpoint and end with code 3: a task that does so
# leaves word and ends with 0, because after the first that ends with anything else, srun would kill the others.
export STOPPED=$PWD/.stopped-$SLURM_JOB_ID
rm -f "$STOPPED"
cancelled=0 again=0
trap 'cancelled=1' TERM
srun --mpi=pmix --cpu-bind=none --kill-on-bad-exit=1 bash -c '
  trap : USR1 TERM # they are for the rank, which gets them too
  "$@"
  code=$?
  if [ "$code" = 3 ] || [ "$code" = 138 ]; then code=0 && : >"$STOPPED"; fi # 138: it was told before it was ready
  exit "$code"' rank "${run[@]}"
code=$?
[ ! -e "$STOPPED" ] || again=1
rm -f "$STOPPED"

# A lost node may end the ranks before SLURM notices it, and queues the job again by itself.
nodes_answer() { timeout 60 srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --mpi=none true; }
if [ "$again" = 0 ]; then
  if [ "$code" = 0 ] || [ "$code" = 2 ] || [ "$SLURM_NNODES" = 1 ] || nodes_answer; then exit "$code"; fi
fi
if [ "$cancelled" = 1 ] || [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_restarts" ]; then
  echo "stopped; submit the job again to go on from its checkpoint" >&2
  exit 3
fi
me=$SLURM_JOB_ID # of one element of an array, this may be the name of all of it
[ -z "${SLURM_ARRAY_JOB_ID:-}" ] || me=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
trap '' TERM # with which SLURM ends this script then
scontrol requeue "$me" || exit 3
