#!/usr/bin/env bash
# /tmp/j.toml by mpirun: 1 parameter server, 1 statistics server, 1 stage server, 1 stage replica, 5 learners
# Made by: rudra slurm /tmp/j.toml --ntasks 9
# Edit it as you like, and submit it where it was made: sbatch j.sh
#SBATCH --job-name=j
#SBATCH --ntasks=9
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# The environment that Rudra is installed in; every node must see it. If the MPI is the cluster's own, load its module.
PATH=/work/main/.venv/bin:$PATH
# How often the job may queue itself again, to go on after a time limit.
max_restarts=10

results=j.h5
run=(rudra run /tmp/j.toml --output "$results" --resume)

# Where Open MPI can, a run goes on without learners that die; without these options any rank that dies ends the job.
outlive=(--with-ft ulfm --mca btl_tcp_flags send,inplace,need-ack,need-csum,hetero-rdma)
mpirun "${outlive[@]}" --version >/dev/null 2>&1 || outlive=()

# SLURM tells this shell alone that the time ends; mpirun passes it on to the ranks, which then save a checkpoint.
mpirun -n "$SLURM_NTASKS" --bind-to none "${outlive[@]}" "${run[@]}" &
ranks=$! told=0 cancelled=0
trap 'told=$((told + 1)); kill -USR1 "$ranks"' USR1
trap 'told=$((told + 1)); cancelled=1; kill -TERM "$ranks"' TERM
while before=$told; wait "$ranks"; code=$?; [ "$told" != "$before" ]; do :; done # a signal ends `wait`, not the ranks

again=0
case $code in
  0) # Open MPI says so too where it has lost one of its daemons
    case $(rudra show "$results" --json) in
      *'"status": "finished"'*) ;;
      *'"status": "failed"'*) code=1 ;;
      *) again=1 ;;
    esac ;;
  1 | 2) ;;
  3) again=1 ;; # stopped as asked
  *) [ "$told" = 0 ] || again=1 ;; # cut short when asked: there may be an earlier checkpoint
esac

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
