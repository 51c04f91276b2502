"""Async: every gradient is applied on arrival (rudra.txt §3.1, eq. 4)."""

from protocols.base import Protocol


class Async(Protocol):
    grants_on_push = False

    @classmethod
    def family(cls, name: str, n: int | None, learners: int) -> str:
        """Returns the family of n-softsync, because the rule is n-softsync with n = λ."""
        return "async (λ-softsync)"


PROTOCOL = Async
