"""Links of machines in virtual time: which tensor crosses them when.

In turns, a tensor has both of its ends' links to itself, and waits for that (`Port.free_at`). Shared, all cross at
once, and divide the links between them as fairly as can be: nobody could get more without another, who has as little,
getting less (max-min fairness), which is about what many streams of TCP or RDMA come to.
"""

from typing import Any

from rudra.simulation.queue import Call, EventQueue


class Port:
    """One direction of a link.

    Args:
        bytes_per_s: that it carries.

    Attributes:
        bytes_per_s: that it carries.
        free_at: in turns, when it carries nothing any more.
    """

    __slots__ = ("bytes_per_s", "free_at")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.free_at = bytes_per_s, 0.0


Ports = dict[tuple[str, str, int], Port]
"""By direction, and what they are the ports of: a machine, or a role."""


class _Flow:
    """A tensor that crosses two ports, at a rate that changes, and what is to be called when it has come."""

    __slots__ = ("done", "left", "ports", "rate")

    def __init__(self, ports: tuple[Port, Port], size_bytes: float, done: tuple[Call, Any, Any]) -> None:
        self.ports, self.left, self.done, self.rate = ports, size_bytes, done, 0.0


class SharedLinks:
    """What crosses links at the same time.

    Args:
        queue: of the simulation.
    """

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue
        self._flows: list[_Flow] = []
        self._since = 0.0  # what is left of the flows is as of then
        self._change = 0  # a number: an end that was foreseen before the latest one is none

    def send(self, time: float, ports: tuple[Port, Port], size_bytes: float, done: tuple[Call, Any, Any]) -> None:
        """Has a tensor cross two ports.

        Args:
            time: from when on, at the earliest now.
            ports: where it leaves and where it arrives.
            size_bytes: of the tensor.
            done: what is called when it has come, with its two arguments.
        """
        self._queue.at(time, self._begin, _Flow(ports, size_bytes, done), None)

    def _begin(self, flow: _Flow, _: None) -> None:
        self._go_on()
        self._flows.append(flow)
        self._divide()

    def _end(self, change: int, _: None) -> None:
        if change != self._change:
            return
        self._go_on()
        least = min(flow.left / flow.rate for flow in self._flows)
        over = [flow for flow in self._flows if flow.left / flow.rate <= least + 1e-12]
        self._flows = [flow for flow in self._flows if flow not in over]
        for flow in over:
            what, whom, about = flow.done
            self._queue.at(self._queue.now, what, whom, about)
        self._divide()

    def _go_on(self) -> None:
        """Lets the time that has passed count."""
        elapsed, self._since = self._queue.now - self._since, self._queue.now
        for flow in self._flows:
            flow.left = max(0.0, flow.left - flow.rate * elapsed)

    def _divide(self) -> None:
        """Gives each flow its rate: again and again all those of the port on which each gets least, what is left."""
        self._change += 1
        if not self._flows:
            return
        using: dict[Port, list[_Flow]] = {}
        for flow in self._flows:
            for port in flow.ports:
                using.setdefault(port, []).append(flow)
        free = {port: port.bytes_per_s for port in using}
        waiting = {port: len(flows) for port, flows in using.items()}
        open_ = set(self._flows)
        while open_:
            tightest = min(waiting, key=lambda port: free[port] / waiting[port])
            rate = free[tightest] / waiting[tightest]
            for flow in [flow for flow in using[tightest] if flow in open_]:
                flow.rate = rate
                open_.discard(flow)
                for port in flow.ports:
                    free[port] = max(0.0, free[port] - rate)
                    waiting[port] -= 1
                    if not waiting[port]:
                        del waiting[port]
        soonest = min(flow.left / flow.rate for flow in self._flows)
        self._queue.at(self._queue.now + soonest, self._end, self._change, None)
