"""What the routes work with: the rooms below, opened once when the server starts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from starlette.requests import Request

from remuda.api.watch import Watch
from remuda.settings import Settings
from remuda.store.base import Store


@dataclass(slots=True, kw_only=True)
class House:
    """Everything a route may use."""

    store: Store
    settings: Settings
    watch: Watch
    now: Callable[[], datetime]
    address: str
    started_at: datetime
    database: str
    stop: Callable[[], None]
    idle_s: Callable[[], float] = field(default=lambda: 0.0)


def house_of(request: Request) -> House:
    """The house that a request came to."""
    house = request.app.state.house
    assert isinstance(house, House)
    return house
