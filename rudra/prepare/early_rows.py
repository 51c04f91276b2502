"""Forward passes that the rows of a run count as a part of an exchange, because they began before its end."""

from collections.abc import Mapping, Sequence
from typing import Any

from rudra.core.backward import BackwardPass
from rudra.core.buckets import MOST, parts
from rudra.core.forward import ForwardTimes, arrivals_s, early_times
from rudra.job.simulation import SimulationTable


def left_out(
    attributes: Mapping[str, Any],
    prior: SimulationTable,
    sizes: tuple[int, int],
    group: Sequence[int],
    compute_s: float,
    copies: float,
) -> float:
    """Returns the fraction of a gradient's time that `compute_s` of a run's rows leaves out.

    Args:
        attributes: Attributes of the run.
        prior: Costs that do not come from the rows, such as the duration of a forward pass.
        sizes: Number of elements of the weights, and number of parameters among them.
        group: Members of a compute group without a server. Fewer than two: the learners have a server.
        compute_s: Usual `compute_s` of a mini-batch.
        copies: Number of vectors that are copied (`rudra.core.buckets.copied`).
    """
    if not (attributes.get("early_passes") and attributes.get("network_bytes_per_s")):
        return 0.0
    share, (size, parameters) = min(prior.forward_share, 0.99), sizes
    if len(group) < 2:
        return share
    measured = [sum(count for count, _ in of) == parameters for of in (prior.final_at, prior.needed_at)]
    backward = BackwardPass.measured(prior.final_at, parameters) if measured[0] else BackwardPass(parameters)
    forward = ForwardTimes(parameters, prior.needed_at if measured[1] else (), share)
    whole_s = compute_s / (1 - share)
    buckets = parts(size, parameters, max(attributes["bucket_bytes"] // 4, size // MOST), backward.starts)
    final_s = [-backward.left(bucket) * backward.share * whole_s for bucket in buckets]
    sent = (len(group) - 1) / len(group) * 4 * size  # in each of two phases
    transfer_s = 2 * (attributes["network_latency_s"] + sent / attributes["network_bytes_per_s"])
    # If the transfer is too short, passes begin after it, as in the run.
    arrived_s = arrivals_s(buckets, final_s, transfer_s)
    return 0.0 if early_times(forward, buckets, arrived_s, copies, seconds=whole_s) is None else share
