"""Async: every gradient is applied on arrival (rudra.txt §3.1, eq. 4)."""

from protocols.base import Protocol


class Async(Protocol):
    grants_on_push = False


PROTOCOL = Async
