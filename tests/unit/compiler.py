"""Tests of torch.compile skip where it has no compiler to work with."""

import shutil
import sysconfig
from pathlib import Path

import pytest

_THERE = shutil.which("g++") is not None and Path(sysconfig.get_paths()["include"], "Python.h").is_file()
needs_compiler = pytest.mark.skipif(not _THERE, reason="torch.compile needs g++ and Python's headers")
