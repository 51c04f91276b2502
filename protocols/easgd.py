"""EA-SGD, elastic averaging: like SMA, without momentum of the central model and without restarts.

Source: Zhang et al. 2015, Algorithm 1, and crossbow.txt §5.5. It is synchronous, or each replica exchanges separately
with z.
"""

from protocols.averaging import Averaging


class EASGD(Averaging):
    early = True
    served_too = True


PROTOCOL = EASGD
