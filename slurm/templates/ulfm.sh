# If Open MPI supports these options, a run survives the death of learners. Otherwise any rank that dies ends the job.
outlive=(@ulfm@)
mpirun "${outlive[@]}" --version >/dev/null 2>&1 || outlive=()
