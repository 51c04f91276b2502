"""What real ranks leave behind: files with the user's umask, and nobody else's files replaced."""

import os
import stat
import subprocess
from pathlib import Path

from tests import forks

ROOT = Path(__file__).resolve().parents[2]
TINY = "--set=data.train_limit=64 --set=training.epochs=1 --set=model.name=mlp --learners=1"


def test_a_run_follows_the_umask_and_replaces_nothing(tmp_path: Path) -> None:
    umask = 0o027
    command = [*forks.rudra(), "run", "digits", "--quiet", "--output=run.h5", *TINY.split()]
    for more, code in ((), 0), ((), 2), (("--force",), 0):
        before = (tmp_path / "run.h5").read_bytes() if code else b""
        done = subprocess.run(
            [*command, *more], cwd=tmp_path, umask=umask, capture_output=True, text=True, timeout=240, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert sorted(os.listdir(tmp_path)) == ["run.ckpt", "run.h5"]
        assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o666 & ~umask}
        if code:
            assert done.stderr == "rudra: run.h5: exists; give another name or --force\n"
            assert (tmp_path / "run.h5").read_bytes() == before
