"""On which topologies replicas are averaged, and by which rules, as the code says."""

from protocols import averaging_pairs
from tests.docs import markdown
from tests.docs.markdown import code


def pairs() -> list[str]:
    """A row for each protocol and shape of topology that go together."""
    rows = [
        (code(pair.protocol), code(pair.shape), "yes" if pair.synchronous else "no", pair.elasticity)
        for pair in averaging_pairs()
    ]
    return markdown.table(["`protocol.name`", "`topology.name`", "synchronous", "α (`elasticity`) by default"], rows)
