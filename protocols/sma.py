"""SMA, synchronous model averaging: replicas are corrected towards a central model that has momentum.

Source: crossbow.txt §3.2, Algorithm 1. Each learner takes a whole batch; c_j = α (w_j - z) is of its replica before the
step and of z before its own; z moves by the sum of all c_j and μ times its last move. When the learning rate drops, all
replicas go on from z.
"""

from protocols.averaging import Averaging


class SMA(Averaging):
    early = True
    MOMENTUM = 0.9
    RESTART = True


PROTOCOL = SMA
