"""Choice of a cut of a model between learners and a stage server, from the sizes and times of its layers.

Source: Park et al., RALP, §4.3, for the skewness of parameters, its threshold, and the cut that sends least. The
paper's Equation 1 is the skewness of parameter sizes, which is positive for all of its networks. Its Table 1 has the
skewness of the parameters' positions, which is computed here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rudra.core.backward import WHOLE, BackwardPass, Leads, after_s
from rudra.core.forward import ForwardTimes, arrivals_s, early_times, pulled_times, step_s

THRESHOLD = -0.5
"""Largest skewness that still lets the paper cut a model."""

Rule = Literal["ralp", "auto"]
Form = Literal["server", "allreduce"]
Cutting = Literal[Form, "weights"]
"""What is cut into buckets: gradients that are pushed to a server, or averaged, or weights that come from a server."""

Buckets = Callable[[int], Sequence[slice]]
"""Returns the buckets of a gradient of some elements. Fewer than two: the gradient is sent as a whole."""


def whole(size: int) -> tuple[slice, ...]:
    """Returns no buckets for any gradient."""
    return ()


@dataclass(frozen=True, slots=True)
class Layer:
    """Layer of a model.

    Attributes:
        name: Name in the model.
        kind: "convolution", "pool", "linear", "recurrent" or "embedding". Empty: the layer only shapes or scales.
        parameters_bytes: Size of its parameters.
        output_bytes: Size of its output for one sample. The gradient of the output has the same size.
        forward_s: Time of the forward pass of a mini-batch.
        backward_s: Time of the backward pass of a mini-batch.
        cut: Whether the model can be cut after this layer.
    """

    name: str
    kind: str
    parameters_bytes: int
    output_bytes: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    cut: bool = True

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class PlacementHardware:
    """Learners and servers of a step, and the link of the server's node.

    Attributes:
        learners: λ.
        minibatch_size: μ.
        bytes_per_s: Bandwidth of the link in each direction.
        latency_s: Latency of a message.
        back_speed: Speed of the stage server relative to a learner.
        servers: Number of stage servers. Each has a link of its own, and learners are divided among them.
        together: Whether the stage server shares the parameter server's link.
        sharing: "turns": a link carries one tensor at a time. "equal": it carries all at once.
    """

    learners: int
    minibatch_size: int
    bytes_per_s: float = float("inf")
    latency_s: float = 0.0
    back_speed: float = 1.0
    servers: int = 1
    together: bool = False
    sharing: Literal["turns", "equal"] = "turns"


@dataclass(frozen=True, slots=True)
class CutEstimate:
    """Predicted traffic and time of a step of all learners for one cut.

    Attributes:
        index: Number of layers in the front.
        name: Name of the first layer of the back.
        front_bytes: Size of the front's parameters.
        activations_bytes: Size of a learner's activations at the cut, for one mini-batch.
        placed_bytes: Bytes of tensors that all learners send and receive in a step.
        step_s: Predicted time of a step.
        between_convolutions: Whether a convolution comes after the cut.
    """

    index: int
    name: str
    front_bytes: int
    activations_bytes: int
    placed_bytes: int
    step_s: float
    between_convolutions: bool


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """Decision whether and where to cut a model.

    Attributes:
        cut: Chosen cut. None: placing layers does not pay.
        why: Reason, in a sentence.
        skewness: Skewness of the parameters.
        cuts: All possible cuts.
        server_bytes: Bytes of tensors in a step through a parameter server.
        allreduce_bytes: Bytes of tensors in a step by a ring.
        server_s: Predicted time of a step through a parameter server.
        allreduce_s: Predicted time of a step by a ring.
    """

    cut: CutEstimate | None
    why: str
    skewness: float
    cuts: tuple[CutEstimate, ...]
    server_bytes: int
    allreduce_bytes: int
    server_s: float
    allreduce_s: float


def skewness(layers: Sequence[Layer]) -> float:
    """Returns the skewness of the parameters: negative if most are at the end of a model, positive if most are at the
    beginning.

    It is the third standardised moment of the position of a parameter, counted in layers that have a kind. Parameters
    of other layers count for the layer before. It is 0 if all parameters are in one layer.
    """
    held: list[int] = []
    for layer in layers:
        if layer.kind or not held:
            held.append(0)
        held[-1] += layer.parameters_bytes
    total = sum(held)
    if not total:
        return 0.0
    mean = sum(place * size for place, size in enumerate(held)) / total
    second, third = (sum(size * (place - mean) ** n for place, size in enumerate(held)) / total for n in (2, 3))
    return third / second**1.5 if second else 0.0


def cuts(layers: Sequence[Layer], cluster: PlacementHardware, buckets: Buckets = whole) -> tuple[CutEstimate, ...]:
    """Returns all possible cuts of a model, with their predicted traffic and times.

    Args:
        layers: Layers of the model.
        cluster: Learners and servers of a step.
        buckets: buckets of gradients that are pushed.
    """
    last = max((place for place, layer in enumerate(layers) if layer.kind == "convolution"), default=-1)
    found, front_bytes = [], 0
    for index, layer in enumerate(layers[:-1], 1):
        front_bytes += layer.parameters_bytes
        if layer.cut:
            sent = layer.output_bytes * cluster.minibatch_size
            back_bytes = sum(behind.parameters_bytes for behind in layers[index:])
            placed = 2 * cluster.learners * (sent + front_bytes) + 2 * (cluster.servers - 1) * back_bytes
            step_s = placed_s(layers, index, cluster, buckets)
            found.append(CutEstimate(index, layers[index].name, front_bytes, sent, placed, step_s, index <= last))
    return tuple(found)


def placed_s(layers: Sequence[Layer], index: int, cluster: PlacementHardware, buckets: Buckets = whole) -> float:
    """Returns the time of a synchronous step with a stage server, which takes one mini-batch after another.

    Several stage servers work in parallel. Then each passes the sum of the gradients to the next, and the last one to
    all.

    Args:
        layers: Layers of the model.
        index: Number of layers in the front.
        cluster: Learners and servers of a step.
        buckets: buckets of gradients that are pushed.
    """
    front, back = layers[:index], layers[index:]
    shipping_s = front[-1].output_bytes * cluster.minibatch_size / cluster.bytes_per_s
    weights_s = sum(layer.parameters_bytes for layer in front) / cluster.bytes_per_s
    back_s = sum(layer.seconds for layer in back) / cluster.back_speed
    sum_s = sum(layer.parameters_bytes for layer in back) / cluster.bytes_per_s + cluster.latency_s
    stage, servers = "server" if cluster.together else "stage", cluster.servers
    around_s = 4 * cluster.latency_s + 2 * (servers - 1) * sum_s
    return around_s + _step_s(
        cluster,
        _Use(weights_s, "server out", shared=True),
        _Use(sum(layer.forward_s for layer in front)),
        _Use(shipping_s, f"{stage} in", servers, shared=True),
        _Use(back_s, "stage", servers),
        _Use(shipping_s, f"{stage} out", servers, first_s=_first_of_s(cluster, shipping_s, back_s)),
        _Use(sum(layer.backward_s for layer in front)),
        _pushed(front, weights_s, buckets),
    )


def server_s(
    layers: Sequence[Layer], cluster: PlacementHardware, buckets: Buckets = whole, weights: Buckets = whole
) -> float:
    """Returns the time of a synchronous step through a parameter server. Its link carries all gradients and weights.

    Args:
        layers: Layers of the model.
        cluster: Learners and servers of a step.
        buckets: buckets of gradients that are pushed.
        weights: buckets of weights. The forward pass begins while they arrive.
    """
    size, seconds = sum(layer.parameters_bytes for layer in layers), sum(layer.seconds for layer in layers)
    transfer_s = size / cluster.bytes_per_s
    if len(parts := weights(size // 4)) > 1:
        together = _users(cluster, 1) if cluster.sharing == "equal" else 1
        early = pulled_times(ForwardTimes.of_layers(layers), parts)
        seconds -= early.hidden_s(seconds, transfer_s * together)
    return 2 * cluster.latency_s + _step_s(
        cluster,
        _Use(transfer_s, "server out", shared=True),
        _Use(seconds),
        _pushed(layers, transfer_s, buckets),
    )


class _Use(NamedTuple):
    """Part of each learner's step.

    Attributes:
        seconds: Duration of the part.
        of: Name of the resource that the part occupies, which serves one learner at a time. Empty: each learner has its
            own.
        servers: Number of such resources, among which learners are divided.
        shared: Whether all learners begin the part together on shared links, so that all finish at the same time.
        first_s: Time until the first learner has finished the part, if the others do not delay it. 0: `alone_s`.
        leads: Moments when more of a gradient may be sent, in the backward pass at the end of the part before.
        backward_s: Time of that pass.
    """

    seconds: float
    of: str = ""
    servers: int = 1
    shared: bool = False
    first_s: float = 0.0
    leads: Leads = WHOLE
    backward_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """Returns the time of the part after the part before, if the other learners do not delay it."""
        return after_s(self.leads, self.seconds, self.backward_s)


def _pushed(layers: Sequence[Layer], seconds: float, buckets: Buckets) -> _Use:
    """Returns the push of the gradient of some layers to the parameter server.

    Args:
        layers: The layers.
        seconds: Time of the whole gradient on the link.
        buckets: buckets of the gradient.
    """
    return _Use(seconds, "server in", leads=_leads(layers, buckets), backward_s=_backward_s(layers))


def _leads(layers: Sequence[Layer], buckets: Buckets) -> Leads:
    """Returns the moments when more of the gradient of some layers may be sent."""
    return BackwardPass.of_layers(layers).leads(buckets(sum(layer.parameters_bytes for layer in layers) // 4))


def _backward_s(layers: Sequence[Layer]) -> float:
    return sum(layer.backward_s for layer in layers)


def _first_of_s(cluster: PlacementHardware, seconds: float, apart_s: float) -> float:
    """Returns when the first tensor has crossed a shared link.

    Args:
        cluster: Learners and links.
        seconds: Time that one tensor takes on the link without others.
        apart_s: Time between the starts of two tensors. While n tensors are on the link, each gets 1/n of it.
    """
    if cluster.sharing == "turns" or seconds <= apart_s or not apart_s:
        return seconds
    return min(_users(cluster, cluster.servers) * seconds, apart_s * math.expm1(min(seconds / apart_s, 50.0)))


def _step_s(cluster: PlacementHardware, *uses: _Use) -> float:
    """Returns when all learners have finished the same parts, one after the other if a resource serves one at a time.

    The resource with the most work decides: all learners use it without a gap, after the first has arrived there, and
    before the last has finished its other parts. If the first use of it is a push in buckets, it begins in the pass.
    """
    if cluster.sharing == "equal" and any(use.shared for use in uses):
        last = max(place for place, use in enumerate(uses) if use.shared)
        parts, rest = uses[: last + 1], uses[last + 1 :]
        waited_s = sum(use.seconds * (_users(cluster, use.servers) if use.shared else 1) for use in parts)
        return waited_s + (_step_s(cluster, *rest) if rest else 0.0)
    found = sum(use.alone_s for use in uses)
    for of in {use.of for use in uses} - {""}:
        places = [place for place, use in enumerate(uses) if use.of == of]
        busy_s = sum(_users(cluster, uses[place].servers) * uses[place].seconds for place in places)
        before_s = sum(use.first_s or use.alone_s for use in uses[: places[0]])
        behind_s = sum(use.alone_s for use in uses[places[-1] + 1 :])
        first = uses[places[0]]
        found = max(found, before_s + after_s(first.leads, busy_s, first.backward_s) + behind_s)
    return found


def _users(cluster: PlacementHardware, servers: int) -> int:
    """Returns the number of learners of each server."""
    return -(-cluster.learners // servers)


def allreduce_s(
    layers: Sequence[Layer], cluster: PlacementHardware, buckets: Buckets = whole, *, copies: float = 0
) -> float:
    """Returns the time of a synchronous step by a ring.

    Args:
        layers: Layers of the model.
        cluster: Learners of a step.
        buckets: buckets of gradients that are averaged.
        copies: Number of vectors that are copied if the next forward pass begins while buckets are under way
            (`rudra.core.buckets.copied`). 0: it may not.
    """
    size, others = sum(layer.parameters_bytes for layer in layers), cluster.learners - 1
    transfer_s = 2 * size * others / cluster.learners / cluster.bytes_per_s
    ring_s = transfer_s + 2 * others * cluster.latency_s
    seconds, backward_s, parts = sum(layer.seconds for layer in layers), _backward_s(layers), buckets(size // 4)
    if not copies or len(parts) < 2:
        return seconds + after_s(_leads(layers, buckets), ring_s, backward_s)
    backward = BackwardPass.of_layers(layers)
    arrived_s = arrivals_s(parts, [-backward.left(part) * backward_s for part in parts], ring_s)
    early = early_times(ForwardTimes.of_layers(layers), parts, arrived_s, copies, seconds=seconds)
    return step_s(seconds, max(arrived_s), early)


def choose(
    rule: Rule,
    layers: Sequence[Layer],
    cluster: PlacementHardware,
    threshold: float = THRESHOLD,
    against: Sequence[Form] = ("server", "allreduce"),
    buckets: Mapping[Cutting, Buckets] | None = None,
    *,
    copies: float = 0,
) -> PlacementDecision:
    """Chooses a cut of a model.

    Args:
        rule: "ralp", the rule of the paper: if parameters are skewed, the cut after the last convolution that sends
            least. "auto": the cut with the shortest predicted step.
        layers: Layers of the model, in order.
        cluster: Learners and servers of a step.
        threshold: Largest skewness that lets "ralp" cut.
        against: Alternatives without a cut, for "auto".
        buckets: buckets of gradients and weights. None: they are sent as a whole.
        copies: As for `allreduce_s`.
    """
    cuttings: tuple[Cutting, ...] = ("server", "allreduce", "weights")
    pushed, averaged, pulled = (whole if buckets is None else buckets[cutting] for cutting in cuttings)
    size, skewed, found = (
        sum(layer.parameters_bytes for layer in layers),
        skewness(layers),
        cuts(layers, cluster, pushed),
    )
    others: dict[Form, float] = {
        "server": server_s(layers, cluster, pushed, pulled),
        "allreduce": allreduce_s(layers, cluster, averaged, copies=copies),
    }
    decide: Callable[[], tuple[CutEstimate | None, str]] = {
        "ralp": lambda: _least_sent(found, size, skewed, threshold),
        "auto": lambda: _shortest(found, {form: others[form] for form in against}),
    }[rule]
    cut, why = decide() if found else (None, "the model cannot be cut anywhere")
    return PlacementDecision(
        cut,
        why,
        skewed,
        found,
        server_bytes=2 * cluster.learners * size,
        allreduce_bytes=2 * (cluster.learners - 1) * size,
        server_s=others["server"],
        allreduce_s=others["allreduce"],
    )


def _least_sent(
    found: Sequence[CutEstimate], size: int, skewed: float, threshold: float
) -> tuple[CutEstimate | None, str]:
    if not skewed <= threshold:
        return None, f"skewness {skewed:.2f} is above the threshold, {threshold:g}: parameters are not at the end"
    behind = [cut for cut in found if not cut.between_convolutions]
    if not behind:
        return None, "every cut has a convolution after it"
    best = min(behind, key=lambda cut: cut.placed_bytes)
    sent = best.activations_bytes + best.front_bytes
    if sent >= size:
        return None, f"activations and the front's parameters, {_mb(sent)}, are not less than the model's, {_mb(size)}"
    return best, f"it sends least: {_mb(sent)} each way for a learner; the whole model is {_mb(size)}"


def _shortest(found: Sequence[CutEstimate], others: Mapping[Form, float]) -> tuple[CutEstimate | None, str]:
    best = min(found, key=lambda cut: cut.step_s)
    form, other = min(others.items(), key=lambda each: each[1])
    name = "the server" if form == "server" else form
    if best.step_s >= other:
        return None, f"a step takes {best.step_s:.3g} s at best, cut at {best.name}, and {other:.3g} s by {name}"
    return best, f"a step takes {best.step_s:.3g} s, and {other:.3g} s by {name}"


def _mb(size: float) -> str:
    return f"{size / 1e6:.3g} MB"
