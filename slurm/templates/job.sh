#!/usr/bin/env bash
# @about@
# Made by: @command@
# Edit it as you like, and submit it where it was made: sbatch @file@
@directives@

# The environment with Rudra, which every node must see. If MPI comes from the cluster, load its module.
PATH=@environment@/bin:$PATH
# How often the job may queue itself again, to continue after a time limit.
max_restarts=@restarts@

@run@

@launch@

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
