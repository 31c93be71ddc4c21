"""The bill of a gang that ran for an hour, as the control plane makes and audits it."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from tests.records import make_attempt_record

from cavvy.control.decide.bills import BillVerdict, audit_bill, bill_gang
from cavvy.domain.events import Charge, ChargeKind
from cavvy.providers.base import GangSpec, GangState, NodeSeen
from cavvy.providers.contract import ContractHarness

MINUTE = timedelta(minutes=1)


async def run_for_an_hour(account: Any, harness: ContractHarness, gang: GangSpec) -> None:
    await harness.launch(gang)
    for _ in range(60):
        await account.wait(MINUTE)
        await harness.ours.gangs()


async def bill_each_node(
    account: Any, harness: ContractHarness, gang: GangSpec
) -> Sequence[tuple[NodeSeen, timedelta, Mapping[ChargeKind, Charge]]]:
    """Remove the gang; its nodes, how long each is billed, and its charges by kind."""
    await harness.remove(gang.name)
    (seen,) = await harness.ours.gangs(gang.name)
    assert seen.state is GangState.ENDED
    now = account.cloud.time
    attempt = make_attempt_record(now, gang.offer, gang=gang.name, nodes=gang.nodes)
    charges = bill_gang(attempt, seen, now, final=True)
    assert audit_bill(attempt, seen, charges).verdict is BillVerdict.AGREES
    found = []
    for rank, node in enumerate(seen.nodes):
        assert node.started_at is not None
        assert node.ended_at is not None
        length = node.ended_at - node.started_at
        assert length >= 55 * MINUTE
        found.append((node, length, {each.kind: each for each in charges if each.rank == rank}))
    return found
