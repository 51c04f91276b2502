"""Tags of what ranks send each other on the job's communicator."""

FAILURE_TAG, CLOCK_TAG, REGROUP_TAG, STANDSTILL_TAG, FIRST_TAG = range(5)
"""Of failures, of clocks, of who is gone and from where the others go on, of who waits, and what roles have first."""

CONTROL, GRADIENTS, WEIGHTS, REDUCTIONS, AVERAGES, STATES, CHANNELS = range(7)
"""Tags from the first on: of each role these channels. Tensors' once more each time that roles regroup, and for each
place that a sender may have among the roles of its rank: what a role is to get of one comes of that one."""
