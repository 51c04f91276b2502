"""Priority of evaluations on a machine whose cores are all in use."""

NICE = 10
"""Nice value of an evaluation that decides nothing: training then has priority."""

WEIGHT = 110 / 1024
"""Time that Linux gives a process of this nice value, relative to one of value 0, if both want the same core."""
