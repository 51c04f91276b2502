"""Conversion of a plan to rows of the result file, and back."""

from typing import Any

import numpy as np

from rudra.core.messages import Rows
from rudra.core.records import ROLE
from topologies import Plan, Role

_OPTIONAL = ("parent", "source", "group")


def rows_of(plan: Plan) -> Rows:
    """Returns one row for each role, by id."""
    rows = np.zeros(len(plan.roles), ROLE)
    for row, role in zip(rows, plan.whole.roles, strict=True):
        for name in ROLE.names or ():
            value: Any = getattr(role, name)
            row[name] = value.encode() if name == "kind" else -1 if value is None else value
    return rows


def about(plan: Plan) -> dict[str, Any]:
    """Returns the attributes of a plan that its rows do not contain."""
    flags = {"overlapped": plan.overlapped, "averaging": plan.averaging, "scheduled": plan.scheduled}
    added = {"reduction": plan.reduction, "sharing": plan.sharing}
    return {"records": plan.max_gradients_per_message, **flags, **added}


def plan_of(rows: Rows, attributes: dict[str, Any]) -> Plan:
    """Returns the plan from the results of `rows_of` and `about`."""
    roles = []
    for row in rows:
        fields = {name: row[name].item() for name in ROLE.names or ()}
        fields |= {name: None for name in _OPTIONAL if fields[name] == -1}
        roles.append(Role(**{**fields, "kind": fields["kind"].decode()}))
    return Plan(
        tuple(roles),
        max_gradients_per_message=attributes["records"],
        overlapped=bool(attributes["overlapped"]),
        reduction=attributes["reduction"],
        averaging=bool(attributes.get("averaging", False)),  # missing in files up to format 7
        sharing=attributes.get("sharing", "nothing"),  # missing in files up to format 7
        scheduled=bool(attributes.get("scheduled", False)),  # missing in files up to format 7
    )
