"""What becomes of transfers when a rank dies, on requests that behave as Open MPI's were seen to."""

import numpy as np
import pytest
from fake_mpi import fake_mpi
from scripted_mpi import Arena, Comm, Request, which_are_over

from rudra.compute.executor import Executor
from rudra.core.messages import PushedGradient
from rudra.core.records import Gradient
from rudra.core.wire import encode
from rudra.errors import RunError
from rudra.mpi import leases
from rudra.mpi.arena import LEASES
from rudra.mpi.failures import Losses
from rudra.mpi.leases import Going, Place
from rudra.mpi.transfers import Transfers, Wanted

SIZE = 5


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Comm:
    fake_mpi(monkeypatch, which_are_over)
    return Comm()


class Server:
    """A server's transfers, and what it heard of."""

    def __init__(self, comm: Comm, arena: Arena | None = None) -> None:
        self.arena = arena or Arena()
        self.executor = Executor((), SIZE, SIZE, 1, memory=arena.allocate if arena else None)
        self.losses = Losses(comm)  # type: ignore[arg-type]
        self.heard: list[str] = []
        self.transfers = Transfers(
            comm,  # type: ignore[arg-type]
            self.losses,
            {0: self.executor},
            lambda wanted, message: self.heard.append(wanted.name),
            lambda going: self.heard.append(going.name),
            self.arena,  # type: ignore[arg-type]
        )

    def post(self, name: str, source: int | None = None) -> None:
        self.transfers.receive(Wanted(0, name, source, 7, halves=False))

    def lose(self, rank: int) -> None:
        self.losses.dead.add(rank)
        self.transfers.lose([rank])

    def poll(self) -> list[str]:
        self.heard.clear()
        self.transfers.poll()
        return list(self.heard)


def test_receives_from_anybody_are_taken_back_and_looked_for(comm: Comm) -> None:
    server = Server(comm)
    server.post("a")
    server.post("b")
    comm.posted[0].state = "pending"
    assert server.poll() == []
    server.lose(3)
    assert all(request.cancelled for request in comm.posted[:2])
    assert server.poll() == []
    comm.announced = [4]
    assert server.poll() == []
    found = comm.posted[2]
    assert found.source == 4
    assert found.wire is server.executor.buffer("a").wire
    found.state = "done"
    assert server.poll() == ["a"]


def test_a_tensor_that_came_as_its_receive_was_taken_back_counts(comm: Comm) -> None:
    server = Server(comm)
    server.post("a")
    comm.posted[0].state = "done"
    server.lose(3)
    assert server.heard == ["a"]
    assert server.poll() == []


def test_a_receive_that_hangs_is_set_aside_and_its_role_goes_on(comm: Comm) -> None:
    server = Server(comm)
    server.post("a")
    stuck, memory = comm.posted[0], server.executor.buffer("a")
    stuck.state = "matched"
    server.lose(3)
    assert not stuck.cancelled
    assert server.executor.buffer("a") is not memory
    comm.announced = [4]
    server.poll()
    assert comm.posted[1].wire is server.executor.buffer("a").wire
    comm.posted[1].state = "done"
    assert server.poll() == ["a"]
    server.transfers.close()  # and nobody waits for the one that hangs


def test_a_tensor_that_was_set_aside_and_comes_after_all_is_not_lost(comm: Comm) -> None:
    """It was that of a living rank."""
    server = Server(comm)
    server.post("a")
    memory = server.executor.buffer("a")
    comm.posted[0].state = "matched"
    server.lose(3)
    comm.announced = [4]
    server.poll()
    comm.posted[0].state = comm.posted[1].state = "done"
    memory.vector.fill_(5.0)
    assert server.poll() == ["a"]  # from rank 4, into the other memory
    server.post("b")
    assert server.poll() == ["b"]
    assert server.executor.buffer("b") is memory
    assert server.executor.buffer("b").vector.tolist() == [5.0] * SIZE


