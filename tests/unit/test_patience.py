"""How long a wait may be: when it is reported, and when it ends the run."""

import pytest

from rudra.mpi.patience import Patience


@pytest.mark.parametrize(
    ("warning_s", "limit_s", "found"),
    [
        (60.0, 12.0, {11.9: "", 12.0: "end", 500.0: "end"}),
        (5.0, 12.0, {4.9: "", 5.0: "report", 6.0: "", 10.0: "report", 11.9: "", 12.0: "end"}),
        (5.0, None, {5.0: "report", 9.9: "", 10.0: "report", 19.9: "", 20.0: "report", 1e6: "report"}),
    ],
)
def test_a_wait_is_reported_less_and_less_often_and_ends_at_its_limit(
    warning_s: float, limit_s: float | None, found: dict[float, str]
) -> None:
    patience = Patience(warning_s, limit_s)
    for _ in range(2):
        assert {waited: patience.due(waited) for waited in found} == found
        patience.begin()
