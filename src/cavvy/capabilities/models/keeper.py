"""The published models of an installation. Nothing of them is reconciled."""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from cavvy.capabilities.models.registry import ModelRegistry, ModelUser
from cavvy.capabilities.models.rows import SqlModels
from cavvy.control.parts import ControlParts


class ModelKeeper:
    """The registry, of which other capabilities learn (`ModelUser`)."""

    waits_outside = False

    def __init__(self, parts: ControlParts) -> None:
        self.registry = ModelRegistry(
            SqlModels(*parts.store.database),
            parts.clock,
            partial(parts.list_own, ModelUser),  # type: ignore[type-abstract]
        )

    def owns(self, key: str) -> bool:
        return False

    async def unfinished(self) -> Sequence[str]:
        return ()

    async def reconcile(self, key: str) -> timedelta | None:
        return None
