"""Forms of a bank, the learners of a rank that compute on one device. Each form but the plain loop has a file.

The plain loop has none: the executor of each learner computes its gradient by itself (`rudra.compute.learners`).
"""
