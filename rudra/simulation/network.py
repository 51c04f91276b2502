"""Network in virtual time: control messages, tensors that occupy ports, and collectives.

A transfer of a tensor waits until the receiver has posted a buffer, as MPI's rendezvous does, and until the ports at
both ends are free. A cost model (`rudra.simulation.costs`) gives all durations.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heappush
from itertools import pairwise
from math import inf
from typing import Any

from rudra.core.actions import CancelReceive, Receive, Reduce, Send
from rudra.core.backward import after_s
from rudra.core.events import ReceiveCancelled, Received, Reduced, Sent
from rudra.core.forward import EarlyTimes
from rudra.core.messages import GRADIENTS, MESSAGES, ROWS
from rudra.simulation.actor import Actor, Offer, Route
from rudra.simulation.costs import CostModel
from rudra.simulation.links import Ports, SharedLinks
from rudra.simulation.queue import Call, EventQueue, Scheduled
from rudra.simulation.timing_only import Tensors
from topologies import Plan

# Types are looked up faster than kinds: a kind is an attribute of the class of a message.
GRADIENT_TYPES = frozenset(MESSAGES[kind] for kind in GRADIENTS)
ROW_TYPES = frozenset(MESSAGES[kind] for kind in ROWS)


class Network:
    """Network between roles.

    Args:
        queue: Event queue of the simulation.
        actors: Actors by role.
        costs: Durations.
        tensors: Object to notify of transfers.
        size_bytes: Size of one tensor on the wire.
        gradient_share: Size of a gradient on the wire, as a fraction of `size_bytes`.
        beside: Network of another job on the same machines.

    Attributes:
        plan: Roles and their ranks.
        ports: Ports of the machines.
        links: Links that several tensors cross at the same time, or None if tensors cross in turns.
        take_core: Function that takes seconds of a core of a node from its learners. None: there are enough cores.
    """

    def __init__(
        self,
        queue: EventQueue,
        actors: Mapping[int, Actor],
        costs: CostModel,
        tensors: Tensors,
        size_bytes: int,
        gradient_share: float,
        beside: "Network | None" = None,
    ) -> None:
        self.plan: Plan = costs.plan
        self._queue, self._heap, self._first, self._last = queue, queue.heap, queue.first, queue.last
        self._actors, self._costs = actors, costs
        self._lent, self._transferred, self._sent = tensors.lent, tensors.transfer, tensors.sent
        self._posted, self._reducer = tensors.posted, tensors.reduce
        self._size_bytes, self._gradient_share = size_bytes, gradient_share
        # If all latencies are equal, tensors arrive in the order of their sends, and need no event.
        self._latency_jitter_s = costs.table.latency_jitter_s
        latencies = {costs.table.latency_s, costs.table.local_latency_s} - {None}
        self._in_order = not self._latency_jitter_s and len(latencies) == 1
        self.ports: Ports = {} if beside is None else beside.ports
        self._own: Ports = {}  # ports of roles
        shared = beside.links if beside is not None else SharedLinks(queue)
        self.links: SharedLinks | None = shared if costs.table.sharing == "equal" else None
        self.take_core: Callable[[int, float], None] | None = None
        self._reductions: dict[tuple[int, int], dict[int, Reduce]] = {}
        self._over = self._deliver  # one bound method for all transfers

    # Actions of roles.

    def send(self, actor: Actor, action: Send, time: float) -> None:
        route = actor.routes.get(action.to) or self._route(actor, action.to)
        arrival = time + route.latency_s
        if self._latency_jitter_s:
            arrival += actor.random.uniform(0.0, self._latency_jitter_s)
        if arrival < route.delivered_at:
            arrival = route.delivered_at
        route.delivered_at = arrival
        receiver = route.receiver
        if action.buffer is None:
            heappush(self._heap, (arrival, next(self._last), receiver.take, receiver, Received(action.message)))
            return
        if self._lent:
            self._lent(actor.role, action.buffer)
        if self._in_order:
            self._offer(receiver, (route, action, arrival))
        else:
            self._queue.at(arrival, self._offer, receiver, (route, action, arrival))

    def receive(self, actor: Actor, action: Receive, time: float) -> None:
        if self._posted:
            self._posted(actor.role, action.buffer)
        offered, source = actor.offered[action.gradient], action.source
        if source is None and offered:
            source = next(iter(offered))
        if source not in offered:
            actor.posted.append(action)
            return
        offers = offered[source]
        route, send, arrival = offers.pop(0)
        if not offers:
            del offered[source]
        self._transfer(route, send, action, arrival if arrival > time else time)

    def withdraw(self, actor: Actor, action: CancelReceive, time: float) -> None:
        for place, receive in enumerate(actor.posted):
            if receive.buffer == action.buffer:
                del actor.posted[place]
                event = ReceiveCancelled(action.buffer)
                self._queue.later(self._queue.now, actor.take, actor, event)  # before any loss noticed from now on
                return

    def reduce(self, actor: Actor, action: Reduce, time: float) -> None:
        """Adds a role to a collective. It starts with its last member, and occupies all members' ports."""
        key = (action.group, action.sequence)
        here = self._reductions.setdefault(key, {})
        here[actor.role] = action
        members = self.plan.together(actor.role, action.group)
        if len(here) < len(members):
            return
        del self._reductions[key]
        seconds = self._costs.reduction_s(members, self._size_bytes)
        about = (self._reduced, members, {role: here[role] for role in members})
        pairs = [(self._actors[a], b) for a, b in pairwise(members)]
        routes = [a.routes.get(b) or self._route(a, b) for a, b in pairs]
        if self.links is not None:
            self._share(routes, time, seconds, about)
            return
        ports = [port for route in routes for port in (route.out, route.into)]
        end = max([time, *(port.free_at for port in ports)]) + seconds
        for port in ports:
            port.free_at = end
        self._queue.at(end, *about)

    def _share(self, routes: Sequence[Route], time: float, seconds: float, about: tuple[Call, Any, Any]) -> None:
        """Sends a collective across its members' links in parallel with other transfers. Without them it takes
        `seconds`.

        Its traffic from each machine to the next one is modelled as if it could fill these links.
        """
        assert self.links is not None
        ends = [(route.out, route.into, route.bytes_per_s) for route in routes if route.between]
        if ends:  # and from the last machine to the first
            first, last = routes[0].sender.role, routes[-1].receiver
            back = last.routes.get(first) or self._route(last, first)
            ends += [(back.out, back.into, back.bytes_per_s)] if back.between else []
        if not ends or not seconds or inf in {rate for *_, rate in ends}:
            self._queue.at(time + seconds, *about)
            return
        left = [len(ends)]

        def arrived(left: list[int], about: tuple[Call, Any, Any]) -> None:
            left[0] -= 1
            if not left[0]:
                what, whom, them = about
                what(whom, them)

        for out, into, rate in ends:
            self.links.send(time, (out, into), seconds * rate, (arrived, left, about))

    # Steps of a transfer.

    def _route(self, actor: Actor, to: int) -> Route:
        link = self._costs.link(actor.role, to)
        size_bytes = self._size_bytes * self._costs.travelling(actor.role, to)
        route = actor.routes[to] = Route(actor, self._actors[to], link, size_bytes, self.ports, self._own)
        if route.transfer_s:
            route.leads, route.pulled = self._costs.leads(actor.role, to), self._costs.pulled(actor.role, to)
        if self.take_core is not None:
            route.core_s = self._costs.core_s(actor.role, to, size_bytes)
        return route

    def _offer(self, receiver: Actor, offer: Offer) -> None:
        """Handles the arrival of a tensor at its receiver."""
        route, send, arrival = offer
        source, gradient = route.sender.role, type(send.message) in GRADIENT_TYPES
        for receive in receiver.posted:
            if receive.gradient is gradient and (receive.source is None or receive.source == source):
                receiver.posted.remove(receive)
                self._transfer(route, send, receive, arrival)
                return
        offered = receiver.offered[gradient]
        if source in offered:
            offered[source].append(offer)
        else:
            offered[source] = [offer]

    def _transfer(self, route: Route, send: Send, receive: Receive, time: float) -> None:
        """Starts a transfer when both ports are free, or at once if links are shared."""
        out, into = route.out, route.into
        if len(route.leads) > 1 and type(send.message) in GRADIENT_TYPES:
            self._push_rest(route, (send, receive), time)
            return
        if self.links is not None:
            seconds = route.transfer_s * (self._gradient_share if receive.gradient else 1.0)
            if seconds:
                route.began_at = time
                ends, about = (out, into), (self._over, route, (send, receive))
                self.links.send(time, ends, seconds * route.bytes_per_s, about)
                return
        if out.free_at > time:
            time = out.free_at
        if into.free_at > time:
            time = into.free_at
        if route.blocking:
            time = max(time, *(port.free_at for port in route.blocking))
        route.began_at = time
        time += route.transfer_s * self._gradient_share if receive.gradient else route.transfer_s
        out.free_at = into.free_at = time
        if route.blocking:
            for port in route.blocking:
                port.free_at = time
        heappush(self._heap, (time, next(self._first), self._over, route, (send, receive)))

    def prepare(self) -> None:
        """Notes the routes that learners send parts of their gradients on early, if links are shared."""
        plan = self.plan
        for learner in plan.learners if self.links is not None else ():
            parent, actor = plan.roles[learner].parent, self._actors[learner]
            owners = plan.front_owners if plan.sharded else () if parent is None else (parent,)
            actor.early = [route for route in (self._route(actor, owner) for owner in owners) if len(route.leads) > 1]

    def push_early(self, actor: Actor, time: float, seconds: float, backward: float) -> None:
        """Sends the buckets of a gradient across shared links while it is computed.

        Args:
            actor: Learner.
            time: Time when the computation begins.
            seconds: Duration of the computation.
            backward: Fraction of it that the backward pass takes, which finishes buckets.
        """
        for route in actor.early:
            pieces = deque(
                (time + seconds * (1 - backward * lead.left), lead.rest - later.rest)
                for lead, later in pairwise(route.leads)
            )
            self._push_piece(route, pieces)

    def _push_piece(self, route: Route, pieces: deque[tuple[float, float]]) -> None:
        """Sends the first of some pieces of a gradient, and later the others. A piece is its time and its fraction."""
        assert self.links is not None
        time, part = pieces.popleft()
        size_bytes = part * route.transfer_s * self._gradient_share * route.bytes_per_s
        ends = route.out, route.into
        self.links.send(max(time, self._queue.now), ends, size_bytes, (self._pushed_piece, route, pieces))

    def _pushed_piece(self, route: Route, pieces: deque[tuple[float, float]]) -> None:
        if pieces:
            self._push_piece(route, pieces)
            return
        route.ahead += 1
        if route.waiting:
            self._push_rest(route, route.waiting.popleft(), self._queue.now)

    def _push_rest(self, route: Route, transfer: tuple[Send, Receive], time: float) -> None:
        """Starts to send the rest of a gradient that is pushed in buckets.

        If links are used in turns, the buckets have crossed them in the backward pass as far as the links were free.
        """
        transfer_s = route.transfer_s * self._gradient_share
        if self.links is not None:
            if not route.ahead:
                route.waiting.append(transfer)
                return
            route.ahead -= 1
            if rest_s := transfer_s * route.leads[-1].rest:
                ends, about = (route.out, route.into), (self._deliver, route, transfer)
                self.links.send(time, ends, rest_s * route.bytes_per_s, about)
            else:
                self._queue.at(time, self._deliver, route, transfer)
            return
        ports = [route.out, route.into, *route.blocking]
        backward_s = self._costs.compute_s[route.sender.role] * self._costs.backward
        sent_at = max(time - backward_s * route.leads[0].left, *(port.free_at for port in ports)) + transfer_s
        for port in ports:
            port.free_at = sent_at
        delivered_at = max(sent_at, time + after_s(route.leads, transfer_s, backward_s))
        self._queue.at(delivered_at, self._deliver, route, transfer)

    def _deliver(self, route: Route, transfer: tuple[Send, Receive]) -> None:
        send, receive = transfer
        sender, receiver = route.sender, route.receiver
        buffer, message = send.buffer or "", send.message
        if self.take_core is not None:
            share = self._gradient_share if receive.gradient else 1.0
            for node, seconds in route.core_s.items():
                self.take_core(node, seconds * share)
        if self._transferred:
            self._transferred(sender.role, buffer, receiver.role, receive.buffer)
        if self._sent:
            self._sent(sender.role, buffer)
        if type(message) in ROW_TYPES:
            message = message.with_own_rows()
        machine = sender.machine
        event = Received(message, receive.buffer)
        if route.pulled is None or receive.gradient or receiver.pulled is None:
            receiver.take(receiver, event)
        else:
            self._queue.later(self._pass_ends_at(route, route.pulled), receiver.take, receiver, event)
        if sender.machine is machine:  # otherwise the sender has restarted
            sender.take(sender, Sent(buffer, receiver.role))

    def _pass_ends_at(self, route: Route, early: EarlyTimes) -> float:
        """Returns when a learner has computed the forward pass that began while weights arrived, if all are there."""
        learner, now = route.receiver, self._queue.now
        assert learner.pulled is not None
        learner.pulled.append((early, now - route.began_at, now))
        if len(learner.pulled) < (len(self.plan.front_owners) if self.plan.sharded else 1):
            return now
        seconds = learner.compute_s()
        ends_at = max(at + times.rest_s(seconds, transfer_s) for times, transfer_s, at in learner.pulled)
        learner.ahead = seconds * (1 - early.share), seconds * early.share
        learner.pulled.clear()
        return max(ends_at, now)

    def _reduced(self, members: Sequence[int], reductions: dict[int, Reduce]) -> None:
        if self._reducer:
            self._reducer(reductions, self.plan.partial_sums(members))
        actions = [reductions[role] for role in members]
        gradients, words = zip(*((action.gradient, action.word) for action in actions), strict=True)
        event = Reduced(actions[0].sequence, gradients, words, actions[0].group)
        early = self._costs.early(members, self._size_bytes)
        for role in members:
            actor, rest_s = self._actors[role], 0.0
            if early is not None and reductions[role].rate is not None:  # a forward pass follows, and has begun
                seconds = actor.compute_s()
                rest_s, actor.ahead = early.rest_s(seconds), (seconds * (1 - early.share), seconds * early.share)
            self._queue.later(self._queue.now + rest_s, actor.take, actor, event)

    # Losses.

    def lend(self, actor: Actor, send: Send) -> None:
        """Marks a tensor's buffer as in use, although its transfer has not started."""
        if self._lent is not None and send.buffer is not None:
            self._lent(actor.role, send.buffer)

    def give_back(self, actor: Actor, send: Send) -> None:
        """Gives a tensor whose transfer is cancelled back to its sender, without notifying the sender's role."""
        if self._sent is not None and send.buffer is not None:
            self._sent(actor.role, send.buffer)

    def carries(self, entry: Scheduled) -> bool:
        """Returns whether an entry of the queue is a transfer of a tensor."""
        return entry[2] in (self._deliver, self._offer)

    def cut(self, actor: Actor) -> tuple[list[tuple[Actor, Send]], list[tuple[Actor, Receive]]]:
        """Ends all transfers to a role and from it.

        Returns:
            Tensors that others were sending to it, and receives from any sender that it had begun to fill.
        """
        role = actor.role
        unsent = [(route.sender, send) for of in actor.offered for offers in of.values() for route, send, _ in offers]
        again: list[tuple[Actor, Receive]] = []

        def involved(entry: Scheduled) -> bool:
            if entry[2] == self._reduced:
                return role in entry[3]
            return self.carries(entry) and actor in _ends(self._route_of(entry))

        for entry in self._queue.remove(involved):
            time, _, what, whom, about = entry
            if what == self._deliver:
                send, receive = about
                self._free_ports(whom, send, time)
                if whom.receiver is actor:
                    unsent.append((whom.sender, send))
                elif receive.source is None:
                    again.append((whom.receiver, receive))
            elif what == self._offer and whom is actor:
                unsent.append((about[0].sender, about[1]))
        actor.posted.clear()
        actor.offered = ({}, {})
        for other in self._actors.values():
            for offered in other.offered:
                offered.pop(role, None)
        for members in self._reductions.values():  # never complete again
            members.pop(role, None)
        return unsent, again

    def abandon(self, statistics: int) -> None:
        """Ends all transfers except to and from one role, and returns the tensors to their senders."""
        keeps = self._actors[statistics]

        def abandoned(entry: Scheduled) -> bool:
            if entry[2] == self._reduced:
                return True
            return self.carries(entry) and keeps not in _ends(self._route_of(entry))

        for entry in self._queue.remove(abandoned):
            if self.carries(entry):
                route, send = self._route_of(entry), entry[4][0] if entry[2] == self._deliver else entry[4][1]
                if entry[2] == self._deliver:
                    self._free_ports(route, send, entry[0])
                self.give_back(route.sender, send)
        self._reductions.clear()
        for actor in self._actors.values():
            if actor.halted or actor is keeps:
                continue
            actor.posted.clear()
            for offered in actor.offered:
                for route, send, _ in (offer for offers in offered.values() for offer in offers):
                    self.give_back(route.sender, send)
                offered.clear()

    def _route_of(self, entry: Scheduled) -> Route:
        route: Route = entry[3] if entry[2] == self._deliver else entry[4][0]
        return route

    def _free_ports(self, route: Route, send: Send, end: float) -> None:
        """Frees ports if the ended transfer was their last. Transfers that already wait keep their times."""
        seconds = route.transfer_s * (self._gradient_share if type(send.message) in GRADIENT_TYPES else 1.0)
        for port in (route.out, route.into, *route.blocking):
            if port.free_at == end:
                port.free_at = max(self._queue.now, end - seconds)


def _ends(route: Route) -> tuple[Actor, Actor]:
    return route.sender, route.receiver
