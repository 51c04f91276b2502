"""Users' protocols and topologies: those of the documentation, and more."""

from pages import names_in, page

from protocols import Protocol

_PAGE = page("own-rules.md")
Bounded = names_in(_PAGE, "bounded.py")["Bounded"]
Racks = names_in(_PAGE, "racks.py")["Racks"]


class Eager(Protocol):
    """Adds in learner order, but lets everybody go on at once: gradients queue up at the server."""

    ordered = True

    def __init__(self, learners: int) -> None:
        super().__init__(learners)
        self.gradients_per_update = learners
