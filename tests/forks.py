"""`rudra …` as forks of one process that has imported everything, in place of an import of torch for each command."""

import atexit
import gc
import json
import os
import socket
import sys
from functools import cache

from rudra import process_exit  # before what it is to outlast
from rudra.mpi import forkserver

_SCRIPT = (sys.executable, "-P", __file__)


@cache
def rudra(before: str = "pass") -> list[str]:
    """The command `rudra`, in this process's environment or one that differs in nothing that an import reads.

    Args:
        before: Python to execute first, which finds `rudra.mpi.launch` and `rudra.mpi.failures` as names.
    """
    return [*_server(), before]


def script(file: str, before: str = "pass") -> list[str]:
    """The command `python FILE`, in the same way."""
    return rudra(f"{before}\nimport runpy; runpy.run_path({file!r}, run_name='__main__'); sys.exit()")


SHARED = "RUDRA_TEST_FORKS"
"""Environment variable: the command of the fork server of all processes of a session, as JSON."""


def share() -> None:
    """Lets processes that this one starts use its fork server, instead of one of their own."""
    os.environ[SHARED] = json.dumps(_server())


@cache
def _server() -> list[str]:
    if shared := os.environ.get(SHARED):
        return [*json.loads(shared)]
    ranks = os.environ.get(forkserver.SERVER)
    held = forkserver.fork_server(_SCRIPT)
    command = held.__enter__()
    atexit.register(held.__exit__, None, None, None)
    del os.environ[forkserver.SERVER]  # that is for ranks
    if ranks is not None:
        os.environ[forkserver.SERVER] = ranks
    return command


def _serve(listener: int, launcher: int) -> list[str]:
    """Returns in each fork, with its arguments."""
    import numpy.ma  # noqa: F401  which `numpy.unique` imports

    import protocols
    import rudra.api
    import rudra.cli.finish
    import rudra.cli.main
    import rudra.cli.run
    import rudra.mpi.launch
    import rudra.preflight
    import rudra.prepare.start
    import rudra.results.progress
    import rudra.simulation.tensors  # noqa: F401
    import topologies

    topologies.shipped(), protocols.shipped()

    gc.freeze()  # what is here is not looked at again when a fork ends
    return forkserver.serve(socket.socket(fileno=listener), socket.socket(fileno=launcher))


if __name__ == "__main__":
    before, *arguments = _serve(*map(int, sys.argv[2:]))
    import torch

    from rudra.cli import finish
    from rudra.cli.main import main
    from rudra.mpi import failures, launch

    if launch.world_size() is None:
        os.environ.pop("RUDRA_PROXY")  # this is no rank
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))  # torch read it when the server imported it
    sys.path[:0] = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv[:] = ["rudra", *arguments]
    finish.has = lambda library: False  # draws no picture of every run
    exec(before)
    sys.exit(process_exit.soon(failures.leave(main(arguments))))
