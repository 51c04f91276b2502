"""The driver of real ranks, and what only it needs."""

import mpi4py

mpi4py.rc.initialize, mpi4py.rc.finalize = False, True  # `rudra.mpi.start` starts it, when all is ready
