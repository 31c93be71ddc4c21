"""Request and response types of the service-key routes, and client functions for these routes."""

from datetime import datetime

from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, segment
from cavvy.client.wire import Answer, Ask


class ServiceKeyAsk(Ask, frozen=True, kw_only=True):
    """`per_s` limits the key's requests per second, and `burst` the number of requests at the same
    time. `tokens_per_min` limits its tokens of language models, and `micros_per_day` the cost of
    its requests on a day in UTC, in micro-dollars. While requests wait, keys are served tokens in
    proportion to `weight`. Requests with the key must not leave the area or country `residency`.
    """

    label: str = ""
    per_s: float | None = None
    burst: int = 1
    tokens_per_min: int | None = None
    micros_per_day: int | None = None
    weight: float = 1.0
    residency: str | None = None
    expires_s: int | None = None


class ServiceKeyView(Answer, frozen=True, kw_only=True):
    """A key of a service, without its secret. `used_at` is the time of the last request with the
    key.
    """

    id: str
    label: str
    user: str
    per_s: float | None
    burst: int
    tokens_per_min: int | None = None
    micros_per_day: int | None = None
    weight: float = 1.0
    residency: str | None = None
    created_at: datetime
    expires_at: datetime | None
    used_at: datetime | None


class ServiceKeyMade(Answer, frozen=True, kw_only=True):
    key: str
    view: ServiceKeyView


def create_service_key(
    client: ApiClient, project: str, service: str, ask: ServiceKeyAsk
) -> ServiceKeyMade:
    """Create a key. Raises ApiError `service-not-found`, `service-open`."""
    return client.ask(_path(project, service), ServiceKeyMade, ask, retry=False)


def list_service_keys(client: ApiClient, project: str, service: str) -> list[ServiceKeyView]:
    """Return the keys of a service. Raises ApiError `service-not-found`."""
    return client.ask(_path(project, service), list[ServiceKeyView])


def revoke_service_key(client: ApiClient, project: str, service: str, key_id: str) -> None:
    """Revoke a key. Raises ApiError `service-not-found`, `service-key-not-found`."""
    path = f"{_path(project, service)}/{segment('key', key_id)}"
    client.call("DELETE", path, retry=False)


def _path(project: str, service: str) -> str:
    return f"{project_path(project)}/services/{segment('service', service)}/keys"
