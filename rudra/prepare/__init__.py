"""Steps from a written job to a run.

1. `start`: beginning of the run according to its files: the start, a checkpoint, or another run's checkpoint. 2.
`resolve`: the job with all open keys filled in, and its plan, the role assignment. 3. `phases`: phases of the run
between the changes of the job.

Each step is a function of its arguments. Facts about machines and files are collected before, as plain values:
`resolve.RankFacts` of the ranks, `cut` of the model's layers, `cost_files` of the costs. Two commands take the written
job from the file of an earlier run: `resume` from a checkpoint, `replayed` from a result file.
"""
