"""What the server tells of published models, which services serve, too."""

from datetime import datetime

from msgspec import field

from cavvy.client.client import ApiClient
from cavvy.client.paths import query
from cavvy.client.wire import Answer


class PublishedFileView(Answer, frozen=True, kw_only=True):
    """A file of a model. `deltas` has the bytes that a device fetches instead if it serves one of
    these versions."""

    path: str
    sha256: str
    size: int
    deltas: dict[str, int]


class ModelView(Answer, frozen=True, kw_only=True):
    """A version of a model, such as defects@7. `size` is in bytes. Of all versions of a model, only
    one has each of the `labels`. Devices get it when it is `signed`: by the server or, if the model
    has a key of a user, with that key."""

    project: str
    name: str
    model: str
    number: int
    main: str
    size: int
    files: list[PublishedFileView]
    job: str
    residency: str
    made_by: str
    created_at: datetime
    notes: dict[str, float]
    labels: list[str] = field(default_factory=list)
    signed: bool = True


def list_models(client: ApiClient, project: str | None) -> list[ModelView]:
    """Return the published models of a project, or of all projects."""
    return client.ask(f"/v1/models{query(project=project)}", list[ModelView])
