"""Selection of cases: `./check` runs a few cases that cover a matrix, and `./check --all` also runs the campaign."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

CAMPAIGN = pytest.mark.campaign


def covering(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns all cases as parameters of a test. Cases that are not kept belong to the campaign.

    Args:
        kept: cases that `./check` runs. Each protocol, topology or kind of fault that no other test covers is in one.
        cases: values of one parameter.
    """
    cases = list(cases)
    assert all(case in cases for case in kept)
    return [pytest.param(case, marks=() if case in kept else CAMPAIGN) for case in cases]


def selected(request: pytest.FixtureRequest, parameter: str) -> set[Any]:
    """Returns the values of a parameter in the tests that this session runs with the requesting fixture.

    A fixture of a module, which prepares all cases at once, prepares only these.
    """
    # Other modules may have a fixture of this name.
    items = (item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path)
    called = [item.callspec for item in items if request.fixturename in item.fixturenames and hasattr(item, "callspec")]
    own = getattr(request, "param", None)
    found = (spec.params for spec in called if spec.params.get(request.fixturename) == own)
    return {params[parameter] for params in found if parameter in params}


def together(kept: Collection[str], cases: Iterable[str]) -> list[Any]:
    """Returns lists of cases as parameters of a test that runs a list at once: the kept ones, and in the campaign all.

    Args:
        kept: names of cases that `./check` runs.
        cases: names of all cases.
    """
    cases = list(cases)
    assert {*kept} <= {*cases}
    return [pytest.param(list(kept), id="some"), pytest.param(cases, id="all", marks=CAMPAIGN)]
