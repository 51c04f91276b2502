"""DiLoCo: model averaging with long periods, and an outer optimiser with Nesterov momentum.

Source: Douillard et al. 2023. The outer optimiser is SGD with rate 0.7 and Nesterov momentum 0.9. The inner optimiser
(AdamW in the paper) is the job's.
"""

from typing import ClassVar

from protocols.averaging import Averaging


class DiLoCo(Averaging):
    PERIOD = 50
    LEARNING_RATE = 0.7
    MOMENTUM = 0.9
    OPTIONS: ClassVar = {"nesterov": True}


PROTOCOL = DiLoCo
