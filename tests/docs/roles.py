"""State diagrams of the roles, as their transition tables say."""

from typing import Any

from rudra.core.messages import MESSAGES, MessageKind
from rudra.roles import MACHINES, Machine
from rudra.roles.dormant import DormantLearner
from tests.docs import markdown
from tests.docs.markdown import code
from topologies.kinds import Variant


def state_diagrams() -> list[str]:
    """For each state machine a diagram of its changes of state, and what it takes without one."""
    lines: list[str] = []
    for machine in dict.fromkeys((*MACHINES.values(), DormantLearner)):
        variants = [_words(variant) for variant, other in MACHINES.items() if other is machine]
        variants = variants or ["any learner that does not take part"]
        module = machine.__module__.replace(".", "/")
        lines += [f"### {machine.__name__}", "", f"Variants: {', '.join(variants)}. Code: `{module}.py`.", ""]
        lines += [*_diagram(machine), "", *_loops(machine), ""]
    return lines[:-1]


def _words(variant: Variant) -> str:
    return variant.name.lower().replace("_", " ")


def _name(trigger: Any) -> str:
    """Of the class of an event or a message."""
    name: str = MESSAGES[trigger].__name__ if isinstance(trigger, MessageKind) else trigger.__name__
    return name


def _diagram(machine: type[Machine]) -> list[str]:
    edges: dict[tuple[str, str], list[str]] = {}
    for (state, trigger), to in machine.TRANSITIONS.items():
        for following in to.states:
            if following is not state:
                edges.setdefault((state.name, following.name), []).append(_name(trigger))
    first = next(iter(machine.TRANSITIONS))[0].name
    drawn = [f"    {before} --> {after}: {', '.join(sorted(set(names)))}" for (before, after), names in edges.items()]
    return ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}", *drawn, "```"]


def _loops(machine: type[Machine]) -> list[str]:
    """What each state takes and stays."""
    stays: dict[str, set[str]] = {}
    for (state, trigger), to in machine.TRANSITIONS.items():
        if state in to.states:
            stays.setdefault(state.name, set()).add(_name(trigger))
    return markdown.table(["state", "takes, and stays"], [(code(s), ", ".join(sorted(n))) for s, n in stays.items()])
