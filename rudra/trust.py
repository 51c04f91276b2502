"""Decides which code a result file or a checkpoint may name, because anybody can write such a file.

Each run signs its job with a key that only this user can read. Names of code are imported from a file only if its
signature is right, if the user trusts the file (`--trust`), or if the user names the job, as in `rudra run JOB
--resume`.

A signature is an HMAC of all data that can name code: the run's identity, the whole job, and the search path
of the run's modules.
"""

import hashlib
import hmac
import json
import os
import secrets
import stat
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rudra.errors import TrustError, one_line, printable
from rudra.log import log
from rudra.plugins import names_code

KEY_BYTES = 32
_SHOWN = 8
"""Maximum number of code names in an error."""


def new_run() -> str:
    """Returns a new identity for a run, which its result file and its checkpoints share."""
    return secrets.token_hex(16)


def code_of(tables: Mapping[str, Any]) -> dict[str, str]:
    """Returns the code that a job names.

    Args:
        tables: tables of the job: table -> key -> value, as in JSON.

    Returns:
        Dotted key -> name of the code. Every text that a plugin could resolve counts, including options of shipped
        objects. A hook always counts, because the shipped hooks write files to paths from the job.
    """
    return {key: text for key, text in _texts(tables) if _executes(key, text)}


def _executes(key: str, text: str) -> bool:
    is_hook = key.startswith("hooks.") and key.endswith(".call")
    return key != "name" and (is_hook or names_code(text))


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields all texts in a value at any depth, each with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping | list):
        for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _texts(inner, f"{key}.{name}" if key else str(name))


def signed(tables: Mapping[str, Any], run: str) -> dict[str, str]:
    """Returns attributes for a file about its run's identity and author. Logs a warning if a needed key is missing.

    Args:
        tables: tables of the job, as in JSON.
        run: identity of the run.

    Returns:
        Attributes `run`, `modules` (the directories of modules, as JSON) and `signature` (empty without a key).
    """
    code = code_of(tables)
    modules = json.dumps(_own_places() if code else [])
    signature = ""
    try:
        signature = _signature(_key(make=True), tables, run, modules)
    except OSError as error:
        if code:
            text = f"the files of this run cannot be signed ({_reason(error)}): replay and resume will need --trust"
            log.warning(text)
    return {"run": run, "modules": modules, "signature": signature}


def admit(
    path: Path, tables: Mapping[str, Any], used: Mapping[str, Any], about: Mapping[str, Any], *, trust: bool
) -> None:
    """Allows imports of the code that a file's job names, if the file is this user's own or the user trusts it.

    Args:
        path: path of the file.
        tables: tables of its job, exactly as in the file.
        used: tables that the rebuilt job will use.
        about: attributes of the file, including the attributes that `signed` returned.
        trust: whether the user trusts the file.

    Raises:
        TrustError: the job names code, and the file is neither the user's own nor trusted. The text lists the code.
    """
    code = code_of(used)
    if not code:
        return
    places: list[str] = []
    if _is_own(tables, about):
        places = json.loads(about["modules"])
    elif not trust:
        shown = [f"{key} = {printable(text[:80])}" for key, text in code.items()]
        listed = ", ".join([*shown[:_SHOWN], *(["…"] if len(shown) > _SHOWN else [])])
        raise TrustError(
            f"{path}: is not signed by you, and would execute {listed}; "
            "valid: --trust (trust=True in Python), if you trust whoever made the file"
        )
    sys.path += [place for place in dict.fromkeys([*places, os.getcwd()]) if place not in sys.path]


def _is_own(tables: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Whether the signature of a file was made with this user's key."""
    run, modules, signature = (about.get(name) for name in ("run", "modules", "signature"))
    if not (isinstance(run, str) and isinstance(modules, str) and isinstance(signature, str)):
        return False
    try:
        wanted = _signature(_key(make=False), tables, run, modules)
    except OSError:
        return False
    return hmac.compare_digest(wanted.encode(), signature.encode(errors="replace"))


def _signature(key: bytes, tables: Mapping[str, Any], run: str, modules: str) -> str:
    text = json.dumps(["rudra job 1", run, modules, tables], sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _own_places() -> list[str]:
    """Returns the directories of `sys.path` that do not belong to the installation of Python."""
    installed = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    beneath = tuple(os.path.join(os.path.realpath(place), "") for place in installed)
    places = dict.fromkeys(os.path.abspath(place) for place in sys.path)
    return [p for p in places if os.path.isdir(p) and not os.path.join(os.path.realpath(p), "").startswith(beneath)]


def data_folder() -> Path:
    """Returns the directory of this user's data for Rudra: `$XDG_DATA_HOME/rudra`, by default `~/.local/share/rudra`.

    Raises:
        OSError: the user has no home.
    """
    if (place := Path(os.environ.get("XDG_DATA_HOME", ""))).is_absolute():
        return place / "rudra"
    with suppress(RuntimeError):  # no HOME, and no user with this number
        if (home := Path.home()).is_absolute():
            return home / ".local" / "share" / "rudra"
    raise OSError("you have no home directory; valid: XDG_DATA_HOME, a directory of yours")


def _key(*, make: bool) -> bytes:
    """Returns this user's key.

    Args:
        make: create a key if there is none.

    Raises:
        OSError: there is no key, or other users could have read or written it.
    """
    file = data_folder() / "key"
    try:
        return _read(file)
    except FileNotFoundError:
        if not make:
            raise
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = file.with_name(f".key-{secrets.token_hex(8)}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as made:
            made.write(secrets.token_bytes(KEY_BYTES))
            made.flush()
            os.fsync(made.fileno())
        try:
            os.link(part, file)
        except FileExistsError:
            pass  # another process was first, so its key is valid
        except OSError:  # a file system without hard links
            os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
    return _read(file)


def _read(file: Path) -> bytes:
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        about = os.fstat(opened.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size != KEY_BYTES:
            raise OSError(f"{file} is not a key; delete it")
        if about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise OSError(f"{file} is not private to you; delete it")
        return opened.read()


def _reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else one_line(error)
