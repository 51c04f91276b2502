"""`rudra validate`."""

import argparse
from typing import TYPE_CHECKING

from rudra.cli.options import counted, job_of, job_options, protocol_text
from rudra.errors import ConfigError
from rudra.log import log
from rudra.machine import cores
from rudra.memory import bytes_text

if TYPE_CHECKING:
    from protocols import Protocol
    from rudra.job.job import Job
    from rudra.simulation.dry_run import Crossed
    from topologies import Plan

SUMMARY = "check a job, and print what it would run"

MORE = """\
Loads the data, builds model, loss, metrics, optimiser and hooks, computes one mini-batch and evaluates one batch
in this process, so that errors appear here and not in the run. Prints ranks, learning rates, expected staleness
and the memory that each role needs."""

EXAMPLES = {
    "rudra validate digits": "check a shipped job",
    "rudra validate my-job.toml --learners 8 --set protocol.n=2": "check a job with other values",
    "rudra validate my-job.toml --syntax": "check the keys only, without data",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    job_options(parser, runs=False)
    parser.add_argument("--syntax", action="store_true", help="check the keys only: read no data, build no model")


def execute(arguments: argparse.Namespace) -> int:
    from rudra.compute.schedule import planned
    from rudra.core.bucket_rules import refusal
    from rudra.core.rows import form_of_gradients
    from rudra.core.work import portion
    from rudra.job.changes import active_text
    from rudra.job.table import named
    from rudra.job.transports import transport_text
    from rudra.prepare.resolve import resolve
    from rudra.report.topology import message, roles
    from rudra.results.identity import tables_of
    from rudra.results.summary import correction_text

    written = job_of(arguments)
    if arguments.syntax:
        job = written.resolved(cores=cores())
        plan = job.plan()
    else:
        job, plan = resolve(written, {}, cores=cores())
    topology = job.make_topology()
    protocol = job.make_protocol(plan)
    factor = protocol.modulation.rate_factor(0.0)
    by_update = job.optimizer.schedule_every == "update"  # the number of updates depends on the data
    known = (job.optimizer.learning_rate,) if by_update else planned(job.optimizer, job.training.epochs).rates
    rates = [f"{rate * factor:.4g}" for rate in known]
    rates[3:-1] = ["…"] if len(rates) > 5 else rates[3:-1]
    modulation = protocol.modulation.name
    each, here = job.cluster.threads_per_rank or 1, cores()
    on_cpu = len(job.learners_on_cpu(plan)) if job.cluster.accelerated else 0
    busy = job.learners + on_cpu * (each - 1) if on_cpu else job.learners * each  # a GPU takes one core
    shared = f"; {counted(job.learners, 'learner')} would share them" if busy > here else ""
    lines = {
        "ranks": f"{plan.ranks}, topology {topology.name}, {counted(job.learners, 'learner')} (λ)",
        "roles": roles(plan),
        "messages": message(plan, protocol.gradients_per_update),
        "protocol": f"{protocol_text(job)}, {counted(protocol.gradients_per_update, 'gradient')} per update (c)",
        "staleness": _staleness_text(protocol, plan, modulation),
        "minibatch": f"{counted(job.training.minibatch_size, 'sample')} per gradient (μ)",
        "learning rate": f"{' then '.join(rates)} = α0 x {factor:.4g} (modulation {modulation})",
        "epochs": f"{job.training.epochs}, seed {job.training.seed}",
        "threads": f"{each} per learner, {counted(here, 'core')} here{shared}",
    }
    if told := job.cpu_learners_text(plan):
        lines["devices"] = f"learners on the CPU: {told}; the others on GPUs"
    if told := job.cpu_learners_unused():
        lines["devices"] = told
    if told := correction_text(dict(job.protocol)):
        lines["correction"] = f"of each gradient before it is averaged: {told}"
    if plan.scheduled:
        share = f"samples / {job.protocol.reference_batch_size}"
        scale = {"linear": f"times {share}", "sqrt": f"times √({share})", "none": "for all"}[job.hogbatch.lr_scaling]
        lines["minibatch"], lines["rates"] = protocol.text, f"the above {scale}"
    if told := form_of_gradients(job, plan):
        lines["gradients"] = told
    if plan.window:
        how = "one after the other" if job.hogbatch.locking else "without a lock"
        nodes = "; averaged over the nodes at each epoch's end" if plan.window_leaders else ""
        lines["weights"] = f"in memory that all ranks of a node share; workers update them {how}{nodes}"
    if job.cluster.shares == "auto":
        lines["shares"] = "in proportion to the learners' speeds, which are measured before training"
    elif job.cluster.shares:
        counts = [portion(plan, role, job.training.minibatch_size, job.cluster.shares).count for role in plan.learners]
        lines["shares"] = f"{min(counts)} to {max(counts)} samples of a batch"
    if text := refusal(job, plan):
        lines["buckets"] = text
    if text := transport_text(job, plan, plan.nodes(near=True)):
        lines["transport"] = text
    for place, hook in enumerate(job.hooks):
        role = plan.roles[hook.roles(plan)[0]].name if hook.role is None else hook.role
        often = f"each {hook.at}" if hook.every == 1 else f"every {hook.every} {hook.at}s"
        lines[f"hook {place}"] = f"{hook.call} at {'the end' if hook.at == 'end' else often}, {role}"
    if told := active_text(tables_of(job)):
        lines["active"] = told
    for change in job.changes:
        lines[f"at {change.boundary.text}"] = change.text
    if job.decisions.call is not None:
        when = {"epoch": "the end of an epoch", "update": "the next update"}[job.decisions.at]
        lines["decisions"] = f"{named(job.decisions.call)} after each epoch; changes take effect with {when}"
    if job.training.target is not None:
        window = job.training.target_window
        few = "" if window <= job.training.epochs else f": never reached, as there are {job.training.epochs} epochs"
        lines["target"] = f"{job.training.target}, by the median of {counted(window, 'evaluation')}{few}"
    if job.optimizer.plateau is not None:
        when = f"after {job.optimizer.plateau} evaluations without improvement"
        lines["schedule"] = f"times {job.optimizer.decay_factor:g} {when}"
    elif job.optimizer.schedule != "step":
        lines["schedule"] = f"{job.optimizer.schedule}, a rate for each {job.optimizer.schedule_every}"
    if job.placement.by_rule:
        lines["placement"] = f"by rule {job.placement.cut}, which chooses before training; {job.placement.rule}"
    elif job.placement.given:
        count = job.placement.servers
        who = f"each of {count} stage servers" if count > 1 else "a stage server"
        lines["placement"] = f"layers from {job.placement.cut} on are with {who}, {job.placement.rule}"
    if plan.averaging:
        lines["averaging"] = protocol.text
    if job.optimizer.average.given:
        lines["average"] = f"{job.optimizer.average.text}; evaluated and exported instead of the last weights"
    if every := job.results.norms_every:
        which = "all updates" if every == 1 else f"updates {every}, {2 * every}, …"
        lines["norms"] = f"of {which} and their gradients, in the result file"
    if job.optimizer.warm_up:
        lines["warm-up"] = f"the rate grows from 0 in the first {job.optimizer.warm_up:g} epochs"
    if job.optimizer.momentum:
        lines["momentum"] = _momentum_text(job, plan, protocol)
        if not job.explicit_momentum(plan):
            text = "this asynchrony leaves no explicit momentum, and may act like more momentum than the job sets"
            log.warning(f"{arguments.job}: [optimizer] momentum_correction: {text}")
    if not arguments.syntax:
        lines |= _rehearsed(job, plan)
    print(f"{arguments.job}: valid")
    print("\n".join(f"  {key:15}{text}" for key, text in lines.items()))
    return 0


def _rehearsed(job: "Job", plan: "Plan") -> dict[str, str]:
    """Tries one mini-batch in this process. Returns its results, and facts that only the data determines."""
    from rudra.compute.device import devices
    from rudra.compute.memory_plan import check_memory, most_at_once
    from rudra.compute.schedule import schedule_of
    from rudra.core.bucket_rules import refusal
    from rudra.data.fingerprint import REPEATABLE
    from rudra.preflight import check_devices
    from rudra.prepare import cost_files
    from rudra.prepare.run_costs import is_run
    from rudra.results.progress import too_few
    from rudra.simulation.dry_run import rehearse

    costs = {}
    if (source := cost_files.source(job)) not in (None, "the job"):
        path = cost_files.find(source)
        costs = {"costs": cost_files.costs_of_run(path, job).as_text()} if is_run(source) else {}
    found = rehearse(job, plan)
    try:
        check_devices(job, plan)
        if found.plan is not None and devices.here(kind := devices.wanted_kind(job.cluster.device)):
            its = devices.DEVICES[kind]
            check_memory(job, plan, found.plan, its, its.device(0), found.samples.training)
    except ConfigError as error:  # a machine that only prepares jobs may have no GPU
        log.warning(f"{job.name}: {error}; a run on this machine is refused")
    if text := too_few(job, found.samples.training):
        log.warning(f"{job.name}: {text}")
    if found.unrepeatable:
        log.warning(f"{job.name}: {found.unrepeatable}: {REPEATABLE}")
    more = {"buckets": text} if (text := refusal(job, plan, found.size)) else {}
    more |= {"metrics": ", ".join(found.metrics)} if found.metrics else {}
    if job.optimizer.schedule_every == "update":
        factor = job.make_protocol(plan).modulation.rate_factor(0.0)
        rates = [factor * rate for rate in schedule_of(job, plan, found.samples.training).rates]
        span = f"{rates[0]:.4g} at first, {max(rates):.4g} at most, {rates[-1]:.4g} at the end"
        more["schedule"] = f"{job.optimizer.schedule}, a rate for each update: {span}"
    if found.plan is not None:
        at_its = "on its device, in addition to torch"
        more["learner memory"] = f"about {found.plan.text(most_at_once(job, plan, found.samples.training))}; {at_its}"
    held = f", {found.samples.validation:,} validation" if found.samples.validation else ""
    tried = 1 if job.scheduled else job.training.minibatch_size
    kinds = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in found.memory.items())
    who = "a server whose learners are on other nodes" if plan.served else "learners on several nodes"
    apart = f"; more at {who}: {bytes_text(found.apart_bytes)}"
    return {
        "data": f"{found.samples.training:,} training{held} and {found.samples.test:,} test samples",
        "model": f"{found.parameters:,} parameters; a gradient of {counted(tried, 'sample')} "
        f"takes {found.gradient_s * 1e3:.3g} ms here, loss {found.loss:.4g} at the initial weights",
        **more,
        **costs,
        **({"a step sends": _crossed_text(found.crossed, len(plan.learners))} if found.crossed else {}),
        "memory": f"about, for each rank: {kinds}; data, once on each node: {bytes_text(found.data_bytes)}"
        f"{apart if found.apart_bytes else ''}",
    }


