"""Samples: their sources, and their order for each learner."""
