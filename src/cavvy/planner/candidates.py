"""Selects the offers that a waiting job may use now, best first, or explains why the job cannot use
any offer.

`control` passes the current offers to this module. The module decides which offers each job may
use; the scheduler decides the order of the jobs.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from heapq import merge
from itertools import groupby

from cavvy.catalog.fit import Constraint, OfferMatches, match_offers, names_instance
from cavvy.domain.allocations import Host, SilentPlace, VolumeLocation
from cavvy.domain.credentials import CredentialBook, split_account
from cavvy.domain.elastic import NodeRange
from cavvy.domain.jobs import JobRecord, PlanState
from cavvy.domain.offers import Offer, list_sellers
from cavvy.domain.policies import BoundPolicy, PolicyBook
from cavvy.domain.tasks import DEFAULT_CPUS, Objection, ResourceSpec, TaskSpec
from cavvy.domain.units import Money, format_memory, format_rate
from cavvy.domain.values import Struct, field, replace
from cavvy.planner.explain import explain, say_no_offer, wish
from cavvy.planner.objections import (
    explain_misplaced,
    explain_policy,
    explain_unsuitable,
    say_bound,
)
from cavvy.planner.placements import PlacementPlan, PlanningContext
from cavvy.planner.rank import order_of, order_offers
from cavvy.planner.shared_hosts import (
    fits_empty,
    object_to_share,
    object_to_topology,
    smallest_shares,
)
from cavvy.scheduler.packing import HostIndex

_OMISSIONS = 2  # the maximum number of omitted accelerators that a reason names
# The maximum number of offers for one job. Shared hosts that come later are added, because only the
# scheduler knows which of them are full.
_MANY = 20
_DEVICES = {
    Constraint.ACCELERATOR,
    Constraint.COUNT,
    Constraint.ACCELERATOR_MEMORY,
    Constraint.INSTANCE,
}
# The cooldown after a failure is shorter than this. A longer cooldown means that a person must
# first fix the cause.
_LONG = timedelta(hours=2)
_NO_PRICES: Mapping[str, Money] = {}

# A function that returns the reasons why an account of a provider cannot run a task; [] if it can.
Objections = Callable[[TaskSpec, str], Sequence[Objection]]


class OfferedMarket(Struct, frozen=True, kw_only=True):
    """The offers of the configured providers. `problems` contains a message for each provider that
    did not answer, or answered incompletely.

    `blind` contains the providers that did not report the locations of their volumes, `unlisted`
    those that have volumes and never report them, and `makers` those that make a volume of a task
    that states no size, see `explain_misplaced`. Before
    `restrict`, the market contains the offers, volumes and problems of all projects' accounts; each
    account is treated as a provider.
    """

    offers: Sequence[Offer]
    hosts: Sequence[Host] = ()
    volumes: Sequence[VolumeLocation] = ()
    blind: frozenset[str] = frozenset()
    unlisted: frozenset[str] = frozenset()
    makers: frozenset[str] = frozenset()
    problems: Sequence[SilentPlace] = ()
    policies: PolicyBook = field(default_factory=PolicyBook)
    credentials: CredentialBook = field(default_factory=CredentialBook)
    # why the price, memory or number of accelerators of an offer is probably wrong, by its key
    doubts: Mapping[str, str] = field(default_factory=dict)

    def explain_misplaced(self, task: TaskSpec, offer: Offer) -> Objection | None:
        """Return why nodes of the offer cannot use a volume of the task, or None."""
        return explain_misplaced(
            task, offer, self.volumes, self.blind, unlisted=self.unlisted, makers=self.makers
        )

    def restrict(self, project: str) -> "OfferedMarket":
        """Return the part of the market that a project's jobs may use: for each provider, the
        offers of the account that applies to the project.
        """
        if not self.credentials:
            return self

        def is_own(account: str) -> bool:
            return account == self.credentials.find_account(project, split_account(account)[0])

        def own_of(accounts: frozenset[str]) -> frozenset[str]:
            return frozenset(split_account(each)[0] for each in accounts if is_own(each))

        return replace(
            self,
            offers=[each for each in self.offers if is_own(each.account)],
            volumes=[
                replace(each, provider=split_account(each.provider)[0])
                for each in self.volumes
                if is_own(each.provider)
            ],
            blind=own_of(self.blind),
            unlisted=own_of(self.unlisted),
            makers=own_of(self.makers),
            problems=[
                SilentPlace(split_account(each.provider)[0], each.why)
                for each in self.problems
                if is_own(each.provider)
            ],
            credentials=CredentialBook(),
        )


class Candidates(Struct, frozen=True, kw_only=True):
    """The offers that a job may use now. If `offers` is empty, `reason` states why. `hopeless` is
    true if `offers` is empty and waiting cannot help. `unusable` is true if a provider that the job
    may use did not answer.
    """

    offers: tuple[Offer, ...] = ()
    reason: str = ""
    hopeless: bool = False
    unusable: bool = False
    bound: str = ""  # which hosts the task's volumes bind it to, for the reason of a wait
    again_at: datetime | None = None  # when a failed offer may be tried again
    plan_state: PlanState | None = None  # the decision of the deadline policy, if it made one


def find_candidates(
    job: JobRecord,
    market: OfferedMarket,
    matches: OfferMatches,
    objections: Objections,
    *,
    situation: PlanningContext,
    now: datetime,
) -> Candidates:
    """Select the offers that the job may use now. `matches` are the offers that fit the job."""
    if not matches.offers:
        return _none_fits(job.task, market, matches)
    able, reasons = _able(job, market, matches.offers, objections)
    if not able:
        reason = "; ".join(reasons) or _explain_groups(matches.offers)
        return _hopeless(job.task, market, reason)
    able = [offer for offer in able if not ends_before(job.task, offer, now)]
    if not able:
        reason = "every node that fits ends by itself before the time of limits.duration"
        return _hopeless(job.task, market, f"{reason}: set `checkpoint`, or a shorter time")
    allowed = (
        able if job.consented else [offer for offer in able if offer.rate.micros_per_hour == 0]
    )
    if not allowed:
        cheapest = min(offer.rate for offer in able)
        reason = (
            f"every offer that fits costs money (from {format_rate(cheapest)} a node), and "
            "the job has neither --yes nor a budget"
        )
        return _hopeless(
            job.task,
            market,
            f"{reason}: submit the job again with --yes, or set limits.budget",
        )
    best, ranked = order_offers(job.task, allowed, now=now, situation=situation)
    if not best:
        return _hopeless(job.task, market, _say(job.task, matches, ranked))
    fine = [each for each in best if not job.avoid or job.avoid.get(each.key, now) <= now]
    if fine:
        return Candidates(
            offers=(*fine[:_MANY], *(each for each in fine[_MANY:] if each.shared)),
            bound=say_bound(job.task, fine, market.volumes),
        )
    again_at = min(job.avoid[each.key] for each in best)
    why = job.setback or "every offer that fits failed recently"
    if again_at - now > _LONG:
        return _hopeless(job.task, market, why)
    return Candidates(
        reason=f"{why}; Cavvy tries again at {again_at:%H:%M:%S} UTC; "
        + say_checks(each.provider for each in best),
        again_at=again_at,
    )


def ends_before(task: TaskSpec, offer: Offer, now: datetime) -> bool:
    """Return whether the node ends before the task may, whose work would then be lost."""
    length = task.limits.duration
    if offer.ends_at is None or length is None or task.checkpoint is not None:
        return False
    return now + length + task.grace > offer.ends_at


def find_usable(
    job: JobRecord, market: OfferedMarket, matches: OfferMatches, objections: Objections
) -> Sequence[Offer]:
    """Return the offers that this job may use, cheapest first. The job's limits and recent failures
    are ignored.
    """
    able, _ = _able(job, market, matches.offers, objections)
    return able if job.consented else [offer for offer in able if offer.rate.micros_per_hour == 0]


def match(job: JobRecord, market: OfferedMarket) -> OfferMatches:
    """Return the offers that fit one node of the job. The result depends only on the job's
    resources.
    """
    return match_offers(market.offers, job.task.resources)


def _able(
    job: JobRecord, market: OfferedMarket, offers: Iterable[Offer], objections: Objections
) -> tuple[list[Offer], Sequence[str]]:
    """Return the offers on which the task could run if all nodes were idle, and the reasons for
    rejecting the other offers.
    """
    task, able, reasons = job.task, [], []
    doubted = 0
    policies = market.policies.find(task.project)
    verdicts: dict[str, Sequence[Objection]] = {}
    index = HostIndex(market.hosts)
    # Most checks give the same result for offers that differ only in their places. Own machines
    # have thousands of such offers.
    located = any(bound.policy.regions for bound in policies)
    passed: set[tuple[Offer, tuple[Host, ...]]] = set()
    for offer in smallest_shares(task, offers, market.hosts):
        verdict = verdicts.get(offer.provider)
        if verdict is None:
            verdict = verdicts[offer.provider] = objections(task, offer.account)
            reasons += [f"{offer.provider}: {reason}" for reason in verdict]
        if verdict:
            continue
        hosts = index.find(offer) if offer.shared else ()
        alike = offer if located else replace(offer, region="", zone=None)
        kind = alike, tuple(map(_shape_of, hosts if task.topology is None else ()))
        known = task.topology is None and kind in passed
        if not known and (shared := object_to_share(task, offer)):
            reasons.append(shared)
            continue
        if misfit := object_to_topology(task, offer, hosts, market.hosts):
            reasons.append(misfit)
            continue
        if not known and offer.shared and not fits_empty(task, offer, hosts):
            reasons.append(_too_many(task, offer))
            continue
        doubt = market.doubts.get(offer.key)
        if doubt and not names_instance(task.resources, offer):
            doubted += 1
            if doubted == 1:
                reasons.append(doubt)
            continue
        if misplaced := market.explain_misplaced(task, offer):
            reasons.append(f"{offer.provider}: {misplaced}")
            continue
        refusal = None if known else _refuse(task, offer, policies)
        if refusal:
            reasons.append(f"{offer.provider}: {refusal.reason}")
            continue
        able.append(offer)
        passed.add(kind)
    if doubted > 1:
        more = f"{doubted - 1} more offer{'s are' if doubted > 2 else ' is'} in doubt"
        reasons.append(f"{more}; `cavvy check PROVIDER` shows examples")
    return able, list(dict.fromkeys(reasons))


def _explain_groups(offers: Sequence[Offer]) -> str:
    """Return why a task with one node uses none of these offers, each of which is for several of a
    group of hosts."""
    names = ", ".join(dict.fromkeys(f"{each.provider} {each.instance_type}" for each in offers))
    return (
        f"No offer: only groups of hosts have what the task needs ({names}), and none of their "
        "hosts alone; set `nodes` to 2 or more, or request less for the node"
    )


def _refuse(task: TaskSpec, offer: Offer, policies: Sequence[BoundPolicy]) -> Objection | None:
    return explain_policy(policies, task, offer) or explain_unsuitable(task, offer)


def _shape_of(host: Host) -> Host:
    """Return what determines which jobs fit on the host while it is empty, for jobs that need no
    topology."""
    return replace(host, name="", devices=("",) * len(host.devices), labels=(), notes=())


def _too_many(task: TaskSpec, offer: Offer) -> str:
    """Return why a gang does not fit on a shared host. The reason states the size of the host."""
    need = task.resources.stated()
    need = replace(need, cpus_min=need.cpus_min or DEFAULT_CPUS)
    node = wish(need).removeprefix("node with ")
    there = (
        f"{offer.vcpus:g} CPU{'s' if offer.vcpus != 1 else ''} and "
        f"{format_memory(offer.memory_mib)}"
    )
    if task.nodes == 1:
        return f"{offer.key}: a node with {node} does not fit on this host, which has {there}"
    return (
        f"{offer.key}: {task.nodes} nodes with {node} each do not fit on this host at the same "
        f"time (the host has {there}); request fewer or smaller nodes"
    )


def _none_fits(task: TaskSpec, market: OfferedMarket, matches: OfferMatches) -> Candidates:
    if not matches.total and not market.problems:
        return Candidates(reason="no provider has an offer now; see `cavvy check`", unusable=True)
    need, names = task.resources, sorted({offer.provider for offer in market.offers})
    wanted = list_sellers(need.providers) or names
    if (unread := _list_silent(task, market)) and not set(wanted) & set(names):
        return Candidates(reason=f"{say_unread(unread)}; {_say_check(task, market)}", unusable=True)
    here = " and ".join(names)
    if need.providers and not any(offer.is_of(need.providers) for offer in market.offers):
        asked = " and ".join(need.providers)
        return _hopeless(
            task,
            market,
            f"No offer: the task allows only {asked} (resources.providers), but only these "
            f"providers have offers: {here}",
        )
    if not matches.misses and set(matches.rejected) <= _DEVICES:
        return _hopeless(
            task, market, f"No offer: none of the configured providers ({here}) has {wish(need)}"
        )
    return _hopeless(
        task, market, _say(task, matches, PlacementPlan(placements=(), considered=0, kept=0))
    )


def _say(task: TaskSpec, matches: OfferMatches, ranked: PlacementPlan) -> str:
    """Return one sentence, without a full stop, that explains why there is no offer and what to
    change.
    """
    return say_no_offer(task, explain([matches], ranked))


def say_unread(problems: Iterable[str]) -> str:
    """Return one sentence, without a full stop, about the offers that could not be read."""
    return f"Cavvy cannot read the offers: {'; '.join(problems)}"


def _list_silent(task: TaskSpec, market: OfferedMarket) -> list[str]:
    """Return the providers that the task may use but whose answers were incomplete, with the
    reasons.
    """
    asked = list_sellers(task.resources.providers)
    return [str(each) for each in market.problems if not asked or each.provider in asked]


def _say_check(task: TaskSpec, market: OfferedMarket) -> str:
    """Return which commands show more about the providers whose answers were incomplete."""
    asked = list_sellers(task.resources.providers)
    return say_checks(
        each.provider for each in market.problems if not asked or each.provider in asked
    )


def say_checks(names: Iterable[str]) -> str:
    """Return which commands show more about the state of these providers."""
    checks = [f"`cavvy check {name}`" for name in dict.fromkeys(names)]
    return f"{' and '.join(checks)} show{'s' if len(checks) == 1 else ''} more"


def list_omissions(need: ResourceSpec, hosts: Iterable[Host]) -> list[str]:
    """Return why hosts do not offer some of their accelerators, for example because the driver
    reports an error. Return [] if no accelerators are requested.
    """
    if not need.accelerators:
        return []
    allowed = [
        each for each in hosts if each.name.partition("/")[0] in list_sellers(need.providers)
    ]
    found = allowed if need.providers else hosts
    return [f"{host.name}: {note}" for host in found for note in host.notes]


def _hopeless(task: TaskSpec, market: OfferedMarket, reason: str) -> Candidates:
    """Return the `Candidates` for a task that no offer fits. The result is hopeless only if every
    provider that the job may use has answered, because a provider that did not answer may have an
    offer that fits.
    """
    if omitted := list_omissions(task.resources, market.hosts):
        names = [each.partition("/")[0] for each in omitted]
        reason = f"{reason}; {'; '.join(omitted[:_OMISSIONS])}; {say_checks(names)}"
    silent = _list_silent(task, market)
    if silent:
        told = f"{reason}; without a complete answer: {'; '.join(silent)}"
        return Candidates(reason=f"{told}; {_say_check(task, market)}", unusable=True)
    return Candidates(reason=reason, hopeless=True)


# A task with alternatives is treated as one task for each alternative. The job is placed with the
# alternative that got an offer, and keeps the other alternatives for its next attempt.


def tasks_of(task: TaskSpec) -> tuple[TaskSpec, ...]:
    """Return one task for each alternative, in the order of the task file."""
    if not task.resources.any_of:
        return (task,)
    return tuple(replace(task, resources=each) for each in task.resources.choices)


def jobs_of(job: JobRecord, tried: NodeRange | None = None) -> tuple[JobRecord, ...]:
    """Return one job for each alternative of its task and, if the job is elastic, for each size,
    the largest one first; with `tried`, for the sizes of this part of its range. Sizes that the
    program did not take are left out."""
    if job.task.elastic is None:
        sized: Sequence[TaskSpec] = (job.task,)
    else:
        sizes = (tried or job.task.elastic).list_sizes(job.most_next)
        sizes = [each for each in sizes if each not in job.untaken] or sizes
        sized = [replace(job.task, nodes=nodes) for nodes in sizes]
    if len(sized) == 1 and sized[0].nodes == job.task.nodes and not job.task.resources.any_of:
        return (job,)
    return tuple(replace(job, task=each) for task in sized for each in tasks_of(task))


def rank_candidates(
    found: Sequence[tuple[JobRecord, Candidates]],
    avoid: Collection[str] = (),
    egress: Mapping[str, Money] = _NO_PRICES,
) -> list[tuple[JobRecord, tuple[Offer, ...]]]:
    """Return the offers to try, best first, each with the job of its alternative.

    If the task states that its alternatives are ordered, all offers of an alternative come before
    the offers of the next alternative. If the alternatives are not ordered, the offers of all
    alternatives are merged by the expected cost of the work, as in `plan`. The offers of one
    alternative keep their order. The offers for a larger size of an elastic job come before those
    for smaller ones. `avoid` lists the offers that recently failed for other jobs, and
    `egress` contains each provider's price for outgoing data.
    """
    some = [(job, candidates.offers) for job, candidates in found if candidates.offers]
    if len(some) < 2 or some[0][0].task.resources.ordered:
        return some
    sizes = dict.fromkeys(job.task.nodes for job, _ in some)
    if len(sizes) > 1:
        parts = [[each for each in some if each[0].task.nodes == nodes] for nodes in sizes]
        return [row for part in parts for row in _merge_offers(part, avoid, egress)]
    return _merge_offers(some, avoid, egress)


def _merge_offers(
    some: Sequence[tuple[JobRecord, tuple[Offer, ...]]],
    avoid: Collection[str],
    egress: Mapping[str, Money],
) -> list[tuple[JobRecord, tuple[Offer, ...]]]:
    """Merge the offers of alternatives by the expected cost of the work."""
    orders = [order_of(job.task, avoid, egress) for job, _ in some]
    rows = [
        [(orders[at](offer), at, offer) for offer in offers] for at, (_, offers) in enumerate(some)
    ]
    merged = merge(*rows, key=lambda row: (row[0], row[1]))
    return [
        (some[at][0], tuple(row[2] for row in run))
        for at, run in groupby(merged, key=lambda row: row[1])
    ]


def join_reasons(reasons: Sequence[str]) -> str:
    """Join the reasons of all alternatives into one sentence."""
    told = list(dict.fromkeys(reason for reason in reasons if reason))
    return "; or ".join(told)


def merge_candidates(placed: Sequence[tuple[JobRecord, Candidates]]) -> Candidates:
    """Combine the candidates of all alternatives and sizes. The result is hopeless only if every
    one is hopeless. Of an elastic job that must wait, only the fewest nodes count in the reason:
    what keeps them from starting keeps more from it.
    """
    found = [each for _, each in placed]
    if len(found) == 1:
        return found[0]
    offers = tuple(offer for each in found for offer in each.offers)
    decided = [
        each.plan_state
        for each in found
        if each.plan_state is not None and (each.offers or not offers)
    ]
    stuck = [row for row in placed if not row[1].hopeless and not row[1].offers] or placed
    least = min(job.task.nodes for job, _ in stuck)
    waiting = [each for job, each in stuck if job.task.nodes == least]
    return Candidates(
        offers=offers,
        reason=join_reasons([each.reason for each in waiting]),
        bound=join_reasons([each.bound for each in found]),
        hopeless=all(each.hopeless for each in found),
        unusable=not offers and any(each.unusable for _, each in stuck),
        again_at=min((each.again_at for each in found if each.again_at is not None), default=None),
        plan_state=decided[0] if decided else None,
    )
