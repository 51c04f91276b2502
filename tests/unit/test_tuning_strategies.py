"""Strategies of `rudra tune` on invented surfaces: what they find, at which cost, and that nothing disturbs them."""

import math
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import torch
from surfaces import AT_ONCE, EPOCH, JOB, OPTIMUM, SURFACES, TARGET, Search, Surface, Trained, averages, new_state

from rudra.errors import ConfigError, RunError
from rudra.tuning.answer import Finalist, answer_of
from rudra.tuning.batches import CAUTION, UpdateBatch, nearest, rescaled
from rudra.tuning.journal import NAME, Journal
from rudra.tuning.probes import Outcome, Probe, ProbeNoise
from rudra.tuning.remarks import remarks
from rudra.tuning.rounds import MOMENTUM, RATE, cold_start, in_order
from rudra.tuning.ruler import Mark
from rudra.tuning.search import Order, lead
from rudra.tuning.space import Candidate, with_settings
from rudra.tuning.state import SearchState
from rudra.tuning.strategies import shipped
from rudra.tuning.strategies.guided import ATTEMPTS
from tests.selection import CAMPAIGN, covering, selected

NOISE = 0.05
"""Standard deviation of the progress of a probe, in epochs of the best settings."""


FEW = {name: surface._replace(only=("hardsync", "softsync", "async")) for name, surface in SURFACES.items()}
"""Surfaces with fewer points."""


def shuffled(seed: int) -> Order:
    chance = random.Random(seed)
    return lambda probes: chance.sample(probes, len(probes))


def best_toml(state: SearchState) -> str:
    answer = answer_of(state, JOB)
    assert answer.winner is not None
    return answer._replace(job=with_settings(JOB, answer.winner.settings)).best()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Optuna's models of few points take three times the processor time with two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Searches = dict[str, tuple[Search, SearchState]]
"""Name of the surface -> search and its end."""


FOUND = ["monotone", "valley in g", "cliff", "speed misleads", "replicas are fast", "flat"]


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Searches:
    searches = {
        name: Search(
            tmp_path_factory.mktemp("guided"),
            "guided",
            surface,
            noise=NOISE,
            at_once=0.0 if name == "flat" else AT_ONCE,
        )
        for name, surface in SURFACES.items()
        if name in {*FOUND, *selected(request, "name")}
    }
    return {name: (search, search.run()) for name, search in searches.items()}


@pytest.mark.parametrize("name", covering(FOUND, SURFACES))
def test_the_default_finds_a_point_that_is_nearly_as_soon_as_the_best(guided: Searches, name: str) -> None:
    search, state = guided[name]
    assert search.lateness(state) <= (2 if name == "speed misleads" else 1.2)
    assert state.spent <= 8 * state.one_run
    winner = answer_of(state, JOB).winner
    assert winner is not None
    assert not winner.predicted


def test_the_default_finds_it_with_the_samples_of_few_reference_runs(guided: Searches) -> None:
    assert median(search.within for search, _ in guided.values()) <= 3


@pytest.mark.parametrize("name", covering(["cliff", "flat", "valley in g"], SURFACES))
def test_halving_finds_it_with_a_larger_budget(tmp_path: Path, name: str) -> None:
    search = Search(tmp_path, "halving", SURFACES[name], 24, noise=NOISE)
    assert search.lateness(search.run()) <= 1.5


def test_first_epoch_prolongs_only_the_best(tmp_path: Path) -> None:
    search = Search(tmp_path, "first-epoch", SURFACES["cliff"], 12)
    state = search.run()
    longer = [p for p in state.probes.values() if p.origin and p != state.reference and p.epochs > 1]
    assert 0 < len(longer) <= 5
    firsts = [p for p in state.probes.values() if p.origin and p != state.reference]
    assert len(firsts) > 15
    assert search.lateness(state) <= 1.5


def test_bayes_finds_it(tmp_path: Path, one_thread: None) -> None:
    search = Search(tmp_path, "bayes", SURFACES["valley in g"]._replace(only=("async",)), 7)
    state = search.run()
    assert search.lateness(state) <= 1.5
    text = search.path.read_bytes()
    search.path.write_bytes(b"".join(text.splitlines(keepends=True)[:-8]))
    search.run()
    assert search.path.read_bytes() == text, "a study that is made again suggests the same"


