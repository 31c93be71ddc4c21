"""Services as commands of jobs and the console see them, since services and jobs share names, and
a task file may describe a service. What runs services tells more (`ServedView`).
"""

from collections.abc import Mapping
from datetime import datetime

from msgspec import UNSET, Raw, field
from msgspec.json import encode

from cavvy.client import wire
from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, query, segment
from cavvy.client.wire import Answer


class ReplicaView(Answer, frozen=True, kw_only=True):
    """A replica of a service. `job` is the ID of the replica's job, which is named NAME-NUMBER,
    where NAME is the service's name. `place` is the replica's location, as account/zone/purchase,
    or "" while the replica has no location. `group` is the name of its group, and `role` what it
    does there; both are "" if the service has no groups. `start_s` contains the duration in seconds
    of each finished phase of the start: queue, machine, prepare, load.
    """

    job: str
    number: int
    revision: int
    group: str = ""
    role: str = ""
    state: str
    reason: str
    place: str
    port: int
    ordered_at: datetime
    ready_at: datetime | None
    ended_at: datetime | None
    in_flight: int | None
    start_s: dict[str, float]


class EdgePathView(Answer, frozen=True, kw_only=True):
    """The devices at the edge that are a part of a service, and the requests for `model` since
    their programs started. The devices answered `answered` of them, half of these within `p50_s`
    seconds; the service answered `cloud_answered`, and neither answered `lost`. `kept` devices send
    no requests because of their residency. Times are null without requests.

    Costs are in micro-dollars. In the last `window_s` seconds, since the first of these programs
    started, the devices cost `micros`, null if the price or the hours of one are not known. In the
    last `cloud_window_s` seconds, the same but at most 30 days, the replicas of the service cost
    `cloud_micros`, and answered `cloud_requests` of all callers, as far as whole minutes are
    counted.
    """

    site: str
    model: str
    devices: int
    kept: int
    answered: int
    p50_s: float | None
    p95_s: float | None
    cloud_answered: int
    cloud_p50_s: float | None
    cloud_p95_s: float | None
    lost: int
    window_s: int = 0
    cloud_window_s: int = 0
    micros: int | None = None
    cloud_micros: int = 0
    cloud_requests: int = 0


class NamedService(Answer, frozen=True, kw_only=True):
    """A service. `state` is ready, starting, idle, failing or ending; `problem` is the reason why
    the last replica failed to start. `target` is the number of replicas that the autoscaler
    requests, and `why` is the reason for this number. `url` is empty while the gateway starts. If
    the gateway cannot listen, `unreachable` is the reason and `state` is failing. `tags` are those
    of its task.
    """

    project: str
    name: str
    state: str
    url: str
    models: list[str]
    revision: int
    ready: int
    target: int
    why: str
    problem: str
    unreachable: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    replicas: list[ReplicaView]


def list_named_services(client: ApiClient, project: str | None = None) -> list[NamedService]:
    path = "/v1/services" + query(project=project)
    return client.ask(path, list[NamedService])


def find_named_service(client: ApiClient, project: str, name: str) -> NamedService:
    """Return a service. Raises ApiError `service-not-found`."""
    return client.ask(service_path(project, name), NamedService)


def put_service(
    client: ApiClient,
    text: str,
    *,
    project: str,
    name: str,
    path: str,
    params: Mapping[str, wire.Scalar],
    origin: object,
    user: str,
    consent: bool,
) -> NamedService:
    """Start a service, or deploy a new revision of it. Raises the same errors as
    `ApiClient.submit`.
    """
    ask = wire.SubmitRequest(
        text=text,
        path=path,
        params=dict(params),
        origin=UNSET if origin is None else Raw(encode(origin)),
        user=user,
        consent=consent,
    )
    return client.ask(service_path(project, name), NamedService, ask, method="PUT")


def end_service(client: ApiClient, project: str, name: str) -> NamedService:
    """End a service. Raises ApiError `service-not-found`."""
    return client.ask(service_path(project, name), NamedService, method="DELETE")


def service_path(project: str, name: str) -> str:
    """Return the path of a service's routes."""
    return f"{project_path(project)}/services/{segment('service', name)}"
