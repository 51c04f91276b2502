"""Lists of rules, and what a rule receives."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import protocols
import topologies
from rudra.job.fields import JobFields
from rudra.job.table import named


class JobPart(NamedTuple):
    """Part of a run: the whole run, or the epochs between two `[[changes]]`.

    Attributes:
        job: Job of the part. The job of the first part has all changes, jobs of later parts have none.
        plan: Roles of the part.
        protocol: Protocol of the part, made for this plan.
        placed: Whether the plan assigns the roles to nodes.
    """

    job: JobFields
    plan: topologies.Plan
    protocol: protocols.Protocol
    placed: bool = False

    @property
    def on(self) -> str:
        """Key and name of the topology: the beginning of a line about it."""
        return f"[topology] name = '{named(self.job.topology.name)}'"

    @property
    def name(self) -> str:
        """Name of the protocol."""
        return type(self.protocol).__name__.lower()

    @property
    def relayed(self) -> bool:
        """Whether servers of a tree forward gradients to the parameter server."""
        return any(role.kind_traits.relays for role in self.plan.roles)

    @property
    def most_samples(self) -> int:
        """Largest number of samples of a gradient."""
        return self.protocol.most_samples or self.job.training.minibatch_size


JobRule = Callable[[JobFields], Iterator[str]]
PartRule = Callable[[JobPart], Iterator[str]]
ChangeRule = Callable[[JobPart, JobPart], Iterator[str]]
SimulatedRule = Callable[[JobFields, topologies.Plan], Iterator[str]]

JOB_RULES: list[JobRule] = []
PART_RULES: list[PartRule] = []
CHANGE_RULES: list[ChangeRule] = []
SIMULATED_RULES: list[SimulatedRule] = []


def job_rule(rule: JobRule) -> JobRule:
    JOB_RULES.append(rule)
    return rule


def part_rule(rule: PartRule) -> PartRule:
    PART_RULES.append(rule)
    return rule


def change_rule(rule: ChangeRule) -> ChangeRule:
    CHANGE_RULES.append(rule)
    return rule


def simulated_rule(rule: SimulatedRule) -> SimulatedRule:
    SIMULATED_RULES.append(rule)
    return rule


def check(rules: Iterable[Callable[..., Iterator[str]]], *about: Any) -> None:
    """Raises ValueError for the first mistake that one of these rules finds.

    Args:
        rules: one of the lists above.
        about: arguments for each rule of that list.
    """
    for rule in rules:
        for text in rule(*about):
            raise ValueError(text)
