# SLURM tells this shell alone that the time ends; mpirun passes it on to the ranks, which then save a checkpoint.
@mpirun@ "${run[@]}" &
ranks=$! told=0 cancelled=0
trap 'told=$((told + 1)); kill -USR1 "$ranks"' USR1
trap 'told=$((told + 1)); cancelled=1; kill -TERM "$ranks"' TERM
while before=$told; wait "$ranks"; code=$?; [ "$told" != "$before" ]; do :; done # a signal ends `wait`, not the ranks

# 3: stopped as asked. More than that after a signal: cut short, but an earlier checkpoint may be there.
[ "$code" = 3 ] || { [ "$told" -gt 0 ] && [ "$code" -gt 3 ]; } || exit "$code"