def test_bayes_without_optuna_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"^--strategy bayes needs optuna: pip install 'rudra\[tune\]'$") as caught:
        Search(tmp_path, "bayes", SURFACES["flat"]).run()
    assert caught.value.exit_code == 2


def test_without_a_difference_the_answer_says_so_and_is_simple(guided: Searches) -> None:
    answer = answer_of(guided["flat"][1], JOB)
    assert answer.winner is not None
    said = "\n".join(answer.lines())
    assert "no difference, so the simpler one wins" in said
    assert "no difference, so it may stay as it is" in said
    assert answer.winner.settings["protocol.name"] == "hardsync"
    said = "\n".join(answer_of(guided["monotone"][1], JOB).lines())
    assert "no difference, so it may" not in said


KILLED = ["guided", "halving", "first-epoch", "omnivore"]


@pytest.mark.parametrize("strategy", covering(["guided", "halving"], KILLED))
def test_a_search_that_is_killed_20_times_writes_the_same(tmp_path: Path, strategy: str) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = Search(tmp_path / "whole", strategy, FEW["ridge of rate and momentum"], 6)
    killed = Search(tmp_path / "killed", strategy, FEW["ridge of rate and momentum"], 6)
    text = best_toml(whole.run())
    chance = random.Random(5)
    for _ in range(20):
        try:
            killed.run(dies_after=chance.choice([0, 1, 1, 1, 2, 2, 3]))
        except KeyboardInterrupt:
            with killed.path.open("ab") as file:
                file.write(b'{"kind": "probe", "na')  # a line that was being written
    assert best_toml(killed.run()) == text
    assert killed.path.read_bytes() == whole.path.read_bytes()


@pytest.mark.parametrize(
    ("strategy", "orders"),
    [
        *(("guided", 3), ("halving", 3)),
        *(pytest.param(*more, marks=CAMPAIGN) for more in (("first-epoch", 3), ("omnivore", 3), ("halving", 20))),
    ],
)
def test_probes_of_a_round_may_finish_in_any_order(tmp_path: Path, strategy: str, orders: int) -> None:
    search = Search(tmp_path, strategy, FEW["cliff"], 6)
    told = [*search.run().outcomes.items()]
    text = search.path.read_text().splitlines()
    written = set()
    for seed in range(orders):
        search.path.unlink()
        assert [*search.run(order=shuffled(seed)).outcomes.items()] == told
        lines = search.path.read_text().splitlines()
        assert sorted(lines) == sorted(text)
        written.add(tuple(lines))
    assert len(written) > 1


@pytest.mark.parametrize("strategy", [name for name in shipped() if name not in ("bayes", "grid")])
def test_a_protocol_that_diverges_at_once_is_not_tried_forever(tmp_path: Path, strategy: str) -> None:
    """Its samples are fast, so every strategy wants it."""

    def value(point: Candidate, sigma: float) -> float:
        return 0.0 if averages(point) else 1.0

    surface = Surface(lambda point, sigma: 400 if averages(point) else 100, value)
    state = Search(tmp_path, strategy, surface).run()
    winner = answer_of(state, JOB).winner
    assert winner is not None
    assert state.outcomes
    failed = [probe for probe in state.probes.values() if state.outcomes[probe.name].failed]
    assert len({probe.name for probe in failed}) == len(failed)
    if strategy == "guided":
        families = Counter(state.batch(probe.by_key).family for probe in failed if probe.origin)
        assert max(families.values()) <= 2


@pytest.mark.parametrize("attempts", [ATTEMPTS, 1])
def test_a_fast_family_that_learns_nothing_has_a_second_probe_with_smaller_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempts: int
) -> None:
    """Without it, the search misses the soonest points."""
    monkeypatch.setattr("rudra.tuning.strategies.guided.ATTEMPTS", attempts)
    surface = Surface(lambda point, sigma: 1000 if averages(point) else 100, width=4.0, lost=OPTIMUM / 4)
    state = Search(tmp_path, "guided", surface).run()
    winner = answer_of(state, JOB).winner
    assert winner is not None
    assert (winner.settings["protocol.name"] in ("sma", "average", "easgd", "diloco")) == (attempts == ATTEMPTS)


