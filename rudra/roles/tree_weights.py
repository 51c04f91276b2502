"""Weights at a server of a tree: the buffers that hold them, and the questions of children for newer ones."""

from rudra.core.events import WEIGHTS, Action, Send
from rudra.core.messages import Weights

WEIGHT_BUFFERS = (f"{WEIGHTS} 0", f"{WEIGHTS} 1")


class WeightBuffers:
    """Two buffers: one is sent to children, and the other one receives newer weights.

    Attributes:
        current: buffer with the newest weights.
        spare: the other buffer.
        awaited: newer weights are announced or on their way.
    """

    def __init__(self) -> None:
        self.current, self.spare = WEIGHT_BUFFERS
        self.awaited = False
        self._lent = dict.fromkeys(WEIGHT_BUFFERS, 0)  # transfers under way

    def validate(self) -> None:
        assert all(lent >= 0 for lent in self._lent.values())

    def send(self, to: int, message: Weights) -> Action:
        """Sends the current weights to a child."""
        self._lent[self.current] += 1
        return Send(to, message, self.current)

    def returned(self, buffer: str) -> None:
        """A transfer to a child has ended."""
        self._lent[buffer] -= 1

    def received(self) -> None:
        """Newer weights are in the spare buffer."""
        self.awaited = False
        self.current, self.spare = self.spare, self.current

    @property
    def can_receive(self) -> bool:
        """Whether the spare buffer is back from all children."""
        return not self._lent[self.spare]

    @property
    def idle(self) -> bool:
        """Whether no transfer to a child is under way."""
        return not any(self._lent.values())


class Questions:
    """Questions of children for newer weights: the timestamp that each asks about, and the timestamp that it holds.

    Attributes:
        with_gradients: that wait for the average with the child's gradient.
        waiting: that the parent is not asked yet.
        asked: that the parent is asked and has not answered.
    """

    def __init__(self) -> None:
        self.with_gradients: dict[int, tuple[int, int]] = {}
        self.waiting: dict[int, tuple[int, int]] = {}
        self.asked: dict[int, tuple[int, int]] = {}

    def pass_on(self) -> None:
        """The average with the children's gradients is on its way to the parent."""
        self.waiting |= self.with_gradients
        self.with_gradients.clear()

    def ask(self) -> int:
        """Asks the parent all questions that wait; returns the oldest timestamp that a child asks about."""
        self.asked, self.waiting = self.waiting, {}
        return min(about for about, _ in self.asked.values())

    def answer(self) -> dict[int, tuple[int, int]]:
        """Returns the questions that the parent has answered."""
        answered, self.asked = self.asked, {}
        return answered

    def lose(self, child: int) -> None:
        """A child is no more."""
        self.with_gradients.pop(child, None)
        self.waiting.pop(child, None)
