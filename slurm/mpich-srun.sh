#!/usr/bin/env bash
# digits by srun: 1 parameter server, 1 statistics server, 4 learners
# Made by: rudra slurm digits --ntasks 6 --time 30 --launcher srun --mpi pmi2 --environment .venv --script slurm/mpich-srun.sh
# Edit it as you like, and submit it where it was made: sbatch slurm/mpich-srun.sh
#SBATCH --job-name=digits
#SBATCH --ntasks=6
#SBATCH --time=30
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# The environment with Rudra, which every node must see. If MPI comes from the cluster, load its module.
PATH=$PWD/.venv/bin:$PATH
# How often the job may queue itself again, to continue after a time limit.
max_restarts=10

results=digits.h5
run=(rudra run digits --output "$results" --resume)

# Before the time limit SLURM signals the ranks. They save a checkpoint and end with code 3. Such a task leaves a marker
# file and ends with 0, because srun kills the other tasks as soon as one ends with a different code.
export STOPPED=$PWD/.stopped-$SLURM_JOB_ID
rm -f "$STOPPED"
cancelled=0 again=0
trap 'cancelled=1' TERM
srun --mpi=pmi2 --cpu-bind=none --kill-on-bad-exit=1 bash -c '
  trap : USR1 TERM # the rank also gets these signals
  "$@"
  code=$?
  if [ "$code" = 3 ] || [ "$code" = 138 ]; then code=0 && : >"$STOPPED"; fi # 138: the signal came too early
  exit "$code"' rank "${run[@]}"
code=$?
[ ! -e "$STOPPED" ] || again=1
rm -f "$STOPPED"

# A lost node may end the ranks before SLURM notices the loss and queues the job again.
nodes_answer() { timeout 60 srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --mpi=none true; }
if [ "$again" = 0 ]; then
  if [ "$code" = 0 ] || [ "$code" = 2 ] || [ "$SLURM_NNODES" = 1 ] || nodes_answer; then exit "$code"; fi
fi
if [ "$cancelled" = 1 ] || [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_restarts" ]; then
  echo "stopped; submit the job again to go on from its checkpoint" >&2
  exit 3
fi
me=$SLURM_JOB_ID # for an element of an array, this may be the id of the whole array
[ -z "${SLURM_ARRAY_JOB_ID:-}" ] || me=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
trap '' TERM # SLURM then sends it to end this script
scontrol requeue "$me" || exit 3
