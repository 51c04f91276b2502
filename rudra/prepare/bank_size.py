"""Size of banks that grow: the largest number of learners that fits into the memory of a device.

It is chosen once, before roles are made, because each of these learners has a role. The result file names it.
"""

from bisect import bisect_right
from collections.abc import Sequence

from rudra.job.job import Job
from rudra.log import log
from rudra.machine import free_memory
from rudra.memory import bytes_text
from rudra.prepare.resolve import RankFacts, fit
from rudra.prepare.start import Decided


def with_bank_size(written: Job, decided: Decided, ranks: Sequence[RankFacts]) -> Decided:
    """Returns the decided keys with the size of banks, if they grow, the job leaves the size open and memory is short.

    Args:
        written: Written job.
        decided: Keys that are already decided.
        ranks: Facts of all ranks. The memory of this rank's machine counts for all.

    Raises:
        RudraError: The job does not fit these ranks, or its data or model has a mistake.
    """
    cluster = written.with_(**decided).cluster
    if not cluster.grows or cluster.most_learners_per_device is not None:
        return decided
    job, plan = fit(written, decided, ranks)
    banks, size = len(plan.whole.ranks_with_learners), job.cluster.bank_size or 1
    most = learners_that_fit(job, size, banks)
    if most >= size:
        return decided
    return {
        **decided,
        "cluster": {**decided.get("cluster", {}), "learners": most * banks, "most_learners_per_device": most},
    }


def learners_that_fit(job: Job, size: int, banks: int) -> int:
    """Returns the number of learners of a bank that fit into memory, up to its size, and logs a limit in one line.

    Args:
        job: Resolved job.
        size: Number of learners of each bank.
        banks: Number of banks. On CPUs they share main memory, of which half is left to others.
    """
    from rudra.compute.device import devices
    from rudra.compute.memory_plan import most_at_once, planned
    from rudra.data.load import load

    data = load(job.data, test=False, seed=job.training.seed, ignored=job.task.ignored)
    wanted = job.cluster.device
    kind = devices.DEVICES[devices.wanted_kind(wanted) if devices.here(wanted) else "cpu"]
    device, plan = kind.device(0), job.plan()
    found = planned(job, plan, data, device)
    if found is None or found.bank is None or data.training is None:
        return size
    samples = most_at_once(job, plan, len(data.training))
    totals = [found.bank._replace(learners=m).plan().total(samples) for m in range(1, size + 1)]
    free = kind.free_bytes(device)
    free = free_memory() // (2 * banks) if free is None else free
    fits = max(1, bisect_right(totals, free))
    if fits < size:
        text = f"{size} learners take {bytes_text(totals[-1])}, where {bytes_text(free)} are free"
        log.info(f"{job.name}: [cluster] {job.cluster.bank_key} has at most {fits} learners: {text}")
    return fits
