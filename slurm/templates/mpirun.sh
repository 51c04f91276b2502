# Before the time limit SLURM signals only this shell. mpirun forwards the signal to the ranks, which save a checkpoint.
@mpirun@ "${run[@]}" &
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
