"""How long a wait may be: when it is reported, and when it ends the run."""

import pytest

from rudra.mpi.patience import PAUSE_S, Patience


def _asked_until(patience: Patience, until_s: int, paused: tuple[int, int] = (0, 0)) -> dict[int, str]:
    """What a wait leads to, asked every second but during a pause: second -> "report" or "end", without the rest."""
    asked = (second for second in range(until_s + 1) if not paused[0] < second < paused[1])
    return {second: due for second in asked if (due := patience.due(float(second)))}


@pytest.mark.parametrize(
    ("warning_s", "limit_s", "found"),
    [
        (60.0, 12.0, {12: "end", 13: "end"}),
        (5.0, 12.0, {5: "report", 10: "report", 12: "end", 13: "end"}),
        (3.0, None, {3: "report", 6: "report", 12: "report"}),
    ],
)
def test_patience_at_its_limits_reports_less_and_less_often_then_ends(
    warning_s: float, limit_s: float | None, found: dict[int, str]
) -> None:
    patience = Patience(warning_s, limit_s)
    for _ in range(2):
        assert _asked_until(patience, 13) == found
        patience.begin()


@pytest.mark.parametrize("ends", [5 + int(PAUSE_S) + 1, 500])
def test_patience_after_a_pause_of_its_own_process_does_not_count_the_pause(ends: int) -> None:
    found = _asked_until(Patience(3.0, 12.0), ends + 20, paused=(5, ends))
    paused_s = ends - 5
    assert min(second for second, due in found.items() if due == "end") == 12 + paused_s
    assert [second for second, due in found.items() if due == "report"] == [3, 6 + paused_s]
