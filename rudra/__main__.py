"""`python -m rudra` and the console script `rudra`."""

import io
import sys

from rudra import interrupts, process_exit


def main() -> int:
    """Runs the command line of this process and returns its exit code."""
    interrupts.leave_at_once()
    from rudra.cli.main import main as run
    from rudra.mpi.failures import leave

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may not be encodable
    return process_exit.soon(leave(run(sys.argv[1:])))


if __name__ == "__main__":
    sys.exit(main())
