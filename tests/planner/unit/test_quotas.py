"""Quotas: what they leave of an offer, which tasks they reject, and what `cavvy nodes quota` prints."""

from datetime import UTC, datetime
from typing import Any

import pytest
from click.testing import CliRunner
from tests.unit.cli_client import FakeClient, client, make_quota

from cavvy.cli.main import cli
from cavvy.client import wire
from cavvy.domain.jobs import JobRecord
from cavvy.domain.offers import NEW_LIMIT, Offer, Quota, limit_offer
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.planner.candidates import Candidates, OfferedMarket, find_candidates, match
from cavvy.planner.objections import explain_quota
from cavvy.planner.placements import PlanningContext
from cavvy.planner.rank import plan

__all__ = ["client"]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
QUOTA = Quota(
    provider="cloud", name="GPU vCPUs", family="P", unit="vCPUs", region="a", limit=192, used=96
)
OFFER = Offer(
    provider="cloud", region="a", instance_type="p", vcpus=96, memory_mib=4096, rate=HourlyRate(9)
)


def look(nodes: int, *offers: Offer) -> Candidates:
    task = TaskSpec(name="t", run="true", nodes=nodes)
    job = JobRecord(
        id="j", project="p", name="n", task=task, submitted_at=NOW, since=NOW, consented=True
    )
    market = OfferedMarket(offers=offers)
    known = PlanningContext()
    return find_candidates(job, market, match(job, market), lambda *_: (), situation=known, now=NOW)


def test_use_is_subtracted_and_the_tightest_quota_counts() -> None:
    limited = limit_offer(OFFER, [(QUOTA, 96), (replace(QUOTA, name="all", limit=1000), 96)])
    assert (limited.capacity, limited.quota_nodes, limited.pool) == (1, 2, "quota GPU vCPUs")
    assert limited.limited_by == "the quota GPU vCPUs in a (96 of 192 vCPUs used, 96 left)"
    everywhere = replace(QUOTA, name="GPUs everywhere", region="", unit="GPUs", limit=8, used=8)
    limited = limit_offer(OFFER, [(QUOTA, 96), (everywhere, 8)])
    assert (limited.capacity, limited.quota_nodes) == (0, 1)
    assert limited.limited_by == "the quota GPUs everywhere (8 of 8 GPUs used, 0 left)"


def test_quotas_of_two_zones_are_two_pools() -> None:
    pools = [limit_offer(OFFER, [(replace(QUOTA, zone=zone), 96)]) for zone in ("a-1", "a-2")]
    assert [each.pool for each in pools] == ["quota GPU vCPUs a-1", "quota GPU vCPUs a-2"]
    assert pools[0].limited_by == "the quota GPU vCPUs in a-1 (96 of 192 vCPUs used, 96 left)"


def test_more_use_than_the_limit_leaves_nothing() -> None:
    assert limit_offer(OFFER, [(replace(QUOTA, used=500), 96)]).capacity == 0


def test_an_unknown_use_counts_as_none() -> None:
    limited = limit_offer(OFFER, [(replace(QUOTA, used=None), 96)])
    assert (limited.capacity, limited.limited_by) == (2, "the quota GPU vCPUs in a (192 vCPUs)")


def test_a_lower_capacity_of_the_provider_stays() -> None:
    small = replace(OFFER, capacity=1, pool="rack")
    text = str(QUOTA)
    limited = replace(small, quota_nodes=2, quota_text=text)
    assert limit_offer(small, [(QUOTA, 96)]) == limited
    assert limit_offer(OFFER, []) is OFFER
    assert limit_offer(OFFER, [(QUOTA, 0)]) is OFFER


def test_a_job_larger_than_the_quota_is_rejected_with_what_is_left() -> None:
    offer = limit_offer(OFFER, [(QUOTA, 96)])
    found = look(3, offer)
    assert found.hopeless
    assert found.reason == (
        "cloud: 3 nodes need more p than the quota GPU vCPUs in a (96 of 192 vCPUs used, 96 left) "
        "allows; `cavvy nodes quota cloud --request` prints the command that requests more"
    )
    other = replace(OFFER, instance_type="q", rate=HourlyRate(99))
    assert look(3, offer, other).offers == (other,)


