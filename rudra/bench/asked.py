"""What benchmarks are asked for: words of `--only`, and where real data is."""

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

from rudra.errors import ConfigError

T = TypeVar("T")


def check_only(benchmark: str, only: Collection[str], known: Iterable[Any]) -> None:
    """Refuses a word that is none of those known, with a ConfigError."""
    words = [str(word) for word in known]
    if strange := [word for word in only if word not in words]:
        raise ConfigError(f"bench {benchmark}: --only {strange[0]}; valid: {', '.join(words)}")


def chosen(only: Collection[str], words: Iterable[T]) -> list[T]:
    """Those of one sort that are asked for; all, if none is."""
    every = list(words)
    return [word for word in every if str(word) in only] or every


def data_directory() -> Path:
    """Where real data is, as `RUDRA_DATA` says."""
    return Path(os.environ.get("RUDRA_DATA", "data")).absolute()
