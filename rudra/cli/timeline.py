"""`rudra timeline`."""

import argparse
from pathlib import Path

from rudra.cli.options import beside, force_option
from rudra.log import log

SUMMARY = "write a run as a trace for Perfetto or Chrome"

MORE = """\
The trace shows on one clock when each learner computed, pushed, waited and pulled, and when the servers updated
and evaluated the weights. Open it at https://ui.perfetto.dev or in chrome://tracing."""

EXAMPLES = {
    "rudra timeline soft.h5": "write soft.trace.json",
    "rudra timeline soft.h5 -o trace.json.gz": "write a compressed trace",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.h5", help="result file")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="TRACE.json", help="trace: .json or .json.gz. Default: FILE.trace.json"
    )
    force_option(parser, "TRACE.json")


def execute(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    import rudra
    from rudra.results.timeline import write_timeline

    output = arguments.output or beside(arguments.file, ".trace.json")
    with rudra.open_results(arguments.file) as results:
        if not results.job.get("results", {}).get("minibatches", True):
            log.warning(f"{arguments.file}: holds no times of learners: [results] minibatches = false")
        with tqdm(unit=" rows", desc=output.name, leave=False, disable=None) as bar:
            events = write_timeline(results, output, bar.update, force=arguments.force)
    print(f"wrote {output}: {events:,} events")
    return 0
