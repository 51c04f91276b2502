"""`rudra bench`."""

from collections.abc import Sequence

from rudra.cli.options import has
from rudra.errors import ConfigError

SUMMARY = "measure Rudra itself against the bounds; bench --help lists them"


def main(argv: Sequence[str]) -> int:
    """Its options are its own."""
    if not has("rudra.bench"):
        raise ConfigError("this installation has no benchmarks")
    from rudra import bench

    return int(bench.main(argv))
