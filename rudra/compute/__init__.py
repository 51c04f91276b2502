"""What computes: flat models, gradients, update rules, executors, devices."""
