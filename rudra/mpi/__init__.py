"""The driver of real ranks, and what only it needs."""
