"""Search for the synchronisation that reaches a job's target soonest: `rudra tune`.

`space` lists what may vary, `prices` predicts the time of every point, `trainer` trains short runs, `store` keeps their
measurements, `ruler` says how much each of their samples is worth, `strategies` decide what to train next, `search`
leads through all of it, and `answer` and `page` report the result.
"""
