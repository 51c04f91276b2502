"""`rudra export`."""

import argparse
from pathlib import Path

from rudra.cli.options import force_option

SUMMARY = "write a run's weights for torch or safetensors"

MORE = """\
All that `load_state_dict` of the model takes, whether it is trained or not, under the names that it has there.
Weights of epochs before the last are in a file where the job says [results] keep_every or keep_best."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.h5")
    parser.add_argument("-o", "--output", type=Path, metavar="W.pt", required=True, help=".pt or .safetensors")
    parser.add_argument(
        "--epoch", type=_epoch, metavar="N", help="as they were at its end, or `best`; default: the final weights"
    )
    force_option(parser, "W.pt")


def execute(arguments: argparse.Namespace) -> int:
    import rudra
    from rudra.results.export import export

    output = arguments.output
    with rudra.open_results(arguments.file) as results:
        names = export(results, output, arguments.epoch, force=arguments.force)
        epoch = results.best_epoch if arguments.epoch == "best" else arguments.epoch
        epoch = epoch or max(results.kept_epochs, default=0)
    print(f"wrote {output}: {names} tensors of epoch {epoch}")
    return 0


def _epoch(text: str) -> int | str:
    """What `--epoch` may be; argparse names it in the error's text."""
    return text if text == "best" else int(text)
