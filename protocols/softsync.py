"""n-softsync: any c = floor(λ/n) gradients make an update, and no learner waits.

Source: rudra.txt §3.1, eq. 5. The server is serial, so "at least c" is exactly c. With n = λ it is the asynchronous
rule.
"""

from protocols.base import Protocol


class Softsync(Protocol):
    grants_on_push = False

    def __init__(self, learners: int, n: int = 1) -> None:
        super().__init__(learners)
        if not 1 <= n <= learners:
            raise ValueError(f"n = {n} is not supported with {learners} learners; use 1 to {learners}")
        self.n = n
        self.gradients_per_update = learners // n

    @classmethod
    def label(cls, name: str, n: int | None) -> str:
        """Returns the paper's notation, such as `2-softsync`."""
        return name if n is None else f"{n}-softsync"

    @classmethod
    def family(cls, name: str, n: int | None, learners: int) -> str:
        return "λ-softsync" if n == learners != 1 else cls.label(name, n)


PROTOCOL = Softsync
