"""Tests of torch.compile skip where it has no compiler to work with, and share what it has compiled."""

import getpass
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

import pytest

_THERE = shutil.which("g++") is not None and Path(sysconfig.get_paths()["include"], "Python.h").is_file()
needs_compiler = pytest.mark.skipif(not _THERE, reason="torch.compile needs g++ and Python's headers")

# Where torch keeps it by itself; said, for commands that have a temporary directory of their own.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")))
