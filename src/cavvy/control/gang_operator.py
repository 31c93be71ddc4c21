"""Carries out decisions about gangs at their providers: polls gangs, launches them and removes
them."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from cavvy.control.agents.leases import first_lease
from cavvy.control.agents.sessions import AgentSessions
from cavvy.control.clock import ControlClock
from cavvy.control.decide.attempt import POLL, REMOVE_AGAIN, AdvanceAttempt
from cavvy.control.decide.attempt_snapshot import AttemptSnapshot, GangAbsence, Seen, shorten
from cavvy.control.decide.bills import accrue, find_accrual_pause, is_accrual_due
from cavvy.control.decide.looks import (
    FIRST_LOOK,
    GangLook,
    after_look,
    after_move,
    first_look,
    is_look_due,
    note_failed_removal,
    note_wait,
)
from cavvy.control.decide.losses import RepairGang, explain_restart
from cavvy.control.decide.repair import repair_gang
from cavvy.control.decide.rows import JobRows, RowChanges, make_event
from cavvy.control.decide.transitions import advance_attempt
from cavvy.control.provider_pool import ProviderPool
from cavvy.domain.events import Charge
from cavvy.domain.gangs import GangSeen
from cavvy.domain.jobs import Attempt, AttemptOutcome, AttemptPhase, FailureKind, Node
from cavvy.domain.tasks import VolumeKind
from cavvy.domain.values import Struct, replace
from cavvy.providers.base import AgentEndpoint, GangSpec, NoCapacity, Refused, TryAgain
from cavvy.spec.support import read_options
from cavvy.store.sql import Store


class GangOperatorDependencies(Struct, frozen=True, kw_only=True):
    """Services that the gang operator needs."""

    pool: ProviderPool
    agents: AgentSessions
    installation: str
    # returns the server's address for the agents of a gang
    agent_endpoint: Callable[[str], AgentEndpoint]


class GangOperator:
    """Calls the providers, and remembers the last poll of each gang. After a restart, all gangs are
    polled again.
    """

    def __init__(
        self, store: Store, clock: ControlClock, dependencies: GangOperatorDependencies
    ) -> None:
        self._store = store
        self._clock = clock
        self._out = dependencies
        self._started_at = clock.now()
        self._looks: dict[str, GangLook] = {}  # by gang
        self._jobs: dict[str, str] = {}  # the IDs of the jobs of the polled gangs, by gang

    @property
    def looks(self) -> Mapping[str, GangLook]:
        """The known facts about each gang, by the gang's name."""
        return self._looks

    def start_over(self) -> None:
        """Forget the results of all polls of gangs. This must be called when the share of the gangs
        that this server manages has changed, because another server may have acted on the new
        gangs.
        """
        self._started_at = self._clock.now()
        self._looks.clear()
        self._jobs.clear()

    @property
    def accrual_pause(self) -> timedelta:
        """The time between two writes of what a running node costs that no budget limits."""
        reports = self._out.agents.gathered
        return find_accrual_pause(reports.agents if reports.is_alone() else 0)

    def afford(self, attempt: Attempt, pays: timedelta | None) -> None:
        """Record how long the rest of the job's budget lasts at the current price, or None if
        nothing limits the job.
        """
        if self._look(attempt).pays != pays:
            self._change(attempt, pays=pays)

    def find_job(self, gang: str) -> str | None:
        """Return the ID of the gang's job, or None if this server has not polled the gang, or has
        seen the gang's attempt end.
        """
        return self._jobs.get(gang)

    def look_now(self, gang: str) -> None:
        """Poll the gang before its next decision, because the gang's provider has signalled a
        change."""
        if gang in self._looks:
            self._looks[gang] = replace(self._looks[gang], looked_at=None, fresh=False)

    def note(self, attempt: Attempt) -> None:
        """Drop the state of the attempt's gang if the attempt has ended. Callers write the attempt
        to the store before they call `note`.
        """
        if attempt.phase is AttemptPhase.ENDED:
            self._looks.pop(attempt.gang, None)
            self._jobs.pop(attempt.gang, None)
            self._out.agents.forget(attempt)

    def is_look_due(self, attempt: Attempt) -> bool:
        delay = self._visibility_delay(attempt)
        return is_look_due(attempt, self._look(attempt), delay, self._clock.now())

    def find_seen(self, attempt: Attempt, *, divided: bool) -> GangSeen | None:
        """Return how the last poll found the gang, or None if it did not, or if something follows
        from the poll: charges that are due, or an end of the budget.
        """
        look = self._look(attempt)
        seen = look.seen if isinstance(look.seen, GangSeen) else None
        due = look.trouble or look.pays is not None or not look.fresh
        due = due or is_accrual_due(attempt, look, divided=divided, pause=self.accrual_pause)
        return None if due else seen

    async def observe(self, attempt: Attempt) -> bool:
        """Poll the gang if a poll is due. Return whether it was polled."""
        if not self.is_look_due(attempt):
            return False
        look, at = self._look(attempt), self._clock.now()
        # Set these before the poll, so that a signal during the poll leads to another poll.
        self._looks[attempt.gang] = replace(look, looked_at=at, fresh=True)
        self._jobs[attempt.gang] = attempt.job_id
        seen: Seen = GangAbsence.UNKNOWN
        trouble = ""
        try:
            seen = await self._out.pool.look(attempt.offer.account, attempt.gang)
        except (TryAgain, Refused) as error:
            trouble = str(error)
        self._looks[attempt.gang] = after_look(self._look(attempt), seen, at, trouble)
        return True

    async def accrue(self, rows: JobRows, attempt: Attempt, *, divided: bool = False) -> RowChanges:
        """Return the charges that must be written now. The bills of replicas are `divided`. For a
        warm gang, the result also contains the attempt's row: if a job takes over the gang before
        the charges are written, the write then fails.
        """
        pause = self.accrual_pause
        if not is_accrual_due(attempt, self._look(attempt), divided=divided, pause=pause):
            return RowChanges()
        stored = await self._store.charges(attempt.job_id)
        nodes = rows.nodes_of(attempt)
        look = self._look(attempt)
        charges, self._looks[attempt.gang] = accrue(
            attempt, look, stored, nodes, divided=divided, pause=pause
        )
        kept = charges and attempt.phase is AttemptPhase.KEPT
        return RowChanges(charges=charges, attempts=(attempt,) if kept else ())

    def note_wait(self, rows: JobRows, attempt: Attempt) -> RowChanges:
        return note_wait(rows, attempt, self._look(attempt), self._clock.now())

    def view(self, rows: JobRows, attempt: Attempt) -> AttemptSnapshot:
        """Return the inputs of a decision about the attempt."""
        look = self._look(attempt)
        return AttemptSnapshot(
            job=rows.job,
            attempt=attempt,
            nodes=tuple(self._heard(attempt, node) for node in rows.nodes_of(attempt)),
            seen=look.seen,
            trouble=look.trouble,
            visibility_delay=self._visibility_delay(attempt),
            listening_since=self._started_at,
            asked=look.doubt,
            removed_at=look.removed_at,
            unsure=look.unsure,
            denied=look.denied,
            sold_out=look.sold_out,
            replaces=self._out.pool.can_replace(attempt.offer.account),
            requested=look.requested,
            spent=rows.spent,
            pays=look.pays,
        )

    async def launch(self, rows: JobRows, attempt: Attempt) -> AdvanceAttempt | None:
        """Request the gang from the provider. Return None if the provider gave no clear answer."""
        asked = replace(
            self._look(attempt),
            requested=True,
            doubt=True,
            fresh=False,
            seen=GangAbsence.UNKNOWN,
            denied=False,
            sold_out="",
        )
        self._looks[attempt.gang] = asked
        self._jobs[attempt.gang] = attempt.job_id  # the provider may signal before the first poll
        try:
            await self._out.pool.launch(await self._make_spec(rows, attempt), attempt.repairs)
        except NoCapacity as error:
            if attempt.repairs:  # the other nodes wait for capacity
                trouble, now = shorten(str(error)), self._clock.now()
                self._change(attempt, sold_out=trouble, looked_at=now, trouble=trouble)
                return None
            reason = f"no capacity at {attempt.offer.key}: {error}"
            return self._deny(attempt, AttemptOutcome.CAPACITY, reason)
        except Refused as error:
            reason = f"{attempt.offer.provider} refused: {error}"
            return self._deny(attempt, AttemptOutcome.REFUSED, reason, error.kind)
        except TryAgain as error:
            # the launch may still succeed, so the next poll is not made at once
            trouble = shorten(str(error))
            self._change(attempt, unsure=True, looked_at=self._clock.now(), trouble=trouble)
            return None
        at = self._clock.now() - POLL + FIRST_LOOK
        self._change(attempt, doubt=False, looked_at=at, trouble="")
        reason = "the provider accepted the launch"
        return AdvanceAttempt(phase=AttemptPhase.BOOTING, reason=reason)

    def has_seen(self, rows: JobRows, attempt: Attempt) -> bool:
        """Return whether a poll has found the gang after all ranks had ended their work."""
        told_at = self._look(attempt).told_at
        ends = [node.exited_at for node in rows.nodes_of(attempt) if node.exited_at is not None]
        return told_at is not None and all(at <= told_at for at in ends)

    async def repair(self, rows: JobRows, attempt: Attempt, action: RepairGang) -> RowChanges:
        """Let the job's next attempt take over the gang and replace its lost nodes. The result of
        the last poll is forgotten, because it shows the lost nodes.
        """
        stored = await self._store.charges(attempt.job_id)
        heard = [self._heard(attempt, node) for node in rows.nodes_of(attempt)]
        rows = replace(rows, nodes={**rows.nodes, attempt.id: heard})
        changes = repair_gang(rows, attempt, action, self._look(attempt), stored, self._clock.now())
        self._looks.pop(attempt.gang, None)
        return changes

    async def remove(self, rows: JobRows, attempt: Attempt) -> RowChanges:
        """Request the gang's removal from the provider. A failed request is repeated sooner than an
        accepted request that had no effect. Return an event if the removal keeps failing.
        """
        now, failed = self._clock.now(), self._look(attempt).failed_removals
        try:
            account, release = attempt.offer.account, rows.job.released
            await self._out.pool.remove(account, attempt.gang, release=release)
        except (TryAgain, Refused) as error:
            at = now - REMOVE_AGAIN + POLL
            self._change(attempt, removed_at=at, fresh=False, failed_removals=failed + 1)
            return note_failed_removal(rows, attempt, self._look(attempt), str(error), now)
        self._change(attempt, removed_at=now, fresh=False, failed_removals=0)
        return RowChanges()

    async def advance(self, rows: JobRows, number: int, action: AdvanceAttempt) -> RowChanges:
        """Move the attempt to its next phase. A gang that will be kept warm is polled first,
        because its charges depend on the poll.
        """
        attempt, now = rows.attempts[number], self._clock.now()
        self._looks[attempt.gang] = look = after_move(self._look(attempt), action.phase)
        if action.phase is AttemptPhase.KEPT and look.told is None:
            await self.observe(attempt)
        stored: Sequence[Charge] = ()
        if action.phase is AttemptPhase.ENDED:
            stored = await self._store.charges(attempt.job_id)
            heard = [self._heard(attempt, node) for node in rows.nodes_of(attempt)]
            rows = replace(rows, nodes={**rows.nodes, attempt.id: heard})
        changes = advance_attempt(rows, attempt, action, self._look(attempt), now, stored)
        return changes.then(self._explain_restart(rows, attempt, action))

    def _explain_restart(
        self, rows: JobRows, attempt: Attempt, action: AdvanceAttempt
    ) -> RowChanges:
        """Return the event that says why the nodes that a gang has left are not kept."""
        why, nodes = self._out.pool.why_not_replace(attempt.offer.account), rows.nodes_of(attempt)
        ends = action.phase is AttemptPhase.ENDING
        told = self._look(attempt).told
        if not (why and ends and explain_restart(rows.job, attempt, nodes, told, action.outcome)):
            return RowChanges()
        text = f"{why}; all {attempt.nodes} nodes are released and requested again"
        event = make_event(rows.job, self._clock.now(), "no-repair", text, attempt.number)
        return RowChanges(events=(event,))

    def _deny(
        self,
        attempt: Attempt,
        outcome: AttemptOutcome,
        reason: str,
        failure: FailureKind | None = None,
    ) -> AdvanceAttempt:
        self._change(attempt, denied=True)
        return AdvanceAttempt(
            phase=AttemptPhase.ENDING, reason=reason, outcome=outcome, failure=failure
        )

    async def _make_spec(self, rows: JobRows, attempt: Attempt) -> GangSpec:
        job, task = rows.job, rows.job.task
        shared = attempt.offer.shared
        allocations = await self._store.allocations_of(attempt.gang) if shared else ()
        longest = task.limits.duration if task.machine is None else None
        spec = GangSpec(
            name=attempt.gang,
            installation=self._out.installation,
            offer=attempt.offer,
            nodes=attempt.nodes,
            round=attempt.number,
            renews=bool(attempt.repairs),
            agent_endpoint=self._out.agent_endpoint(attempt.gang),
            lease=first_lease(job, attempt, rows.spent),
            longest=longest and max(timedelta(0), longest - rows.ran(self._clock.now())),
            allocations=tuple(allocations),
            labels={**task.tags, "project": job.project, "job": job.name},
            user=job.user,
            params=task.params,
            inputs=task.inputs,
            volumes=[  # the agent mounts folders of the node itself
                each for each in task.volumes if each.kind is not VolumeKind.FOLDER
            ],
            grace=task.grace,
            disk_gib=task.resources.disk_gib,
            disk_type=task.resources.disk_type,
            network=task.resources.network,
            topology=task.topology if attempt.nodes > 1 else None,
            options=read_options(task.resources, attempt.offer.provider),
            env=task.env,
            image=task.image,
        )
        if not spec.renews:
            return spec
        return replace(spec, agent_endpoint=self._out.agent_endpoint(spec.token_name))

    def _look(self, attempt: Attempt) -> GangLook:
        known = self._looks.get(attempt.gang)
        return first_look(attempt, self._started_at) if known is None else known

    def _change(self, attempt: Attempt, **changes: object) -> None:
        look = self._look(attempt)
        self._looks[attempt.gang] = replace(look, **changes)  # type: ignore[arg-type]  # fields

    def _visibility_delay(self, attempt: Attempt) -> timedelta:
        return self._out.pool.visibility_delay(attempt.offer.account)

    def _heard(self, attempt: Attempt, node: Node) -> Node:
        """Return the node with `heard_at` set to the time of the last message that this process
        received from the node's agent.
        """
        heard = self._out.agents.heard(attempt.id, node.rank)
        return replace(node, heard_at=max(heard, node.heard_at or heard)) if heard else node
