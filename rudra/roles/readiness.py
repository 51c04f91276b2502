"""Readiness of the roles below another one: whether all hold the same initial weights."""


class Readiness:
    """Digests of the initial weights that roles have reported.

    Attributes:
        digest: the first one; None: there is none yet.
        roles: ids of those that have reported.
        agree: whether all digests are equal.
    """

    def __init__(self) -> None:
        self.digest: int | None = None
        self.roles: set[int] = set()
        self.agree = True

    def enter(self, role: int, digest: int) -> bool:
        """Takes the digest of a role; returns whether it equals the first one."""
        if self.digest is None:
            self.digest = digest
        self.agree = self.agree and digest == self.digest
        self.roles.add(role)
        return digest == self.digest
