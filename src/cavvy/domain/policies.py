"""Policies: restrictions on the jobs of a project."""

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from math import inf

from cavvy.domain.accounts import INSTALLATION, Project
from cavvy.domain.shares import DOLLARS, GPUS
from cavvy.domain.units import HourlyRate, format_price
from cavvy.domain.values import Struct, field, replace


class UserBounds(Struct, frozen=True, kw_only=True):
    """The limits of one user in a project and the projects below it. Each replaces the limit of the
    same name that the project's policy has for each user; None and absent accelerators do not.
    """

    gpus: float | None = None
    jobs: int | None = None
    waiting: int | None = None
    accelerators: Mapping[str, float] = field(default_factory=dict)
    micros_per_hour: int | None = None


class ProjectPolicy(Struct, frozen=True, kw_only=True):
    """Restrictions on the jobs of a project and of the projects below it. Empty tuples and None
    permit everything.

    `regions` are names of regions, countries or areas, as in a task. `accelerators` are products,
    families, vendors or kinds, as in a task. `max_rate` is the highest price of one node. `images`
    contains names of container images in the form REGISTRY/REPOSITORY. In a name, `*` matches any
    characters. `image_digests` permits only images that are named by their digest. `signed_by`
    contains public keys in PEM form; an image must be signed with one of these keys.
    `max_gpus` is the most GPUs that all these jobs hold at the same time, `user_gpus` and
    `user_jobs` the most GPUs and running jobs of each user, and `user_waiting` the most of each
    user's jobs that wait. The fields with `accelerators` are the same for the GPUs of each name,
    and those with `micros_per_hour` for what all nodes together cost. `users` are the limits of
    users by their names, instead of those of each user.

    The other fields are no restrictions. `keep_jobs_days` is how long ended jobs are kept, 0 for
    forever; the nearest policy that sets it applies. `share` is the project's weight among the
    projects with the same parent, and `quota_gpus` are the GPUs up to which its jobs go first
    (`scheduler.shares`); the share and the quotas apply only to the project for which they are set.
    """

    providers: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    accelerators: tuple[str, ...] = ()
    max_rate: HourlyRate | None = None
    images: tuple[str, ...] = ()
    image_digests: bool = False
    signed_by: tuple[str, ...] = ()
    keep_jobs_days: int | None = None
    share: float | None = None
    quota_gpus: float | None = None
    max_gpus: float | None = None
    user_gpus: float | None = None
    user_jobs: int | None = None
    user_waiting: int | None = None
    quota_accelerators: Mapping[str, float] = field(default_factory=dict)
    max_accelerators: Mapping[str, float] = field(default_factory=dict)
    user_accelerators: Mapping[str, float] = field(default_factory=dict)
    quota_micros_per_hour: int | None = None
    max_micros_per_hour: int | None = None
    user_micros_per_hour: int | None = None
    users: Mapping[str, UserBounds] = field(default_factory=dict)

    def find_waiting(self, user: str) -> int | None:
        """Return the most jobs of this user that wait, or None without a limit."""
        own = self.users.get(user)
        return self.user_waiting if own is None or own.waiting is None else own.waiting


def name_key(pem: str) -> str:
    """Return the fingerprint of a public key in PEM form: the SHA-256 of its DER form."""
    body = "".join(line for line in pem.splitlines() if not line.startswith("-"))
    digest = sha256(base64.b64decode(body)).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


class BoundPolicy(Struct, frozen=True):
    """A policy, and the project for which it was set, which may be the INSTALLATION."""

    project: str
    policy: ProjectPolicy

    @property
    def owner(self) -> str:
        """The project as text for messages."""
        return f"project {self.project}" if self.project else "the installation"


