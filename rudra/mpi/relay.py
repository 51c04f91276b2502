"""Standard error of ranks and their launcher: lines for the user, words for the launcher, and noise."""

import re
import signal
from collections import deque
from collections.abc import Callable

UNENDED = b"\x1e\n"
"""Ends a piece of a rank's output that does not end its line. The relay removes it again.

mpirun holds back a rank's output until a newline comes, and a progress bar writes none.
"""

START_LINE = b"\x1estart\n"
"""Word that a rank writes when MPI has started. The relay removes this and all other words."""

TRAINING_LINE = b"\x1etraining\n"
"""Word that rank 0 writes when all ranks are ready to train. From then on ranks watch each other themselves."""

DIED = "died before training began"
"""End of a line that names ranks which died before training."""

_OF_OTHERS = {signal.SIGALRM, signal.SIGABRT}
"""Signals that end a rank because its wait for another rank was too long."""

_RULE = b"-" * 74  # Open MPI frames its messages with lines of exactly this
_WORD = re.compile(rb"\x1e(start|training|end|exit|killed|left)(?: (\d+))?(?: (\d+))?$")
_NOISE = re.compile(  # occurs at the end of a run, or when a rank has died
    rb"NBC_Progress: an error |(\[[^]]+:\d+\] |\[\[\d+,\d+\],\d+\]\[).*opal_modex_recv|"
    rb"\[warn\] Epoll |Abort is in progress\.\.\.hit ctrl-c again|"
    rb"\[[^]]+:\d+\] (PMIX ERROR: PMIX_ERR_UNREACH |pmix_ptl_base: send_msg: )"
)
_MPI = re.compile(rb"\[[^]]+:\d+\] |\[\[\d+,\d+\],\d+\]\[")  # start of MPI's own unframed lines
_UNSTARTED = re.compile(rb"\[[^]]+:0+\] \*\*\* ")  # from a rank without MPI
_BANNER = re.compile(rb"(prterun|prted|mpirun|orterun|MPI_ABORT) ")
_PARAGRAPH = re.compile(rb"It looks like MPI_INIT ")
_DEATH = re.compile(
    r"rudra: (rank \d+(?: \([^()]*\))?(?:, rank \d+(?: \([^()]*\))?)*|\d+ of the \d+ ranks on \S+) " + DIED
)


def end_line(code: int) -> bytes:
    """Returns the word that a rank writes when it ends by itself with this exit code."""
    return b"\x1eend %d\n" % code


def exit_line(code: int, *, lost: bool = False) -> bytes:
    """Returns the word of a rank that ends all ranks: the launcher's exit code, and whether a rank was lost."""
    return b"\x1eexit %d %d\n" % (code, lost)


class OutputRelay:
    """Relay that passes on the ranks' output, byte for byte and at once, without the other output of mpirun and MPI.

    Until MPI has started on all ranks, only mpirun and MPI draw frames. MPI's output is passed on after the start.

    Args:
        write: receives output for the user.
        ranks: number of ranks that write.

    Attributes:
        banners: texts of mpirun's banners that were removed.
        withheld: removed output, unchanged. Only its last part if it is long.
        unstarted: whether MPI wrote some of this output before it started.
        reported: whether a rank wrote a line that begins with `rudra: `.
        died: whether a rank that ends the run reported ranks dead before training. The launcher reports it for all.
        dead: ranks that were named in these reports.
        about_dead: text about dead ranks from the last report.
        killed: rank on this node -> signal that killed it, but not from mpirun.
        left: ranks on this node that failed but were not killed, or were killed by mpirun.
        started: number of ranks on which MPI has started.
        training: whether the ranks have begun to train.
        ends: exit codes of the ranks that have ended by themselves.
        code: exit code of the run as reported by a rank. None: no rank reported one.
        lost: whether the reported reason was the death of another rank.
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
        self._noise = False  # whether the last line was noise
        self._banner: list[bytes] | None = None  # lines of the open frame, if there is one
        self._early: list[bytes] = []  # MPI's output until all ranks have started

    @property
    def explained(self) -> bool:
        """Whether a rank has reported how the run or the rank itself ended."""
        return self.code is not None or any(self.ends) or self.died

    @property
    def killed_early(self) -> set[int]:
        """Ranks that were killed before MPI had started on all ranks."""
        if self.started >= self._ranks or self.code is not None or self.ends:
            return set()
        return {rank for rank, number in self.killed.items() if number not in _OF_OTHERS} or {*self.killed}

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        out = b"".join(map(self._line, lines))
        if out:
            self._write(out)

    def close(self) -> None:
        """Passes on the rest at the end of the output."""
        rest = b"".join(line + b"\n" for line in [_RULE, *self._banner]) if self._banner is not None else b""
        rest += self._rest.strip(b"\0")
        self._banner, self._rest = None, b""
        self.unstarted |= bool(self._early)
        if rest:
            self._write(rest)

    def _line(self, line: bytes) -> bytes:
        """Returns the part of one line of mpirun's standard error that is for the user."""
        line = line.lstrip(b"\0")  # mpirun sometimes writes zero bytes
        if word := _WORD.search(line):  # even in a frame, which another process draws
            return line[: word.start()] + self._heard(word[1], [int(number) for number in word.groups()[1:] if number])
        before, rule, after = line.partition(_RULE)
        if self._banner is not None:
            return self._framed(line, end=bool(rule))
        if rule and not after:  # a rank's unfinished line may precede it
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
                return self._death_notice(death[1])
            self.reported = True
        return (line + b"\n").strip(b"\0").replace(UNENDED, b"")

    def _framed(self, line: bytes, *, end: bool) -> bytes:
        """Processes a line inside a frame, as `_line` does outside."""
        assert self._banner is not None
        starting = self.started < self._ranks
        if not end and (self._banner or starting or _BANNER.match(line) or _PARAGRAPH.match(line)):
            self._banner.append(line)
            return b""
        lines, self._banner = self._banner, None
        if not lines:  # a rank drew this line, not the launcher
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
        """Records a word of a rank to the launcher, and returns output that is now for the user."""
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

    def _death_notice(self, dead: str) -> bytes:
        """Records dead ranks. Several ranks may report them, each with the ranks that it knows."""
        self.died, self.about_dead = True, dead
        self.dead |= {int(rank) for rank in re.findall(r"rank (\d+)", dead)}
        return b""

    def _withhold(self, line: bytes) -> bytes:
        self.withheld.append(line + b"\n")
        return b""
