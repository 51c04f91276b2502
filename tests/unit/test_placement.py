"""Where models are cut: the paper's tables from the shapes of its networks, and both rules."""

import math
import re
import tomllib
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rudra.core.layout import Placed
from rudra.core.placement import (
    Layer,
    PlacementDecision,
    PlacementHardware,
    choose,
    cuts,
    placed_s,
    server_s,
    skewness,
)
from rudra.core.wire import tail_bytes
from rudra.job.job import Job
from rudra.prepare.cut import buckets_of
from rudra.prepare.profile import Profile, as_toml
from rudra.simulation.predict import Outline, predict
from tests.selection import CAMPAIGN
from tests.unit.convnets import DEVICES, NETWORKS

GIB = 2**30

PAPER = {  # its Table 1; and the layers, parameters in millions, and MB sent of the cut and of the whole model
    "AlexNet": (-2.27, 11, 61.84, 31.7, 247),
    "GoogLeNet": (-0.74, 72, 7.00, 24.0, 28),
    "Inception-v3": (-0.96, 109, 23.82, 87.3, 95),
    "LeNet": (-1.16, 6, 2.17, 0.62, 8.7),
    "OverFeat": (-2.11, 11, 145.92, 68.6, 584),
    "ResNet-50": (-1.26, 56, 25.53, 94.5, 102),
    "VGG11": (-3.62, 16, 132.86, 43.3, 531),
    "VGG19": (-3.02, 24, 143.67, 86.5, 575),
}


def decided(name: str, learners: int = 8, threshold: float = -0.5) -> PlacementDecision:
    make, size = NETWORKS[name]
    return choose("ralp", make(1000), PlacementHardware(learners, size), threshold)


@pytest.mark.parametrize("name", PAPER)
def test_table_1(name: str) -> None:
    skewed, count, millions, sent, whole = PAPER[name]
    layers = NETWORKS[name][0](1000)
    assert f"{skewness(layers):.2f}" == f"{skewed:.2f}"
    assert len(layers) == count
    size = sum(layer.parameters_bytes for layer in layers)
    assert size / 4e6 == pytest.approx(millions, abs=0.005)
    assert size / 1e6 == pytest.approx(whole, rel=0.01)
    cut = decided(name).cut
    assert cut.name == "linear1"
    assert (cut.front_bytes + cut.activations_bytes) / 1e6 == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize(
    ("name", "size", "ring", "placed"),
    [("AlexNet", 0.23, 3.23, 0.47), ("Inception-v3", 0.09, 1.24, 1.30), ("VGG11", 0.50, 6.93, 0.64)],
)
def test_table_2(name: str, size: float, ring: float, placed: float) -> None:
    """Its gigabytes are of 2^30 bytes, and its workers eight."""
    found = decided(name)
    taken = [found.server_bytes / 16, found.allreduce_bytes, found.cut.placed_bytes]
    assert [each / GIB for each in taken] == pytest.approx([size, ring, placed], abs=0.0055)


def placed_job(layers: Sequence[Layer], cluster: PlacementHardware, buckets: str | float) -> Job:
    """A job with the times of these layers, and the cluster's link."""
    link = {"bandwidth_bytes_per_s": cluster.bytes_per_s, "latency_s": cluster.latency_s, "sharing": cluster.sharing}
    told = Profile("x", cluster.minibatch_size, tuple(layers), 0.0, 0.0, 1.0, 1)
    return Job(
        model={"name": "lenet"},  # of which nothing counts: its sizes are known
        training={"minibatch_size": cluster.minibatch_size},
        protocol={"name": "hardsync"},
        cluster={"learners": cluster.learners, "buckets": buckets},
        simulation={**tomllib.loads(as_toml(told)), **link},
    )


def step_s(layers: Sequence[Layer], cluster: PlacementHardware, cut: int | None, buckets: str | float = "off") -> float:
    """Seconds of a synchronous step in virtual time, through one parameter server; `cut`: in front of which layer."""
    size, whole_s = sum(layer.parameters_bytes for layer in layers), sum(layer.seconds for layer in layers)
    placed = None
    if cut is not None:
        front = sum(layer.parameters_bytes for layer in layers[:cut])
        back_s = sum(layer.seconds for layer in layers[cut:])
        crossing = layers[cut - 1].output_bytes * cluster.minibatch_size
        placed = Placed(front / size, crossing / size, back_s / whole_s)
    job = placed_job(layers, cluster, buckets).with_(
        placement={"cut": 1, "rule": "synchronous"} if cut else {},
        simulation={"compute_s": whole_s, "jitter": 0.0, "tensors": False},
    )
    images = cluster.learners * cluster.minibatch_size
    return images / predict(job, updates=8, known=Outline(10**6, size + tail_bytes(1), placed)).samples_per_s


