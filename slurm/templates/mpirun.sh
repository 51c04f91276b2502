# SLURM tells this shell alone that the time ends; mpirun passes it on to the ranks, which then save a checkpoint.
@mpirun@ "${run[@]}" &
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