@pytest.mark.parametrize("strategy", [name for name in shipped() if name not in ("bayes", "grid")])
def test_rates_and_momenta_of_the_user_hold(tmp_path: Path, strategy: str) -> None:
    surface = SURFACES["monotone"]
    state = new_state(surface)
    state.given = {RATE: [0.02, 0.05], MOMENTUM: [0.0, 0.5]}
    lead(state, shipped()[strategy], Journal(tmp_path / NAME, {}), Trained(state, surface), lambda probe: None)
    probes = [probe.by_key for probe in state.probes.values() if probe.settings]
    assert {settings[RATE] for settings in probes} == {0.02, 0.05}
    assert {settings[MOMENTUM] for settings in probes if MOMENTUM in settings} <= {0.0, 0.5}


def test_a_strategy_that_asks_again_for_the_same_probe_ends(tmp_path: Path) -> None:
    state = new_state(SURFACES["flat"])
    probe = Probe.of({RATE: 0.1}, "", 1)
    train = Trained(state, SURFACES["flat"])
    with pytest.raises(RunError, match="asks again for probes that have ended"):
        lead(state, lambda state: [probe], Journal(tmp_path / NAME, {}), train, lambda probe: None)


def test_nothing_diverges_forever(tmp_path: Path) -> None:
    search = Search(tmp_path, "guided", Surface(lambda point, sigma: 1.0, cliff=0.0))
    state = search.run()
    assert state.cold is None
    assert min(probe.by_key["optimizer.learning_rate"] for probe in state.probes.values()) == 1e-5
    answer = answer_of(state, JOB)
    assert answer.winner is None
    first, *_, last = answer.lines()
    assert first == f"{JOB.name}: no point reached validation accuracy >= 0.9"
    assert last.startswith("  note: the loss diverged with every learning rate: 1e-05, 3.16e-05, ")
    assert len(state.probes) <= 9


def test_a_target_that_the_first_evaluation_meets_compares_nothing(tmp_path: Path) -> None:
    search = Search(tmp_path, "guided", Surface(lambda point, sigma: 1.0, lambda point, sigma: 40.0))
    with pytest.raises(ConfigError, match=r"the first evaluation already meets .*; use a tighter one") as caught:
        search.run()
    assert caught.value.exit_code == 2


def test_the_job_as_given_wins_if_it_is_the_soonest(guided: Searches) -> None:
    state = guided["monotone"][1]
    answer = answer_of(state, JOB)
    assert answer.winner is not None
    assert answer.given is not None
    given = next(p for p in state.probes.values() if p.seed and not p.origin and not p.settings)
    marks = state.outcomes[given.name].marks
    early = Outcome((marks[0]._replace(samples=1, metric=1.0),))
    before = state.outcomes.copy()
    state.tell(given._replace(epochs=1), early)
    first, *rest = answer_of(state, JOB).lines()
    for name, outcome in before.items():
        state.tell(state.probes[name]._replace(epochs=max(1, len(outcome.marks))), outcome)
    assert first.endswith("is the job as given")
    assert not any("the job as given" in line for line in rest)


@pytest.mark.parametrize("strategy", covering(["guided", "first-epoch", "grid"], [*KILLED, "grid"]))
def test_every_point_has_one_name(tmp_path: Path, strategy: str) -> None:
    surface = FEW["ridge of rate and momentum"]._replace(only=("hardsync",))
    state = Search(tmp_path, strategy, surface, 1e4 if strategy == "grid" else 12).run()
    assert all(MOMENTUM in probe.by_key for probe in state.probes.values() if probe.settings)
    fresh = [with_settings(JOB, probe.by_key) for probe in state.probes.values() if probe.seed == 1]
    assert len(fresh) == len({job.to_json() for job in fresh}) > 1


def test_a_winner_that_is_the_job_as_given_is_trained_once(tmp_path: Path) -> None:
    own = JOB.optimizer

    def is_own(point: Candidate, sigma: float) -> float:
        synchronous = point.job.protocol.name == "softsync" and point.settings.get("protocol.n", 1) == 1
        return 1.0 if synchronous and point.job.training.minibatch_size == 8 else 0.01

    best = own.learning_rate / (1 - own.momentum)
    surface = Surface(lambda point, sigma: 100, is_own, size=0, width=0.3, only=("softsync",), cliff=10.0)
    state = new_state(surface, 12)
    lead(state, shipped()["guided"], Journal(tmp_path / NAME, {}), Aimed(state, surface, best), lambda probe: None)
    answer = answer_of(state, JOB)
    assert answer.winner is not None
    assert answer.winner.settings == {}
    assert "is the job as given" in next(answer.lines())
    assert len(answer.winner.times_s) == 3


