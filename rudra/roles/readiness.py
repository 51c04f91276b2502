"""Readiness of the roles below a server or a first learner: whether all of them hold the same initial weights."""


class Readiness:
    """Digests of the initial weights that roles have reported.

    Attributes:
        digest: digest that was reported first, or None before any report.
        roles: ids of the roles that have reported.
        agree: whether all reported digests are equal.
    """

    def __init__(self) -> None:
        self.digest: int | None = None
        self.roles: set[int] = set()
        self.agree = True

    def enter(self, role: int, digest: int) -> bool:
        """Records the digest of a role and returns whether it equals the first digest."""
        if self.digest is None:
            self.digest = digest
        self.agree = self.agree and digest == self.digest
        self.roles.add(role)
        return digest == self.digest
