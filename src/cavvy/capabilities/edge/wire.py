"""Request and response types of the routes for devices at the edge, and
the client functions for them."""

from datetime import datetime

from msgspec import UNSET, UnsetType, field

from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, query, segment
from cavvy.client.wire import Answer, Ask


class EnrolmentAsk(Ask, frozen=True, kw_only=True):
    """A token with which `count` devices of a site can enrol within `valid_s` seconds. With
    `allow_exec`, they run commands of users."""

    site: str
    count: int = 1
    labels: dict[str, str] = field(default_factory=dict)
    valid_s: float = 86_400.0
    allow_exec: bool = False


class EnrolmentView(Answer, frozen=True, kw_only=True):
    """The shell command that enrols a device, and runs its program."""

    command: str
    token: str
    expires_at: datetime


class DeviceModelView(Answer, frozen=True, kw_only=True):
    """What a device does with a model: the version that it serves, the version that it refused, and
    why. `errors` is the share of failed requests to the served version."""

    name: str
    serving: int
    refused: int
    problem: str
    requests: int
    errors: float


class DeviceView(Answer, frozen=True, kw_only=True):
    """A device. `state` is online, offline (not heard of for ten minutes), silent (never heard of)
    or retired."""

    project: str
    name: str
    site: str
    state: str
    labels: dict[str, str]
    facts: dict[str, str]
    enrolled_at: datetime
    heard_at: datetime | None
    models: list[DeviceModelView]
    free_mib: int
    skew_s: float
    waiting: int
    agent: str
    settings_problem: str = ""


class SettingsAsk(Ask, frozen=True, kw_only=True):
    """Change what is set for a device, or for all devices of a site or with a label such as
    kind=jetson: one of the three is named. `values` has options of the devices' program (every_s,
    look_s, probation_s, spool_mib, share) and variables, in capital letters, that the engines get.
    `secrets` names secrets of the project that they get as variables. `unset` names what is to be
    set there no more."""

    device: str = ""
    site: str = ""
    label: str = ""
    values: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)


class SettingsView(Answer, frozen=True, kw_only=True):
    """What is set for a device, or for those of a site or with a label. It concerns `devices`
    devices now, of which `too_old` run a program that takes no settings."""

    project: str
    device: str
    site: str
    label: str
    values: dict[str, str]
    secrets: list[str]
    devices: int
    too_old: int


class DeviceSettingView(Answer, frozen=True, kw_only=True):
    """A setting that a device gets. `kind` is option, variable or secret, and `source` says what
    it was set for, such as site/lyon. The value of a secret is never told; `missing` means that
    the project does not have the secret any more."""

    name: str
    kind: str
    value: str
    source: str
    missing: bool


class DeviceSettingsView(Answer, frozen=True, kw_only=True):
    """The settings of a device, their revision, and the one that the device uses: "" for none, null
    if it has not checked in or its program is too old for settings."""

    revision: str
    used: str | None
    problem: str
    settings: list[DeviceSettingView]


class SiteAsk(Ask, frozen=True, kw_only=True):
    """The most that the devices of a site fetch together from each server, in MiB a second, and
    the hours of their day in which they update. null is no limit. Each device costs
    `device_micros_per_hour` micro-dollars an hour; null if that is not known. A request without
    this field leaves the price as it is."""

    mib_per_s: float | None = None
    window: tuple[int, int] | None = None
    device_micros_per_hour: int | UnsetType | None = UNSET


class SiteView(Answer, frozen=True, kw_only=True):
    """The limits of a site and the price of its devices, as in SiteAsk."""

    project: str
    name: str
    mib_per_s: float | None
    window: tuple[int, int] | None
    device_micros_per_hour: int | None = None


class RetiredView(Answer, frozen=True, kw_only=True):
    """The secrets that a retired device may have, which should be replaced if it is lost, with the
    services for which it got each. Its engines had those of `variables` in their environment."""

    secrets: dict[str, list[str]] = field(default_factory=dict)
    variables: list[str] = field(default_factory=list)


class DeviceTaskAsk(Ask, frozen=True, kw_only=True):
    """A command for a device, or [] for the newest lines of its log."""

    command: list[str] = field(default_factory=list)


class DeviceTaskView(Answer, frozen=True, kw_only=True):
    """What a device answered. `told` means that it has the task, and `exit_code` is null until it
    has answered. The end of the output is kept."""

    id: str
    told: bool
    output: str
    exit_code: int | None


class RolloutAsk(Ask, frozen=True, kw_only=True):
    """Bring version `to` of a model, or the one that has the label `label` now, to the devices of a
    site with these labels, wave by wave. The model `cavvy.edge` without a version is the server's
    own version of the devices' program, with the Python packages of the uploaded snapshot
    `packages`, which has them as `packages/NAME.whl`, or with those of its former version."""

    model: str
    to: int = 0
    packages: str = ""
    label: str = ""
    site: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    waves: list[float] = field(default_factory=list)
    soak_s: float = 600.0
    mib_per_s: float | None = None
    window: tuple[int, int] | None = None
    collect_below: float | None = None
    alpha: float = 0.005
    made_by: str = ""


