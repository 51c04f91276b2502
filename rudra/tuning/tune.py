"""`rudra.tune`: prepares a search, leads it, and writes the answer."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rudra.errors import ConfigError
from rudra.files import locked, written
from rudra.job.job import Job
from rudra.job.simulation import UNMEASURED
from rudra.job.target import Target
from rudra.log import log
from rudra.machine import cores
from rudra.prepare import cost_files
from rudra.results.progress import Bar
from rudra.simulation.dry_run import check_target
from rudra.simulation.predict import outline
from rudra.tuning import answer, prices, probes, search, space, steady
from rudra.tuning.budgets import Budget, check_reference, metered
from rudra.tuning.final_scores import ends_of, evaluator, final_scores
from rudra.tuning.journal import NAME, Journal
from rudra.tuning.page import write_page
from rudra.tuning.prices import Price
from rudra.tuning.room import Room, within
from rudra.tuning.rounds import safest
from rudra.tuning.space import Candidate, Refused, Settings, with_settings
from rudra.tuning.state import SearchState
from rudra.tuning.store import ProbeStore
from rudra.tuning.strategies import shipped
from rudra.tuning.trainer import Trainer, code_digest, simulated

if TYPE_CHECKING:
    from rudra.tuning.ranks import Ranks

DEFAULT = "guided"
BUDGET = "8x"
BEST = "best.toml"
ANOTHER = (
    "your code is not deterministic: two equal runs of this job end with different weights, and their losses differ by "
    "{:.2g} %; differences below cannot be trusted"
)


class Outlook(NamedTuple):
    """Points of a search, before it.

    Attributes:
        job: Job that probes vary.
        target: Target on the validation split.
        prices: Prices. The first one belongs to the job as given.
        refused: Combinations that the job or its cluster does not allow.
        training_samples: Samples in an epoch.
        costs: Origin of the times.
    """

    job: Job
    target: Target
    prices: list[Price]
    refused: list[Refused]
    training_samples: int
    costs: str

    def lines(self) -> list[str]:
        """Returns the plan in words, the fastest points first."""
        free = [price for price in self.prices[1:] if price.dominated is None]
        given = self.prices[0]
        found = [
            f"{self.job.name}: {len(self.prices) - 1} points; {len(free)} after {len(self.prices) - 1 - len(free)} "
            f"that make the same weights as a faster one; {len(self.refused)} combinations refused",
            f"times: {self.costs}",
            f"the job as given: {given.samples_per_s:,.0f} samples/s, staleness {given.staleness:.1f}",
        ]
        free.sort(key=lambda price: -price.samples_per_s)
        found += [f"  {p.samples_per_s:10,.0f} samples/s  σ {p.staleness:5.1f}  {p.point.name}" for p in free]
        found += [f"  same weights as {p.dominated.name}: {p.point.name}" for p in self.prices[1:] if p.dominated]
        reasons: dict[str, list[str]] = {}
        for refused in self.refused:
            reasons.setdefault(refused.reason, []).append(answer.named(refused.settings))
        return found + [f"  refused: {names[0]}: {reason}" for reason, names in reasons.items()]

    def begun(self, budget: float, given: Mapping[str, Sequence[Any]], *, real: bool = False) -> SearchState:
        """Returns the state of a search that begins.

        Args:
            budget: Number of reference runs whose samples it may train.
            given: Key -> values, as for `tune`.
            real: Whether probes train on real ranks.
        """
        return SearchState(
            self.job,
            self.target,
            self.prices,
            untimed=space.untimed(given),
            training_samples=self.training_samples,
            budget=budget,
            longest=self.job.training.epochs,
            given=given,
            real=real,
        )


def plan(
    job: Job,
    *,
    target: str | None = None,
    learners: Sequence[int] = (),
    given: Mapping[str, Sequence[Any]] | None = None,
    quiet: bool = False,
    room: Room = Room(),  # noqa: B008
) -> Outlook:
    """Finds the points of a job, and predicts their times. It trains nothing.

    Args:
        job: The job.
        target: Target, such as "accuracy >= 0.9". None: `training.target`.
        learners: Values of λ to choose from. Empty: the job's.
        given: Key -> values, in place of the values of a search.
        quiet: Whether to show no progress.
        room: Ranks and memory for a point.

    Raises:
        ConfigError: There is no target, or no point is possible.
    """
    goal = _goal(job, target)
    measured = cost_files.source(job)
    costs = measured or f"guessed ({UNMEASURED} {job.name})"
    resolved = cost_files.load(job.resolved(threads_per_rank=job.cluster.threads_per_rank or 1))
    varied = probes.searched(resolved, goal)
    refused: list[Refused] = []
    values = {**({"cluster.learners": [*learners]} if learners else {}), **(given or {})}
    dimensions = [d for d in space.chosen(values) if d.timed]
    points = within(space.points(varied, dimensions, refused), room, refused)
    if not points:
        reasons = "; ".join(dict.fromkeys(each.reason for each in refused[:3]))
        raise ConfigError(f"{job.name}: no point of the space is possible: {reasons}")
    with Bar(total=len(points) + 1, desc=f"{job.name}: predicting", disable=quiet) as bar:
        found = prices.priced([Candidate({}, varied), *points], refused, bar.update, cores())
    if len(found) < 2:
        raise ConfigError(f"{job.name}: no point of the space fits its cluster: {refused[0].reason}")
    return Outlook(varied, goal, found, refused, outline(varied).training_samples, costs)


def tune(
    job: Job,
    *,
    target: str | None = None,
    budget: float | str = BUDGET,
    learners: Sequence[int] = (),
    given: Mapping[str, Sequence[Any]] | None = None,
    strategy: str = DEFAULT,
    output: str | Path | None = None,
    store: str | Path | None = None,
    mpi: bool = False,
    quiet: bool = False,
) -> answer.Verdict:
    """Searches for the settings that let a job reach its target soonest. Probes train in virtual time or on real ranks.

    Args:
        job: The job.
        target: Target, such as "accuracy >= 0.9". None: `training.target`. It is measured on the
            validation split, so that the test set decides nothing.
        budget: Limit of training: a number of reference runs, such as 8 or "8x", or a time, such as "15m" or
            "2h". The first probe turns a time into a number of samples.
        learners: Values of λ to choose from. Empty: the job's.
        given: Key -> values, in place of the values of a search.
        strategy: Name of a strategy, see `rudra.tuning.strategies`.
        output: Directory of the journal and the answer. None: `NAME-tune`. The same call continues a search that was
            stopped.
        store: Directory of what probes measured, which searches of the job with other costs, targets or budgets may
            share. It also has the checkpoints of probes, which may be removed after a search. None: `probes` in
            `output`, without checkpoints at the end.
        mpi: Whether probes train on real MPI ranks, one probe at a time. Without a launcher, each probe starts its
            ranks. Under mpirun or srun every rank makes this call, and gets the same answer.
        quiet: Whether to show no progress.

    Raises:
        ConfigError: The job or an argument is not usable.
        ResultsError: The directory cannot be written, or another search uses it.
        RudraError: With `mpi`: a rank died, so that the same call continues (`exit_code` 3), or a probe failed.
    """
    about: dict[str, Any] = {"target": target, "learners": learners, "given": given, "quiet": quiet}
    about |= {"budget": Budget.parse(budget), "strategy": strategy, "output": output, "store": store}
    if not mpi:
        return _tuned(job, None, **about)
    from rudra.tuning.ranks import with_ranks

    return with_ranks(lambda ranks: _tuned(job, ranks, **about))


def _tuned(
    job: Job,
    ranks: "Ranks | None",
    *,
    target: str | None,
    budget: Budget,
    learners: Sequence[int],
    given: Mapping[str, Sequence[Any]] | None,
    strategy: str,
    output: str | Path | None,
    store: str | Path | None,
    quiet: bool,
) -> answer.Verdict:
    """Searches in virtual time, or with real ranks. See `tune`."""
    if strategy not in (valid := shipped()):
        raise ConfigError(f"--strategy {strategy}: unknown; valid: {', '.join(valid)}")
    check_target(probes.searched(job, _goal(job, target)))
    directory = Path(output or f"{job.name}-tune")
    place = Path(store or directory / "probes")
    with locked(directory, "search"), locked(place, "search"):
        job, priced, room = (job, job, Room()) if ranks is None else ranks.prepared(job, directory)
        found = plan(priced, target=target, learners=learners, given=given, quiet=quiet, room=room)
        kept = ProbeStore(place)
        code, apart = code_digest(found.job, kept)
        head: dict[str, Any] = {
            "rudra": version("rudra"),
            "job": json.loads(found.job.to_json()),
            "target": repr(found.target),
            "mpi": ranks is not None,
            "strategy": strategy,
            "budget": budget.text,
            "learners": [*learners],
            "space": dict(given or {}),
        }
        journal = Journal(directory / NAME, {**head, "code and data": code})
        if not code and next(journal.of("repeat"), None) is None:
            journal.add({"kind": "repeat", "percent": 100 * apart})
        luck = [ANOTHER.format(entry["percent"]) for entry in journal.of("repeat")]
        for text in luck:
            log.warning(f"{job.name}: {text}")
        state = found.begun(budget.runs, given or {}, real=ranks is not None)
        execute = simulated if ranks is None else ranks.execute
        trainer = Trainer(found.job, found.target, kept, code or f"any in {directory.resolve()}", state, execute)
        train = metered(trainer.train, budget, state, journal, trainer.wall_s)
        if ranks is not None:
            train = steady.watched(train, lambda: _few(state, trainer), journal, job.name)
        with Bar(
            total=1.0, desc=f"{job.name}: searching", disable=quiet, bar_format="{desc} {percentage:3.0f}%|{bar}|"
        ) as bar:
            began = time.monotonic()

            def say(probe: probes.Probe) -> None:
                bar.n = min(1.0, state.spent / state.allowed)
                bar.set_description_str(f"{job.name}: {answer.named(probe.by_key)}, {time.monotonic() - began:.0f} s")

            search.lead(state, valid[strategy], journal, train, say)
        check_reference(budget, state, journal)
        said = answer.answer_of(state, job)
        notes = (*said.notes, *luck, *steady.notes(journal))
        said = said._replace(costs=found.costs, notes=notes)
        ends = [end for f in said.roles.values() for end in ends_of(state, f.settings, fresh=not f.predicted)]
        reads = evaluator(found.job, found.target, job.data.test_limit)
        said = said._replace(scores=final_scores(state, ends, journal, trainer.checkpoint, reads))
        if said.winner is not None:
            settings = said.winner.settings
            said = said._replace(job=_complete(job, settings, trainer.job_of(settings)))
            with written(directory / BEST) as file:
                file.write(said.best().encode())
        with written(directory / "tried.csv") as file:
            file.write(answer.tried(state).encode())
        write_page(directory, state, said, found.refused)
        if store is None:
            kept.clear()
    return said


FEW_S = 1.0
"""Predicted time of the training that measures whether the machine is steady."""


def _few(state: SearchState, trainer: Trainer) -> float:
    """Trains a few samples as the reference does, and returns the training time in seconds."""
    price = safest(state)
    update = price.point.job.learners * price.point.job.training.minibatch_size
    return trainer.time_s(price.point.settings, max(20 * update, round(FEW_S * price.samples_per_s)))


def _goal(job: Job, target: str | None) -> Target:
    text = target or job.training.target
    if text is None:
        raise ConfigError(f"{job.name}: no target; give one, such as --target 'accuracy >= 0.9'")
    goal = Target.parse(text)
    return replace(goal, split="validation")


def _complete(job: Job, settings: Settings, trained: Job) -> Job:
    """Returns the winner as a job of the user, with the learning rates and the average of its training."""
    keys = ("schedule", "milestones", "schedule_options", "schedule_every")
    own = {key: getattr(trained.optimizer, key) for key in keys}
    average = trained.optimizer.average.non_defaults
    return with_settings(job, settings).with_(optimizer={**own, "average": average})
