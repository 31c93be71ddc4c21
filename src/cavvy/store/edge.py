"""Devices, models and rollouts, whose rows have a name in a project: `Store.edge`."""

from collections.abc import Sequence

from msgspec.json import Decoder

from cavvy.domain.edge import (
    EdgeDevice,
    EdgeInvitation,
    ModelRepository,
    ModelVersion,
    Rollout,
)
from cavvy.domain.values import replace
from cavvy.store.documents import encode
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.services import NamedRows

_REPORT = (
    "UPDATE edge_devices SET document = ?, version = version + 1 "
    "WHERE project = ? AND name = ? AND version = ?"
)


class SqlEdge:
    """The rows of devices at the edge and of the models that they serve."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        database = read, write
        self._write = write
        self.invitations = NamedRows(
            *database, "edge_invitations", "enrolment token", Decoder(EdgeInvitation).decode
        )
        self.devices = NamedRows(*database, "edge_devices", "device", Decoder(EdgeDevice).decode)
        self.rollouts = NamedRows(*database, "rollouts", "rollout", Decoder(Rollout).decode)
        self.repositories = NamedRows(
            *database, "model_repositories", "repository", Decoder(ModelRepository).decode
        )
        self.models = NamedRows(
            *database,
            "models",
            "model",
            Decoder(ModelVersion).decode,
            ("snapshot",),
            lambda model: (model.snapshot,),
        )

    async def put_reports(self, devices: Sequence[EdgeDevice]) -> None:
        """Replace devices that have checked in. A device that was changed meanwhile is left as it
        is, since it will check in again."""

        def write(session: DatabaseSession) -> None:
            for each in devices:
                document = encode(replace(each, version=each.version + 1))
                session.run(_REPORT, (document, each.project, each.name, each.version))

        await self._write(write)
