"""What operators have ordered for the installation's own hosts, and reservations:
`Store.maintenance`."""

from collections.abc import Mapping, Sequence

from cavvy.domain.maintenance import NodeState, Reservation
from cavvy.domain.values import replace
from cavvy.store.base import NameConflict, RowNotFound, StaleVersion
from cavvy.store.documents import decode_node_state, decode_reservation, encode
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.rows import insert_into, update_of

_COLUMNS = ("version", "closed", "document")
_INSERT = insert_into("node_states", (*_COLUMNS, "name"), "ON CONFLICT DO NOTHING")
_UPDATE = update_of("node_states", _COLUMNS, ("name", "version"))
_RESERVE = insert_into("reservations", ("name", "version", "document"), "ON CONFLICT DO NOTHING")
CLOSED = "SELECT name FROM node_states WHERE closed = 1"  # the hosts on which no work may be placed


class SqlMaintenance:
    """The rows of node states and reservations."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read = read
        self._write = write

    async def states(self) -> Mapping[str, NodeState]:
        """Return the states of all hosts for which something was ordered, by name."""
        sql = "SELECT document FROM node_states ORDER BY name"
        rows = await self._read(lambda session: session.run(sql).fetchall())
        found = (decode_node_state(row[0]) for row in rows)
        return {each.name: each for each in found}

    async def put_state(self, state: NodeState) -> NodeState:
        """Insert the state (if its version is 0) or replace it, and return the stored state. Work
        that is being placed on the host is written before this or refused. Raises StaleVersion.
        """
        stored = replace(state, version=state.version + 1)
        closed = int(state.cordoned_at is not None)
        values: list[object] = [stored.version, closed, encode(stored), state.name]
        sql = _INSERT
        if state.version:
            sql, values = _UPDATE, [*values, state.version]

        def write(session: DatabaseSession) -> None:
            if not session.driver.is_sqlite:
                session.run("SELECT name FROM hosts WHERE name = ? FOR UPDATE", (state.name,))
            if session.run(sql, values).rowcount == 0:
                raise StaleVersion(f"node {state.name} is not at version {state.version}")

        await self._write(write)
        return stored

    async def reservations(self) -> Sequence[Reservation]:
        """Return all reservations, sorted by name."""
        sql = "SELECT document FROM reservations ORDER BY name"
        rows = await self._read(lambda session: session.run(sql).fetchall())
        return [decode_reservation(row[0]) for row in rows]

    async def add_reservation(self, reservation: Reservation) -> Reservation:
        """Insert a reservation. Raises NameConflict."""
        stored = replace(reservation, version=1)
        values = (stored.name, stored.version, encode(stored))

        def write(session: DatabaseSession) -> None:
            if session.run(_RESERVE, values).rowcount == 0:
                raise NameConflict(f"a reservation is named {stored.name} already")

        await self._write(write)
        return stored

    async def delete_reservation(self, name: str) -> None:
        """Delete a reservation. Raises RowNotFound."""
        sql = "DELETE FROM reservations WHERE name = ?"

        def write(session: DatabaseSession) -> None:
            if session.run(sql, (name,)).rowcount == 0:
                raise RowNotFound(f"there is no reservation {name}")

        await self._write(write)
