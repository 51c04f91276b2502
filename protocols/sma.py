"""SMA, synchronous model averaging: replicas are corrected towards a central model that has momentum.

Source: crossbow.txt §3.2, Algorithm 1. Each learner takes a whole batch. The correction c_j = α (w_j - z) uses the
replica before the step and z before its own step. z moves by the sum of all c_j and by μ times its last move. When the
learning rate drops, all replicas continue from z.
"""

from protocols.averaging import Averaging


class SMA(Averaging):
    early = True
    MOMENTUM = 0.9
    RESTART = True


PROTOCOL = SMA
