"""Corrections of gradients: mistakes of the user's, one line each, and jobs that have no place for a correction."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rudra
from protocols import Correction, GradientRecord
from rudra.compute.correcting import Corrector
from rudra.core.actions import Correct
from rudra.errors import ConfigError, CorrectionError
from tests.unit.sparse_samples import job, write_samples

ACTION = Correct("gradient", "weights", "pulled", 3, 17, 5, 2, 8)


class Faulty(Correction):
    needs_pulled_weights = True

    def __init__(self, fault: Callable[..., Any] = lambda *about: None, state: Any = None) -> None:
        self.fault, self.kept = fault, {} if state is None else state

    def correct(self, gradient: Any, weights: Any, pulled_weights: Any, record: GradientRecord) -> None:
        return self.fault(gradient, weights, pulled_weights)  # type: ignore[no-any-return]

    def state(self) -> Any:
        return self.kept


class Counting(Correction):
    def __init__(self) -> None:
        self.calls = torch.zeros(1)

    def correct(self, gradient: Any, weights: Any, pulled_weights: Any, record: GradientRecord) -> None:
        self.calls += 1

    def state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def exits(*about: Any) -> None:
    raise SystemExit(3)


def divides(g: Any, w: Any, p: Any) -> None:
    g.div_(0)


def resizes(g: Any, w: Any, p: Any) -> None:
    g.resize_(2)


def changes_weights(g: Any, w: Any, p: Any) -> None:
    w.zero_()


def changes_pulled_weights(g: Any, w: Any, p: Any) -> None:
    p.zero_()


def returns(g: Any, w: Any, p: Any) -> Any:
    return g + w - p


def has_another_shape(g: Any, w: Any, p: Any) -> None:
    g.copy_(torch.ones(3))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (has_another_shape, "RuntimeError: The size of tensor a (4) must match the size of tensor b (3)"),
        (exits, "SystemExit: 3"),
        (divides, "the corrected gradient is not finite, but it was before"),
        (returns, "correct() returned a Tensor; change gradient in place, and return nothing"),
        (resizes, "gradient is (2,) now, not (4,); keep its memory"),
        (changes_weights, "it changed weights or pulled_weights; change only gradient"),
        (changes_pulled_weights, "it changed weights or pulled_weights; change only gradient"),
    ],
)
def test_a_mistake_in_a_correction_is_one_line_that_names_it(fault: Callable[..., Any], said: str) -> None:
    corrector = Corrector("mine:Rule", "parameter server (rank 0)", lambda: Faulty(fault), [slice(0, 4)])
    with pytest.raises(CorrectionError) as caught:
        corrector.correct(torch.ones(4), torch.ones(4), torch.ones(4), ACTION)
    line = "parameter server (rank 0): correction mine:Rule failed at gradient of learner 3, step 17: "
    assert str(caught.value).startswith(line + said)


@pytest.mark.parametrize("state", [(1,), {"mean": 3.0}, {"mean": torch.ones(2, 2)}, {"mean": torch.ones(2).double()}])
def test_a_state_that_no_checkpoint_can_hold_is_refused_at_the_first_gradient(state: Any) -> None:
    made = Corrector("mine:Rule", "parameter server", lambda: Faulty(state=state), [slice(0, 4)])
    with pytest.raises(CorrectionError, match=r"correction mine:Rule failed at state\(\): "):
        made.correct(torch.ones(4), torch.ones(4), torch.ones(4), ACTION)


def test_a_gradient_that_is_not_finite_already_is_not_the_mistake_of_the_correction() -> None:
    corrector = Corrector("mine:Rule", "server", Faulty, [slice(0, 4)])
    corrector.correct(torch.full((4,), float("nan")), torch.ones(4), torch.ones(4), ACTION)


def test_a_checkpoint_has_the_state_after_the_last_update() -> None:
    """Later gradients are computed again by a resumed run, and corrected again."""
    corrector = Corrector("mine:Rule", "server", Counting, [slice(0, 4)], first=8)
    vectors = torch.ones(4), torch.ones(4), None
    for _ in range(3):
        corrector.correct(*vectors, ACTION)
    corrector.updated()
    corrector.correct(*vectors, ACTION)
    (name, saved), *_ = corrector.state().items()
    assert name == "correction.8-12.calls"
    assert saved.tolist() == [3]
    later = Corrector("mine:Rule", "server", Counting, [slice(0, 4)], first=8)
    later.restore({name: saved, "correction.0-8.calls": torch.full((1,), 7.0)})
    later.correct(*vectors, ACTION)
    later.updated()
    assert later.state()[name].tolist() == [4]
    assert saved.tolist() == [3]


def test_load_state_that_fails_names_the_correction() -> None:
    corrector = Corrector("mine:Rule", "server", Faulty, [slice(0, 4)])
    with pytest.raises(ValueError, match=r"correction mine:Rule: load_state\(\) does not accept mean of state\(\)"):
        corrector.restore({"correction.0-4.mean": torch.ones(4)})


def test_a_mistake_ends_a_simulation_with_the_users_traceback(tmp_path: Path) -> None:
    broken = rudra.Job(
        model={"name": "mlp", "options": {"hidden": [4]}},
        data={"name": "digits", "train_limit": 40},
        training={"epochs": 1, "minibatch_size": 4, "evaluate": False},
        protocol={"name": "async", "correction": f"{__name__}:Broken"},
        cluster={"learners": 2, "threads_per_rank": 1},
    )
    with pytest.raises(CorrectionError) as caught:
        rudra.simulate(broken, output=tmp_path / "out.h5", progress="quiet")
    assert caught.value.exit_code == 1
    first, *more = caught.value.report.splitlines()
    assert f"correction {__name__}:Broken failed at gradient of learner" in first
    assert more[-1] == "ZeroDivisionError: division by zero"


class Broken(Correction):
    def correct(self, gradient: Any, weights: Any, pulled_weights: Any, record: GradientRecord) -> None:
        gradient.mul_(1 / 0)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            {"topology": {"name": "adv", "options": {"fan_out": 2}}},
            "topology adv, whose servers add gradients on the way",
        ),
        ({"topology": {"name": "adv*"}}, "topology adv*, whose servers add gradients on the way"),
        (
            {"topology": {"name": "groups", "options": {"groups": 2, "reduction": "mpi"}}},
            "[topology] options.reduction = 'mpi', which is not repeatable",
        ),
        ({"placement": {"cut": 1, "rule": "merged"}}, "[placement] cut, because no role sees a whole gradient"),
        (
            {"protocol": {"name": "hogbatch"}, "hogbatch": {"weights": "shared"}},
            "[hogbatch] weights = 'shared', where no server sees a gradient",
        ),
        (
            {"protocol": {"name": "hardsync"}, "simulation": {"batching": "big-batch"}},
            "[simulation] batching = 'big-batch', which computes only the sum of all gradients",
        ),
    ],
)
def test_a_job_without_single_gradients_refuses_a_correction(tables: dict[str, Any], said: str) -> None:
    protocol = {"name": "async", **tables.get("protocol", {}), "correction": "dc_asgd"}
    with pytest.raises(ConfigError, match=re.escape(f"correction = 'dc_asgd' is not supported with {said}; use ")[:-8]):
        rudra.Job(cluster={"learners": 8}, **{**tables, "protocol": protocol}).resolved()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"correction": "dcasgd"}, "'dcasgd' is unknown; valid: dc_asgd, package.module:callable"),
        (
            {"correction": "protocols:Protocol"},
            "correction: Protocol makes no correction; use a class of",
        ),
        ({"correction": "protocols:MODULATIONS"}, "makes no correction; use a class of protocols.Correction"),
        (
            {"correction": "dc_asgd", "correction_options": {"lambda0": 1}},
            "correction_options: dc_asgd: got an unexpected keyword argument 'lambda0'; its parameters: coefficient, "
            "adaptive, decay",
        ),
        (
            {"correction": "dc_asgd", "correction_options": {"coefficient": -1}},
            "correction_options: dc_asgd: coefficient = -1; valid: 0 and more",
        ),
        (
            {"correction_options": {"coefficient": 1}},
            "correction_options.coefficient is not supported without a correction",
        ),
    ],
)
def test_a_wrong_correction_or_option_is_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        rudra.Job(protocol={"name": "async", **table})


def test_rows_of_a_sparse_layer_refuse_a_correction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="correction = 'dc_asgd' is not supported with gradients in rows"):
        rudra.simulate(job(write_samples(tmp_path), sparse=True, protocol={"correction": "dc_asgd"}))
