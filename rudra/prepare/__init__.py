"""The way from a written job to one that can run, step by step.

1. `start`: where the run begins, as its files say: at the start, at a checkpoint, or with another run's checkpoint.
2. `resolve`: the job with all keys that it leaves open, and its plan: who is who.
3. `phases`: the parts of the run between the changes of the job.

Each step is a function of its arguments. What it needs to know of a machine or of files is found before, as plain
values: `resolve.RankFacts` of the ranks, `cut` of the model's layers, `cost_files` of the costs. Two commands take the
written job from a file of an earlier run: `resume` from a checkpoint, `replayed` from a result file.
"""
