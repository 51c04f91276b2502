"""Measures how long the learners of a bank compute together, for cost files."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rudra.job.job import Job
from rudra.job.tables import ClusterTable
from rudra.prepare.bank_size import learners_that_fit


class BankCosts(NamedTuple):
    """Times of banks of several sizes, in the form that `cluster.bank` names or that `auto` would take.

    Attributes:
        relative: m -> μ -> time until each of m learners has computed a mini-batch, as a multiple of the time of one.
        forms: m -> the forms of the banks of this size, one for each μ.
    """

    relative: Mapping[int, Mapping[int, float]]
    forms: Mapping[int, tuple[str, ...]]

    def as_toml(self, compute_s: Mapping[int, float]) -> str:
        """Returns the key `bank_s` of a cost file, or an empty text.

        The time of one learner was measured with every overhead of a run. So the times here are multiples of it.

        Args:
            compute_s: μ -> seconds of one learner.
        """
        if not self.relative:
            return ""
        tables = (
            f"{m} = {{ {', '.join(f'{size} = {compute_s[size] * of:.4g}' for size, of in sizes.items())} }}"
            for m, sizes in self.relative.items()
        )
        forms = "; ".join(f"{m}: {', '.join(dict.fromkeys(own))}" for m, own in self.forms.items())
        return f"\nbank_s = {{ {', '.join(tables)} }}  # of learners_per_device; forms {forms}"


NO_BANKS = BankCosts({}, {})


def measure_banks(job: Job, asked: ClusterTable, sizes: Sequence[int], most: int, span_s: float) -> BankCosts:
    """Measures banks of 1, 2, 4 … learners in this process.

    Args:
        job: Resolved job for measurements.
        asked: Table whose `bank` and `streams` say how the learners compute.
        sizes: Values of μ.
        most: Largest number of learners of a bank. Fewer are measured if memory is short.
        span_s: Seconds of each measurement.

    Raises:
        ConfigError: The model or the data does not allow the form that the job names.
    """
    from rudra.compute.bank.choice import check_form, fastest, measured_times, possible_forms
    from rudra.compute.bank.trial import BankLearners
    from rudra.compute.device.placement import virtual
    from rudra.compute.executor import torch_as_in
    from rudra.compute.first_gradient import try_first_gradient
    from rudra.data.load import load

    device = virtual(job.cluster.device, window=False)
    relative: dict[int, dict[int, float]] = {}
    forms: dict[int, list[str]] = {}
    data = load(job.data, seed=job.training.seed, ignored=job.task.ignored)
    with torch_as_in(job.cluster):
        for size in sizes:
            gradients, alone_s = "", 0.0
            for m in _doubled(_bank(job, asked, size, most)):
                own = _bank(job, asked, size, m)
                plan = own.plan()
                gradients = gradients or try_first_gradient(own, plan, data, device)
                learners = BankLearners(own, plan, data, device, gradients)
                if m == 1:
                    possible = ["loop"]
                elif own.cluster.bank == "auto":
                    possible, _ = possible_forms(learners, plan)
                else:
                    check_form(own, plan, data, device)
                    possible = [own.cluster.bank]
                times = measured_times(learners, possible, span_s)
                form = fastest(times)
                alone_s = alone_s or times[form]
                relative.setdefault(m, {})[size] = times[form] / alone_s
                forms.setdefault(m, []).append(form)
    return BankCosts(relative, {m: tuple(own) for m, own in forms.items()})


def _bank(job: Job, asked: ClusterTable, size: int, learners: int) -> Job:
    streams = None if asked.streams is None else min(asked.streams, learners)
    about = {"learners": learners, "learners_per_device": learners, "bank": asked.bank, "streams": streams}
    return job.with_(training={"minibatch_size": size}, cluster=about)


def _doubled(job: Job) -> list[int]:
    """Returns the powers of two up to the largest bank that fits into memory."""
    most = learners_that_fit(job, job.learners, 1)
    return [1 << power for power in range(most.bit_length())]
