#!/usr/bin/env bash
# digits by mpirun: 1 parameter server, 1 statistics server, 2 tree servers, 12 learners
# Made by: rudra slurm digits --nodes 2 --ntasks-per-node 8 --cpus-per-task 2 --learners 12 --set topology.name=adv --time 1:00:00 --output many.h5 --environment .venv --script slurm/several-per-node.sh
# Edit it as you like, and submit it where it was made: sbatch slurm/several-per-node.sh
#SBATCH --job-name=many
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=2
#SBATCH --time=1:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# The environment with Rudra, which every node must see. If MPI comes from the cluster, load its module.
PATH=$PWD/.venv/bin:$PATH
# How often the job may queue itself again, to continue after a time limit.
max_restarts=10

results=many.h5
run=(rudra run digits --set topology.name=adv --set cluster.learners=12 --output "$results" --resume)

# If Open MPI supports these options, a run survives the death of learners. Otherwise any rank that dies ends the job.
outlive=(--with-ft ulfm)
mpirun "${outlive[@]}" --version >/dev/null 2>&1 || outlive=()

# Before the time limit SLURM signals only this shell. mpirun forwards the signal to the ranks, which save a checkpoint.
mpirun -n "$SLURM_NTASKS" --bind-to none "${outlive[@]}" "${run[@]}" &
ranks=$! told=0 cancelled=0
trap 'told=$((told + 1)); kill -USR1 "$ranks"' USR1
trap 'told=$((told + 1)); cancelled=1; kill -TERM "$ranks"' TERM
while before=$told; wait "$ranks"; code=$?; [ "$told" != "$before" ]; do :; done # a signal ends `wait`, not the ranks

again=0
case $code in
  0) # Open MPI also returns 0 if it has lost one of its daemons
    case $(rudra show "$results" --json) in
      *'"status": "finished"'*) ;;
      *'"status": "failed"'*) code=1 ;;
      *) again=1 ;;
    esac ;;
  1 | 2) ;;
  3) again=1 ;; # stopped on request
  *) [ "$told" = 0 ] || again=1 ;; # killed after a signal: there may be an earlier checkpoint
esac

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
