"""Routes for policies: restrictions on the jobs of a project or of the installation."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, to_builtins
from msgspec.structs import asdict
from starlette.requests import Request

from cavvy.api.app_state import AppState, app_state_of
from cavvy.api.audit import note_change
from cavvy.api.errors import ApiProblem
from cavvy.api.routes.jobs import ProjectPath
from cavvy.api.routing import RouteGroup
from cavvy.api.rules import in_path, on_installation, require_above
from cavvy.api.wire import view
from cavvy.catalog.accelerators import (
    AcceleratorKind,
    Vendor,
    find_accelerator,
    is_known,
    list_accelerators,
    names_matching,
    suggest,
)
from cavvy.client import policy_wire as wire
from cavvy.control.worklist import QUEUE
from cavvy.domain.accounts import INSTALLATION, Permission
from cavvy.domain.offers import list_sellers
from cavvy.domain.policies import (
    BoundPolicy,
    ProjectPolicy,
    UserBounds,
    find_conflict,
    find_raised,
    say_amount,
)
from cavvy.domain.units import HourlyRate, format_count
from cavvy.domain.values import replace
from cavvy.providers.registry import list_known
from cavvy.scheduler.shares import JOBS, ExceededBound

router = RouteGroup("policies", prefix="/v1")
_LONGEST = 200  # maximum entries of a list, and maximum characters of an entry
_MOST_KEYS = 20
_MOST_TOLD = 5  # exceeded quotas and limits that one message names
_MOST_DAYS = 36_500  # for which a policy can keep ended jobs
_MOST = 1_000_000  # the highest share and number of GPUs or jobs of a policy
_MOST_MICROS = 1_000_000_000_000  # a million dollars an hour
# the fields that order and limit the queue (`scheduler.shares`)
_OF_QUEUE = ("share", "quota_gpus", "max_gpus", "user_gpus", "user_jobs", "user_waiting")
_RATES = ("quota_micros_per_hour", "max_micros_per_hour", "user_micros_per_hour")
_ACCELERATORS = ("quota_accelerators", "max_accelerators", "user_accelerators")


@router.get("/projects/{project}/policy", rule=in_path(Permission.VIEW))
async def list_policies(app_state: AppState, project: ProjectPath) -> list[wire.ProjectPolicyView]:
    """List the policies that apply to a project's jobs, with the project's own policy last."""
    return [_view(each) for each in await _find(app_state, project)]


@router.get("/policy", rule=on_installation(Permission.VIEW))
async def list_general(app_state: AppState) -> list[wire.ProjectPolicyView]:
    """List the policy of the installation, if it has one."""
    return [_view(each) for each in await _find(app_state, INSTALLATION)]


@router.put(
    "/projects/{project}/policy", rule=in_path(Permission.MANAGE), errors=("policy-exceeded",)
)
async def put(
    request: Request, project: ProjectPath, ask: wire.PolicyAsk, *, accept_exceeded: bool = False
) -> None:
    """Set the policy of a project, which also applies to all subprojects. Fields that the request
    does not contain keep their values. Quotas and limits are lowered below what is in use only with
    `accept_exceeded`.
    """
    await _change(request, project, ask, accept_exceeded=accept_exceeded)


@router.put("/policy", rule=on_installation(Permission.MANAGE), errors=("policy-exceeded",))
async def put_general(
    request: Request, ask: wire.PolicyAsk, *, accept_exceeded: bool = False
) -> None:
    """Set the policy of the installation, which applies to all projects. Fields that the request
    does not contain keep their values. Limits are lowered below what is in use only with
    `accept_exceeded`.
    """
    await _change(request, INSTALLATION, ask, accept_exceeded=accept_exceeded)


@router.delete("/projects/{project}/policy", rule=in_path(Permission.MANAGE))
async def delete(request: Request, project: ProjectPath) -> None:
    """Delete the policy of a project; the policies of its parent projects still apply."""
    await _put(request, project, None)


@router.delete("/policy", rule=on_installation(Permission.MANAGE))
async def delete_general(request: Request) -> None:
    """Delete the policy of the installation."""
    await _put(request, INSTALLATION, None)


async def _find(app_state: AppState, project: str) -> Sequence[BoundPolicy]:
    return await app_state.store.policies_of(project)


async def _change(
    request: Request, project: str, ask: wire.PolicyAsk, *, accept_exceeded: bool
) -> None:
    """Set the fields that the request contains. The others stay: clients of former versions do not
    know all fields.
    """
    found = await _find(app_state_of(request), project)
    own = (each for each in found if each.project == project)
    before = _view(next(own, BoundPolicy(project=project, policy=ProjectPolicy())))
    sent = {name: value for name, value in asdict(ask).items() if value is not UNSET}
    policy = _read(replace(before, **sent))
    await _put(request, project, policy, accept_exceeded=accept_exceeded)


async def _put(
    request: Request, project: str, policy: ProjectPolicy | None, *, accept_exceeded: bool = True
) -> None:
    app_state = app_state_of(request)
    book = await app_state.store.policies()
    before = next((each.policy for each in book if each.project == project), None)
    old, new = before or ProjectPolicy(), policy or ProjectPolicy()
    if project != INSTALLATION and (raised := find_raised(old, new)):
        # at the cost of the projects beside it
        require_above(request, book.parents.get(project), f"{raised} of {project}")
    if problem := find_conflict(book, project, old, new):
        hint = "a quota must fit into the quotas and limits of the projects above it"
        raise ApiProblem("invalid-request", problem, hint)
    if policy is not None and not accept_exceeded:
        await _refuse_exceeded(app_state, project, policy)
    note_change(request, before=_facts(before), after=_facts(policy))
    await app_state.store.put_policy(project, policy)
    app_state.control_plane.pool.expire()  # the cached offers were filtered by the former policies
    app_state.control_plane.hint(QUEUE)


async def _refuse_exceeded(app_state: AppState, project: str, policy: ProjectPolicy) -> None:
    """Raise ApiProblem if a quota or limit would be lowered below what is held now."""
    queue = app_state.control_plane.fair_queue
    found = await queue.list_exceeded(project, policy, app_state.now())
    if not found:
        return
    told = [_say_exceeded(project, each) for each in found[:_MOST_TOLD]]
    if more := len(found) - len(told):
        told.append(f"{more} more are exceeded")
    if not all(each.is_quota for each in found):
        told.append("running jobs would continue, and others wait until there is room")
    if any(each.is_quota for each in found):
        told.append("other projects could get back for their quotas what is above the quota")
    raise ApiProblem("policy-exceeded", "; ".join(told))


def _say_exceeded(project: str, bound: ExceededBound) -> str:
    place = f"project {project}" if project else "the installation"
    held, most = (
        format_count(int(amount), "job") if bound.name == JOBS else say_amount(bound.name, amount)
        for amount in (bound.held, bound.most)
    )
    if bound.user is not None:
        user = f"user {bound.user or 'without a name'}"
        return f"{user} holds {held} in {place}, more than the limit of {most}"
    return f"{place} holds {held}, more than its {'quota' if bound.is_quota else 'limit'} of {most}"


def _read(ask: wire.ProjectPolicyView) -> ProjectPolicy:
    """Raises ApiProblem."""
    for name in ("providers", "regions", "accelerators", "images"):
        entries = getattr(ask, name)
        if len(entries) > _LONGEST or any(not 0 < len(each) <= _LONGEST for each in entries):
            raise ApiProblem(
                "invalid-request",
                f"`{name}` must have at most {_LONGEST} entries of 1 to {_LONGEST} characters",
            )
    if blank := next((each for each in ask.images if " " in each), None):
        raise ApiProblem("invalid-request", f"{blank!r} cannot be the name of an image")
    known = list_known()
    if unknown := [each for each in ask.providers if not list_sellers((each,)) & known.keys()]:
        raise ApiProblem(
            "invalid-request",
            f"{unknown[0]!r} is not a provider",
            f"the providers are {', '.join(sorted(known))}",
        )
    for each in ask.accelerators:
        _require_known(each)
    if ask.max_rate_micros_per_hour is not None and ask.max_rate_micros_per_hour < 0:
        raise ApiProblem("invalid-request", "`max_rate_micros_per_hour` must not be negative")
    if not 0 <= (ask.keep_jobs_days or 0) <= _MOST_DAYS:
        raise ApiProblem("invalid-request", f"`keep_jobs_days` must be 0 to {_MOST_DAYS:,}")
    rate = ask.max_rate_micros_per_hour
    return ProjectPolicy(
        providers=tuple(ask.providers),
        regions=tuple(ask.regions),
        accelerators=tuple(ask.accelerators),
        max_rate=None if rate is None else HourlyRate(rate),
        images=tuple(ask.images),
        image_digests=ask.image_digests,
        signed_by=_read_keys(ask.signed_by),
        keep_jobs_days=ask.keep_jobs_days,
        **_read_queue(ask),
    )


def _read_queue(ask: wire.ProjectPolicyView) -> dict[str, Any]:
    """Return the fields that order and limit the queue. Raises ApiProblem."""
    for name in (*_OF_QUEUE, *_RATES):
        most = _MOST_MICROS if name in _RATES else _MOST
        if not 0 <= (getattr(ask, name) or 0) <= most:
            raise ApiProblem("invalid-request", f"`{name}` must be a number from 0 to {most:,}")
    by_accelerator = {name: _read_accelerators(name, getattr(ask, name)) for name in _ACCELERATORS}
    quotas = (ask.share, ask.quota_gpus, ask.quota_micros_per_hour)
    compares = any(each is not None for each in quotas) or ask.quota_accelerators
    if ask.project == INSTALLATION and compares:
        raise ApiProblem(
            "invalid-request",
            "a share and a quota compare projects, so the server has none",
            "set them for a project: `cavvy project policy set -p PROJECT`",
        )
    numbers = {name: getattr(ask, name) for name in (*_OF_QUEUE, *_RATES)}
    return {**numbers, **by_accelerator, "users": _read_users(ask.users)}


def _read_users(users: Mapping[str, wire.UserLimitsView]) -> Mapping[str, UserBounds]:
    """Raises ApiProblem."""
    if len(users) > _LONGEST or not all(
        0 < len(name) <= _LONGEST and name.isprintable() for name in users
    ):
        raise ApiProblem(
            "invalid-request",
            f"`users` must have at most {_LONGEST} names of 1 to {_LONGEST} printable characters",
        )
    found = {}
    for user, limits in users.items():
        where = f"`users`: {user}"
        for name in ("gpus", "jobs", "waiting", "micros_per_hour"):
            most = _MOST_MICROS if name == "micros_per_hour" else _MOST
            if not 0 <= (getattr(limits, name) or 0) <= most:
                raise ApiProblem(
                    "invalid-request", f"{where}: `{name}` must be a number from 0 to {most:,}"
                )
        own = UserBounds(
            gpus=limits.gpus,
            jobs=limits.jobs,
            waiting=limits.waiting,
            accelerators=_read_accelerators(f"users.{user}.accelerators", limits.accelerators),
            micros_per_hour=limits.micros_per_hour,
        )
        if own != UserBounds():  # without limits, those of each user apply
            found[user] = own
    return found


def _read_accelerators(field: str, numbers: Mapping[str, float]) -> Mapping[str, float]:
    """Return the numbers by the names of the catalog. Raises ApiProblem."""
    if len(numbers) > _LONGEST or any(len(name) > _LONGEST for name in numbers):
        raise ApiProblem(
            "invalid-request",
            f"`{field}` must have at most {_LONGEST} names of at most {_LONGEST} characters",
        )
    found: dict[str, float] = {}
    for text, number in numbers.items():
        name = _name_accelerator(text)
        if name in found:
            raise ApiProblem(
                "invalid-request", f"`{field}` has {name} twice", "name each accelerator once"
            )
        if not 0 <= number <= _MOST:
            raise ApiProblem(
                "invalid-request", f"`{field}`: {name} must have a number from 0 to {_MOST:,}"
            )
        found[name] = number
    return found


def _name_accelerator(text: str) -> str:
    """Return the name of a product, a family, a vendor or a kind. Raises ApiProblem."""
    _require_known(text)
    known = find_accelerator(text)
    if known is not None and known.memory_mib is not None and len(known.accelerator.memory) > 1:
        raise ApiProblem(
            "invalid-request",
            f"{text!r} names a size of memory, but all sizes of {known.accelerator.name} count "
            "together",
            f"write {known.accelerator.name}",
        )
    names = [str(each) for each in (*Vendor, *AcceleratorKind)]
    names += [row.family for row in list_accelerators()]
    names.sort(key=lambda each: each.lower() != text.lower())
    if known is not None:
        names += [known.accelerator.name, *known.accelerator.aliases]
    meant = names_matching(text)
    # an alias such as H100-SXM may mean less than the name of its product
    return next((each for each in names if names_matching(each) == meant), text)


def _require_known(accelerator: str) -> None:
    """Raises ApiProblem."""
    if not is_known(accelerator):
        close = suggest(accelerator)
        raise ApiProblem(
            "invalid-request",
            f"{accelerator!r} is not the name of a GPU, a family, a vendor or a kind",
            f"did you mean {close}?" if close else "see `cavvy offers --accelerators`",
        )


def _read_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """Raises ApiProblem."""
    from cavvy.api.images.signatures import SignerKeyUnusable, read_key

    if len(keys) > _MOST_KEYS:
        raise ApiProblem("invalid-request", f"`signed_by` must have at most {_MOST_KEYS} keys")
    try:
        return tuple(dict.fromkeys(read_key(each) for each in keys))
    except SignerKeyUnusable as error:
        hint = (
            "give the public key that `cosign generate-key-pair` wrote (cosign.pub); keyless "
            "signatures, which have an identity instead of a key, are not supported"
        )
        raise ApiProblem("invalid-request", f"a key of `signed_by`: {error}", hint) from error


def _view(bound: BoundPolicy) -> wire.ProjectPolicyView:
    policy = bound.policy
    return view(
        wire.ProjectPolicyView,
        policy,
        project=bound.project,
        providers=list(policy.providers),
        regions=list(policy.regions),
        accelerators=list(policy.accelerators),
        max_rate_micros_per_hour=(
            None if policy.max_rate is None else policy.max_rate.micros_per_hour
        ),
        images=list(policy.images),
        signed_by=list(policy.signed_by),
        **{name: dict(getattr(policy, name)) for name in _ACCELERATORS},
        users={
            user: view(wire.UserLimitsView, each, accelerators=dict(each.accelerators))
            for user, each in policy.users.items()
        },
    )


def _facts(policy: ProjectPolicy | None) -> dict[str, object] | None:
    """Return the facts about a policy for the audit log."""
    if policy is None:
        return None
    facts = to_builtins(_view(BoundPolicy(INSTALLATION, policy)))
    return {
        name: value
        for name, value in facts.items()
        if name != "project"
        and value is not None
        and value is not False
        and value != []
        and value != {}
    }
