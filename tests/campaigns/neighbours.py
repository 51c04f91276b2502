"""A campaign of SIGKILLs while ranks read gradients and weights in each other's memory, on real ranks.

Each place carries a checksum, which its reader compares when it takes the tensor, and when it gives it back: what was
written to meanwhile, by whom ever, ends the run with an error, and is counted.
"""

import random
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from tqdm import tqdm

from rudra.findings import Goal, Report
from tests.campaigns.faults import SETTINGS, TREE, Campaign, Tally
from topologies.kinds import LEARNER, PARAMETER_SERVER, TREE_SERVER

CHANGED = "has changed meanwhile"
MODEL = "model.name=tests.campaigns.checked:network"
SMALL = (MODEL, "model.options.hidden=[625, 625]")
LARGE = (
    MODEL,
    "model.options.hidden=[8400, 8400]",
    "data.train_limit=96",
    "training.minibatch_size=4",
    "training.epochs=3",
)
KINDS: dict[str, tuple[str, Sequence[str], int]] = {
    "1.7 MB, learners, softsync": (LEARNER, (*SETTINGS["softsync"], *SMALL), 16),
    "1.7 MB, learners, hardsync": (LEARNER, ("protocol.name=hardsync", *SMALL), 14),
    "1.7 MB, learners of a tree": (LEARNER, (*SETTINGS[TREE], *SMALL), 12),
    "1.7 MB, servers of a tree": (TREE_SERVER, (*SETTINGS[TREE], *SMALL), 10),
    "1.7 MB, learners, adv*": (LEARNER, (*SETTINGS["async, adv*"], *SMALL), 14),
    "1.7 MB, members of groups": (LEARNER, (*SETTINGS["async, groups"], *SMALL), 14),
    "1.7 MB, parameter server": (PARAMETER_SERVER, (*SETTINGS["softsync"], *SMALL), 12),
    "289 MB, learners, async": (LEARNER, (*SETTINGS["async"], *LARGE), 4),
    "289 MB, parameter server": (PARAMETER_SERVER, (*SETTINGS["async"], *LARGE), 4),
}
"""Kind of role, settings, and how many of them are killed."""


def run(*, quick: bool) -> Report:
    """Runs the campaign; the notes give its seed."""
    seed = random.SystemRandom().randrange(1 << 32)
    kinds = dict(list(KINDS.items())[: 1 if quick else None])
    tallies: dict[str, Tally] = {}
    with (
        tempfile.TemporaryDirectory(prefix="rudra-bench-") as name,
        tqdm(total=sum(1 if quick else kills for *_, kills in kinds.values()), leave=False, disable=None) as bar,
        closing(Campaign(Path(name), random.Random(seed), bar, quick=quick)) as campaign,
    ):
        for about, (kind, settings, kills) in kinds.items():
            if not quick:
                campaign.undisturbed(settings)
            strike = campaign.servers if kind == PARAMETER_SERVER else campaign.outlived
            tallies[about] = strike(kind, settings, 1 if quick else kills)
    report = Report(["killed", "times", "went on or began again", "changed while read", "hung", "s to notice or end"])
    faults, survived = (sum(getattr(tally, name) for tally in tallies.values()) for name in ("faults", "survived"))
    all_changed = all_hung = 0
    for about, tally in tallies.items():
        changed, hung = (len([text for text in tally.texts if word in text]) for word in (CHANGED, "it hung"))
        all_changed, all_hung = all_changed + changed, all_hung + hung
        took = f"{statistics.median(tally.seconds):.2f} ({max(tally.seconds):.2f})" if tally.seconds else "-"
        report.rows.append([about, tally.faults, tally.survived, changed, hung, took])
        report.notes += [f"{about}: {text}" for text in tally.texts]
    report.notes.append(f"seed {seed}")
    report.goals = [
        Goal("changed while read = 0", [float(all_changed)], at_most=0.0),
        Goal("hangs = 0", [float(all_hung)], at_most=0.0),
        Goal("all went on, or began again", [survived / faults], at_least=1.0),
    ]
    return report
