"""Errors that end a command with one line and a fixed exit code.

A user's mistake exits with 2, a run that failed with 1; neither shows a traceback of ours.
"""

import traceback
from collections.abc import Iterable
from difflib import get_close_matches

EXIT_FAILED, EXIT_MISTAKE = 1, 2
EXIT_STOPPED = 3
"""A run was stopped as somebody asked, and left a checkpoint to resume from."""


def printable(text: str) -> str:
    """The text with escapes in the place of line ends and control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def meant(word: str, valid: Iterable[str]) -> str:
    """The end of a line about an unknown word: which of the valid ones it may be a slip for; perhaps empty."""
    cased = {each.casefold(): each for each in valid}
    near = get_close_matches(word.casefold(), cased, n=1)
    return f"; did you mean {cased[near[0]]}?" if near else ""


def unknown(word: str, valid: Iterable[str]) -> str:
    """What is said of a word that is none of the valid ones, after the name of its key."""
    valid = list(valid)
    return f"'{word}' is unknown; valid: {', '.join(valid)}{meant(word, valid)}"


def one_line(error: BaseException) -> str:
    """What another library's error says; its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


class RudraError(Exception):
    """Base of all errors that Rudra raises on purpose. Its text is one line, which names what was wrong.

    Attributes:
        exit_code: exit code of a command that ends with this error: 1 it ran and failed, 2 the user made a mistake,
            3 it was stopped and can be resumed.
        said: whether the text has been printed on standard error already, as by ranks that failed.
    """

    exit_code = 2
    said = False

    def __str__(self) -> str:
        """The text on one line, with escapes in place of control characters."""
        return printable(super().__str__())

    @property
    def report(self) -> str:
        """What a command prints: the line, followed by the traceback of the user's own code if that has failed."""
        return f"rudra: {self}"


class ConfigError(RudraError):
    """A job, a command-line option or an argument of a function is not usable."""


class DataError(RudraError):
    """A data set is missing, damaged, or does not fit the model."""


class TopologyError(RudraError):
    """The number of ranks, or their nodes, do not fit the roles that the job needs."""


class ProtocolError(RudraError):
    """A role received an event that its state forbids, because Rudra or the user's own protocol has a defect.

    Its report ends with the last events of that role.
    """

    exit_code = 1

    @property
    def report(self) -> str:
        return "\n".join([super().report, *getattr(self, "__notes__", ())])


class ResultsError(RudraError):
    """A result file cannot be created, written or read, or does not hold what was asked for."""


class ReplayError(RudraError):
    """A recorded run cannot be repeated. A replay that differs from the record does not raise this."""


class LaunchError(RudraError):
    """MPI or its launcher is missing or broken."""


class RunError(RudraError):
    """A run started and failed. The text names the rank and the role where one is to blame.

    Attributes:
        lost: whether the run failed because a rank died, so that another start may succeed.
    """

    exit_code = 1
    lost = False


class HookError(RunError):
    """A hook, which is the user's own code, raised an exception; `__cause__` is that exception."""

    @property
    def report(self) -> str:
        cause = self.__cause__
        if cause is None:
            return super().report
        frames = cause.__traceback__ and cause.__traceback__.tb_next  # the first one is ours
        return f"{super().report}\n{''.join(traceback.format_exception(type(cause), cause, frames)).rstrip()}"


class CheckpointError(RudraError):
    """A checkpoint is missing, damaged, or belongs to another job."""


class TrustError(RudraError):
    """A file that is not this user's own names code, which is imported only if the user trusts the file."""


class Interrupted(KeyboardInterrupt):
    """Somebody stopped this process; the user's own code raises other ones."""
