"""Runs a campaign and prints its report."""

import argparse
import json
import sys

from rudra.cli.options import at_least
from rudra.errors import RudraError
from tests.campaigns import jobs, kills, phases
from tests.campaigns.phases import PLACES

DESCRIPTION = """\
Runs jobs on real ranks, hits them by faults, and counts what survives or recovers. Without an
option learners, servers and whole jobs are killed at random moments. Progress is on standard
error: a bar on a terminal, else a line for each fault. The exit code is 1 if a goal is missed."""

parser = argparse.ArgumentParser(
    "python -m tests.campaigns", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
)
which = parser.add_mutually_exclusive_group()
about = "kill each role at each phase of a run, on these topologies or on all"
which.add_argument("--phases", nargs="*", choices=PLACES, metavar="TOPOLOGY", help=f"{about}: {', '.join(PLACES)}")
about = "hit these jobs by each kind of fault at a random moment; resume and replay them"
which.add_argument("--jobs", nargs="+", metavar="JOB", help=about)
about = "kill ranks at random moments while others read their memory, and check what was read"
which.add_argument("--checksums", action="store_true", help=about)
parser.add_argument("--times", type=at_least(1), metavar="N", help="with --jobs: no more than N faults")
parser.add_argument("--quick", action="store_true", help="a few faults: show that it works")
parser.add_argument("--json", action="store_true", help="print a JSON object")
arguments = parser.parse_args()
if arguments.times and not arguments.jobs:
    parser.error("--times needs --jobs")
try:
    if arguments.jobs:
        report = jobs.run(arguments.jobs, times=arguments.times, quick=arguments.quick)
    elif arguments.phases is not None:
        report = phases.run(arguments.phases, quick=arguments.quick)
    else:
        report = kills.run(checksums=arguments.checksums, quick=arguments.quick)
except RudraError as error:
    sys.exit(f"campaign: {error}")
print(json.dumps(report.as_dict()) if arguments.json else report.as_text())
sys.exit(not all(goal.reached for goal in report.goals))
