"""Requests for the weights of a server, and transfers of the weights to its children."""

from collections.abc import Sequence

from protocols import Clock
from rudra.core.actions import Action, Send
from rudra.core.buffer_names import WEIGHTS
from rudra.core.messages import PullAnswer, Weights
from rudra.roles.correcting import ServerCorrection

NO_WEIGHTS = -1
"""Value of `held` in a gradient's message if the worker requests work but needs no weights."""


class WeightRequests:
    """Children's requests for newer weights, and transfers of the weights to children.

    Args:
        role: id of the server.
        correction: correction of gradients, which notes the weights that children hold. None: the job has none.

    Attributes:
        waiting: requests without an answer: child -> (timestamp, held). The child requests weights
            newer than `timestamp`, and has the weights of timestamp `held`.
        lent: number of transfers under way. They read the weights, which therefore must not change.
        clock: clock of the protocol at the timestamp of the weights.
        weights: message with the weights.
    """

    clock: Clock
    weights: Weights
    _newest: PullAnswer

    def __init__(self, role: int, correction: ServerCorrection | None) -> None:
        self._role, self._correction = role, correction
        self.waiting: dict[int, tuple[int, int]] = {}
        self.lent = 0

    def renew(self, clock: Clock) -> None:
        """Prepares the messages about the weights of another timestamp."""
        self.clock = clock
        self._newest, self.weights = PullAnswer(self._role, clock.timestamp), Weights(self._role, clock.timestamp)

    def send(self, child: int) -> Send:
        """Sends the weights to a child."""
        self.lent += 1
        return Send(child, self.weights, WEIGHTS)

    def send_first(self, receivers: Sequence[int], children: Sequence[int]) -> list[Action]:
        """Sends the weights to all roles that get them from the server. Then all children hold them."""
        self.lent = 0
        if self._correction is not None:
            self._correction.answered(*children)
        return [self.send(to) for to in receivers]

    def remove(self, child: int) -> int:
        """Removes a request that is answered now. Returns the timestamp of the weights that the child holds."""
        if self._correction is not None:
            self._correction.answered(child)
        return self.waiting.pop(child)[1]

    def answer(self, child: int) -> list[Action]:
        """Answers a request with the newest timestamp, and with the weights if they are newer than the child's."""
        held, answer = self.remove(child), Send(child, self._newest)
        return [answer] if held == self.clock.timestamp else [answer, self.send(child)]
