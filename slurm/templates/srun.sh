# Before the time limit SLURM signals the ranks. They save a checkpoint and end with code 3. Such a task leaves a marker
# file and ends with 0, because srun kills the other tasks as soon as one ends with a different code.
export STOPPED=$PWD/.stopped-$SLURM_JOB_ID
rm -f "$STOPPED"
cancelled=0 again=0
trap 'cancelled=1' TERM
@srun@ bash -c '
  trap : USR1 TERM # the rank also gets these signals
  "$@"
  code=$?
  if [ "$code" = 3 ] || [ "$code" = 138 ]; then code=0 && : >"$STOPPED"; fi # 138: the signal came too early
  exit "$code"' rank "${run[@]}"
code=$?
[ ! -e "$STOPPED" ] || again=1
rm -f "$STOPPED"
