"""Holds timelines against the rules of the Trace Event Format."""

import json
from collections import defaultdict
from typing import Any


def check_trace(text: str, learners: int) -> dict[tuple[int, str], float]:
    """Returns how long each kind of span took, in seconds, by process and name.

    Spans of one thread must be in order and not overlap, as viewers nest those that do.
    """
    trace = json.loads(text, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(f"{name} is not JSON")))
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    ends: dict[tuple[int, int], float] = defaultdict(float)
    taken: dict[tuple[int, str], float] = defaultdict(float)
    named: dict[tuple[int, str], Any] = {}
    arrows: dict[int, list[tuple[str, float]]] = defaultdict(list)
    counted = 0.0
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid"} <= set(event)
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert isinstance(event["tid"], int)
            named[event["pid"], event["name"]] = event["args"]
        elif event["ph"] == "C":
            assert event["ts"] >= counted
            counted = event["ts"]
            assert event["args"]
            assert all(isinstance(value, float) for value in event["args"].values())
        elif event["ph"] in "sf":
            arrows[event["id"]].append((event["ph"], event["ts"]))
        else:
            assert event["ph"] == "X"
            assert event["dur"] >= 0
            thread = event["pid"], event["tid"]
            assert event["ts"] >= ends[thread] - 1e-6, f"{event} begins before the one before it ends"
            ends[thread] = event["ts"] + event["dur"]
            taken[event["pid"], event["name"]] += event["dur"] / 1e6
    for begin, end in arrows.values():
        assert (begin[0], end[0]) == ("s", "f")
        assert begin[1] <= end[1]
    assert {args["name"] for (_, name), args in named.items() if name == "process_name"} == {
        "rank 0: parameter server",
        "rank 1: statistics server",
        *(f"rank {2 + i}: learner {i}" for i in range(learners)),
        *([f"rank {2 + learners}: stage server"] if arrows else []),
    }
    return taken
