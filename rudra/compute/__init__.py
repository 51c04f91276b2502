"""Computation: flat models, gradients, update rules, executors, devices."""
