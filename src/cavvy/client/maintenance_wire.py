"""Request and response types of the routes for maintenance of own hosts, and the client functions
for them."""

from datetime import datetime

from cavvy.client.client import ApiClient
from cavvy.client.paths import query, segment
from cavvy.client.wire import Answer, Ask


class HostAsk(Ask, frozen=True, kw_only=True):
    """A host, such as "ssh/box", or only "box" if one provider has it, and why nothing new is to
    run on it."""

    node: str
    reason: str = ""
    user: str = ""


class CordonAsk(HostAsk, frozen=True, kw_only=True):
    """Cordon a host. With `gpus`, counted from 0, only these GPUs are closed."""

    gpus: tuple[int, ...] = ()


class DrainAsk(HostAsk, frozen=True, kw_only=True):
    """Drain a host. Its work is to leave within `within_s` seconds."""

    within_s: float


class UncordonAsk(Ask, frozen=True, kw_only=True):
    """A host that takes new work again."""

    node: str


class HolderView(Answer, frozen=True, kw_only=True):
    """What one rank of a job holds of a host: whole `devices`, or `part` of one, CPUs and memory.
    The names are "" if the job belongs to a project that the caller may not see.

    `until` is when it ends: when its nodes are taken (`until_from` is "notice"), when nodes without
    work are released ("kept"), when its time limit ends it ("limit"), or when jobs like it ended
    ("estimate"). None means that it is not known. `lost_s` is the work that the job would repeat if
    it left now, and `lost_micros` the cost of this work.
    """

    project: str
    job: str
    job_id: str
    user: str
    rank: int
    phase: str
    devices: list[str]
    part: float
    cpus: float
    memory_mib: int
    since: datetime
    until: datetime | None
    until_from: str
    lost_s: float
    lost_micros: int


class ReservedPartView(Answer, frozen=True, kw_only=True):
    """What is reserved of a host: `devices`, or the whole host if there are none."""

    host: str
    devices: list[str]


class ReservationView(Answer, frozen=True, kw_only=True):
    """Parts of hosts that only jobs of `project` (and of `user`, if it is not "") use from
    `begins_at` to `ends_at`. `gpus` counts the reserved devices."""

    name: str
    project: str
    user: str
    parts: list[ReservedPartView]
    gpus: int
    begins_at: datetime
    ends_at: datetime
    made_by: str
    reason: str


class ReservationAsk(Ask, frozen=True, kw_only=True):
    """Reserve the hosts `nodes`, or `gpus` devices, for `length_s` seconds. Without `name`, the
    server chooses one. With `moves`, work that may still run at the begin leaves before it.
    `made_by` is the user who asks."""

    project: str
    user: str = ""
    name: str = ""
    nodes: list[str]
    gpus: int = 0
    begins_at: datetime
    length_s: float
    reason: str = ""
    made_by: str = ""
    moves: bool = False


class HostView(Answer, frozen=True, kw_only=True):
    """An own host of the server. `state` is ready, cordoned, draining, drained or unreachable, and
    `why` says more. A host that is drained is to be empty at `drain_by`."""

    name: str
    state: str
    why: str
    since: datetime | None
    drain_by: datetime | None
    cpus: float
    memory_mib: int
    devices: list[str]
    kinds: list[str]
    sick: dict[str, str]
    holders: list[HolderView]
    reservations: list[ReservationView]


def list_hosts(client: ApiClient) -> list[HostView]:
    """Return the server's own hosts, and who holds what on them."""
    return client.ask("/v1/hosts", list[HostView])


def cordon_host(client: ApiClient, ask: CordonAsk) -> HostView:
    """Place no new work on a host. Raises ApiError."""
    return client.ask("/v1/hosts/cordon", HostView, ask)


def drain_host(client: ApiClient, ask: DrainAsk) -> HostView:
    """Cordon a host, and let its work leave. Raises ApiError."""
    return client.ask("/v1/hosts/drain", HostView, ask)


def uncordon_host(client: ApiClient, ask: UncordonAsk) -> HostView:
    """Place work on a host again. Raises ApiError."""
    return client.ask("/v1/hosts/uncordon", HostView, ask)


def list_reservations(client: ApiClient, project: str | None) -> list[ReservationView]:
    """Return the reservations that have not ended, of a project or of all projects."""
    return client.ask(f"/v1/reservations{query(project=project)}", list[ReservationView])


def add_reservation(client: ApiClient, ask: ReservationAsk) -> ReservationView:
    """Reserve hosts or GPUs for a project. Raises ApiError."""
    return client.ask("/v1/reservations", ReservationView, ask)


def delete_reservation(client: ApiClient, name: str) -> None:
    """Give what is reserved back. Raises ApiError."""
    client.call("DELETE", f"/v1/reservations/{segment('reservation', name)}")
