"""Search for the synchronisation that reaches a job's target soonest: `rudra tune`.

`space` lists what may vary, `prices` predicts the time of every point, `probes` trains short runs, `ruler` measures how
much each of their samples is worth, `strategies` decide what to train next, and `search` leads through all of it.
"""