@pytest.mark.parametrize(
    ("name", "behind_1_gbit_s", "behind_10_gbit_s"),
    [
        ("AlexNet", 1.0, 1.0),
        ("GoogLeNet", 1.70, 1.21),
        pytest.param("Inception-v3", 2.49, 1.29, marks=CAMPAIGN),
        ("LeNet", 1.0, 1.0),
        pytest.param("OverFeat", 10.2, 2.55, marks=CAMPAIGN),
        pytest.param("ResNet-50", 1.69, 1.15, marks=CAMPAIGN),
        ("VGG11", 1.18, 1.09),
        pytest.param("VGG19", 1.48, 1.17, marks=CAMPAIGN),
    ],
)
def test_auto_takes_the_best_cut_and_the_papers_rule_may_not(
    name: str, behind_1_gbit_s: float, behind_10_gbit_s: float
) -> None:
    """In virtual time, of all cuts and none; the paper's rule refuses cuts between convolutions, which send less."""
    make, size = NETWORKS[name]
    layers = DEVICES[name].timed(make(1000), size)
    for gbit_s, of_paper in ((1, behind_1_gbit_s), (10, behind_10_gbit_s), (56, 1.0)):
        cluster = PlacementHardware(4, size, gbit_s * 1.25e8, 1e-5)
        auto, ralp = (choose(rule, layers, cluster, against=("server",)) for rule in ("auto", "ralp"))
        seconds = {None: step_s(layers, cluster, None)}
        seconds |= {cut.index: step_s(layers, cluster, cut.index) for cut in auto.cuts}
        chosen = [seconds[None if found.cut is None else found.cut.index] for found in (auto, ralp)]
        assert chosen[0] <= 1.05 * min(seconds.values())
        assert chosen[1] / min(seconds.values()) == pytest.approx(of_paper, rel=0.03)


@pytest.mark.each_value
@pytest.mark.parametrize("sharing", ["turns", "equal"])
@pytest.mark.parametrize("learners", [1, 3, 16])
@pytest.mark.parametrize("rate", [1e8, 1e9, 7e9])
def test_a_step_takes_what_virtual_time_says(learners: int, rate: float, sharing: Any) -> None:
    """For cuts in front of a convolution and of the linear layers, and for none."""
    layers = DEVICES["VGG11"].timed(NETWORKS["VGG11"][0](1000), 64)
    cluster = PlacementHardware(learners, 64, rate, 1e-5, sharing=sharing)
    found = {cut.index: cut.step_s for cut in cuts(layers, cluster)}
    for cut in (2, 8, 13, None):
        ours = server_s(layers, cluster) if cut is None else found[cut]
        assert ours == pytest.approx(step_s(layers, cluster, cut), rel=0.02 if sharing == "turns" else 0.08), cut


@pytest.mark.each_value
@pytest.mark.parametrize("sharing", ["turns", "equal"])
@pytest.mark.parametrize("learners", [1, 3, 16])
@pytest.mark.parametrize("rate", [1e8, 1e9, 7e9])
@pytest.mark.parametrize("buckets", ["auto", 20.0])
def test_a_step_hides_what_virtual_time_hides(learners: int, rate: float, sharing: Any, buckets: str | float) -> None:
    """Gradients leave in buckets during the backward pass, and parts of them when their layers are computed.

    Without a cut the forward pass begins while weights arrive.
    """
    layers = DEVICES["VGG11"].timed(NETWORKS["VGG11"][0](1000), 64)
    cluster = PlacementHardware(learners, 64, rate, 1e-5, sharing=sharing)
    given, pulled = map(buckets_of(placed_job(layers, cluster, buckets)).__getitem__, ("server", "weights"))
    found = {cut.index: cut.step_s for cut in cuts(layers, cluster, given)}
    for cut in (2, 8, 13, None):
        ours = server_s(layers, cluster, given, pulled) if cut is None else found[cut]
        theirs = step_s(layers, cluster, cut, buckets)
        assert ours == pytest.approx(theirs, rel=0.02 if sharing == "turns" else 0.08), cut
        assert ours <= (server_s(layers, cluster) if cut is None else placed_s(layers, cut, cluster))


def test_a_threshold_of_one_and_a_half_takes_those_that_gain_most() -> None:
    taken = {name for name in NETWORKS if decided(name, threshold=-1.5).cut is not None}
    assert taken == {"AlexNet", "OverFeat", "VGG11", "VGG19"}


def conv(size: int, out: int, seconds: float = 0.0) -> Layer:
    return Layer("conv", "convolution", size, out, seconds)


