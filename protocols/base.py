"""The interface of a protocol."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

from protocols.modulation import MODULATIONS, Modulation


class Clock(NamedTuple):
    """What a protocol may know of the server's progress.

    Attributes:
        timestamp: timestamp of the server's weights: the number of updates so far.
        pushed: number of gradients received so far from each learner (or compute group), in learner order; empty on a
            server of a tree, which does not know them.
    """

    timestamp: int
    pushed: Sequence[int]


class Protocol:
    """Base class of all protocols: when the server updates the weights, and which learners wait for it.

    As it stands it is fully asynchronous: each gradient makes an update, and no learner waits. A subclass changes
    `gradients_per_update`, `update_due` or `pull_granted`. Its keyword arguments are the job's `protocol.options`.
    Compute groups count as one learner each.

    Args:
        learners: λ, the number of learners.

    Attributes:
        learners: λ, the number of learners.
        gradients_per_update: c, the number of gradients that make an update; at least 1.
        n: splitting parameter, by which modulation `n` divides the learning rate; λ unless a subclass sets it.
        outer_rate: rate at which the weights are updated by the mean of replicas' differences; None: gradients make
            updates, at the rate of the schedule.
        period: mini-batches of a learner that make one of its gradients; more than 1 only under `Averaging`.
        modulation: how the learning rate depends on staleness and learners; set when the job makes the protocol.
        ordered: class attribute. True: the server takes one gradient of each learner for an update, and adds them in
            learner order; `gradients_per_update` must then be λ.
        grants_on_push: class attribute. True: any gradient that arrives may let `pull_granted` say yes to a waiting
            learner, so the server asks again after each. False: only an update may, as where the rule looks at
            timestamps alone. This costs less, and a tree of servers needs it.
        averages: class attribute. Whether learners train replicas of their own and average them (`Averaging`).
        table: class attribute. Name of the job's table whose keys are arguments of the class; empty: there is none.
        topology: class attribute. Name of the topology for a job that names none.
        schedules: class attribute. Whether a coordinator assigns the samples (`Hogbatch`).
        most_samples: most samples of a gradient; None: the job's mini-batch size.
        replayable: class attribute. Whether the record of the applied gradients determines the weights bit for bit.
        default_modulation: class attribute. Name of the modulation that `modulation = "auto"` stands for.
        modulations: class attribute. Names of the modulations that the protocol allows.
    """

    ordered: ClassVar[bool] = False
    grants_on_push: ClassVar[bool] = True
    averages: ClassVar[bool] = False
    schedules: ClassVar[bool] = False
    table: ClassVar[str] = ""
    topology: ClassVar[str] = "base"
    replayable: ClassVar[bool] = True
    default_modulation: ClassVar[str] = "n"
    modulations: ClassVar[tuple[str, ...]] = tuple(MODULATIONS)
    modulation: Modulation
    period: int = 1
    outer_rate: float | None = None
    most_samples: int | None = None

    def __init__(self, learners: int) -> None:
        self.learners = learners
        self.n = learners
        self.gradients_per_update = 1

    @classmethod
    def of(cls, protocol: "Protocol") -> Self:
        """A protocol that is known to be of this class."""
        if not isinstance(protocol, cls):
            raise TypeError(f"{type(protocol).__name__} is not a {cls.__name__}")
        return protocol

    @property
    def text(self) -> str:
        """The rule with its settings, for people; empty: the name says it."""
        return ""

    @classmethod
    def label(cls, name: str, n: int | None) -> str:
        """What people call a run under it, of the job's name for it and n."""
        return name

    @classmethod
    def family(cls, name: str, n: int | None, learners: int) -> str:
        """What people call the runs that make one curve over λ."""
        return cls.label(name, n)

    @property
    def waits(self) -> bool:
        """Whether a learner may have to wait: a subclass has a `pull_granted` of its own."""
        return type(self).pull_granted is not Protocol.pull_granted

    @property
    def expected_staleness(self) -> float:
        """⟨σ⟩, the mean staleness to expect of all gradients where no learner waits, however fast each learner is.

        Every update makes the gradients staler that are under way, λ - 1 of them, and applies c. Where c = ⌊λ/n⌋ was
        rounded down that is more than n.
        """
        return (self.learners - 1) / self.gradients_per_update

    def update_due(self, pending: int) -> bool:
        """Whether the server updates the weights now.

        Args:
            pending: number of gradients that the server has received since its last update.
        """
        return pending >= self.gradients_per_update

    def rate_scale(self, samples: int) -> float:
        """Factor on the learning rate of an update that applies so many samples."""
        return 1.0

    def pull_granted(self, learner: int, timestamp: int, clock: Clock) -> bool:
        """Whether a learner that asks for weights is answered now. If not, it waits, and the server asks again later.

        Args:
            learner: number of the learner that asks, from 0.
            timestamp: timestamp of the weights that the learner has.
            clock: the server's progress.
        """
        return True

    def state(self) -> dict[str, Any]:
        """What changes in the protocol during a run: numbers, texts, lists and dicts, which JSON can hold.

        A checkpoint keeps it as it was after the last update. Only `update_due` may change it. A subclass that changes
        itself defines this method and `restore`.
        """
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a state: when a run is resumed, when all learners begin again, and when a learner has died.

        Args:
            state: what `state` gave, perhaps of a protocol for another number of learners.

        Raises:
            ValueError: it is no state of this protocol.
        """
        if state:
            raise ValueError("the protocol has no state; define state() and restore()")