def test_what_a_dying_rank_half_sent_is_void(comm: Comm) -> None:
    server = Server(comm)
    server.losses.dead.add(9)  # some loss before, so that tensors are looked for
    server.post("a")
    comm.announced = [3]
    server.poll()
    comm.posted[0].state = "failed"
    assert server.poll() == []
    comm.announced = [4]
    server.poll()
    comm.posted[1].state = "done"
    assert server.poll() == ["a"]


@pytest.mark.parametrize("fails_first", [True, False])
def test_receives_from_the_dead_alone_are_gone(comm: Comm, fails_first: bool) -> None:
    server = Server(comm)
    server.post("a", 3)
    server.post("b", 4)
    if fails_first:
        comm.posted[0].state = "failed"
        assert server.poll() == []
    server.lose(3)
    assert server.poll() == []
    comm.posted[1].state = "done"
    assert server.poll() == ["b"]


def test_sends_end_whatever_became_of_their_receiver(comm: Comm) -> None:
    server = Server(comm)
    requests = [Request() for _ in range(4)]
    for place, request in enumerate(requests):
        server.transfers.send(request, Going(0, f"{place}", 1))  # type: ignore[arg-type]
    requests[1].state, requests[2].state = "done", "failed"
    assert server.poll() == ["1", "2"]
    requests[0].state = requests[3].state = "done"
    assert server.poll() == ["0", "3"]


def test_what_is_abandoned_is_not_heard_of_and_must_end_before_its_memory_serves_again(comm: Comm) -> None:
    server = Server(comm)
    for name, source in (("a", 1), ("b", 2), ("c", 3)):
        server.post(name, source)
    sends = [Request() for _ in range(2)]
    for to, send in enumerate(sends):
        server.transfers.send(send, Going(0, f"to {to}", to))  # type: ignore[arg-type]
    coming, from_dead, open_ = comm.posted
    coming.state = from_dead.state = "matched"
    assert server.transfers.abandon({0}, but_to=1) == [Going(0, "to 1", 1)]
    server.poll()
    assert open_.cancelled
    assert not server.transfers.quiet, "something may still be written"
    before = server.executor.buffer("b")
    server.lose(2)
    assert server.executor.buffer("b") is not before, "what the dead had begun may hang, and has memory of its own"
    assert not server.transfers.quiet
    coming.state = "done"
    for send in sends:
        send.state = "done"
    assert server.poll() == ["to 1"]
    assert server.transfers.quiet


@pytest.mark.parametrize(("state", "withdrawn"), [("open", True), ("matched", False), ("done", False)])
def test_a_receive_is_withdrawn_unless_something_comes(comm: Comm, state: str, withdrawn: bool) -> None:
    server = Server(comm)
    server.post("a")
    comm.posted[0].state = state
    assert server.transfers.withdraw(0, "a") is withdrawn
    assert server.heard == (["a"] if state == "done" else [])
    assert not server.transfers.withdraw(0, "other")


# Neighbours, who tell where tensors lie.

NEAR, TAG = 3, 7
GIVEN = Gradient(-1, 0, 1, 0, 0, 0, -1, 1.0, 0.5, 1.0, 0)
TAKEN, DONE = 0, 1


