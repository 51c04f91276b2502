"""`rudra …` as a fork of one process that has imported everything, in place of an import of torch for each command.

Its arguments are a line of Python to execute first, and those of `rudra`.
"""

import os
import socket
import sys


def serve(listener: int, launcher: int) -> list[str]:
    """Returns in each fork, with its arguments."""
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    import rudra.api
    import rudra.mpi.launch
    import rudra.results.resume  # noqa: F401
    from rudra.mpi import forkserver

    return forkserver.serve(socket.socket(fileno=listener), socket.socket(fileno=launcher))


if __name__ == "__main__":
    before, *arguments = serve(*map(int, sys.argv[2:]))
    del os.environ["RUDRA_PROXY"]  # this is no rank
    sys.argv[:] = ["rudra", *arguments]
    from rudra.cli.main import main
    from rudra.mpi import failures, launch

    exec(before, {"failures": failures, "launch": launch})
    sys.exit(main(arguments))
