"""What a device and its server say to each other: each document once. Servers read and write them
with `msgspec`, which checks the limits, since devices are not trusted; devices with `read_*` and
`write`, since they have only Python.

A device may run the program with which it was enrolled for years. So a document grows only by
fields with a default, and each side ignores what it does not know.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

MOST_MODELS = 64  # in a report
MOST_OUTPUT = 64 * 1024  # characters of the output of a task
TYPE_CHECKING = False
if TYPE_CHECKING or __name__.startswith("cavvy.capabilities."):  # on servers
    from typing import Annotated

    from msgspec import Meta

    from cavvy.capabilities.edge.on_device.front import BUCKETS

    Count = Annotated[int, Meta(ge=0, le=1 << 50)]
    Name = Annotated[str, Meta(max_length=63)]
    Text = Annotated[str, Meta(max_length=64)]
    Logs = Annotated[float, Meta(ge=-1e17, le=1e17)]
    Clock = Annotated[float, Meta(ge=0, lt=253_402_300_800)]  # seconds since 1970, to the year 9999
    Seconds = Annotated[int, Meta(ge=0, le=1 << 32)]
    Models = Annotated[tuple["ModelTold", ...], Meta(max_length=MOST_MODELS)]
    Buckets = dict[Annotated[int, Meta(ge=0, lt=BUCKETS)], Count]
    Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
    Output = Annotated[str, Meta(max_length=MOST_OUTPUT)]
    ExitCode = Annotated[int, Meta(ge=0, le=255)]

_MOST_PEERS = 4  # that a fetch may ask
_NAME = re.compile(r"[a-z0-9-]{1,63}")  # of a model
_URL = re.compile(r"https?://[A-Za-z0-9.:\[\]-]{1,300}(/[A-Za-z0-9._~/-]{0,300})?")  # of a service
_WRONG = (AttributeError, KeyError, OverflowError, RecursionError, TypeError)

# What devices send


@dataclass(frozen=True, kw_only=True)
class Enrolment:
    """A new device: its key, and what it tells about its hardware."""

    key: str
    hostname: str = ""
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A text of the server, signed with the device's key."""

    project: Name
    device: Name
    nonce: str
    signature: str


@dataclass(frozen=True, kw_only=True)
class SumsTold:
    """Sums over the requests to the version that a device serves, as `RevisionSums` has them."""

    requests: Count = 0
    errors: Count = 0
    timed: Count = 0
    logs: Logs = 0.0
    squares: Logs = 0.0


@dataclass(frozen=True, kw_only=True)
class PathsTold:
    """Answers of the device and of a service, by the bucket of their time, and requests that
    neither answered."""

    device: Buckets = field(default_factory=dict)
    cloud: Buckets = field(default_factory=dict)
    lost: Count = 0


@dataclass(frozen=True, kw_only=True)
class ModelTold:
    """What a device does with a model; `nouns.ModelReport` says what the fields mean."""

    name: Name
    serving: Count = 0
    refused: Count = 0
    refused_in: Count = 0
    problem: str = ""
    sums: SumsTold | None = None  # without a version that is served
    on_trial: bool = False
    unfetched: Count = 0
    paths: PathsTold | None = None  # without a request


@dataclass(frozen=True, kw_only=True)
class CheckIn:
    """What a device tells; `nouns.DeviceReport` says what the fields mean. `settings` is None of a
    program that knows no settings."""

    models: Models = ()
    free_mib: Count = 0
    clock: Clock = 0.0  # of the device
    waiting: Count = 0
    agent: str = ""
    share: Text = ""
    up_s: Seconds = 0
    settings: Text | None = None
    settings_problem: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskOutput:
    output: Output
    exit_code: ExitCode


@dataclass(frozen=True, kw_only=True)
class SampleTold:
    """A request whose answer was uncertain. The request and the answer are decoded and encoded
    again, so that each sample is one line that every reader can decode."""

    number: Number
    model: Name
    version: Count = 0
    at: float = 0.0
    certainty: float = 0.0
    request: Any = None
    answer: Any = None


@dataclass(frozen=True, kw_only=True)
class Samples:
    samples: list[SampleTold]


# What servers answer


@dataclass(frozen=True, kw_only=True)
class Enrolled:
    project: str
    device: str
    site: str
    allow_exec: bool


@dataclass(frozen=True, kw_only=True)
class Nonce:
    """A text to sign."""

    nonce: str


@dataclass(frozen=True, kw_only=True)
class DeviceToken:
    token: str
    valid_s: float


@dataclass(frozen=True, kw_only=True)
class WantedVersion:
    """A version that the device is to serve. It updates in the hours of both windows; a program
    that does not know `site_window` finds the narrower one in `window`. With `wait`, another device
    of the site fetches it first."""

    name: str
    number: int
    rollout: int = 0
    mib_per_s: float | None = None
    window: tuple[int, ...] | None = None
    site_window: tuple[int, ...] | None = None
    collect_below: float | None = None
    wait: bool = False