def linear(size: int, out: int, seconds: float = 0.0, *, cut: bool = True) -> Layer:
    return Layer("linear", "linear", size, out, seconds, cut=cut)


@pytest.mark.parametrize(
    ("layers", "threshold", "index", "why"),
    [
        ([conv(1, 9), conv(1, 5), linear(900, 1), linear(5, 1)], -0.5, 2, "it sends least"),
        ([conv(1, 9), Layer("relu", "", 0, 5), linear(900, 1), linear(5, 1)], 99, 2, "it sends least"),
        ([conv(900, 9), conv(1, 5), linear(1, 1)], -0.5, None, "skewness .* is above the threshold, -0.5: param"),
        ([conv(1, 1), conv(1, 9), linear(900, 800), linear(5, 1)], -0.1, 2, "it sends least"),
        ([conv(1, 9), conv(1, 950), linear(900, 950), linear(5, 1)], -0.1, None, "are not less than the model's"),
        ([linear(1, 9, cut=False), linear(900, 1)], 9, None, "the model cannot be cut anywhere"),
        ([linear(1, 9), conv(900, 1)], 9, None, "every cut has a convolution after it"),
    ],
)
def test_the_papers_rule(layers: list[Layer], threshold: float, index: int | None, why: str) -> None:
    found = choose("ralp", layers, PlacementHardware(4, 1), threshold)
    assert (found.cut and found.cut.index) == index
    assert re.search(why, found.why)


@pytest.mark.parametrize(
    ("cluster", "index", "why"),
    [
        (
            PlacementHardware(4, 1, 1e3),
            2,
            r"a step takes 2\.48 s, and 8\.13 s by allreduce",
        ),  # bytes count: the small activations
        (
            PlacementHardware(4, 1, 1e9),
            None,
            r"a step takes .* s at best, cut at .*, and 2\.1 s by ",
        ),  # computing alone
        (PlacementHardware(4, 1, 1e5, back_speed=100), 1, r"a step takes 1\.11 s, and 2\.16 s by "),
    ],
)
def test_the_shortest_step(cluster: PlacementHardware, index: int | None, why: str) -> None:
    layers = [conv(10, 2000, 1.0), conv(10, 20, 1.0), linear(4000, 10, 0.1)]
    found = choose("auto", layers, cluster)
    assert (found.cut and found.cut.index) == index, found
    assert re.search(why, found.why), found.why


layers_of = st.lists(
    st.builds(
        Layer,
        st.just("x"),
        st.sampled_from(["convolution", "linear", "pool", ""]),
        st.integers(0, 10**6),
        st.integers(1, 10**6),
        st.floats(0, 10),
        st.floats(0, 10),
        st.booleans(),
    ),
    min_size=2,
    max_size=12,
)


@given(layers_of, st.integers(1, 64), st.integers(1, 512), st.floats(1e3, 1e12), st.floats(0.1, 100))
def test_what_is_chosen_is_allowed_and_pays(
    layers: list[Layer], learners: int, size: int, rate: float, speed: float
) -> None:
    cluster = PlacementHardware(learners, size, rate, 1e-5, speed)
    by_bytes, by_time = (choose(rule, layers, cluster, 0.0) for rule in ("ralp", "auto"))  # type: ignore[arg-type]
    for found in (by_bytes, by_time):
        assert [cut.index for cut in found.cuts] == [i for i, layer in enumerate(layers[:-1], 1) if layer.cut]
        assert found.why
    if (cut := by_bytes.cut) is not None:
        assert by_bytes.skewness <= 0
        assert not any(layer.kind == "convolution" for layer in layers[cut.index :])
        assert cut.placed_bytes < by_bytes.server_bytes
    best = min((cut.step_s for cut in by_time.cuts), default=float("inf"))
    others = min(by_time.server_s, by_time.allreduce_s)
    assert (by_time.cut is not None) == (best < others)
    assert by_time.cut is None or by_time.cut.step_s == best


@given(layers_of)
def test_skewness_is_that_of_the_mirror_with_another_sign(layers: list[Layer]) -> None:
    counted = [layer for layer in layers if layer.kind]
    if sum(layer.parameters_bytes for layer in counted):
        assert skewness(counted[::-1]) == pytest.approx(-skewness(counted), abs=1e-6)


def test_a_skewness_at_the_threshold_is_placed() -> None:
    """The paper places layers up to the threshold, which belongs to it."""
    layers = [conv(1, 9), conv(1, 5), linear(900, 1), linear(5, 1)]
    skewed = skewness(layers)
    assert choose("ralp", layers, PlacementHardware(4, 1), skewed).cut is not None
    assert choose("ralp", layers, PlacementHardware(4, 1), math.nextafter(skewed, -math.inf)).cut is None
