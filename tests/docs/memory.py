"""The table of `docs/memory.md`: vectors of the model's size that each role holds, counted in short simulations."""

from rudra.job.job import Job
from rudra.simulation.dry_run import buffers_of
from tests.docs import markdown

_JOBS = {
    "`hardsync`, `softsync` or `async` on `base`": ["protocol.name=softsync"],
    "`adv`": ["topology.name=adv", "topology.options.fan_out=2"],
    "`adv*`": ["topology.name=adv*", "topology.options.fan_out=2"],
    "`hardsync` on `groups` (all-reduce)": ["protocol.name=hardsync", "topology.name=groups"],
    "`average`, `diloco`, `easgd`, `sma`": ["protocol.name=sma"],
    "`easgd` with a server": ["protocol.name=easgd", "topology.options.parameter_server=true", "averaging.period=4"],
    "`hierarchical`": ["protocol.name=sma", "topology.name=hierarchical", "topology.options.blocks=2"],
    "`hogbatch`": ["protocol.name=hogbatch"],
}
_KINDS = ("learner", "parameter server", "tree server", "statistics server")


def vectors() -> list[str]:
    """Returns the number of vectors of each role, for several protocols and topologies."""
    rows = []
    for name, settings in _JOBS.items():
        job = Job.load("digits", settings).resolved()
        plan = job.plan()
        counted = buffers_of(job, plan)
        most = {
            kind: max((len(counted[i]) for i, role in enumerate(plan.roles) if role.kind == kind), default=0)
            for kind in _KINDS
        }
        rows.append((name, *(str(most[kind] or "–") for kind in _KINDS)))
    return markdown.table(("job", *_KINDS), rows)
