"""Request and response types of the policy routes, and client functions that call these routes."""

from msgspec import UNSET, UnsetType, field
from msgspec.json import encode

from cavvy.client.client import ApiClient
from cavvy.client.errors import ApiError
from cavvy.client.paths import project_path
from cavvy.client.wire import Answer, Ask


class UserLimitsAsk(Ask, frozen=True, kw_only=True):
    """The most GPUs, running jobs and waiting jobs of one user, GPUs by their names, and
    micro-dollars an hour. Null and absent names leave the limit that the policy has for each user.
    """

    gpus: float | None = None
    jobs: int | None = None
    waiting: int | None = None
    accelerators: dict[str, float] = field(default_factory=dict)
    micros_per_hour: int | None = None


class UserLimitsView(Answer, frozen=True, kw_only=True):
    """The limits of one user, which replace those of each user."""

    gpus: float | None = None
    jobs: int | None = None
    waiting: int | None = None
    accelerators: dict[str, float] = field(default_factory=dict)
    micros_per_hour: int | None = None


class PolicyAsk(Ask, frozen=True, kw_only=True):
    """The resources that the jobs of a project may use. Empty lists and null permit everything;
    fields that the request does not contain keep their values. `max_rate_micros_per_hour` is the
    highest price of one node. `signed_by` contains public keys in PEM form; each image must be
    signed with one of these keys. `keep_jobs_days` is how long ended jobs are kept, 0 for forever;
    with null, a parent project or the server decides. `share` is the
    project's weight in the queue among the projects with the same parent, 1 if null. Up to
    `quota_gpus` GPUs, the project's jobs go first. `max_gpus` is the most GPUs that its jobs hold
    at the same time; `user_gpus` and `user_jobs` are the most GPUs and running jobs of each user,
    and `user_waiting` is the most of each user's jobs that wait. The fields with `accelerators` are
    the same for the GPUs of one name, such as `{"H100": 8}`, and those with `micros_per_hour` for
    the price of all nodes together in micro-dollars an hour. `users` are limits of users by their
    names, instead of those of each user.
    """

    providers: list[str] | UnsetType = UNSET
    regions: list[str] | UnsetType = UNSET
    accelerators: list[str] | UnsetType = UNSET
    max_rate_micros_per_hour: int | UnsetType | None = UNSET
    images: list[str] | UnsetType = UNSET
    image_digests: bool | UnsetType = UNSET
    signed_by: list[str] | UnsetType = UNSET
    keep_jobs_days: int | UnsetType | None = UNSET
    share: float | UnsetType | None = UNSET
    quota_gpus: float | UnsetType | None = UNSET
    max_gpus: float | UnsetType | None = UNSET
    user_gpus: float | UnsetType | None = UNSET
    user_jobs: int | UnsetType | None = UNSET
    user_waiting: int | UnsetType | None = UNSET
    quota_accelerators: dict[str, float] | UnsetType = UNSET
    max_accelerators: dict[str, float] | UnsetType = UNSET
    user_accelerators: dict[str, float] | UnsetType = UNSET
    quota_micros_per_hour: int | UnsetType | None = UNSET
    max_micros_per_hour: int | UnsetType | None = UNSET
    user_micros_per_hour: int | UnsetType | None = UNSET
    users: dict[str, UserLimitsAsk] | UnsetType = UNSET


class ProjectPolicyView(Answer, frozen=True, kw_only=True):
    """A policy and its project. An empty `project` means the installation."""

    project: str
    providers: list[str]
    regions: list[str]
    accelerators: list[str]
    max_rate_micros_per_hour: int | None
    images: list[str]
    image_digests: bool
    signed_by: list[str] = field(default_factory=list)
    keep_jobs_days: int | None = None
    share: float | None = None
    quota_gpus: float | None = None
    max_gpus: float | None = None
    user_gpus: float | None = None
    user_jobs: int | None = None
    user_waiting: int | None = None
    quota_accelerators: dict[str, float] = field(default_factory=dict)
    max_accelerators: dict[str, float] = field(default_factory=dict)
    user_accelerators: dict[str, float] = field(default_factory=dict)
    quota_micros_per_hour: int | None = None
    max_micros_per_hour: int | None = None
    user_micros_per_hour: int | None = None
    users: dict[str, UserLimitsView] = field(default_factory=dict)


def list_policies(client: ApiClient, project: str | None) -> list[ProjectPolicyView]:
    """Return the policies that apply to the jobs of a project, with the project's own policy last.
    If `project` is None, return the policy of the installation.
    """
    return client.ask(_path(project), list[ProjectPolicyView])


def put_policy(
    client: ApiClient, project: str | None, ask: PolicyAsk, *, accept_exceeded: bool = False
) -> str:
    """Change the policy of a project or, if `project` is None, of the installation. Raises
    ApiError, with the code `policy-exceeded` if a quota or limit would be lowered below what is in
    use. With `accept_exceeded`, the policy is changed all the same, and the message is returned.
    """
    try:
        client.call("PUT", _path(project), encode(ask))
    except ApiError as error:
        if error.code != "policy-exceeded" or not accept_exceeded:
            raise
        client.call("PUT", f"{_path(project)}?accept_exceeded=true", encode(ask))
        return error.message
    return ""


def delete_policy(client: ApiClient, project: str | None) -> None:
    client.call("DELETE", _path(project))


def _path(project: str | None) -> str:
    return "/v1/policy" if project is None else f"{project_path(project)}/policy"
