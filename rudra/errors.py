"""Errors that end a command with one line and a fixed exit code.

A user's mistake exits with 2, and a failed run with 1. Neither shows a traceback of Rudra's code.
"""

import traceback
from collections.abc import Iterable
from difflib import get_close_matches

EXIT_FAILED, EXIT_MISTAKE = 1, 2
EXIT_STOPPED = 3
"""Exit code of a run that was stopped on request, and left a checkpoint to resume from."""


def printable(text: str) -> str:
    """Returns the text with escapes for line ends and control characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def meant(word: str, valid: Iterable[str]) -> str:
    """Returns the end of a line about an unknown word: the valid word with the closest spelling, or nothing."""
    words = list(valid)
    initials = {"".join(part[:1] for part in word.split("_")): word for word in words if "_" in word.strip("_")}
    cased = initials | {word.casefold(): word for word in words}  # lr means learning_rate
    near = get_close_matches(word.casefold(), cased, n=1)
    return f"; did you mean {cased[near[0]]}?" if near else ""


def unknown(word: str, valid: Iterable[str], hint: str = "") -> str:
    """Returns the part after the key's name in a message about a word that is not valid.

    Args:
        word: the word.
        valid: all valid words.
        hint: end of the line. Empty: the valid word with the closest spelling.
    """
    valid = list(valid)
    return f"'{word}' is unknown; valid: {', '.join(valid)}{hint or meant(word, valid)}"


def one_line(error: BaseException) -> str:
    """Returns the message of another library's error, or its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


class RudraError(Exception):
    """Base of all errors that Rudra raises on purpose. Its text is one line, which names the problem.

    Attributes:
        exit_code: exit code of a command that ends with this error. 1: it ran and failed. 2: the user made a mistake.
            3: it was stopped and can be resumed.
        said: whether the text is already on standard error, for instance because a failed rank printed it.
    """

    exit_code = 2
    said = False

    def __str__(self) -> str:
        """Returns the text on one line, with escapes for control characters. Several mistakes are several arguments."""
        return printable("; ".join(map(str, self.args)))

    @property
    def report(self) -> str:
        """Returns the text that a command prints: the line, and the traceback if the user's own code has failed."""
        return f"rudra: {self}"


class ConfigError(RudraError):
    """A job, a command-line option or an argument of a function is not usable."""


class DataError(RudraError):
    """A data set is missing, damaged, or does not fit the model."""


class TopologyError(RudraError):
    """The number of ranks, or their nodes, do not fit the roles that the job needs."""


class ProtocolError(RudraError):
    """A role received an event that its state forbids, because Rudra or the user's own protocol has a defect.

    The report of the error ends with the role's last events.
    """

    exit_code = 1

    @property
    def report(self) -> str:
        return "\n".join([super().report, *getattr(self, "__notes__", ())])


class ResultsError(RudraError):
    """A result file cannot be created, written or read, or does not contain the requested data."""


class ReplayError(RudraError):
    """A recorded run cannot be repeated. A replay that differs from the record does not raise this."""


class LaunchError(RudraError):
    """MPI or its launcher is missing or broken."""


class RunError(RudraError):
    """A run started and failed. The text names the rank and the role if one of them caused the failure.

    Attributes:
        lost: whether the run failed because a rank died, so that another start may succeed.
        cause: name and rank of the role that caused it. Empty: the role that fails.
    """

    exit_code = 1
    lost = False
    cause = ""


class HookError(RunError):
    """A hook, which is the user's own code, raised an exception, which is `__cause__`."""

    @property
    def report(self) -> str:
        cause = self.__cause__
        if cause is None:
            return super().report
        frames = cause.__traceback__ and cause.__traceback__.tb_next  # the first frame is Rudra's
        return f"{super().report}\n{''.join(traceback.format_exception(type(cause), cause, frames)).rstrip()}"


class CorrectionError(HookError):
    """A correction of gradients, which may be the user's own code, failed or left something unusable.

    Its exception is `__cause__`, if it raised one.
    """


class CheckpointError(RudraError):
    """A checkpoint is missing, damaged, or belongs to another job."""


class TrustError(RudraError):
    """A file of another user names code, which is imported only if the user trusts the file."""


class Interrupted(KeyboardInterrupt):
    """A request to stop this process, as opposed to a KeyboardInterrupt that the user's own code raises."""
