"""Words in the names of a checkpoint's tensors, apart from the names of buffers."""

OPTIMIZER = "optimizer."
BACK = "back."
"""Prefixes of the state of the optimiser that updates the weights, and of state of the owner of the last layers."""

VELOCITY, STEP = "momentum_buffer", "step"
"""Keys of SGD's momentum, and of the number of steps, in the state of an optimiser."""

CORRECTION = "correction."
"""Beginning of the names of a correction's tensors."""
