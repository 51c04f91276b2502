"""The space of a search: what may vary, one row of `DIMENSIONS` for each, and the points of a job.

A point is a job with settings of its own. A combination that the job does not allow is refused with its reason.
"""

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import protocols
import topologies
from rudra.errors import ConfigError, RudraError
from rudra.job.job import Job
from rudra.job.table import named
from rudra.log import only_errors
from rudra.prepare.cut import choose_cut

Settings = Mapping[str, Any]
"""Key of the job, such as `protocol.name` -> value."""


class Dimension(NamedTuple):
    """Something that may vary.

    Attributes:
        title: Name for people.
        keys: Keys of the job that it sets together.
        values: Function of the job with the settings of the dimensions before. It returns the values of the keys.
            Empty: the dimension does not apply, and its keys keep their values.
        timed: Whether it changes the time of a sample. Otherwise it only changes what a sample is worth.
    """

    title: str
    keys: tuple[str, ...]
    values: Callable[[Job], Iterable[tuple[Any, ...]]]
    timed: bool = True


class Refused(NamedTuple):
    """A combination that is not possible, and why."""

    settings: Settings
    reason: str


class Candidate(NamedTuple):
    """A job with settings of its own.

    Attributes:
        settings: Settings that distinguish it, by key.
        job: The job with these settings.
    """

    settings: Settings
    job: Job

    @property
    def name(self) -> str:
        """Short name for people, and for sorting."""
        return in_words(self.settings)


_SHORT = {
    "protocol.name": "{}",
    "topology.name": "on {}",
    "topology.options.groups": "g = {}",
    "protocol.n": "n = {}",
    "training.minibatch_size": "μ = {}",
    "averaging.period": "τ = {}",
    "cluster.learners": "λ = {}",
    "cluster.learners_per_rank": "m = {}",
    "cluster.learners_per_device": "m = {}",
    "placement.cut": "cut {}",
    "cluster.shares": "shares {}",
    "optimizer.learning_rate": "α0 = {:.3g}",
    "optimizer.momentum": "momentum {:g}",
    "averaging.outer.learning_rate": "outer rate {:g}",
    "averaging.outer.momentum": "outer momentum {:g}",
    "optimizer.average.window": "average over each {}",
}

_PLACES = {key: place for place, key in enumerate(_SHORT)}


def said(key: str, value: Any) -> str:
    """Returns a setting as people read it."""
    form = _SHORT.get(key, key.rpartition(".")[2] + " {}")
    return form.format(value) if isinstance(value, int | float) or ":" not in form else form.partition("{")[0]


def in_words(settings: Settings) -> str:
    """Returns settings as people read them, the protocol first."""
    keys = sorted(settings, key=lambda key: _PLACES.get(key, len(_PLACES)))
    return ", ".join(said(key, settings[key]) for key in keys if settings[key] not in (None, {}, (), []))


def powers(most: int, least: int = 1) -> list[int]:
    """Returns the powers of two from `least` to `most`."""
    return [1 << i for i in range(least.bit_length() - 1, most.bit_length())]


def _pairs(job: Job) -> Iterator[tuple[Any, ...]]:
    """Every protocol with every topology, and nothing of the job's own protocol in another one."""
    own = named(job.protocol.name)
    names = [] if job.scheduled else [name for name, rule in protocols.shipped().items() if not rule.schedules]
    here = job.topology.name
    for pair in itertools.product(dict.fromkeys([own, *names]), dict.fromkeys([here, *topologies.shipped()])):
        if pair != ("softsync", "groups") or pair == (
            own,
            here,
        ):  # one synchronous group, or async ones, in other words
            yield pair