class Neighbours(Server):
    """A server beside rank `NEAR`, whose memory holds two vectors."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm, Arena(NEAR))
        self.comm = comm
        self.arena.there[NEAR] = np.arange(2 * SIZE, dtype=np.float32).view(np.uint8)

    def want(self, *, reads: bool = True, near: bool = True) -> Request:
        self.transfers.receive(Wanted(0, "a", None, TAG, halves=False, near=near, reads=reads))
        return self.comm.posted[-1]

    def tell(self, request: Request, number: int = 5, *, second: bool = False, copied: bool = False) -> None:
        """A place comes."""
        data = Place(SIZE * 4 * second, SIZE * 4, number, copied, self.checksum).encode() + encode(MESSAGE)
        request.wire[: len(data)] = data if isinstance(request.wire, bytearray) else np.frombuffer(data, np.uint8)
        request.source, request.state = NEAR, "done"

    checksum = 0

    def lend(self, name: str = "g", to: int = 1, most: int = 2) -> Place:
        message = PushedGradient(0, 0, 0, (GIVEN,))
        self.transfers.lend(Going(0, name, to), message, NEAR, TAG, halves=False, most=most)
        return Place.decode(self.comm.posted[-1].wire)

    def say(self, place: Place, what: int) -> None:
        self.arena.words[NEAR, place.number % LEASES] = 2 * place.number + what

    def was_told(self, number: int) -> int | None:
        said = self.arena.said_to.get((NEAR, number % LEASES), -1)
        return said & 1 if said >> 1 == number else None


MESSAGE = PushedGradient(1, 0, 0, (GIVEN,))


def test_what_a_neighbour_lends_is_read_there_and_given_back_when_the_next_may_come(comm: Comm) -> None:
    server = Neighbours(comm)
    server.tell(server.want(), second=True)
    assert server.poll() == ["a"]
    found = server.executor.buffer("a")
    assert found.borrowed
    assert found.vector.data_ptr() == server.arena.there[NEAR].ctypes.data + SIZE * 4
    assert server.was_told(5) == TAKEN
    server.tell(server.want(), 6)
    assert server.was_told(5) == DONE
    assert server.poll() == ["a"]
    assert server.executor.buffer("a").vector.tolist() == [0, 1, 2, 3, 4]
    assert not server.arena.own, "nothing needed memory of its own"


@pytest.mark.parametrize(("reads", "copied"), [(False, False), (True, True), (False, True)])
def test_who_makes_a_copy_is_done_at_once(comm: Comm, reads: bool, copied: bool) -> None:
    server = Neighbours(comm)
    server.tell(server.want(reads=reads), copied=copied)
    assert server.poll() == ["a"]
    assert server.was_told(5) == DONE
    assert not server.executor.buffer("a").borrowed
    assert server.executor.buffer("a").vector.tolist() == [0, 1, 2, 3, 4]


def test_where_others_may_send_too_a_place_comes_into_the_memory_for_a_tensor(comm: Comm) -> None:
    server = Neighbours(comm)
    server.executor = Executor((), 100, 100, 1)
    server.transfers._executors[0] = server.executor  # type: ignore[index]
    request = server.want(near=False)
    memory = request.wire
    server.tell(request)
    assert server.poll() == ["a"]
    assert server.executor.buffer("a").borrowed
    assert server.want(near=False).wire is not None
    assert len(memory) > 400


def test_a_tensor_is_lent_until_its_reader_has_done_with_it(comm: Comm) -> None:
    server = Neighbours(comm)
    buffer = server.executor.buffer("g")
    place = server.lend()
    assert server.poll() == []
    assert (buffer.readers, server.executor.lent["g"]) == (1, 1)
    server.say(place, TAKEN)
    assert server.poll() == ["g"]
    assert buffer.readers == 1
    assert server.executor.renew("g") is not buffer, "the next gradient goes elsewhere"
    server.say(place, DONE)
    assert server.poll() == []
    assert buffer.readers == 0
    second = server.lend()
    assert server.executor.renew("g") is buffer, "two generations take turns"
    server.say(second, DONE)
    assert server.poll() == ["g"]


def test_readers_may_keep_so_many_generations_and_copy_the_next(comm: Comm) -> None:
    server = Neighbours(comm)
    places = []
    for _ in range(4):
        server.executor.renew("g")
        places.append(server.lend())
        server.say(places[-1], DONE if places[-1].copied else TAKEN)
        server.poll()
    assert [place.copied for place in places] == [False, False, True, True]
    assert len(server.arena.own) == 3
    for place in places[:2]:
        server.say(place, DONE)
    server.poll()
    server.executor.renew("g")
    assert not server.lend().copied


def test_who_changes_it_elsewhere_waits_for_readers_only_while_two_generations_are_read(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Neighbours(comm)
    monkeypatch.setattr(server.executor, "copy_on_write", lambda name: name == "g")
    first, same = server.lend(), server.lend()
    assert server.poll() == ["g", "g"], "the next one is made elsewhere"
    assert server.executor.renew("g").readers == 0
    second = server.lend()
    assert server.poll() == [], "there is no room for a third"
    server.say(first, DONE)
    assert server.poll() == []
    server.say(same, DONE)
    assert server.poll() == ["g"]
    server.say(second, DONE)
    assert server.poll() == [], "it was heard of"
    server.lend("kept")
    assert server.poll() == [], "its owner waits until it is taken"


def test_what_was_said_of_a_lease_long_ago_says_nothing_of_this_one(comm: Comm) -> None:
    server = Neighbours(comm)
    place = server.lend()
    server.arena.words[NEAR, place.number % LEASES] = 2 * (place.number - LEASES) + DONE
    assert server.poll() == []
    assert server.executor.buffer("g").readers == 1


def test_leases_have_words_of_their_own_whoever_keeps_one_for_long(comm: Comm) -> None:
    server = Neighbours(comm)
    kept = server.lend("kept")
    numbers = []
    for _ in range(2 * LEASES):
        place = server.lend()
        numbers.append(place.number)
        server.say(place, DONE)
        assert server.poll() == ["g"]
    assert kept.number % LEASES not in {number % LEASES for number in numbers}


def test_no_more_leases_are_open_than_have_words(comm: Comm) -> None:
    server = Neighbours(comm)
    numbers = {server.lend().number for _ in range(LEASES)}
    assert len({number % LEASES for number in numbers}) == LEASES
    with pytest.raises(AssertionError, match=f"all {LEASES} leases to rank {NEAR} are open"):
        server.lend()
    assert server.executor.buffer("g").readers == LEASES


@pytest.mark.parametrize("taken", [False, True])
def test_the_leases_of_the_dead_are_over(comm: Comm, taken: bool) -> None:
    server = Neighbours(comm)
    place = server.lend()
    if taken:
        server.say(place, TAKEN)
        assert server.poll() == ["g"]
    server.lose(NEAR)
    assert server.poll() == ([] if taken else ["g"]), "a send to the dead counts as sent, once"
    assert server.executor.buffer("g").readers == 0
    assert server.poll() == []


def test_what_is_lent_to_the_dead_by_a_role_that_is_not_told_yet_is_back_at_once(comm: Comm) -> None:
    """The loss is an event, and others, found at the same time, may come before it: a role answers who is no more."""
    server = Neighbours(comm)
    server.lose(NEAR)
    server.lend()
    assert server.poll() == ["g"]
    assert server.executor.buffer("g").readers == 0
    assert server.poll() == []


def test_what_a_dead_rank_has_lent_stays_whole(comm: Comm) -> None:
    server = Neighbours(comm)
    request = server.want()
    server.tell(request)
    server.lose(NEAR)
    assert server.heard == ["a"], "it had been received completely"
    assert server.executor.buffer("a").vector.tolist() == [0, 1, 2, 3, 4]


def test_leases_to_a_role_that_is_dropped_are_over_and_others_go_on(comm: Comm) -> None:
    server = Neighbours(comm)
    server.lend("one", to=1)
    server.lend("two", to=2)
    server.transfers.drop(1, NEAR)
    assert server.heard == ["one"]
    assert [server.executor.buffer(name).readers for name in ("one", "two")] == [0, 1]


def test_who_begins_anew_has_lent_nothing_but_to_the_statistics_server(comm: Comm) -> None:
    server = Neighbours(comm)
    server.lend("one", to=1)
    snapshot = server.lend("two", to=2)
    assert server.transfers.abandon({0}, but_to=2) == [Going(0, "two", 2)]
    assert [server.executor.buffer(name).readers for name in ("one", "two")] == [0, 1]
    server.say(snapshot, DONE)
    assert server.poll() == ["two"]


@pytest.mark.parametrize("when", ["taken", "given back"])
def test_a_checksum_tells_of_what_changes_while_it_is_read(
    comm: Comm, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(leases, "CHECKED", True)
    server = Neighbours(comm)
    memory = server.arena.there[NEAR]
    server.checksum = leases.zlib.crc32(memory[: SIZE * 4].data)
    server.tell(server.want())
    if when == "taken":
        memory[0] += 1
        with pytest.raises(RunError, match="has changed during the transfer"):
            server.poll()
        return
    assert server.poll() == ["a"]
    memory[0] += 1
    with pytest.raises(RunError, match="has changed during the transfer"):
        server.want()
