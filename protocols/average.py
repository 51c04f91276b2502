"""Model averaging (local SGD): every `period` mini-batches all replicas continue from their mean.

Source: McMahan et al. 2017 (federated averaging), Stich 2019 (local SGD). With period 1, plain SGD inside and outer
momentum m it is hardsync with momentum m.
"""

from protocols.averaging import Averaging


class Average(Averaging):
    pass


PROTOCOL = Average
