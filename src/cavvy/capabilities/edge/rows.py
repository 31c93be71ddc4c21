"""Devices and rollouts, whose rows have a name in a project: `Store.edge`."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from msgspec.json import Decoder

from cavvy.capabilities.edge.nouns import (
    MOST_SAMPLES,
    SAMPLE_DAYS,
    EdgeDevice,
    EdgeInvitation,
    EdgeSample,
    EdgeSettings,
    EdgeSite,
    Rollout,
)
from cavvy.capabilities.models.rows import SqlModels
from cavvy.domain.values import replace
from cavvy.store.accounts import check_open
from cavvy.store.base import StaleVersion
from cavvy.store.documents import encode, plain, to_micros
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.named_rows import NamedRows
from cavvy.store.rows import insert_into, update_of

_REPORT = (
    "UPDATE edge_devices SET document = ?, version = version + 1 "
    "WHERE project = ? AND name = ? AND version = ?"
)


_USE = update_of("edge_invitations", ("document", "version"), ("project", "name", "version"))
_ENROL = insert_into(
    "edge_devices", ("project", "name", "document", "version"), "ON CONFLICT DO NOTHING"
)
_ADD = insert_into(
    "edge_samples",
    ("project", "device", "number", "model", "residency", "received_at", "body"),
    "ON CONFLICT DO NOTHING",
)
_OF_DEVICE = "FROM edge_samples WHERE project = ? AND device = ?"
_TRIM = (
    f"DELETE {_OF_DEVICE} AND number <= "
    f"(SELECT number {_OF_DEVICE} ORDER BY number DESC LIMIT 1 OFFSET {MOST_SAMPLES})"
)
_EXPIRE = "DELETE FROM edge_samples WHERE project = ? AND model = ? AND received_at < ?"
_LIST = (
    "SELECT device, number, residency, received_at, body FROM edge_samples "
    "WHERE project = ? AND model = ? AND (received_at, device, number) > (?, ?, ?) "
    "ORDER BY received_at, device, number LIMIT ?"
)


class SqlEdge(SqlModels):
    """The rows of devices at the edge, and those of the models that they serve."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        super().__init__(read, write)
        database = read, write
        self._read, self._write = read, write
        self.invitations = NamedRows(
            *database, "edge_invitations", "enrolment token", Decoder(EdgeInvitation).decode
        )
        self.devices = NamedRows(*database, "edge_devices", "device", Decoder(EdgeDevice).decode)
        self.sites = NamedRows(*database, "edge_sites", "site", Decoder(EdgeSite).decode)
        self.settings = NamedRows(
            *database, "edge_settings", "settings", Decoder(EdgeSettings).decode
        )
        self.rollouts = NamedRows(*database, "rollouts", "rollout", Decoder(Rollout).decode)

    async def add_samples(
        self, project: str, device: str, samples: Sequence[EdgeSample], now: datetime
    ) -> None:
        """Add samples of a device, except those that were added before. Of a device, the newest
        MOST_SAMPLES are kept, and of all devices those of SAMPLE_DAYS."""
        received, oldest = to_micros(now), to_micros(now - timedelta(days=SAMPLE_DAYS))

        def write(session: DatabaseSession) -> None:
            for each in samples:
                values = (each.number, each.model, each.residency, received, plain(each.body))
                session.run(_ADD, (project, device, *values))
            session.run(_TRIM, (project, device, project, device))
            for model in {each.model for each in samples}:
                session.run(_EXPIRE, (project, model, oldest))

        await self._write(write)

    async def list_samples(
        self, project: str, model: str, after: tuple[int, str, int], limit: int
    ) -> Sequence[EdgeSample]:
        """Return samples after a place: time of receipt in microseconds, device, number."""
        values = (project, model, *after, limit)
        rows = await self._read(lambda session: session.run(_LIST, values).fetchall())
        return [
            EdgeSample(
                device=row[0],
                number=row[1],
                residency=row[2],
                received=row[3],
                body=row[4],
                model=model,
            )
            for row in rows
        ]

    async def enrol(self, invited: EdgeInvitation, device: EdgeDevice) -> EdgeDevice:
        """Insert a device and count one use of its invitation, in one transaction. Raises
        StaleVersion."""
        used = replace(invited, left=invited.left - 1, version=invited.version + 1)
        stored = replace(device, version=1)

        def write(session: DatabaseSession) -> None:
            check_open(session, [device.project])
            spent = (encode(used), used.version, invited.project, invited.name, invited.version)
            added = (stored.project, stored.name, encode(stored), 1)
            if not (session.run(_USE, spent).rowcount and session.run(_ENROL, added).rowcount):
                raise StaleVersion(f"the invitation or the device {device.name} has changed")

        await self._write(write)
        return stored

    async def put_reports(self, devices: Sequence[EdgeDevice]) -> Sequence[EdgeDevice]:
        """Replace devices that have checked in, and return them as they are stored. A device that
        was changed meanwhile, for example retired, is left as it is and not returned."""

        def write(session: DatabaseSession) -> Sequence[EdgeDevice]:
            stored = []
            for each in devices:
                fresh = replace(each, version=each.version + 1)
                values = (encode(fresh), each.project, each.name, each.version)
                if session.run(_REPORT, values).rowcount:
                    stored.append(fresh)
            return stored

        return await self._write(write)
