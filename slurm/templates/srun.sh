# SLURM tells the ranks themselves that the time ends. They save a checkpoint and end with code 3: a task that does so
# leaves word and ends with 0, because after the first that ends with anything else, srun would kill the others.
export STOPPED=$PWD/.stopped-$SLURM_JOB_ID
rm -f "$STOPPED"
cancelled=0 again=0
trap 'cancelled=1' TERM
@srun@ bash -c '
  trap : USR1 TERM # they are for the rank, which gets them too
  "$@"
  code=$?
  if [ "$code" = 3 ] || [ "$code" = 138 ]; then code=0 && : >"$STOPPED"; fi # 138: it was told before it was ready
  exit "$code"' rank "${run[@]}"
code=$?
[ ! -e "$STOPPED" ] || again=1
rm -f "$STOPPED"
