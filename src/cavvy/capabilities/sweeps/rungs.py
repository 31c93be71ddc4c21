"""The values that jobs of a sweep had reported at the steps at which they are compared."""

from math import isfinite

from cavvy.domain.values import Struct
from cavvy.store.base import OwnWrite
from cavvy.store.drivers import RunTransaction
from cavvy.store.rows import RowCodec


class RungValue(Struct, frozen=True, kw_only=True):
    """The value that a member had reported when it reached a rung, which is a number of steps at
    which members are compared. `stopped` is set if the member was stopped there."""

    array_id: str
    job_id: str
    rung: int
    value: float
    stopped: bool


_RUNGS = RowCodec(RungValue, "rung_values")


def insert_rung(rung: RungValue) -> OwnWrite:
    """Return the write of a row. A report that is repeated changes nothing."""
    return OwnWrite(f"{_RUNGS.insert} ON CONFLICT DO NOTHING", _RUNGS.values(rung))


class StoredRungs:
    """The rows of rungs."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read = read

    async def count(self, job_id: str) -> int:
        """Return how many rungs a job has reached."""
        sql = "SELECT COUNT(*) FROM rung_values WHERE job_id = ?"
        rows = await self._read(lambda session: session.run(sql, (job_id,)).fetchall())
        return int(rows[0][0])

    async def list_of_array(self, array_id: str) -> dict[str, dict[int, float]]:
        """Return the values of each job of an array at each rung that it has reached."""
        sql = "SELECT job_id, rung, value FROM rung_values WHERE array_id = ?"
        rows = await self._read(lambda session: session.run(sql, (array_id,)).fetchall())
        found: dict[str, dict[int, float]] = {}
        for job_id, rung, value in rows:
            found.setdefault(job_id, {})[rung] = value
        return found


def read_number(value: object) -> float | None:
    """Return the number, or None. A value that is not finite says nothing about a job."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and isfinite(value) else None  # type: ignore[arg-type]
