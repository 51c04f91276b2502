"""EA-SGD, elastic averaging: as SMA, without momentum of the central model and without restarts.

Source: Zhang et al. 2015, Algorithm 1, and crossbow.txt §5.5. Synchronously, or each replica with z alone.
"""

from protocols.averaging import Averaging


class EASGD(Averaging):
    early = True
    served_too = True


PROTOCOL = EASGD
