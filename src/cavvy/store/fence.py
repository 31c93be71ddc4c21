"""The check that lets only the holder of a lease write the rows that belong to the lease; see
`leases.py`."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from cavvy.domain.values import Struct
from cavvy.store.base import LeaseLost
from cavvy.store.drivers import DatabaseSession

_T = TypeVar("_T")
_CHECK = "SELECT 1 FROM cavvy_leases WHERE name = ? AND holder = ? AND fence = ? FOR SHARE"


class Fence(Struct, frozen=True, kw_only=True):
    """The permission to write: a transaction is refused if the lease no longer has this holder and
    fencing number."""

    name: str
    holder: str
    number: int


# The fence of the running pass. None for requests, whose writes are protected by the rows'
# versions.
FENCE: ContextVar[Fence | None] = ContextVar("FENCE", default=None)


def fenced(work: Callable[[DatabaseSession], _T], fence: Fence) -> Callable[[DatabaseSession], _T]:
    """Return a function that checks the fence and then runs `work` in the same transaction. The
    returned function raises LeaseLost if the fence is outdated. The fence's row stays locked until
    the transaction ends, so a new holder of the lease waits for this transaction.
    """

    def checked(session: DatabaseSession) -> _T:
        check_fence(session, fence)
        return work(session)

    return checked


def check_fence(session: DatabaseSession, fence: Fence) -> None:
    """Check the fence in the open transaction, and lock the fence's row. Raises LeaseLost."""
    values = (fence.name, fence.holder, fence.number)
    if session.run(_CHECK, values).fetchone() is None:
        raise LeaseLost(
            f"another server has taken over the lease {fence.name}, so nothing was written"
        )