def _n(job: Job) -> Iterator[tuple[int]]:
    """n of softsync. With n = λ it is async, and with groups a group counts as one learner."""
    if named(job.protocol.name) == "softsync" and job.topology.name != "groups":
        yield from ((n,) for n in powers(job.learners // 2))


def _groups(job: Job) -> Iterator[tuple[int]]:
    """g of compute groups. Synchronous ones are a single group, and g = λ is async without groups."""
    if job.topology.name == "groups":
        synchronous = job.make_protocol().ordered
        yield from ((g,) for g in ([1] if synchronous else powers(job.learners // 2, 2)))


def _sizes(job: Job) -> Iterator[tuple[int]]:
    """μ: a quarter of the job's to four times as many samples."""
    if not job.scheduled:
        own = job.training.minibatch_size
        yield from ((size,) for size in dict.fromkeys(max(1, round(own * 2**i)) for i in range(-2, 3)))


def _periods(job: Job) -> Iterator[tuple[int]]:
    """τ: the protocol's own, a quarter, and four times as many mini-batches."""
    protocol = job.make_protocol()
    if protocol.averages:
        own = protocol.period
        yield from ((period,) for period in sorted({max(1, own // 4), own, own * 4, own * 16 if own == 1 else own}))


def _shares(job: Job) -> Iterator[tuple[Any]]:
    """Shares by speed, if learners of a group or of a synchronous update differ."""
    speeds = job.simulation.slowdown
    if speeds and not job.make_protocol().averages:
        yield from (((),), ("auto",))


def _per_rank(job: Job) -> Iterator[tuple[int, int]]:
    """m and λ: learners of averages on the same ranks, as many as the job has and twice as many."""
    if job.make_protocol().averages and not job.simulation.slowdown and not _has_banks(job):
        each = job.cluster.learners_per_rank
        yield from ((each * times, job.learners * times) for times in (1, 2))


def _has_banks(job: Job) -> bool:
    """Whether learners may share a device in a bank: the job has banks, or their times are known."""
    table = job.cluster
    return table.learners_per_device is not None or (bool(job.simulation.bank_s) and table.learners_per_rank == 1)


def _per_device(job: Job, sizes: Sequence[Any] = ()) -> Iterator[tuple[Any, int]]:
    """m and λ: learners of averages on the same devices, up to the largest bank whose time is known.

    Args:
        job: Job whose λ gives the number of devices.
        sizes: Values of m of the user. Empty: powers of two.
    """
    own = job.cluster.bank_size or 1
    devices = job.learners // own
    if sizes or (job.make_protocol().averages and not job.simulation.slowdown and _has_banks(job)):
        most = max(job.simulation.bank_s, default=2 * own)
        for m in sizes or sorted({*powers(most), *([] if job.cluster.grows else [own])}):
            alone = m == 1 and job.cluster.learners_per_device is None
            yield (None if alone else m, job.learners if m == "auto" else devices * m)


def _cuts(job: Job) -> Iterator[tuple[str | None]]:
    """Whole models, or the best cut of `rudra place`, if the times of the layers are known."""
    if job.simulation.layers and not job.placement.given and not job.scheduled:
        yield (None,)
        with suppress(RudraError), only_errors():
            if (cut := choose_cut(job.with_(placement={"cut": "auto"}))) is not None:
                yield (cut,)


def _windows(job: Job) -> Iterator[tuple[str | None]]:
    """Average over each epoch, in place of the average of all probes, unless the job has one of its own."""
    if job.optimizer.average.rate is None:
        yield from ((window,) for window in dict.fromkeys([job.optimizer.average.window, "1 epoch"]))


def by_steps(middle: float, factor: float, steps: int) -> list[float]:
    """Returns a geometric series around a value, rounded to three digits."""
    return [float(f"{middle * factor**i:.3g}") for i in range(-steps, steps + 1)]


OF_STRATEGIES = {"optimizer.learning_rate", "optimizer.momentum"}
"""Keys that strategies vary for each point. Other values of the user make points of their own."""

PER_RANK = ("cluster.learners_per_rank", "cluster.learners")
PER_DEVICE = ("cluster.learners_per_device", "cluster.learners")

DIMENSIONS: tuple[Dimension, ...] = (
    Dimension("protocol and topology", ("protocol.name", "topology.name"), _pairs),
    Dimension("splitting", ("protocol.n",), _n),
    Dimension("compute groups", ("topology.options.groups",), _groups),
    Dimension("mini-batch", ("training.minibatch_size",), _sizes),
    Dimension("period", ("averaging.period",), _periods),
    Dimension("shares", ("cluster.shares",), _shares),
    Dimension("learners per rank", PER_RANK, _per_rank),
    Dimension("learners per device", PER_DEVICE, _per_device),
    Dimension("cut", ("placement.cut",), _cuts),
    Dimension(
        "learning rate",
        ("optimizer.learning_rate",),
        lambda job: ((rate,) for rate in by_steps(job.optimizer.learning_rate, math.sqrt(10), 3)),
        timed=False,
    ),
    Dimension(
        "momentum",
        ("optimizer.momentum",),
        lambda job: ((momentum,) for momentum in (0.0, 0.3, 0.6, 0.9)) if job.optimizer.name == "sgd" else (),
        timed=False,
    ),
    Dimension(
        "outer rate",
        ("averaging.outer.learning_rate",),
        lambda job: ((rate,) for rate in (None, 0.3, 1.0)) if named(job.protocol.name) == "diloco" else (),
        timed=False,
    ),
    Dimension(
        "outer momentum",
        ("averaging.outer.momentum",),
        lambda job: ((momentum,) for momentum in (None, 0.0)) if named(job.protocol.name) in ("diloco", "sma") else (),
        timed=False,
    ),
    Dimension("average over time", ("optimizer.average.window",), _windows, timed=False),
)
"""All dimensions, in the order of their effect on a point."""


def chosen(given: Mapping[str, Sequence[Any]]) -> list[Dimension]:
    """Returns the dimensions of a search.

    Args:
        given: Values of keys, in place of the values in `DIMENSIONS`, wherever the dimension applies. A single value
            fixes the key. A key without a dimension gets one. With λ, learners per rank or device are only those given.
    """
    found, own = [], dict(given)
    for dimension in DIMENSIONS:
        if dimension.keys in (PER_RANK, PER_DEVICE) and not given.keys().isdisjoint((*PER_RANK, *PER_DEVICE)):
            if dimension.keys == PER_RANK or own.keys() & {*PER_RANK, *PER_DEVICE} != {PER_DEVICE[0]}:
                continue  # the user chooses λ
            dimension = dimension._replace(values=partial(_per_device, sizes=own.pop(PER_DEVICE[0])))
        mine = {key: own.pop(key) for key in dimension.keys if key in own}
        if mine:
            timed = dimension.timed or OF_STRATEGIES.isdisjoint(mine)
            dimension = dimension._replace(values=_Limited(dimension, mine), timed=timed)
        found.append(dimension)
    others = (Dimension(key, (key,), _Values(key, values)) for key, values in own.items())
    return [*others, *found]


def finest(settings: Settings, job: Job, given: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yields other values of the dimensions that neither change times nor belong to strategies, one at a time.

    Args:
        settings: Settings of a candidate.
        job: The job with these settings.
        given: Keys whose values the user gives.
    """
    for dimension in DIMENSIONS:
        if not dimension.timed and OF_STRATEGIES.isdisjoint(dimension.keys) and {*given}.isdisjoint(dimension.keys):
            own = tuple(value_of(job, key) for key in dimension.keys)
            for values in dimension.values(job):
                if values != own:
                    yield {**settings, **dict(zip(dimension.keys, values, strict=True))}


def value_of(job: Job, key: str) -> Any:
    """Returns the value of a job's key, such as `training.minibatch_size`. None: there is none."""
    found: Any = job
    for name in key.split("."):
        found = getattr(found, name, None)
    return found


def untimed(given: Mapping[str, Sequence[Any]]) -> set[str]:
    """Returns the keys of a search that do not change the time of a sample.

    Args:
        given: As for `chosen`.
    """
    return {key for dimension in chosen(given) if not dimension.timed for key in dimension.keys}


class _Values:
    """The same values for every job. A single one that the job has already does not vary."""

    def __init__(self, key: str, values: Sequence[Any]) -> None:
        self._key, self._values = key, values

    def __call__(self, job: Job) -> Iterator[tuple[Any, ...]]:
        if [value_of(job, self._key)] != [*self._values]:
            yield from ((value,) for value in self._values)


class _Limited:
    """Values of a dimension with the user's values of some of its keys."""

    def __init__(self, dimension: Dimension, given: Mapping[str, Sequence[Any]]) -> None:
        self._dimension, self._given = dimension, given

    def __call__(self, job: Job) -> Iterator[tuple[Any, ...]]:
        keys, given = self._dimension.keys, self._given
        usual = [*self._dimension.values(job)]
        if usual and given.keys() == {*keys}:
            yield from itertools.product(*(given[key] for key in keys))
            return
        yield from (value for value in usual if all(value[keys.index(key)] in given[key] for key in given))


_OF_PROTOCOL = ("period", "elasticity", "local_elasticity", "restart", "keep_momentum")


def with_settings(job: Job, settings: Settings) -> Job:
    """Returns a job with settings. Another protocol or topology brings the defaults of its own keys.

    Probes that cannot compute gradients together, because of their protocol or unequal parts, compute them one by one.

    Raises:
        ConfigError: The job does not allow them.
    """
    tables: dict[str, Any] = {}
    if settings.get("protocol.name", named(job.protocol.name)) != named(job.protocol.name):
        tables["protocol"] = {"n": None, "options": {}}
        tables["averaging"] = dict.fromkeys(_OF_PROTOCOL) | {"outer": {}}
        tables["simulation"] = {"batching": "none"}
    if settings.get("cluster.shares"):
        tables["simulation"] = {"batching": "none"}
    if settings.get("cluster.learners_per_device", "auto") != "auto" and job.cluster.grows:
        tables["cluster"] = {"most_learners_per_device": None, "growth": "double", "active_learners": None}
    if settings.get("topology.name", job.topology.name) != job.topology.name:
        tables["topology"] = {"options": {}}
    for key, value in settings.items():
        table, _, rest = key.partition(".")
        into = tables.setdefault(table, {})
        inner, _, last = rest.rpartition(".")
        if inner:
            before = into.get(inner, getattr(getattr(job, table), inner))
            before = before if isinstance(before, Mapping) else before.non_defaults
            into = into.setdefault(inner, dict(before))
        into[last] = value
    return job.with_(**tables)


def spelled_out(job: Job) -> dict[str, Any]:
    """Returns the tables of a job with the defaults that its protocol has for keys of a search."""
    tables: dict[str, Any] = json.loads(job.to_json())
    rule = job.make_protocol()
    tables["protocol"]["n"] = rule.gradients_per_update
    if rule.averages:
        tables["averaging"]["period"] = rule.period
    return tables


_UNTRAINED = {"training": ("epochs", "target", "target_window", "stop_at_target", "patience"), "simulation": ("costs",)}
"""Keys of tables that do not decide the weights."""


def trajectory(job: Job) -> str:
    """Returns everything of a job that decides its weights after a number of samples, except its code and data.

    The weights of a protocol that waits for all learners do not depend on time. If it averages gradients
    (`Protocol.ordered`), they do not depend on the topology either, except for rounding.
    """
    tables = json.loads(job.to_json())
    for name in ("name", "results", "hooks"):
        del tables[name]
    for name, keys in _UNTRAINED.items():
        for key in keys:
            del tables[name][key]
    rule = job.make_protocol()
    waits = rule.ordered or (rule.averages and not job.plan().served)
    timed = job.simulation.faults or job.cluster.shares == "auto" or job.cluster.grows
    if waits and not timed:
        tables["simulation"] = {"batching": job.simulation.batching}
    if rule.ordered:
        del tables["topology"]
    return json.dumps(tables, sort_keys=True)


def points(job: Job, dimensions: Sequence[Dimension], refused: list[Refused]) -> list[Candidate]:
    """Returns all points of a job. Combinations that the job does not allow are added to `refused`.

    Args:
        job: Job with its number of learners.
        dimensions: Dimensions that vary.
        refused: Is extended by the combinations that are not possible, each as early as it is known.
    """
    found = [Candidate({}, job)]
    for dimension in dimensions:
        larger: list[Candidate] = []
        for point in found:
            values = [*dimension.values(point.job)]
            if not values:
                larger.append(point)
            for value in values:
                settings = {**point.settings, **dict(zip(dimension.keys, value, strict=True))}
                try:
                    larger.append(Candidate(settings, with_settings(job, settings)))
                except ConfigError as error:
                    refused.append(Refused(settings, str(error)))
        found = larger
    return found
