"""Windows of several nodes, whose weights are averaged at each epoch's end, while nobody computes.

Nobody has Hogbatch across nodes; this is iterative parameter mixing (McDonald et al. 2010), once for each epoch. The
first learner of each node, its leader, sends the weights of its window to the coordinator, which takes their mean,
weighted by the samples that each node has applied since the last one, in the order of the nodes; the leader then begins
its window anew with that.
"""

from collections.abc import Sequence

from rudra.core.events import WEIGHTS, Accumulate, Action, Receive, Received, Send
from rudra.core.messages import CollectWindow, Weights, WindowWeights
from topologies import Plan


class NodeWindows:
    """The average of the nodes' windows, for the coordinator.

    Args:
        plan: who is who.
        role: the coordinator.
        learned: for each learner, the samples that are in the weights.

    Attributes:
        several: there are several nodes; else nothing here is used.
        busy: an average is under way.
        surviving: the part of the updates since the last average that races have left.
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
        """Whether nodes have applied anything since the last average."""
        return self.several and list(learned) != self._before

    def join(self, learned: Sequence[int], *, last: bool) -> list[Action]:
        """Asks for the weights of all nodes; unless it is the last time, they get the average."""
        grown = [now - before for now, before in zip(learned, self._before, strict=True)]
        self._samples = {leader: sum(grown[i] for i in there) for leader, there in self._leaders.items()}
        self._before, self._awaited = list(learned), set(self._leaders)
        asked = CollectWindow(self._role, average_follows=not last)
        receives = [Receive(_buffer(leader), leader, gradient=True) for leader in self._leaders]
        return [*receives, *(Send(leader, asked) for leader in self._leaders)]

    def take(self, event: Received[WindowWeights]) -> list[Action]:
        """The weights of a node have come; once all are there, they are averaged."""
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
        """Gives all nodes the average, as the weights of a timestamp."""
        self._awaited = set(self._leaders)
        weights = Weights(self._role, timestamp)
        return [Send(leader, weights, WEIGHTS) for leader in self._leaders]

    def shared(self, leader: int) -> None:
        """A node has it."""
        self._awaited.remove(leader)

    @property
    def surviving(self) -> float:
        total = sum(self._samples.values())
        return sum(self._surviving[leader] * samples for leader, samples in self._samples.items()) / total


def _buffer(leader: int) -> str:
    return f"gradient of role {leader}"
