"""A service as the routes of services show it."""

from typing import Any

from msgspec import structs
from tests.console_rig import NOW
from tests.console_rig import served as name_service

from cavvy.capabilities.serving.wire import ServedView
from cavvy.client.service_wire import ReplicaView


def served(name: str = "chat", *replicas: ReplicaView, **fields: Any) -> ServedView:
    usual = structs.asdict(name_service(name, *replicas))
    usual |= {"user": "ada", "created_at": NOW, "least": 1, "most": 1}
    return ServedView(**usual | {"traffic": None, "spent_micros": 0} | fields)
