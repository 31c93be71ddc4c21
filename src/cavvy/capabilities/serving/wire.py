"""Response types of the service routes, and client functions that call these routes. Clients submit
a service like a job, with a `SubmitRequest`.
"""

from datetime import datetime

from msgspec import field

from cavvy.client import wire
from cavvy.client.client import ApiClient
from cavvy.client.ledger_wire import TokensView
from cavvy.client.paths import project_path, query, segment
from cavvy.client.service_wire import EdgePathView, NamedService, service_path
from cavvy.client.wire import Answer, Ask, EnergyView


class ServiceTrafficView(Answer, frozen=True, kw_only=True):
    """The gateway's counts since it was started. Rates cover the last 10 seconds.
    Percentiles cover all requests, from their arrival to the last byte of the answer. `joined` is
    the number of requests that were sent in the `batches`. `unserved` requests got no replica in
    time; `shed` of these were refused at once, because the queue was full or the wait too long.
    """

    arrivals: int
    answered: int
    lost: int
    unserved: int = 0
    shed: int = 0
    in_flight: int
    waiting: int
    per_s: float
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    batches: int = 0
    joined: int = 0


class FallbackView(Answer, frozen=True, kw_only=True):
    """A fallback of a service: the host of an API, or another service. `answered` is the number of
    its answers since the gateway started, null while the gateway starts. `spent_micros` is what the
    API has cost in all, null for a service, whose replicas cost what they cost, and for an API
    whose prices are unknown.
    """

    name: str
    model: str
    answered: int | None
    spent_micros: int | None


class LevelShares(Answer, frozen=True, kw_only=True):
    """The service level of a service in a period: the share of requests that were answered, and the
    share of answers that came within `p95`. Each value is null until it is measured.
    """

    requests: int
    availability: float | None
    in_time: float | None


class ObjectiveView(Answer, frozen=True, kw_only=True):
    """An objective for a language model: `ttft` or `token_gap`. The share `share` of all answers
    should not exceed `limit_s`. Of the present load, this share is expected to keep `expected_s`
    with `needed` replicas, and `best_s` with any number of replicas; the three are null until the
    model's speed was measured.
    """

    name: str
    share: float
    limit_s: float
    needed: int | None = None
    expected_s: float | None = None
    best_s: float | None = None


class TokenSpeedView(Answer, frozen=True, kw_only=True):
    """The measured speed of a language model on a replica. A prompt takes `base_s` and `prompt_s`
    for each token; two tokens of an answer are `gap_s` apart, and `running_s` more for each running
    request. `prompt` and `completion` are the mean numbers of tokens of a prompt, without its
    cached part, and of an answer.
    """

    prompt_s: float
    base_s: float
    gap_s: float
    running_s: float
    prompt: float
    completion: float


class LevelView(Answer, frozen=True, kw_only=True):
    """The service level that `slo` requires, and the level in the last hour and in the last day.
    `speed` is null until it was measured.
    """

    availability: float | None
    p95_s: float | None
    hour: LevelShares
    day: LevelShares
    objectives: list[ObjectiveView] = field(default_factory=list)
    speed: TokenSpeedView | None = None


class AimView(Answer, frozen=True, kw_only=True):
    """Why too few of about the last hour's requests were on time: the share `on_time` waited at
    most `wait_s`, and `aim` was wanted. `cause` is `most` (`replicas.max` is reached), `learnt`
    (bursts are expected from now on, the next at `next_at`), `irregular` (bursts cannot be
    foreseen) or `start` (the load grows faster than replicas start, in `start_s`). `needed`
    replicas would be enough, which costs `more_micros_hr` more than `replicas.min` while they run;
    null if the price is not known. The last `bursts` bursts had `ratio` times the usual load.
    """

    on_time: float
    aim: float
    wait_s: float
    cause: str
    needed: int
    start_s: float
    bursts: int
    ratio: float
    next_at: datetime | None = None
    more_micros_hr: int | None = None


class TrialView(Answer, frozen=True, kw_only=True):
    """The running trial of a new revision next to the serving revision, or the last trial that
    ended. `end` is "" during the trial. After the trial, `end` is the reason why the revision took
    over (enough, time, ready) or was rolled back (errors, latency, failed, withdrawn). A canary
    gets `weight` percent of the requests until it has received `asked` requests. `errors` is the
    share of each revision's requests that failed, the old revision first. `slower` is the new
    revision's latency divided by the old revision's latency. The revision is rolled back when
    `evidence` reaches `bound`.
    """

    revision: int
    end: str
    promoted: bool
    weight: int | None
    requests: int
    asked: int | None
    errors: list[float]
    slower: float
    evidence: float
    bound: float
    problem: str