@pytest.mark.parametrize(
    ("trained_s", "given_s", "said"),
    [
        (0.0, 30.0, ""),
        (50.0, 30.0, ", 50.0 s of training: paid back after 3 runs of the job"),
        (20.0, 30.0, ", 20.0 s of training: paid back after 1 run of the job"),
        (50.0, 10.0, ", 50.0 s of training"),
        (50.0, math.inf, ", 50.0 s of training"),
    ],
)
def test_an_answer_of_real_ranks_says_when_the_search_is_paid_back(
    guided: Searches, trained_s: float, given_s: float, said: str
) -> None:
    found = answer_of(guided["monotone"][1], JOB)
    winner = found.finalists[0]._replace(times_s=(10.0,))
    given = Finalist({}, (given_s,))
    lines = [*found._replace(finalists=(winner,), given=given, trained_s=trained_s).lines()]
    assert f"  searched with the samples of {found.spent:.1f} reference runs{said}" in lines


class Aimed(Trained):
    """Trains on a surface whose best effective learning rate is another one."""

    def __init__(self, state: SearchState, surface: Surface, best: float) -> None:
        super().__init__(state, surface, noise=0)
        self._scale = OPTIMUM / best

    def __call__(self, probe: Probe, before: Outcome | None) -> Outcome:
        scaled = {**probe.by_key, RATE: probe.by_key.get(RATE, JOB.optimizer.learning_rate) * self._scale}
        return super().__call__(probe._replace(settings=Probe.of(scaled, "", 0).settings), before)


@pytest.mark.parametrize("given", [{}, {MOMENTUM: [0.9], RATE: [0.01, 0.1, 1.0]}])
def test_the_last_neighbours_are_finer_steps_of_rate_and_momentum(
    tmp_path: Path, given: dict[str, list[float]]
) -> None:
    surface = FEW["ridge of rate and momentum"]._replace(only=("hardsync",))
    state = new_state(surface, 60)
    state.given = given
    lead(state, shipped()["guided"], Journal(tmp_path / NAME, {}), Trained(state, surface, 0), lambda probe: None)
    rates = {probe.by_key[RATE] for probe in state.probes.values() if probe.origin}
    tried = {probe.by_key[MOMENTUM] for probe in state.probes.values() if probe.origin}
    if given:
        assert rates <= {0.01, 0.1, 1.0}
        assert tried == {0.9}
    else:
        best = state.estimates()[0].settings
        assert {float(f"{best[RATE] * 1.5:.3g}"), float(f"{best[RATE] / 1.5:.3g}")} <= rates
        assert {round(best[MOMENTUM] + 0.1, 2), round(best[MOMENTUM] - 0.1, 2)} <= {*tried, 1.0}


def batch(samples: int, factor: float = 1.0, staleness: float = 0.0) -> UpdateBatch:
    return UpdateBatch((), samples, factor, staleness)


@pytest.mark.parametrize(
    ("noise_scale", "before", "after", "rate"),
    [
        (64, batch(64), batch(64), 1.0),
        (1e9, batch(64), batch(16), 0.25),  # far below B the rate is proportional to the batch
        (1e-9, batch(64), batch(16), 1.0),  # far above B it is constant
        (64, batch(64), batch(32), 2 / 3),
        (1e9, batch(64, 0.5), batch(16, 0.25), 0.5),  # the modulation has done half of it
        (64, batch(64), batch(8, 1 / 8, 7.0), CAUTION),  # as many samples are under way, and modulation is as strong
        (math.nan, batch(64), batch(8, 1.0, 7.0), CAUTION / 8),
        (math.nan, batch(8, 1.0, 7.0), batch(32, 1.0, 1.0), 4.0),
        (1e-9, batch(64), batch(8, 1 / 8), 8.0),
        (math.nan, batch(64), batch(8, 1 / 8), 8.0),
    ],
)
def test_the_noise_of_gradients_centres_the_learning_rate(
    noise_scale: float, before: UpdateBatch, after: UpdateBatch, rate: float
) -> None:
    assert rescaled(1.0, noise_scale, before, after) == pytest.approx(rate)
    assert nearest([0.1, 0.316, 1.0], 0.5) == 0.316