def _crossed_text(one: "Crossed", learners: int) -> str:
    """Describes the traffic of a step: 2 W (O + P) of tensors, as in the RALP paper (§4.3), and the rest separately."""
    tensors = bytes_text(learners * (one.activations + one.parameters))
    apart = {"buffers": one.buffers, "generators": one.generator, "headers": one.headers}
    others = ", ".join(f"{bytes_text(learners * size)} of {what}" for what, size in apart.items() if size)
    return (
        f"{tensors} of tensors: for each of {counted(learners, 'learner')} activations of "
        f"{bytes_text(one.activations // 2)} and parameters of {bytes_text(one.parameters // 2)}, both ways; "
        f"{others}; no targets"
    )


def _staleness_text(protocol: "Protocol", plan: "Plan", modulation: str) -> str:
    """Describes the expected average staleness, with a note if modulation "n" divides the rate by less than that."""
    sigma = protocol.expected_staleness
    if not sigma:
        return "0"
    about = "more than" if plan.overlapped else "at most" if plan.window else "about"
    text = f"{about} {sigma:.3g} on average (⟨σ⟩)"
    if modulation == "n" and sigma > protocol.n:
        text += f", not n = {protocol.n}: α0/n is {sigma / protocol.n:.3g} times α0/⟨σ⟩"
    return text


def _momentum_text(job: "Job", plan: "Plan", protocol: "Protocol") -> str:
    table, sigma = job.optimizer, protocol.expected_staleness
    if table.momentum_correction == "none":
        return f"{table.momentum:g}, {table.momentum_form}'s form" if table.name == "sgd" else f"{table.momentum:g}"
    if not sigma:
        return f"{table.momentum:g}, all of it explicit: nothing is stale"
    acts = f"⟨σ⟩ of about {sigma:.3g} acts like {sigma / (1 + sigma):.3g}"
    return f"{job.explicit_momentum(plan):.4g} explicit, of {table.momentum:g}: {acts}"
