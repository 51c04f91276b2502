"""The way from a written job to one that can run, step by step.

1. `start`: where the run begins, as its files say: at the start, at a checkpoint, or with another run's.
2. `resolve` and `fit`: the job with all keys that it leaves open, and its plan: who is who.
3. `phases`: the parts of the run between the changes of the job.

What these steps need to know of a machine they are given as plain values, so each is a function of its arguments.
`cut` and `cost_files` find such values out.
"""