class UnplacedView(Answer, frozen=True, kw_only=True):
    """The number of waiting requests whose data must stay in `places`. Only a replica that is in
    all of these places may serve them. The service has its maximum number of replicas, so a replica
    in `places` can start only after the replica `instead` has ended.
    """

    places: list[str]
    waiting: int
    instead: str


class WebhookView(Answer, frozen=True, kw_only=True):
    """A webhook of a service. If the server listens on no address for users, other systems cannot
    reach the webhook, and `url` is only a path.
    """

    name: str
    url: str
    signature: str


class CronView(Answer, frozen=True, kw_only=True):
    """A cron line of a service, and the next time at which it calls `path`."""

    cron: str
    time_zone: str
    path: str
    next_at: datetime | None


class QueueView(Answer, frozen=True, kw_only=True):
    """The number of calls in the queue of a service. The waiting calls include running calls;
    `running` is null if another server sends the calls.
    """

    waiting: int
    running: int | None
    done: int
    dead: int


class ServedView(NamedService, frozen=True, kw_only=True):
    """A service with what is known of it. `queue` is null and `fallbacks` and `edge` are empty in
    lists of services. `aim` is null while enough requests are on time.
    """

    user: str
    created_at: datetime
    least: int
    most: int
    unplaced: list[UnplacedView] = field(default_factory=list)
    traffic: ServiceTrafficView | None
    trial: TrialView | None = None
    slo: LevelView | None = None
    aim: AimView | None = None
    webhooks: list[WebhookView] = field(default_factory=list)
    crons: list[CronView] = field(default_factory=list)
    queue: QueueView | None = None
    fallbacks: list[FallbackView] = field(default_factory=list)
    edge: list[EdgePathView] = field(default_factory=list)
    spent_micros: int
    tokens: list[TokensView] = field(default_factory=list)
    energy: EnergyView | None = None


def list_services(client: ApiClient, project: str | None = None) -> list[ServedView]:
    path = "/v1/services" + query(project=project)
    return client.ask(path, list[ServedView])


def find_service(client: ApiClient, project: str, name: str) -> ServedView:
    """Return a service. Raises ApiError `service-not-found`."""
    return client.ask(service_path(project, name), ServedView)


def read_service_figures(
    client: ApiClient, project: str, name: str, *, since: datetime, points: int = 300
) -> wire.JobFigures:
    """Return the traffic, queue and replicas of a service until now: at most `points` values of
    each figure. Raises ApiError `service-not-found`, `invalid-request`.
    """
    asked = query(since=since.isoformat(), points=points)
    return client.ask(service_path(project, name) + "/figures" + asked, wire.JobFigures)


class ServiceKeyAsk(Ask, frozen=True, kw_only=True):
    """`per_s` limits the key's requests per second, and `burst` the number of requests at the same
    time. `tokens_per_min` limits its tokens of language models, and `micros_per_day` the cost of
    its requests on a day in UTC, in micro-dollars. While requests wait, those of keys with a
    higher `priority` (`low`, `normal` or `high`) start first, and keys of one priority are served
    tokens in proportion to `weight`. Requests with the key must not leave the area or country
    `residency`.
    """

    label: str = ""
    per_s: float | None = None
    burst: int = 1
    tokens_per_min: int | None = None
    micros_per_day: int | None = None
    weight: float = 1.0
    priority: str = "normal"
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
    priority: str = "normal"
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
    return client.ask(_keys_path(project, service), ServiceKeyMade, ask, retry=False)


def list_service_keys(client: ApiClient, project: str, service: str) -> list[ServiceKeyView]:
    """Return the keys of a service. Raises ApiError `service-not-found`."""
    return client.ask(_keys_path(project, service), list[ServiceKeyView])


def revoke_service_key(client: ApiClient, project: str, service: str, key_id: str) -> None:
    """Revoke a key. Raises ApiError `service-not-found`, `service-key-not-found`."""
    path = f"{_keys_path(project, service)}/{segment('key', key_id)}"
    client.call("DELETE", path, retry=False)


def _keys_path(project: str, service: str) -> str:
    return f"{project_path(project)}/services/{segment('service', service)}/keys"
