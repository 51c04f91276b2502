"""Links of machines in virtual time: when each tensor crosses them.

If links are used in turns, a tensor occupies the links at both of its ends, and waits until they are free
(`Port.free_at`). If links are shared, all tensors cross at once with max-min fair rates: no tensor could get more
unless another with an equal or smaller rate got less. Many streams of TCP or RDMA share a link in about this way.
"""

from typing import Any

from rudra.simulation.queue import Call, EventQueue


class Port:
    """One direction of a link.

    Args:
        bytes_per_s: Bandwidth of the port.

    Attributes:
        bytes_per_s: Bandwidth of the port.
        free_at: Time when the port is free again, if links are used in turns.
    """

    __slots__ = ("bytes_per_s", "free_at")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.free_at = bytes_per_s, 0.0


Ports = dict[tuple[str, str, int], Port]
"""Ports by direction and owner, which is a machine or a role."""


class _Flow:
    """Tensor that crosses two ports at a variable rate, with the function to call when it has arrived."""

    __slots__ = ("done", "left", "ports", "rate")

    def __init__(self, ports: tuple[Port, Port], size_bytes: float, done: tuple[Call, Any, Any]) -> None:
        self.ports, self.left, self.done, self.rate = ports, size_bytes, done, 0.0


class SharedLinks:
    """Links that several tensors cross at the same time.

    Args:
        queue: Event queue of the simulation.
    """

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue
        self._flows: list[_Flow] = []
        self._since = 0.0  # time of the last update of the flows' remaining bytes
        self._change = 0  # version number: ends that were predicted before the latest change are ignored

    def send(self, time: float, ports: tuple[Port, Port], size_bytes: float, done: tuple[Call, Any, Any]) -> None:
        """Sends a tensor across two ports.

        Args:
            time: Start time, not in the past.
            ports: Port at the sender and port at the receiver.
            size_bytes: Size of the tensor.
            done: Function to call on arrival, with its two arguments.
        """
        self._queue.at(time, self._begin, _Flow(ports, size_bytes, done), None)

    def _begin(self, flow: _Flow, _: None) -> None:
        self._schedule_next()
        self._flows.append(flow)
        self._divide()

    def _end(self, change: int, _: None) -> None:
        if change != self._change:
            return
        self._schedule_next()
        least = min(flow.left / flow.rate for flow in self._flows)
        over = [flow for flow in self._flows if flow.left / flow.rate <= least + 1e-12]
        self._flows = [flow for flow in self._flows if flow not in over]
        for flow in over:
            what, whom, about = flow.done
            self._queue.at(self._queue.now, what, whom, about)
        self._divide()

    def _schedule_next(self) -> None:
        """Subtracts the bytes that have crossed since the last change."""
        elapsed, self._since = self._queue.now - self._since, self._queue.now
        for flow in self._flows:
            flow.left = max(0.0, flow.left - flow.rate * elapsed)

    def _divide(self) -> None:
        """Sets max-min fair rates: repeatedly takes the port with the least rate per flow, and fixes the rates of its
        flows."""
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
