"""Weights at a tree server: their buffers, and the children's requests for newer weights."""

from rudra.core.actions import Action, Send
from rudra.core.buffer_names import WEIGHTS
from rudra.core.messages import Weights

WEIGHT_BUFFERS = (f"{WEIGHTS} 0", f"{WEIGHTS} 1")


class WeightBuffers:
    """Pair of buffers: one is sent to children, and the other receives newer weights.

    Attributes:
        current: buffer with the newest weights.
        spare: the other buffer.
        awaited: whether newer weights are announced or on their way.
    """

    def __init__(self) -> None:
        self.current, self.spare = WEIGHT_BUFFERS
        self.awaited = False
        self._lent = dict.fromkeys(WEIGHT_BUFFERS, 0)  # number of transfers under way

    def validate(self) -> None:
        assert all(lent >= 0 for lent in self._lent.values())

    def send(self, to: int, message: Weights) -> Action:
        """Sends the current weights to a child."""
        self._lent[self.current] += 1
        return Send(to, message, self.current)

    def returned(self, buffer: str) -> None:
        """Notes the end of a transfer to a child."""
        self._lent[buffer] -= 1

    def received(self) -> None:
        """Makes the spare buffer current, because newer weights have arrived in it."""
        self.awaited = False
        self.current, self.spare = self.spare, self.current

    @property
    def can_receive(self) -> bool:
        """Whether all transfers of the spare buffer have ended."""
        return not self._lent[self.spare]

    @property
    def idle(self) -> bool:
        """Whether no transfer to a child is under way."""
        return not any(self._lent.values())


class Questions:
    """Children's requests for newer weights. A request has the timestamp asked about and the timestamp that is held.

    Attributes:
        with_gradients: requests that wait for the average with the child's gradient, by child.
        waiting: requests that can be sent to the parent, by child.
        asked: requests that the parent has received and not answered, by child.
    """

    def __init__(self) -> None:
        self.with_gradients: dict[int, tuple[int, int]] = {}
        self.waiting: dict[int, tuple[int, int]] = {}
        self.asked: dict[int, tuple[int, int]] = {}

    def pass_on(self) -> None:
        """Makes the requests in `with_gradients` wait for the parent, because their average is on its way."""
        self.waiting |= self.with_gradients
        self.with_gradients.clear()

    def ask(self) -> int:
        """Marks all waiting requests as sent to the parent. Returns the oldest timestamp that a child asks about."""
        self.asked, self.waiting = self.waiting, {}
        return min(about for about, _ in self.asked.values())

    def answer(self) -> dict[int, tuple[int, int]]:
        """Returns the requests that the parent has answered."""
        answered, self.asked = self.asked, {}
        return answered

    def lose(self, child: int) -> None:
        """Drops the requests of a lost child."""
        self.with_gradients.pop(child, None)
        self.waiting.pop(child, None)
