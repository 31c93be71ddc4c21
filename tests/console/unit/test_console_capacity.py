"""The console's page about markets and quotas."""

import html
import re
import time
from datetime import timedelta
from typing import Any

import pytest
from tests.console_rig import HOSTILE_TEXTS, NOW, CannedClient, sign_in

from cavvy.client import ApiError, wire
from cavvy.client.transport import HttpAnswer
from cavvy.console.memory import PAGE_S


def market(key: str = "aws/us/us-a/p5:8/spot", **fields: Any) -> wire.MarketListing:
    usual = {
        "market": key,
        "granted": 7,
        "refused": 2,
        "refused_at": NOW - timedelta(hours=1),
        "lives": 7,
        "taken": 3,
        "failed": 1,
        "node_hours": 42.25,
        "boots": 7,
        "boot_s": 90.0,
        "preemptions_per_hour": 0.071,
    }
    return wire.MarketListing(**usual | fields)


def quota(**fields: Any) -> wire.QuotaRow:
    usual = {
        "provider": "aws",
        "region": "us-east-1",
        "family": "P",
        "name": "Running P instances",
        "unit": "vCPUs",
        "purchase": "spot",
        "limit": 384.0,
        "used": 192.0,
        "left": 192.0,
        "request": "aws service-quotas ...",
    }
    return wire.QuotaRow(**usual | fields)


def report(*quotas: wire.QuotaRow) -> wire.QuotaReport:
    untold = [wire.UntoldQuotas(provider="gcp", reason="no permission")]
    return wire.QuotaReport(quotas=list(quotas), untold=untold)


def words(page: str) -> str:
    return html.unescape(" ".join(re.sub(r"<[^>]+>", " ", page).split()))


def test_markets_are_listed_and_searched() -> None:
    found = [market("local/here/cpu:0/on-demand", granted=1, refused=0, boots=0), market()]
    client = CannedClient({"/v1/markets": found})
    browser = sign_in(client)
    text = words(browser.get("/capacity").text)
    assert "p5, 8 GPUs aws us-a, spot 7 2 0.071 3 1 1m30s 42.2 1h00m ago" in text
    assert "cpu local here, on-demand 1 0 – 3 1 – 42.2" in text
    assert text.index("p5, 8 GPUs") < text.index("cpu local"), "the most used comes first"
    assert "p5, 8" not in words(browser.get("/capacity?text=LOCAL").text)
    assert "No market matches." in browser.get("/capacity?text=nothing").text
    assert client.asked == ["GET /v1/markets"], "once a minute, and no quotas"


def test_quotas_are_requested_only_if_the_user_asks_for_them() -> None:
    rows = [quota(), quota(family="G", limit=0.0, used=None, left=None)]
    client = CannedClient({"/v1/markets": [], "/v1/quotas": report(*rows)})
    browser = sign_in(client)
    assert "/capacity?quotas=all" in browser.get("/capacity").text
    browser.get("/capacity?quotas=all", headers={"sec-fetch-dest": "empty"})
    assert "GET /v1/quotas" not in client.asked, "updates do not show the quotas"
    text = words(browser.get("/capacity?quotas=all").text)
    assert "aws us-east-1 P spot 384 192 192 vCPUs" in text
    assert "1 quota has a limit of 0 and no row" in text
    assert "The quotas of gcp are unknown: no permission" in text
    assert "G spot 0 – – vCPUs" in words(browser.get("/capacity?quotas=all&text=g").text)
    assert client.asked.count("GET /v1/quotas") == 1


def test_quotas_have_more_time_than_other_answers() -> None:
    limits: dict[str, float] = {}

    class TimedClient(CannedClient):
        def send(self, method: str, target: str, *arguments: Any, **named: Any) -> HttpAnswer:
            assert self.until is not None
            limits[target] = self.until - time.monotonic()
            return super().send(method, target, *arguments, **named)

        def sibling(self) -> "TimedClient":
            return TimedClient(self.answers, self.asked)

    browser = sign_in(TimedClient({"/v1/markets": [], "/v1/quotas": report(), "/v1/nodes": []}))
    browser.get("/capacity?quotas=all")
    browser.get("/machines")
    assert limits["/v1/quotas"] > 50, "the providers may take a minute"
    assert limits["/v1/nodes"] <= PAGE_S, "the next page has the usual limit"


@pytest.mark.parametrize("status", [403, 503, 0])
def test_quotas_that_cannot_be_read_leave_the_markets(status: int) -> None:
    refusal = ApiError("problem", "the providers are silent", "", status)
    client = CannedClient({"/v1/markets": [market()], "/v1/quotas": refusal})
    page = sign_in(client).get("/capacity?quotas=all")
    assert page.status_code == 200
    assert "The quotas cannot be shown: the providers are silent." in words(page.text)
    assert "p5, 8 GPUs" in words(page.text)


def test_markets_that_the_user_may_not_see() -> None:
    refusal = ApiError("role-needed", "no role in the installation", "", 403)
    text = words(sign_in(CannedClient({"/v1/markets": refusal})).get("/capacity").text)
    assert "The markets cannot be shown: no role in the installation." in text


def test_long_tables_are_cut_and_say_so() -> None:
    found = [market(f"aws/us/p{number}:8/spot") for number in range(320)]
    text = words(sign_in(CannedClient({"/v1/markets": found})).get("/capacity").text)
    assert "20 more markets match." in text


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_texts_of_providers_are_shown_as_they_are(text: str) -> None:
    rows = report(quota(provider=text, family=text, name=text, unit=text))
    client = CannedClient({"/v1/markets": [market(text)], "/v1/quotas": rows})
    page = sign_in(client).get("/capacity", params={"quotas": "all", "text": text}).text
    assert text not in page
    assert html.unescape(page).count(text) >= 7
