"""`rudra export`."""

import argparse
from pathlib import Path

from rudra.cli.options import force_option

SUMMARY = "write a run's weights for torch or safetensors"

MORE = """\
The file has every entry of the model's state dict, under the same names, so that `load_state_dict` accepts it.
A result file holds the final weights. It also holds earlier weights if the job sets [results] keep_every or
keep_best."""

EXAMPLES = {
    "rudra export soft.h5 -o soft.pt": "write the final weights, for torch.load",
    "rudra export soft.h5 -o soft.safetensors": "write them for safetensors",
    "rudra export my-job.h5 -o best.pt --epoch best": "write the weights of the epoch with the best evaluation",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.h5", help="result file")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="W.pt|W.safetensors",
        required=True,
        help="file to write: .pt or .safetensors",
    )
    parser.add_argument(
        "--epoch", type=_epoch, metavar="N", help="weights at the end of epoch N, or `best`. Default: the final weights"
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
    """Parses `--epoch`. argparse uses the function's name in its error message."""
    return text if text == "best" else int(text)
