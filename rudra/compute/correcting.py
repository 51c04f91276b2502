"""Corrections of gradients on behalf of an owner of weights: calls, checks and state of `protocols.Correction`."""

from collections.abc import Callable, Mapping, Sequence

import torch

from protocols import Correction, GradientRecord
from rudra.compute.parts import pieces_of
from rudra.core.actions import Correct
from rudra.core.layout import Entry, Part
from rudra.core.state_names import CORRECTION
from rudra.errors import CorrectionError, Interrupted, one_line
from rudra.job.job import Job
from rudra.job.table import named
from topologies import Plan

State = dict[str, torch.Tensor]


class Corrector:
    """Correction of the gradients of one owner of weights.

    Several servers with parts of the weights have a correction each. In a replay one server has all their parts, and
    corrects each part as in the run.

    Args:
        name: Name of the correction in errors.
        owner: Title of the owner in errors.
        make: Makes a correction without a state.
        pieces: Slices of the owner's vector that are corrected separately.
        first: Place of the owner's vector in the whole vector.
    """

    def __init__(
        self, name: str, owner: str, make: Callable[[], Correction], pieces: Sequence[slice], first: int = 0
    ) -> None:
        self._name, self._owner, self._make, self._pieces = name, owner, make, tuple(pieces)
        self._prefixes = [f"{CORRECTION}{first + piece.start}-{first + piece.stop}." for piece in pieces]
        self._last: list[State] | None = None  # states after the last update, if gradients were corrected since then
        self.reset()

    def reset(self) -> None:
        """Begins without a state."""
        self._rules, self._last = [self._make() for _ in self._pieces], None

    def correct(
        self, gradient: torch.Tensor, weights: torch.Tensor, pulled: torch.Tensor | None, action: Correct
    ) -> None:
        """Corrects a gradient in place, (parameters,) float32.

        Raises:
            CorrectionError: The correction raises an exception, or leaves something that a run cannot use.
        """
        if self._last is None:
            self._last = [{name: tensor.clone() for name, tensor in state.items()} for state in self._states()]
        record = GradientRecord(action.learner, action.step, action.timestamp, action.staleness, action.samples)
        where = f"gradient of learner {record.learner}, step {record.step}"
        was_finite = _is_finite(gradient)
        for rule, piece in zip(self._rules, self._pieces, strict=True):
            held = pulled[piece] if pulled is not None and rule.needs_pulled_weights else None
            self._call(rule, gradient[piece], weights[piece], held, record, where)
        if was_finite and not _is_finite(gradient):
            raise self._error(where, "the corrected gradient is not finite, but it was before")

    def _call(
        self,
        rule: Correction,
        gradient: torch.Tensor,
        weights: torch.Tensor,
        pulled: torch.Tensor | None,
        record: GradientRecord,
        where: str,
    ) -> None:
        read = [each for each in (weights, pulled) if each is not None]
        versions, place, shape = [each._version for each in read], gradient.data_ptr(), gradient.shape
        try:
            returned: object = rule.correct(gradient, weights, pulled, record)  # type: ignore[func-returns-value]
        except Interrupted:
            raise
        except BaseException as error:  # sys.exit too: all of it is the user's
            raise self._error(where, f"{type(error).__name__}: {one_line(error)}") from error
        if returned is not None:
            kind = type(returned).__name__
            raise self._error(where, f"correct() returned a {kind}; change gradient in place, and return nothing")
        if gradient.shape != shape or gradient.data_ptr() != place:
            raise self._error(where, f"gradient is {tuple(gradient.shape)} now, not {tuple(shape)}; keep its memory")
        if [each._version for each in read] != versions:
            raise self._error(where, "it changed weights or pulled_weights; change only gradient")

    def updated(self) -> None:
        """Takes note of an update of the weights by the corrected gradients."""
        self._last = None

    def state(self) -> State:
        """Returns the state after the last update, for a checkpoint. Later gradients are corrected again."""
        states = self._states() if self._last is None else self._last
        pairs = zip(self._prefixes, states, strict=True)
        return {f"{prefix}{name}": tensor for prefix, state in pairs for name, tensor in state.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes over the state of the owner's parts from the tensors of a checkpoint. Others are ignored.

        Raises:
            ValueError: The correction does not accept its state.
        """
        self.reset()
        for rule, prefix in zip(self._rules, self._prefixes, strict=True):
            mine = {n.removeprefix(prefix): t.clone() for n, t in tensors.items() if n.startswith(prefix)}
            if not mine:
                continue
            try:
                rule.load_state(mine)
            except Exception as error:  # the user's own code raises what it likes
                text = f"load_state() does not accept {', '.join(mine)} of state(): {one_line(error)}"
                raise ValueError(f"correction {self._name}: {text}") from error

    def _states(self) -> list[State]:
        """Returns the checked state of each correction."""
        states = []
        for rule in self._rules:
            try:
                state = rule.state()
            except Exception as error:
                raise self._error("state()", f"{type(error).__name__}: {one_line(error)}") from error
            if not isinstance(state, dict):
                raise self._error("state()", f"it returns a {type(state).__name__}; return a dict of tensors")
            for name, tensor in state.items():
                fits = isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32 and tensor.dim() == 1
                if not (fits and isinstance(name, str)):
                    raise self._error("state()", f"{name!r} is no one-dimensional float32 tensor")
            states.append(state)
        return states

    def _error(self, where: str, what: str) -> CorrectionError:
        return CorrectionError(f"{self._owner}: correction {self._name} failed at {where}: {what}")


def corrector_of(
    job: Job, plan: Plan, role: int, layout: Sequence[Entry], parameters: int, part: Part | None
) -> Corrector | None:
    """Returns the corrector of an owner of weights. None: the job has no correction.

    Args:
        job: Resolved job.
        plan: Role assignment.
        role: Id of the owner.
        layout: Layout of the whole vector.
        parameters: Number of parameters that the owner has.
        part: Part of the vector that the owner has. None: it has all.
    """
    if job.protocol.correction is None:
        return None
    first = 0 if part is None else part.stretches[0].start
    pieces = pieces_of(job, layout, parameters, part)
    return Corrector(named(job.protocol.correction), plan.roles[role].title, job.make_correction, pieces, first)


def _is_finite(vector: torch.Tensor) -> bool:
    """Returns whether all elements are finite. The sum usually shows it, in one pass without a copy."""
    return bool(vector.sum().isfinite()) or bool(vector.isfinite().all())