@pytest.mark.parametrize(("measured", "first"), [(None, 4), (ProbeNoise(2.0, 1.0), 4), (ProbeNoise(500.0, 9.0), 16)])
def test_batches_near_the_noise_scale_are_tried_first(tmp_path: Path, measured: ProbeNoise | None, first: int) -> None:
    search = Search(tmp_path, "guided", SURFACES["flat"]._replace(only=("hardsync",)), measured=measured)
    state = search.run()
    sizes = [probe.by_key["training.minibatch_size"] for probe in state.probes.values() if probe.origin]
    assert next(size for size in sizes if size != 8) == first
    noted = [note for note in answer_of(state, JOB).notes if "the gradient noise of the cold start suggests" in note]
    assert len(noted) == (measured is not None)
    again = search.run()  # from the journal
    assert again.noise == state.noise == measured


@pytest.mark.parametrize(
    ("split", "last", "said"),
    [
        (0.1, 0.005, "with 111 validation samples the accuracy is known to ±0.057, but an epoch of the reference"),
        (0.1, 0.06, None),
        (0.9, 0.03, None),
        (None, 0.005, None),  # no validation split, so its size is unknown
    ],
)
def test_a_target_that_chance_may_reach_is_said(split: float | None, last: float, said: str | None) -> None:
    state = new_state(SURFACES["flat"])
    state.job, state.training_samples = JOB.with_(data={"validation_split": split}), 1000
    cold = cold_start(state)[0]
    state.tell(cold, Outcome((Mark(1000, 1.0, 0.5, 1.0),)))
    marks = (Mark(1000, 0.5, TARGET.value - last / 2, 1.0), Mark(2000, 0.4, TARGET.value + last / 2, 2.0))
    state.tell(Probe(cold.settings, cold.end, 2), Outcome(marks))
    noted = [note for note in remarks(state, cold.by_key) if "chance may decide" in note]
    assert (said is None) == (noted == [])
    assert said is None or said in noted[0]


@pytest.mark.parametrize(("reachable", "runs"), [(1, 2), (2, 3), (3, 3)])
def test_a_reference_that_stalls_has_a_lower_rate(tmp_path: Path, reachable: int, runs: int) -> None:
    """The best rate of the cold start stalls above the target, as one that overfits does."""
    state = new_state(FEW["monotone"], 1e3)
    trained, tried = Trained(state, FEW["monotone"], 0.0), []

    def train(probe: Probe, before: Outcome | None) -> Outcome:
        outcome = trained(probe, before)
        if not probe.origin:
            return outcome
        tried.append(probe.by_key[RATE])
        if len({*tried}) > reachable:
            return outcome
        return Outcome(tuple(mark._replace(loss=1.0, metric=0.75) for mark in outcome.marks))

    lead(state, in_order, Journal(tmp_path / NAME, {}), train, lambda probe: None)
    rates = [*dict.fromkeys(tried)]
    assert len(rates) == runs
    assert rates == sorted(rates, reverse=True)
    assert math.isfinite(state.reference_samples) == (reachable < 3)
    assert max(probe.epochs for probe in state.probes.values() if probe.origin) < JOB.training.epochs


def test_a_prediction_is_not_below_a_run_that_has_not_reached_the_target() -> None:
    state = new_state(SURFACES["flat"])
    marks = [Mark(EPOCH * n, 1 - 0.1 * n, 0.5 + 0.1 * n, float(n)) for n in range(1, 7)]  # 0.9 after four epochs
    cold = cold_start(state)[0]
    state.tell(cold, Outcome((marks[0],)))
    state.tell(Probe(cold.settings, cold.end, 4), Outcome(tuple(marks[:4])))
    epoch_s = EPOCH / state.rate(cold.by_key)
    answer = answer_of(state, JOB)
    assert answer.winner is not None
    assert answer.winner.predicted
    assert answer.winner.time_s == pytest.approx(5 * epoch_s), "with the epoch of the cold start"
    late = tuple(mark._replace(metric=0.5) for mark in marks)
    state.tell(Probe(cold.settings, "", 6, 1), Outcome(late))
    again = answer_of(state, JOB)
    assert again.winner is not None
    assert again.winner.time_s == pytest.approx(6 * epoch_s)
