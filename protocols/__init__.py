"""Synchronisation protocols: pure rules that say when a server updates, and at which learning rate.

A protocol never sees weights, messages or clocks. The server asks it three questions. A new protocol is a new file that
answers them (`Protocol`):

* In which order are gradients received (`ordered`), and how many make an update (`update_due`)?
* May this learner have the weights now, or does it wait for an update (`pull_granted`)?
* What are a gradient's weight in the average and the update's learning rate (`Modulation`)?

Another rule sees the gradients themselves, and changes them before they are averaged (`Correction`).
"""

from protocols.averaging import Averaging, Pair, pairs
from protocols.base import Clock, Protocol
from protocols.correction import Correction, GradientRecord
from protocols.hogbatch import Hogbatch
from protocols.making import (
    averaging_names,
    averaging_pairs,
    corrections,
    make,
    make_correction,
    rule_of,
    shipped,
)
from protocols.modulation import MODULATIONS, Modulation
from protocols.probe import own_update_due, restored, saved

__all__ = [
    "MODULATIONS",
    "Averaging",
    "Clock",
    "Correction",
    "GradientRecord",
    "Hogbatch",
    "Modulation",
    "Pair",
    "Protocol",
    "averaging_names",
    "averaging_pairs",
    "corrections",
    "make",
    "make_correction",
    "own_update_due",
    "pairs",
    "restored",
    "rule_of",
    "saved",
    "shipped",
]
