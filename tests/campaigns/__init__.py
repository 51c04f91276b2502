"""Campaigns of faults on real ranks: `python -m tests.campaigns --help`."""
