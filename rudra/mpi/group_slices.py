"""Division of a compute group's vector among the group's ranks: which rank adds which slice."""

from collections.abc import Collection, Mapping, Sequence

from rudra.core.buckets import ALIGNED

FEW = 2
"""Up to this number of members that share memory, each rank that needs the sum computes all of it."""


class GroupSlices:
    """The division of a group's vector, as one of its ranks sees it.

    Args:
        me: world rank of this process.
        members: role -> rank of the group's members, in group_rank order.
        size: number of elements of the vector.
        shared: ranks whose memory this rank reads.
        sums: order of addition (`Plan.partial_sums`). A rank's members must all be in one partial sum. Empty: there is
            only one sum.
        library: whether the MPI library adds.

    Attributes:
        me: world rank of this process.
        size: number of elements of the vector.
        step: number of elements of each slice except the last.
        of_rank: rank -> its slice.
        roles: members on this rank, in group_rank order.
        mine: group ranks of the members on this rank.
        others: rank -> group ranks of its members, for all other ranks.
        sums: group ranks of the members in each partial sum.
        home: number of the partial sum that this rank helps to add.
        home_of_first: number of the partial sum of the first member, which receives the total if only one member does.
        adders: for each partial sum, owner of a slice -> rank that adds this slice.
        near: other ranks of the home sum whose gradients are read in shared memory.
        far: other ranks of the home sum whose gradients arrive in messages.
        alone: whether each rank that needs the total adds all of it.
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
        self.step = step = -(-size // (len(ranks) * ALIGNED)) * ALIGNED
        self.of_rank = {rank: slice(min(i * step, size), min((i + 1) * step, size)) for i, rank in enumerate(ranks)}
        self.sums = sums or [range(len(members))]
        in_sum = [list(dict.fromkeys(by_place[place] for place in of)) for of in self.sums]  # ranks of each sum
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
        """Whether the first member is on this rank."""
        return 0 in self.mine

    def length(self, owner: int) -> int:
        """Returns the number of elements of a slice."""
        return self.of_rank[owner].stop - self.of_rank[owner].start

    def added_by(self, rank: int) -> list[int]:
        """Returns the owners of the slices of the home sum that a rank adds."""
        return [owner for owner, adder in self.adders[self.home].items() if adder == rank]
