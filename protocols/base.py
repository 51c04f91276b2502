"""Interface of a protocol."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

from protocols.modulation import MODULATIONS, Modulation


class Clock(NamedTuple):
    """Progress of the server, as far as a protocol may know it.

    Attributes:
        timestamp: Timestamp of the server's weights: the number of updates so far.
        pushed: Number of gradients received so far from each learner (or compute group), in learner order. It is empty
            on a server of a tree, which does not know these numbers.
    """

    timestamp: int
    pushed: Sequence[int]


class Protocol:
    """Base class of all protocols: when the server updates the weights, and which learners wait for it.

    The base class is fully asynchronous: each gradient makes an update, and no learner waits. A subclass changes
    `gradients_per_update`, `update_due` or `pull_granted`. Its keyword arguments are the job's `protocol.options`.
    Compute groups count as one learner each.

    Args:
        learners: λ, the number of learners.

    Attributes:
        learners: λ, the number of learners.
        gradients_per_update: c, the number of gradients that make an update, at least 1.
        n: Splitting parameter: modulation `n` divides the learning rate by it. It is λ unless a subclass sets it.
        outer_rate: Rate of the update of the weights by the mean of the replicas' differences. None: gradients make
            updates, at the rate of the schedule.
        period: Number of mini-batches of a learner for each of its gradients. It is larger than 1 only under
            `Averaging`.
        modulation: Dependence of the learning rate on staleness and learners. It is set when the job makes the
            protocol.
        ordered: Class attribute. Whether the server takes one gradient of each learner for an update, and adds them in
            learner order. `gradients_per_update` must then be λ.
        grants_on_push: Class attribute. Whether every arriving gradient may let `pull_granted` release a waiting
            learner, so that the server asks again after each. Otherwise only an update may release one, because the
            rule depends only on timestamps. This costs less, and a tree of servers requires it.
        averages: Class attribute. Whether learners train replicas of their own and average them (`Averaging`).
        table: Class attribute. Name of the job's table whose keys are arguments of the class. Empty: there is none.
        topology: Class attribute. Name of the topology for a job that names none.
        schedules: Class attribute. Whether a coordinator assigns the samples (`Hogbatch`).
        most_samples: Largest number of samples of a gradient. None: the job's mini-batch size.
        replayable: Class attribute. Whether the record of the applied gradients determines the weights bit for bit.
        default_modulation: Class attribute. Name of the modulation for `modulation = "auto"`.
        modulations: Class attribute. Names of the modulations that the protocol allows.
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
        """Returns the protocol, checked to be an instance of this class."""
        if not isinstance(protocol, cls):
            raise TypeError(f"{type(protocol).__name__} is not a {cls.__name__}")
        return protocol

    @property
    def text(self) -> str:
        """Returns the rule with its settings, for people. Empty: the name says everything."""
        return ""

    @classmethod
    def label(cls, name: str, n: int | None) -> str:
        """Returns the label of a run with this protocol, from the job's name for it and n."""
        return name

    @classmethod
    def family(cls, name: str, n: int | None, learners: int) -> str:
        """Returns the label of the runs that form one curve over λ."""
        return cls.label(name, n)

    @property
    def waits(self) -> bool:
        """Whether a learner may have to wait, because a subclass has its own `pull_granted`."""
        return type(self).pull_granted is not Protocol.pull_granted

    @property
    def expected_staleness(self) -> float:
        """Expected mean staleness ⟨σ⟩ of all gradients if no learner waits, whatever the speed of each.

        Every update makes the λ - 1 gradients in flight staler, and applies c gradients. If c = ⌊λ/n⌋ was rounded down,
        the result is larger than n.
        """
        return (self.learners - 1) / self.gradients_per_update

    def update_due(self, pending: int) -> bool:
        """Returns whether the server updates the weights now.

        Args:
            pending: Number of gradients that the server has received since its last update.
        """
        return pending >= self.gradients_per_update

    def rate_scale(self, samples: int) -> float:
        """Returns the factor on the learning rate of an update that applies this number of samples."""
        return 1.0

    def pull_granted(self, learner: int, timestamp: int, clock: Clock) -> bool:
        """Returns whether a learner that asks for weights is answered now. Otherwise it waits, and the server asks
        again later.

        Args:
            learner: Number of the learner, from 0.
            timestamp: Timestamp of the learner's weights.
            clock: Progress of the server.
        """
        return True

    def state(self) -> dict[str, Any]:
        """Returns the attributes that change during a run: numbers, texts, lists and dicts that JSON can hold.

        A checkpoint keeps the state after the last update. Only `update_due` may change it. A subclass that changes its
        attributes defines this method and `restore`.
        """
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a state: when a run is resumed, when all learners restart, and when a learner has died.

        Args:
            state: Result of `state`, perhaps of a protocol for another number of learners.

        Raises:
            ValueError: It is no state of this protocol.
        """
        if state:
            raise ValueError("the protocol has no state; define state() and restore()")
