"""Devices as queues of work: what a device computes, the host only begins, and later asks whether it is done."""
