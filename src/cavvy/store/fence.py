"""The check that lets only the holder of a lease write the rows that belong to the lease; see
`leases.py`."""

from contextvars import ContextVar

from cavvy.domain.values import Struct
from cavvy.store.base import LeaseLost
from cavvy.store.drivers import DatabaseSession
from cavvy.store.prepared import SqlCursor

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


def begin_fenced(session: DatabaseSession, fence: Fence) -> None:
    """Begin a transaction whose first statement checks the fence. Raises LeaseLost if the fence is
    outdated. The fence's row stays locked until the transaction ends, so a new holder of the lease
    waits for this transaction.
    """
    _refuse_outdated(session.begin_with(_CHECK, _list_values(fence)), fence)


def check_fence(session: DatabaseSession, fence: Fence) -> None:
    """Check the fence in the open transaction, and lock the fence's row. Raises LeaseLost."""
    _refuse_outdated(session.run(_CHECK, _list_values(fence)), fence)


def _list_values(fence: Fence) -> tuple[str, str, int]:
    return fence.name, fence.holder, fence.number


def _refuse_outdated(found: SqlCursor, fence: Fence) -> None:
    if found.fetchone() is None:
        raise LeaseLost(
            f"another server has taken over the lease {fence.name}, so nothing was written"
        )