def test_a_job_for_which_the_quota_is_in_use_waits_and_takes_other_offers_first() -> None:
    offer, other = limit_offer(OFFER, [(QUOTA, 96)]), replace(OFFER, instance_type="q")
    assert look(2, offer, replace(other, rate=HourlyRate(99))).offers[0].instance_type == "q"
    assert look(2, offer).offers == (offer,)
    assert explain_quota(TaskSpec(name="t", run="true", nodes=2), offer) is None
    (shown,) = plan(TaskSpec(name="t", run="true", nodes=2), [offer], now=NOW).placements
    assert not shown.available
    assert shown.notes[0] == (
        "only 1 of 2 nodes are free now, limited by the quota GPU vCPUs in a (96 of 192 vCPUs "
        "used, 96 left)"
    )


def test_a_quota_of_0_rejects_a_single_node() -> None:
    refusal = explain_quota(
        TaskSpec(name="t", run="true"), limit_offer(OFFER, [(replace(QUOTA, limit=0, used=0), 96)])
    )
    assert refusal is not None
    assert refusal.field == "resources"
    assert "a node needs more p than the quota GPU vCPUs in a (0 of 0 vCPUs used" in refusal.reason


def test_the_message_names_the_quota_that_allows_too_few_nodes() -> None:
    """Not the quota that leaves the fewest nodes now."""
    busy, low = (
        replace(QUOTA, name="busy", limit=960, used=864),
        replace(QUOTA, name="low", limit=192, used=0),
    )
    for capacity in (None, 1):
        offer = limit_offer(replace(OFFER, capacity=capacity), [(busy, 96), (low, 96)])
        refusal = explain_quota(TaskSpec(name="t", run="true", nodes=3), offer)
        assert refusal is not None
        assert "than the quota low in a (0 of 192 vCPUs used" in refusal.reason


def tell(client: FakeClient, monkeypatch: pytest.MonkeyPatch, *rows: wire.QuotaRow) -> None:
    untold = [wire.UntoldQuotas(provider="ssh", reason="Cavvy does not read quotas of it")]
    report = wire.QuotaReport(quotas=list(rows), untold=untold)
    monkeypatch.setattr(client, "quotas", lambda _: report, raising=False)


def run(*words: str) -> Any:
    return CliRunner().invoke(cli, ["quota", *words], prog_name="cavvy")


def test_the_table_hides_quotas_of_0_and_names_silent_providers(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(
        client,
        monkeypatch,
        make_quota(),
        make_quota(family="None yet", name="none", limit=0, left=0),
    )
    shown = run().stdout
    assert "Standard NDSH100v5 Family vCPUs" in shown
    assert "None yet" not in shown
    assert "1 quota has a limit of 0" in shown
    for words in ((), ("-o", "json"), ("--request",)):
        told = run(*words).stderr
        assert "note: the quotas of ssh are unknown: Cavvy does not read quotas of it" in told
    assert "None yet" in run("--all").stdout
    assert "None yet" in run("--family", "none").stdout
    assert "None yet" not in run("--family", "NDSH100").stdout
    assert "eastus" not in run("--region", "westeurope").stdout


def test_the_table_has_zones_only_if_a_quota_is_for_one(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(client, monkeypatch, make_quota())
    assert "ZONE" not in run().stdout
    tell(client, monkeypatch, make_quota(), make_quota(zone="AD-1"))
    head, whole, part = run().stdout.splitlines()
    assert head.split()[:3] == ["PROVIDER", "REGION", "ZONE"]
    assert (whole.split()[2], part.split()[2]) == ("-", "AD-1")


def test_requests_are_the_providers_commands_with_the_wanted_limit(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(client, monkeypatch, make_quota())
    assert run("--request").stdout == f"az quota update --limit-object value={NEW_LIMIT}\n"
    assert run("azure", "--request", "--to", "192").stdout.endswith("value=192\n")
    none = run("--request", "--family", "nothing")
    assert none.exit_code == 1
    assert "no quota is selected" in none.stderr
