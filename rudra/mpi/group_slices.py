"""How the vector of a compute group is divided among the group's ranks, and which rank adds what."""

from collections.abc import Collection, Mapping, Sequence

from rudra.compute.averaging import CACHE_LINE

FEW = 2
"""Of so many members that share memory, whoever needs the sum makes all of it."""

_ALIGNED = CACHE_LINE // 4


class GroupSlices:
    """The division of a group's vector, as one of its ranks sees it.

    Args:
        me: this rank.
        members: role -> rank, of the group's members, in group_rank order.
        size: of the vector, in elements.
        shared: ranks whose memory this rank reads.
        sums: the order of addition (`Plan.partial_sums`), in which a rank has members in one partial sum; empty: all
            are added in one.
        library: whether the MPI library adds.

    Attributes:
        me: as given.
        size: as given.
        step: elements of all slices but the last.
        of_rank: rank -> its slice.
        roles: the members here, in group_rank order.
        mine: their places in the group.
        others: rank -> places of its members, of all other ranks.
        sums: places of the members in each partial sum.
        home: number of the partial sum that is made here.
        home_of_first: number of that of the first member, who takes the sum where it goes to one alone.
        adders: for each partial sum, who adds which slice of it, by the slice's owner.
        near: other ranks of the partial sum whose gradients are read where they lie.
        far: likewise whose gradients come in messages.
        alone: whether each rank that needs the sum makes all of it.
    """

    def __init__(
        self,
        me: int,
        members: Mapping[int, int],
        size: int,
        shared: Collection[int],
        sums: Sequence[Sequence[int]],
        *,
        library: bool,
    ) -> None:
        self.me, self.size = me, size
        self.others: dict[int, list[int]] = {}
        for place, rank in enumerate(members.values()):
            self.others.setdefault(rank, []).append(place)
        ranks, by_place = list(self.others), list(members.values())
        self.step = step = -(-size // (len(ranks) * _ALIGNED)) * _ALIGNED
        self.of_rank = {rank: slice(min(i * step, size), min((i + 1) * step, size)) for i, rank in enumerate(ranks)}
        self.sums = sums or [range(len(members))]
        in_sum = [list(dict.fromkeys(by_place[place] for place in of)) for of in self.sums]  # ranks of each
        self.home = next(number for number, its in enumerate(in_sum) if me in its)
        self.home_of_first = next(number for number, of in enumerate(self.sums) if 0 in of)
        self.adders = [
            {owner: owner if owner in its else its[place % len(its)] for place, owner in enumerate(ranks)}
            for its in in_sum
        ]
        self.mine = self.others.pop(me)
        self.roles = tuple(list(members)[place] for place in self.mine)
        mates = set(in_sum[self.home])
        self.near = [rank for rank in self.others if rank in mates and rank in shared]
        self.far = [rank for rank in self.others if rank in mates and rank not in shared and not library]
        self.alone = len(mates) == len(members) <= FEW and len(self.near) == len(members) - 1 > 0

    @property
    def has_first(self) -> bool:
        """Whether the first member is here."""
        return 0 in self.mine

    def length(self, owner: int) -> int:
        """Elements of a slice."""
        return self.of_rank[owner].stop - self.of_rank[owner].start

    def added_by(self, rank: int) -> list[int]:
        """Owners of the slices of the partial sum here that a rank adds."""
        return [owner for owner, adder in self.adders[self.home].items() if adder == rank]