class PolicyBook:
    """The policies of all projects."""

    def __init__(
        self, policies: Iterable[BoundPolicy] = (), projects: Iterable[Project] = ()
    ) -> None:
        self._policies = {each.project: each for each in policies}
        self.parents: Mapping[str, str | None] = {each.name: each.parent for each in projects}

    def __iter__(self) -> Iterator[BoundPolicy]:
        return iter(self._policies.values())

    def find(self, project: str) -> Sequence[BoundPolicy]:
        """Return the policies that apply to the jobs of a project: the policies of the
        installation, of the projects above this project, and of the project itself, in this order.
        """
        if not self._policies:
            return ()
        names, name = [], project or None
        while name is not None and name not in names:
            names.append(name)
            name = self.parents.get(name)
        names.append(INSTALLATION)
        return [self._policies[each] for each in reversed(names) if each in self._policies]


def find_lifted(book: PolicyBook, project: str, parent: str | None) -> Sequence[BoundPolicy]:
    """Return the policies that would no longer restrict a project if it moved below `parent`.
    The result has no policy that would also apply below `parent`.
    """
    own = [each for each in book.find(project) if each.project == project]
    kept = [_only_restrictions(each) for each in (*book.find(parent or INSTALLATION), *own)]
    kept.append(ProjectPolicy())
    return [each for each in book.find(project) if _only_restrictions(each) not in kept]


def find_raised(before: ProjectPolicy, after: ProjectPolicy) -> str:
    """Return what the change gives the project at the cost of the projects beside it, or ""."""
    if (before.share, _quotas_of(before)) != (after.share, _quotas_of(after)):
        return "change the share or the quota"
    limits = _limits_of(after)
    if any(limits.get(name, inf) > most for name, most in _limits_of(before).items()):
        return "raise a limit"
    return ""


def find_conflict(
    book: PolicyBook, project: str, before: ProjectPolicy, after: ProjectPolicy
) -> str:
    """Return which quota could never be used, because the project itself or one above it has a
    lower quota or limit, or "". A change of other fields has no conflicts."""
    quotas, limits = _quotas_of(after), _limits_of(after)
    if (quotas, limits) == (_quotas_of(before), _limits_of(before)):
        return ""
    changed = BoundPolicy(project, after)
    policies = {**{each.project: each for each in book}, project: changed}
    new = PolicyBook(policies.values())
    new.parents = book.parents
    for name in policies:
        line = new.find(name)
        if changed in line and (problem := _find_unusable(line)):
            return problem
    return ""


def _find_unusable(line: Sequence[BoundPolicy]) -> str:
    """Return which quota of the last project in the line could never be used, or ""."""
    *above, own = line
    for name, quota in _quotas_of(own.policy).items():
        found = [(each.owner, "limit", _limits_of(each.policy).get(name)) for each in line]
        found += [(each.owner, "quota", _quotas_of(each.policy).get(name)) for each in above]
        for owner, kind, most in found:
            if most is not None and quota > most:
                return (
                    f"the quota of {own.owner} is {say_amount(name, quota)}, but {owner} has a "
                    f"{kind} of {say_amount(name, most)}"
                )
    return ""


def say_amount(name: str, amount: float) -> str:
    """Return an amount that a quota or limit counts as text for people."""
    if name == DOLLARS:
        return f"{format_price(amount / 1e6)} an hour"
    return f"{amount:g} {name or 'GPUs'}"


def _quotas_of(policy: ProjectPolicy) -> Mapping[str, float]:
    found = {GPUS: policy.quota_gpus, DOLLARS: policy.quota_micros_per_hour}
    known = {name: amount for name, amount in found.items() if amount is not None}
    return {**known, **policy.quota_accelerators}


def _limits_of(policy: ProjectPolicy) -> Mapping[str, float]:
    found = {GPUS: policy.max_gpus, DOLLARS: policy.max_micros_per_hour}
    known = {name: amount for name, amount in found.items() if amount is not None}
    return {**known, **policy.max_accelerators}


def _only_restrictions(bound: BoundPolicy) -> ProjectPolicy:
    return replace(
        bound.policy,
        keep_jobs_days=None,
        share=None,
        quota_gpus=None,
        quota_accelerators={},
        quota_micros_per_hour=None,
    )