@dataclass(frozen=True, kw_only=True)
class CloudService:
    """A service that answers what the device cannot for a model, or less surely than `below`."""

    model: str
    url: str
    key: str = ""
    below: float | None = None


@dataclass(frozen=True, kw_only=True)
class PeersTold:
    """By model, the addresses of devices that have its files, and the key that they ask for."""

    key: str = ""
    at: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GivenTask:
    """A command of a user, or [] for the newest lines of the log."""

    id: str
    command: list[str]


@dataclass(frozen=True, kw_only=True)
class CheckedIn:
    """The answer to a check-in. `settings` is the revision of the settings that the device is to
    have; `clouds` is None of a server that knows none."""

    now: float | None = None
    every_s: float = 0.0
    models: list[WantedVersion]
    clouds: list[CloudService] | None = None
    program: WantedVersion | None = None
    settings: str | None = None
    peers: PeersTold = PeersTold()
    tasks: list[GivenTask] = field(default_factory=list)


# What devices do with them


def write(document: Any) -> dict[str, Any]:
    """Return one of the documents as a device sends it: without fields that are None."""
    return asdict(document, dict_factory=_make_table)


def _make_table(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if value is not None}


def read_nonce(told: dict[str, Any]) -> Nonce:
    return Nonce(nonce=told["nonce"])


def read_token(told: dict[str, Any]) -> DeviceToken:
    return DeviceToken(token=str(told["token"]), valid_s=float(told["valid_s"]))


def read_answer(answer: bytes, program: str) -> CheckedIn:
    """Return the answer to a check-in; `program` is the name of the device's program among models.
    Raises ValueError: the device goes on serving after any answer, and a name must not lead out of
    the folder of models.
    """
    try:
        told = json.loads(answer)
        models = [_read_version(each, _check_name(each["name"])) for each in told["models"]]
        given, now = told.get("program"), told.get("now")
        tasks = told.get("tasks")
        return CheckedIn(
            now=now if isinstance(now, (int, float)) else None,
            models=models,
            clouds=read_clouds(told) if "clouds" in told else None,
            program=None if given is None else _read_version(given, program),
            settings=told.get("settings"),
            peers=read_peers(told.get("peers")),
            tasks=[found for each in _list(tasks) if (found := read_task(each)) is not None],
        )
    except _WRONG as error:
        raise ValueError(f"its answer is not valid ({type(error).__name__}: {error})") from error


def _read_version(told: dict[str, Any], name: str) -> WantedVersion:
    return WantedVersion(
        name=name,
        number=int(told["number"]),
        rollout=int(told.get("rollout") or 0),
        collect_below=_read_float(told.get("collect_below")),
        mib_per_s=_read_float(told.get("mib_per_s")),
        window=tuple(int(hour) for hour in told.get("window") or ())[:2],
        wait=told.get("wait") is True,
        site_window=tuple(int(hour) for hour in told.get("site_window") or ())[:2],
    )


def read_peers(told: Any) -> PeersTold:
    """What is not valid is left out: the server has all files."""
    told = told if isinstance(told, dict) else {}
    key, at = told.get("key"), told.get("at")
    return PeersTold(
        key=key[:100] if isinstance(key, str) else "",
        at={
            name: [each for each in found if isinstance(each, str)][:_MOST_PEERS]
            for name, found in (at.items() if isinstance(at, dict) else ())
            if isinstance(found, list)
        },
    )


def read_clouds(told: dict[str, Any]) -> list[CloudService]:
    """Return the services that answer for this device. Raises ValueError."""
    try:
        return [
            CloudService(
                model=_check_name(each["model"]),
                url=_check_url(each["url"]),
                key=str(each.get("key") or ""),
                below=_read_float(each.get("below")),
            )
            for each in told.get("clouds", ())
        ]
    except _WRONG as error:
        raise ValueError(f"its services are not valid ({type(error).__name__}: {error})") from error


def read_task(told: Any) -> GivenTask | None:
    """Return a task, or None if it has no valid form."""
    told = told if isinstance(told, dict) else {}
    task_id, command = told.get("id"), told.get("command")
    if not isinstance(task_id, str) or not task_id.isalnum() or not isinstance(command, list):
        return None
    texts = all(isinstance(each, str) for each in command)
    return GivenTask(id=task_id, command=command) if texts else None


def _list(told: Any) -> list[Any]:
    return told if isinstance(told, list) else []


def _read_float(told: Any) -> float | None:
    return None if told is None else float(told)


def _check_url(url: str) -> str:
    if not _URL.fullmatch(url):
        raise ValueError(f"it names a service at {url[:80]!r}")
    return url


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"it names a model {name[:80]!r}")
    return name
