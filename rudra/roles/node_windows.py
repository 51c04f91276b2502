"""Windows of several nodes, averaged at the end of each epoch while training pauses.

Hogbatch is not defined for several nodes. The average is iterative parameter mixing (McDonald et al. 2010), once for
each epoch. The first learner of each node is its leader. It sends the weights of its window to the coordinator, which
averages them in the order of the nodes. Each node is weighted by the samples that it has applied since the last
average. The leader then restarts its window from the average.
"""

from collections.abc import Sequence

from rudra.core.actions import Accumulate, Action, Receive, Send
from rudra.core.buffer_names import WEIGHTS
from rudra.core.events import Received
from rudra.core.messages import CollectWindow, Weights, WindowWeights
from topologies import Plan


class NodeWindows:
    """Average of the nodes' windows, made by the coordinator.

    Args:
        plan: roles of the run and their connections.
        role: id of the coordinator.
        learned: for each learner, the number of its samples that are in the weights.

    Attributes:
        several: whether there are several nodes. Otherwise this object is not used.
        busy: whether an average is under way.
        surviving: fraction of the updates since the last average that were not overwritten in races.
    """

    def __init__(self, plan: Plan, role: int, learned: Sequence[int]) -> None:
        self._role, self._leaders = role, plan.window_leaders
        self.several = bool(self._leaders)
        self._before = list(learned)
        self._samples: dict[int, int] = {}
        self._awaited: set[int] = set()
        self._surviving: dict[int, float] = {}

    @property
    def busy(self) -> bool:
        return bool(self._awaited)

    def is_due(self, learned: Sequence[int]) -> bool:
        """Returns whether any node has applied samples since the last average."""
        return self.several and list(learned) != self._before

    def join(self, learned: Sequence[int], *, last: bool) -> list[Action]:
        """Requests the weights of all nodes. They receive the average, unless this is the `last` request."""
        grown = [now - before for now, before in zip(learned, self._before, strict=True)]
        self._samples = {leader: sum(grown[i] for i in there) for leader, there in self._leaders.items()}
        self._before, self._awaited = list(learned), set(self._leaders)
        asked = CollectWindow(self._role, average_follows=not last)
        receives = [Receive(_buffer(leader), leader, gradient=True) for leader in self._leaders]
        return [*receives, *(Send(leader, asked) for leader in self._leaders)]

    def take(self, event: Received[WindowWeights]) -> list[Action]:
        """Takes the weights of a node, and averages when the weights of all nodes have arrived."""
        self._awaited.remove(event.message.sender)
        self._surviving[event.message.sender] = event.message.surviving
        if self._awaited:
            return []
        actions: list[Action] = []
        total = 0
        for leader, samples in self._samples.items():
            total += samples
            if samples:
                actions.append(Accumulate(WEIGHTS, _buffer(leader), samples / total, 1.0))
        return actions

    def give(self, timestamp: int) -> list[Action]:
        """Sends the average to all nodes as the weights of a timestamp."""
        self._awaited = set(self._leaders)
        weights = Weights(self._role, timestamp)
        return [Send(leader, weights, WEIGHTS) for leader in self._leaders]

    def shared(self, leader: int) -> None:
        """Takes note that a node has received the average."""
        self._awaited.remove(leader)

    @property
    def surviving(self) -> float:
        total = sum(self._samples.values())
        return sum(self._surviving[leader] * samples for leader, samples in self._samples.items()) / total


def _buffer(leader: int) -> str:
    return f"gradient of role {leader}"
