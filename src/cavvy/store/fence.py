"""The check that lets only the holder of a lease write; see `leases.py`."""

from collections.abc import Callable
from typing import TypeVar

from cavvy.domain.values import Struct
from cavvy.store.base import LeaseLost
from cavvy.store.drivers import DatabaseSession

_T = TypeVar("_T")
_CHECK = "SELECT 1 FROM cavvy_leases WHERE name = ? AND holder = ? AND fence = ? FOR SHARE"
LOST = (
    "another server works with this database now, so nothing was written; this server stops "
    "working with it"
)


class Fence(Struct, frozen=True, kw_only=True):
    """The right to write: a transaction is refused if the lease has another holder or number."""

    name: str
    holder: str
    number: int


def fenced(work: Callable[[DatabaseSession], _T], fence: Fence) -> Callable[[DatabaseSession], _T]:
    """Make a unit of work that first checks the fence, in the same transaction, and raises
    LeaseLost if it is outdated. The row stays locked until the transaction ends, so a new holder
    waits for it.
    """

    def checked(session: DatabaseSession) -> _T:
        check_fence(session, fence)
        return work(session)

    return checked


def check_fence(session: DatabaseSession, fence: Fence) -> None:
    """Raise LeaseLost if the fence is outdated. The lease stays locked until the transaction
    ends.
    """
    values = (fence.name, fence.holder, fence.number)
    if session.run(_CHECK, values).fetchone() is None:
        raise LeaseLost(LOST)
