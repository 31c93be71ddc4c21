"""Devices at the edge, and rollouts of models to them."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum

from cavvy.domain.service_updates import CanaryTrial, RevisionSums
from cavvy.domain.tasks import WAVES
from cavvy.domain.values import Struct, field

# A device checks in at this interval, in seconds.
CHECK_IN_S = 60.0
PROGRAM = "cavvy.edge"  # the devices' own program, which they get like a model
MOST_SAMPLES = 2000  # that are kept of one device
SAMPLE_DAYS = 90  # for which samples are kept


class EdgeInvitation(Struct, frozen=True, kw_only=True):
    """A token with which `left` more devices can enrol. `name` is the SHA-256 of the token."""

    project: str
    name: str
    site: str
    labels: Mapping[str, str] = field(default_factory=dict)
    expires_at: datetime
    left: int = 1
    allow_exec: bool = False
    version: int = 0


class EdgeSite(Struct, frozen=True, kw_only=True):
    """What holds for all devices of a site together: the most that they fetch from a server, in MiB
    a second, and the hours of their day in which they update. Each device costs
    `device_micros_per_hour`; None if that is not known."""

    project: str
    name: str
    mib_per_s: float | None = None
    window: tuple[int, int] | None = None
    device_micros_per_hour: int | None = None
    version: int = 0


class EdgeSettings(Struct, frozen=True, kw_only=True):
    """What is set for the program and the engines of devices. `name` is "device/NAME",
    "label/NAME=VALUE" or "site/NAME". `options` are those of the program, `variables` those of the
    engines' environment, and `secrets` names secrets of the project, which are variables too."""

    project: str
    name: str
    options: Mapping[str, float | str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    version: int = 0

    def covers(self, device: "EdgeDevice") -> bool:
        kind, _, value = self.name.partition("/")
        if kind == "label":
            label, _, wanted = value.partition("=")
            return device.labels.get(label) == wanted
        return value == (device.name if kind == "device" else device.site)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all that is set."""
        return (*self.options, *self.variables, *self.secrets)


class EdgeDevice(Struct, frozen=True, kw_only=True):
    """An enrolled device. `key` is its public Ed25519 key in hexadecimal; the private key never
    leaves the device. A device that is `retired_at` gets no more answers. With `allow_exec`, it
    runs commands of users."""

    project: str
    name: str
    site: str
    labels: Mapping[str, str] = field(default_factory=dict)
    key: str
    facts: Mapping[str, str] = field(default_factory=dict)
    enrolled_at: datetime
    allow_exec: bool = False
    retired_at: datetime | None = None
    report: "DeviceReport | None" = None  # the newest
    version: int = 0


class PathCounts(Struct, frozen=True, kw_only=True):
    """What became of the requests for a model since the device's program started: the answers of
    the device and of a service in the cloud, by the bucket of the time that they took, and the
    requests that neither answered."""

    device: Mapping[int, int] = field(default_factory=dict)
    cloud: Mapping[int, int] = field(default_factory=dict)
    lost: int = 0


class ModelReport(Struct, frozen=True, kw_only=True):
    """What a device does with one model: the version that it serves, perhaps on trial, the version
    whose trial failed there (`refused`), in which rollout (0 if the device does not tell), why, the
    version that it could not fetch (`unfetched`; it tries again), and
    the sums over the requests to the served version. `paths` is None until the first request. A
    rollout notes the report of a device that it has counted, with the time `at` of the report.
    """

    name: str
    serving: int = 0
    on_trial: bool = False
    refused: int = 0
    refused_in: int = 0
    unfetched: int = 0
    problem: str = ""
    sums: RevisionSums = RevisionSums()
    paths: PathCounts | None = None
    at: datetime | None = None


class DeviceReport(Struct, frozen=True, kw_only=True):
    """What a device told when it checked in. `free_mib` is the space on its disk, and `skew_s` the
    seconds by which its clock is ahead of the server's."""

    at: datetime
    models: tuple[ModelReport, ...] = ()
    free_mib: int = 0
    skew_s: float = 0.0
    waiting: int = 0  # samples and figures that it has not sent yet
    agent: str = ""  # the version of its program
    share: str = ""  # where other devices of its site can take files from it, or ""
    up_s: int = 0  # since its program started; 0 if the program does not tell
    settings: str | None = None  # the revision that it uses; None if its program knows none
    settings_problem: str = ""

    def of(self, model: str) -> ModelReport | None:
        return next((each for each in self.models if each.name == model), None)


class EdgeSample(Struct, frozen=True, kw_only=True):
    """A request whose answer was uncertain, with the answer, as JSON. The device has numbered it;
    `received` is the time of receipt in microseconds since 1970."""

    device: str
    number: int
    model: str
    residency: str = ""
    received: int = 0
    body: str


class RolloutPhase(StrEnum):
    """Where a rollout stands. A halted rollout gives its devices their former version back."""

    RUNNING = "running"
    DONE = "done"
    HALTED = "halted"
    REPLACED = "replaced"  # by a newer rollout of the model to the same devices


class Rollout(Struct, frozen=True, kw_only=True):
    """One model on its way to the devices of `site` ("" for all) with `labels`. `name` is
    "MODEL-NUMBER"; a rollout with a higher number is newer. Devices get the version `to` wave by
    wave: `wave` is the index in `waves`, whose shares of the devices have it then. `trial` compares
    the new version with what the other devices serve. A wave lasts at least `soak_s` seconds.
    """

    project: str
    name: str
    model: str
    to: int
    site: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    phase: RolloutPhase = RolloutPhase.RUNNING
    reason: str = ""
    waves: tuple[float, ...] = WAVES
    wave: int = 0
    wave_at: datetime
    grown: int = 0  # devices that may have the version while a wave grows; 0 if all of the wave
    soak_s: float = 600.0
    mib_per_s: float | None = None  # limit of each device's download
    window: tuple[int, int] | None = None  # hours of the device's day in which it updates
    collect_below: float | None = None  # outputs less certain than this are kept as samples
    residency: str = ""  # of the model: only devices with this label `residency` get it
    alpha: float = 0.005  # the probability that an equally good version halts
    trial: CanaryTrial = CanaryTrial()
    # by device, its sums when they were last added to the trial
    counted: Mapping[str, ModelReport] = field(default_factory=dict)
    sums_old: RevisionSums = RevisionSums()
    sums_new: RevisionSums = RevisionSums()
    # devices whose counts are left out, because no other device agreed with them
    doubted: tuple[str, ...] = ()
    # devices that are last, because they could not fetch the version (with why), or seem not to be
    # able to ("")
    unable: Mapping[str, str] = field(default_factory=dict)
    made_by: str = ""
    job: str = ""  # ID of the job whose step began it
    created_at: datetime
    version: int = 0

    @property
    def number(self) -> int:
        return int(self.name.rpartition("-")[2])

    def is_refused(self, report: ModelReport) -> bool:
        """Return whether a device has refused the version, not only in an earlier rollout."""
        return report.refused == self.to and report.refused_in in (0, self.number)

    def is_unfetched(self, report: ModelReport) -> bool:
        """Return whether a device has tried to fetch the version, and could not."""
        return report.unfetched == self.to and report.serving != self.to

    def covers(self, device: EdgeDevice) -> bool:
        """Return whether the device is one of those that the rollout is for."""
        labels = device.labels
        return (
            device.retired_at is None
            and self.site in ("", device.site)
            and self.residency in ("", labels.get("residency"))
            and all(labels.get(name) == value for name, value in self.labels.items())
        )
