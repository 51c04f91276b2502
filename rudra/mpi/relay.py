"""What ranks and their launcher write on standard error: lines for the user, words for the launch, and noise."""

import re
import signal
from collections import deque
from collections.abc import Callable, Sequence

UNENDED = b"\x1e\n"
"""Ends a piece of a rank's output that does not end its line; the relay takes it out again.

mpirun holds back what a rank writes until a newline comes, and a progress bar writes none.
"""

START_LINE = b"\x1estart\n"
"""What a rank writes when MPI has started; the relay takes it out, and the other words."""

TRAINING_LINE = b"\x1etraining\n"
"""What rank 0 writes when all ranks are ready to train: from then on they notice themselves who does not answer."""

DIED = "died before training began"
"""Ends the line about ranks that did, whoever says it."""

_OF_OTHERS = {signal.SIGALRM, signal.SIGABRT}
"""Signals that end a rank because it waited for another one in vain."""

_RULE = b"-" * 74  # Open MPI frames its messages with lines of exactly this
_WORD = re.compile(rb"\x1e(start|training|end|exit|killed|left)(?: (\d+))?(?: (\d+))?$")
_NOISE = re.compile(  # now and then, while it ends or a rank has died
    rb"NBC_Progress: an error |(\[[^]]+:\d+\] |\[\[\d+,\d+\],\d+\]\[).*opal_modex_recv|"
    rb"\[warn\] Epoll |Abort is in progress\.\.\.hit ctrl-c again|"
    rb"\[[^]]+:\d+\] (PMIX ERROR: PMIX_ERR_UNREACH |pmix_ptl_base: send_msg: )"
)
_MPI = re.compile(rb"\[[^]]+:\d+\] |\[\[\d+,\d+\],\d+\]\[")  # how MPI's own lines begin that are not framed
_UNSTARTED = re.compile(rb"\[[^]]+:0+\] \*\*\* ")  # of a rank on which MPI has not started
_BANNER = re.compile(rb"(prterun|prted|mpirun|orterun|MPI_ABORT) ")
_PARAGRAPH = re.compile(rb"It looks like MPI_INIT ")
_DEATH = re.compile(
    r"rudra: (rank \d+(?: \([^()]*\))?(?:, rank \d+(?: \([^()]*\))?)*|\d+ of the \d+ ranks on \S+) " + DIED
)
_SIGNALLED = re.compile(r"process rank (\d+) .*exited on signal (\d+)")
_EXITED = re.compile(r"Process name: \[[^\]]*,(\d+)\] Exit code: (\d+)")
_ABORTED = re.compile(r"MPI_ABORT was invoked on rank (\d+)")


def end_line(code: int) -> bytes:
    """What a rank writes when it ends by itself, with this exit code."""
    return b"\x1eend %d\n" % code


def exit_line(code: int, *, lost: bool = False) -> bytes:
    """What a rank writes that ends all, so that the launcher ends with this code, and knows if a rank was lost."""
    return b"\x1eexit %d %d\n" % (code, lost)


