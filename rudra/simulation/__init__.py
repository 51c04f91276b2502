"""The driver in virtual time, and what only it needs."""
