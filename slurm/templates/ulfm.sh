# Where Open MPI can, a run goes on without learners that die; without these options any rank that dies ends the job.
outlive=(@ulfm@)
mpirun "${outlive[@]}" --version >/dev/null 2>&1 || outlive=()
