"""Job files of small networks that several modules of tests run."""

from pathlib import Path


def short_job(
    directory: Path, protocol: str, model: str = "small_models:network", *, epochs: int = 2, **tables: str
) -> Path:
    """Epochs of twenty mini-batches for each of three learners."""
    path = directory / "job.toml"
    more = "".join(f"[{name}]\n{text}\n" for name, text in tables.items() if name != "results")
    path.write_text(
        f'[model]\nname = "{model}"\n[data]\nname = "point_data:delayed"\n'
        f"[training]\nepochs = {epochs}\nminibatch_size = 4\n[optimizer]\nlearning_rate = 0.05\n"
        f'[protocol]\nname = "{protocol}"\n[cluster]\nlearners = 3\n'
        f"[results]\nflush_s = 0.1\nreport_s = 0.0\n{tables.get('results', '')}\n{more}"
    )
    return path


SGD = "learning_rate = 0.05\nmomentum = 0.9\n"


def restartable_job(directory: Path, protocol: str, optimizer: str = SGD, more: str = "", *, epochs: int = 3) -> Path:
    """Epochs of forty updates of hardsync, with a schedule, dropout and a checkpoint every few updates."""
    path = directory / "job.toml"
    path.write_text(
        '[model]\nname = "small_models:dropping"\n[data]\nname = "point_data:delayed"\n'
        f"[training]\nepochs = {epochs}\nminibatch_size = 2\nseed = 7\n"
        f"[optimizer]\nmilestones = {[*range(1, epochs)]}\n{optimizer}"
        f'[protocol]\nname = "{protocol}"\n[cluster]\nlearners = 3\nthreads_per_rank = 1\n'
        f'[results]\nflush_s = 0.2\nreport_s = 0.05\nkeep_every = 1\ncheckpoint_every = "7 updates"\n{more}'
    )
    return path
