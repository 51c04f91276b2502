"""The MPI driver, and modules that only it needs."""

import mpi4py

mpi4py.rc.initialize, mpi4py.rc.finalize = False, True  # `rudra.mpi.start` starts MPI when all is ready