class RolloutView(Answer, frozen=True, kw_only=True):
    """A rollout. Of its `devices`, `in_wave` are to have the new version, `serving` serve it, and
    `refused` tried it and went back. `errors` are the shares of failed requests to the old and the
    new version. `left_out` names devices that the model's residency excludes."""

    project: str
    name: str
    model: str
    to: int
    site: str
    labels: dict[str, str]
    phase: str
    reason: str
    wave: int
    waves: list[float]
    devices: int
    in_wave: int
    serving: int
    refused: int
    requests: int
    errors: tuple[float, float]
    residency: str
    left_out: list[str]
    made_by: str
    created_at: datetime


class SampleView(Answer, frozen=True, kw_only=True):
    """A request whose answer was uncertain. `body` is JSON with model, version, at, certainty,
    request and answer."""

    device: str
    number: int
    body: str


class SamplesView(Answer, frozen=True, kw_only=True):
    """Samples, how many were left out because of their residency, and the place after which to ask
    for more; "" if there are no more."""

    samples: list[SampleView]
    left_out: int
    after: str


class HaltAsk(Ask, frozen=True, kw_only=True):
    """Why a rollout is taken back."""

    reason: str = ""


def invite_devices(client: ApiClient, project: str, ask: EnrolmentAsk) -> EnrolmentView:
    """Create a token for new devices. Raises ApiError."""
    return client.ask(f"{project_path(project)}/edge/tokens", EnrolmentView, ask)


def list_devices(client: ApiClient, project: str | None) -> list[DeviceView]:
    """Return the devices of a project, or of all projects."""
    return client.ask(f"/v1/edge/devices{query(project=project)}", list[DeviceView])


def get_device(client: ApiClient, project: str, name: str) -> DeviceView:
    """Return one device. Raises ApiError."""
    return client.ask(_device(project, name), DeviceView)


def retire_device(client: ApiClient, project: str, name: str) -> RetiredView:
    """Refuse a device from now on. Raises ApiError."""
    return client.ask(_device(project, name), RetiredView, method="DELETE")


def list_settings(client: ApiClient, project: str | None) -> list[SettingsView]:
    """Return what is set for devices of a project, or of all projects."""
    return client.ask(f"/v1/edge/settings{query(project=project)}", list[SettingsView])


def change_settings(client: ApiClient, project: str, ask: SettingsAsk) -> SettingsView:
    """Set and unset what is set for devices. Raises ApiError."""
    return client.ask(f"{project_path(project)}/edge/settings", SettingsView, ask)


def get_device_settings(client: ApiClient, project: str, name: str) -> DeviceSettingsView:
    """Return the settings of a device. Raises ApiError."""
    return client.ask(f"{_device(project, name)}/settings", DeviceSettingsView)


def list_sites(client: ApiClient, project: str | None) -> list[SiteView]:
    """Return the limits of the sites of a project, or of all projects."""
    return client.ask(f"/v1/edge/sites{query(project=project)}", list[SiteView])


def limit_site(client: ApiClient, project: str, name: str, ask: SiteAsk) -> SiteView:
    """Replace the limits of a site. Raises ApiError."""
    path = f"{project_path(project)}/edge/sites/{segment('site', name)}"
    return client.ask(path, SiteView, ask, method="PUT")


def ask_device(client: ApiClient, project: str, name: str, command: list[str]) -> DeviceTaskView:
    """Ask a device to run a command, or with [] for its log, at its next check-in. Raises
    ApiError."""
    path = f"{_device(project, name)}/tasks"
    return client.ask(path, DeviceTaskView, DeviceTaskAsk(command=command), retry=False)


def read_device_task(
    client: ApiClient, project: str, name: str, task_id: str, wait_s: float = 0
) -> DeviceTaskView:
    """Return a task, after a change or `wait_s` seconds. Raises ApiError."""
    path = f"{_device(project, name)}/tasks/{segment('task', task_id)}{query(wait_s=wait_s)}"
    return client.ask(path, DeviceTaskView, wait_s=wait_s)


def deploy_model(client: ApiClient, project: str, ask: RolloutAsk) -> RolloutView:
    """Begin a rollout. Raises ApiError."""
    return client.ask(f"{project_path(project)}/rollouts", RolloutView, ask)


def list_rollouts(client: ApiClient, project: str | None) -> list[RolloutView]:
    """Return the rollouts of a project, or of all projects, newest first."""
    return client.ask(f"/v1/rollouts{query(project=project)}", list[RolloutView])


def halt_rollout(client: ApiClient, project: str, name: str, reason: str) -> RolloutView:
    """Take a version back from the devices of a rollout. Raises ApiError."""
    path = f"{project_path(project)}/rollouts/{segment('rollout', name)}/halt"
    return client.ask(path, RolloutView, HaltAsk(reason=reason))


def list_samples(
    client: ApiClient, project: str, model: str, *, residency: str = "", after: str = ""
) -> SamplesView:
    """Return samples that devices have sent, oldest first. Raises ApiError."""
    more = query(model=model, residency=residency or None, after=after or None)
    return client.ask(f"{project_path(project)}/edge/samples{more}", SamplesView)


def _device(project: str, name: str) -> str:
    return f"{project_path(project)}/edge/devices/{segment('device', name)}"