class OutputRelay:
    """Passes on what the ranks write, byte for byte and at once, without what mpirun and MPI say beside.

    Before MPI has started on all ranks, nobody else draws frames; what MPI says then is passed on when it has.

    Args:
        write: takes what is for the user.
        ranks: how many write.

    Attributes:
        banners: text of mpirun's banners that were taken out, one string each.
        withheld: what was taken out, as it was; the last of it, if it is much.
        unstarted: some of it is MPI's, and was said before it started.
        reported: whether a rank wrote a line that begins with `rudra: `.
        died: one that ends the run said that ranks died before training began; the launcher says it for all.
        dead: those that were named then.
        about_dead: who died, as the last such line has it.
        killed: ranks on this node that were, not by mpirun, and the signals.
        left: ranks on this node that ended badly, but were not killed, or by mpirun.
        started: on how many ranks MPI has started.
        training: they have begun to train.
        ends: exit codes of the ranks that have ended by themselves.
        code: that a rank said is the run's; None: none did.
        lost: it said that this is because another one died.
    """

    def __init__(self, write: Callable[[bytes], None], ranks: int) -> None:
        self.banners: list[str] = []
        self.withheld: deque[bytes] = deque(maxlen=1000)
        self.reported = self.died = self.unstarted = self.training = False
        self.dead: set[int] = set()
        self.killed: dict[int, int] = {}
        self.left: set[int] = set()
        self.about_dead = ""
        self.started = 0
        self.ends: list[int] = []
        self.code: int | None = None
        self.lost = 0
        self._write, self._ranks = write, ranks
        self._rest = b""
        self._noise = False  # in the last line
        self._banner: list[bytes] | None = None  # its lines so far, while one is open
        self._early: list[bytes] = []  # what MPI has said so far

    @property
    def explained(self) -> bool:
        """Whether a rank has said how it all ended, or how it ended itself."""
        return self.code is not None or any(self.ends) or self.died

    @property
    def killed_early(self) -> set[int]:
        """Ranks that were killed before MPI had started on all."""
        if self.started >= self._ranks or self.code is not None or self.ends:
            return set()
        return {rank for rank, number in self.killed.items() if number not in _OF_OTHERS} or {*self.killed}

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        out = b"".join(map(self._line, lines))
        if out:
            self._write(out)

    def close(self) -> None:
        """Passes on what is left at the end of the output."""
        rest = b"".join(line + b"\n" for line in [_RULE, *self._banner]) if self._banner is not None else b""
        rest += self._rest.strip(b"\0")
        self._banner, self._rest = None, b""
        self.unstarted |= bool(self._early)
        if rest:
            self._write(rest)

    def _line(self, line: bytes) -> bytes:
        """What of one line of mpirun's standard error is for the user."""
        line = line.lstrip(b"\0")  # which mpirun writes now and then
        if word := _WORD.search(line):  # even in a frame, which is somebody else's
            return line[: word.start()] + self._heard(word[1], [int(number) for number in word.groups()[1:] if number])
        before, rule, after = line.partition(_RULE)
        if self._banner is not None:
            return self._framed(line, end=bool(rule))
        if rule and not after:  # a rank's unfinished line may stand before it
            self._banner = []
            return before
        noise, self._noise = self._noise, bool(_NOISE.match(line))
        if self._noise or (noise and not line):  # an empty line may follow
            return self._withhold(line)
        if _UNSTARTED.match(line):
            self.unstarted = True
            return self._withhold(line)
        if _MPI.match(line) and self.started < self._ranks:
            self._early.append(line + b"\n")
            return self._withhold(line)
        if (told := line.lstrip(b"\r\0")).startswith(b"rudra: "):
            if death := _DEATH.fullmatch(told.decode(errors="replace")):
                return self._told_of(death[1])
            self.reported = True
        return (line + b"\n").strip(b"\0").replace(UNENDED, b"")

    def _framed(self, line: bytes, *, end: bool) -> bytes:
        """As `_line`, of one inside a frame."""
        assert self._banner is not None
        starting = self.started < self._ranks
        if not end and (self._banner or starting or _BANNER.match(line) or _PARAGRAPH.match(line)):
            self._banner.append(line)
            return b""
        lines, self._banner = self._banner, None
        if not lines:  # not the launcher's: a rank drew a line
            return _RULE + b"\n" + (line + b"\n").strip(b"\0").replace(UNENDED, b"")
        text = b"\n".join([_RULE, *lines, _RULE])
        if _BANNER.match(lines[0]):
            self.banners.append(b"\n".join(lines).decode(errors="replace"))
        elif _PARAGRAPH.match(lines[0]):
            self.unstarted = True
        else:
            self._early.append(text + b"\n")
        return self._withhold(text)

    def _heard(self, word: bytes, numbers: list[int]) -> bytes:
        """Takes note of what a rank says to the launcher; what is for the user now."""
        if word == b"exit":
            self.code, self.lost = numbers
        elif word == b"end":
            self.ends += numbers
        elif word == b"killed":
            rank, number = numbers
            self.killed[rank] = number
        elif word == b"left":
            self.left.update(numbers)
        elif word == b"training":
            self.training = True
        else:
            self.started += 1
            if self.started >= self._ranks:
                early, self._early = self._early, []
                return b"".join(early)
        return b""

    def _told_of(self, dead: str) -> bytes:
        """Takes note of who has died: several ranks may say it, each of those that it knows of."""
        self.died, self.about_dead = True, dead
        self.dead |= {int(rank) for rank in re.findall(r"rank (\d+)", dead)}
        return b""

    def _withhold(self, line: bytes) -> bytes:
        self.withheld.append(line + b"\n")
        return b""


def explain(banners: Sequence[str], roles: Sequence[str]) -> str | None:
    """One line that says which rank ended the job and how, from mpirun's banners; None where they name none."""
    text = " ".join(" ".join(banners).split())

    def named(rank: str) -> str:
        return f"rank {rank} ({roles[int(rank)]})" if int(rank) < len(roles) else f"rank {rank}"

    if found := _SIGNALLED.search(text):
        number = int(found[2])
        hint = "; is there enough memory?" if number == signal.SIGKILL else ""
        return f"{named(found[1])} was killed by signal {number} ({signal_name(number)}){hint}"
    if found := _ABORTED.search(text):
        return f"{named(found[1])} ended the run"
    if found := _EXITED.search(text):
        return f"{named(found[1])} exited with code {found[2]}"
    return None


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
