"""Tags of messages between ranks on the job's communicator."""

from rudra.core.buckets import MOST

FAILURE_TAG, CLOCK_TAG, REGROUP_TAG, STANDSTILL_TAG, NETWORK_TAG, FIRST_TAG = range(6)
"""Tags of failures, clock readings, regrouping (dead ranks and new position), waits and measurements of the network,
and the first tag of roles."""

CONTROL, GRADIENTS, WEIGHTS, AVERAGES, STATES, PUSHES, REDUCTIONS = range(7)
"""Channels of each role. Their tags begin at `FIRST_TAG`. A tensor's tag also depends on how often the roles have
regrouped, except for states, and on its sender's place among the roles of its rank, so that a receive only matches its
own sender. Each bucket has a channel of its own, from `REDUCTIONS` on, of a reduction or of a push. The message that
ends a push in buckets has the channel `PUSHES`."""

CHANNELS = REDUCTIONS + MOST
