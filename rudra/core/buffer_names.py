"""Names of buffers, or their first words, that executors interpret."""

WEIGHTS, GRADIENT = "weights", "gradient"
REPLICA, DIFFERENCE = "replica", "difference"
REFERENCE, CORRECTION = "reference", "correction"
SNAPSHOT, DOWNCAST = "snapshot", "downcast"
AVERAGE = "average"
"""Trained weights and gradients; a learner's replica
and its difference from the weights; a block's reference and the difference of a replica from it; copies for
evaluations, and copies that are sent down the tree of weights; the average of the weights over time."""

PULLED = "pulled"
"""First word of the names of a server's copies of the weights that its learners hold."""

ACTIVATIONS, ACTIVATION_GRADIENT = "activations", "returned"
"""Buffers of the activations of the first layers and of their gradient. Their size differs from the size of the
weights."""
