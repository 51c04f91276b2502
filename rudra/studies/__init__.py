"""Many runs: sweeps, batch jobs, measured costs."""
