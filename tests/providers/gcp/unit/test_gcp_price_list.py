"""Google's list of prices: the sum of a machine's parts, and commitments beside it.

The prices of A2's parts are Google's for us-central1; their sum is the catalog's own price of
a2-highgpu-1g. The commitments of T4 are Google's, too (SKUs 75EB-68C0-259C and A360-7A19-4436).
"""

import json
import threading
from collections.abc import Iterator, Mapping
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner

from cavvy.cli.main import cli
from cavvy.domain.offers import Offer, Purchase
from cavvy.providers import prices
from cavvy.providers.gcp.price_list import GcpPrices
from cavvy.providers.prices import NeedsLogin, PriceError, PriceQuery
from cavvy.store.snapshot import CatalogSnapshot
from cavvy.store.snapshot.choose import SHIPPED

TODAY = date(2026, 11, 23)
ON_DEMAND, SPOT, YEAR, YEARS = "OnDemand", "Preemptible", "Commit1Yr", "Commit3Yr"


def sku(description: str, usage: str, dollars: str, unit: str = "h") -> dict[str, object]:
    """One SKU in the documented form: https://cloud.google.com/billing/v1/how-tos/catalog-api."""
    units, _, rest = dollars.partition(".")
    price = {"currencyCode": "USD", "units": units, "nanos": int(rest.ljust(9, "0"))}
    expression = {
        "usageUnit": unit,
        "displayQuantity": 1,
        "tieredRates": [{"startUsageAmount": 0, "unitPrice": price}],
    }
    return {
        "name": "services/6F81-5844-456A/skus/0000-0000-0000",
        "description": description,
        "category": {"serviceDisplayName": "Compute Engine", "usageType": usage},
        "serviceRegions": ["us-central1"],
        "pricingInfo": [{"pricingExpression": expression}],
    }


SKUS = [
    sku("A2 Instance Core running in Americas", ON_DEMAND, "0.031611"),
    sku("A2 Instance Ram running in Americas", ON_DEMAND, "0.004237", "GiBy.h"),
    sku("Nvidia Tesla A100 GPU running in Americas", ON_DEMAND, "2.933908"),
    sku("Nvidia Tesla A100 80GB GPU running in Americas", ON_DEMAND, "3.92808"),
    sku("Nvidia Tesla A100 80GB GPU attached to DWS Defined Duration VMs in X", ON_DEMAND, "1.0"),
    sku("SSD backed Local Storage", ON_DEMAND, "0.08", "GiBy.mo"),
    # Google puts the local SSDs of spot machines into the wrong category
    sku("SSD backed Local Storage attached to Spot Preemptible VMs", ON_DEMAND, "0.03", "GiBy.mo"),
    sku("Spot Preemptible A2 Instance Core running in Americas", SPOT, "0.01"),
    sku("Spot Preemptible A2 Instance Ram running in Americas", SPOT, "0.001", "GiBy.h"),
    sku("Nvidia Tesla A100 GPU attached to Spot Preemptible VMs running in Americas", SPOT, "1.0"),
    sku("Commitment v1: A2 Cpu in Americas for 1 Year", YEAR, "0.02"),
    sku("Commitment v1: A2 Ram in Americas for 1 Year", YEAR, "0.002", "GiBy.h"),
    sku("Commitment v1: Nvidia Tesla A100 GPU running in Americas for 1 Year", YEAR, "2.0"),
    sku("N1 Predefined Instance Core running in Americas", ON_DEMAND, "0.031611"),
    sku("N1 Predefined Instance Ram running in Americas", ON_DEMAND, "0.004237", "GiBy.h"),
    sku("Nvidia Tesla T4 GPU running in Americas", ON_DEMAND, "0.35"),
    sku("Commitment v1: Cpu in Americas for 1 Year", YEAR, "0.019915"),
    sku("Commitment v1: Ram in Americas for 1 Year", YEAR, "0.002669", "GiBy.h"),
    sku("Commitment v1: Nvidia Tesla T4 GPU running in Americas for 1 Year", YEAR, "0.22"),
    sku("Commitment v1: Cpu in Americas for 3 Year", YEARS, "0.014225"),
    sku("Commitment v1: Ram in Americas for 3 Year", YEARS, "0.001907", "GiBy.h"),
    sku("Commitment v1: Nvidia Tesla T4 GPU running in Americas for 3 Years", YEARS, "0.16"),
    sku("Licensing Fee for Windows Server on VM with 4 VCPU", ON_DEMAND, "9.0"),
    sku("Network Internet Egress from Americas to China", ON_DEMAND, "0.2", "GiBy"),
]


class Handler(BaseHTTPRequestHandler):
    """Serves the SKUs in pages of seven, to requests with the key."""

    def do_GET(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        if self.headers["X-Goog-Api-Key"] != "a-key":
            self.send_error(403)
            return
        start = int(asked.get("pageToken", ["0"])[0])
        told: dict[str, object] = {"skus": SKUS[start : start + 7], "nextPageToken": ""}
        if start + 7 < len(SKUS):
            told["nextPageToken"] = str(start + 7)
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{served.server_address[1]}"
    served.shutdown()
    served.server_close()
    thread.join()


@pytest.fixture(scope="module")
def machines() -> Mapping[str, Offer]:
    with CatalogSnapshot.open(SHIPPED) as shipped:
        return shipped.machines("gcp")


def fetch(server: str, machines: Mapping[str, Offer]) -> dict[tuple[str, str, int], int]:
    query = PriceQuery(
        machines=machines, today=TODAY, progress=lambda _: None, pause=lambda _: None
    )
    told = GcpPrices(base=server).fetch(query)
    assert not told.complete
    return {
        (each.instance_type, str(each.purchase), each.term_months): each.rate.micros_per_hour
        for each in told.offers
    }


def test_a_machine_costs_the_sum_of_its_parts(
    server: str, machines: Mapping[str, Offer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_API_KEY", "a-key")
    found = fetch(server, machines)
    assert found["a2-highgpu-1g", "on-demand", 0] == 3_673_385
    assert found["a2-highgpu-8g", "on-demand", 0] == 8 * 3_673_385
    assert found["a2-highgpu-1g", "spot", 0] == 120_000 + 85_000 + 1_000_000
    # A2 Ultra has a local SSD for each GPU
    assert found["a2-ultragpu-1g", "on-demand", 0] == pytest.approx(5_068_798, abs=2)
    assert ("a2-ultragpu-1g", "spot", 0) not in found, "a part without a spot price"
    assert not [key for key in found if key[0].startswith(("tpu-", "a3-mega", "e2-", "n2-"))]


def test_commitments_of_one_and_three_years_are_read(
    server: str, machines: Mapping[str, Offer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_API_KEY", "a-key")
    found = fetch(server, machines)
    assert found["a2-highgpu-1g", "reserved", 12] == 240_000 + 170_000 + 2_000_000
    assert ("a2-highgpu-1g", "reserved", 36) not in found
    assert found["n1-standard-4-t4x1", "reserved", 12] == 4 * 19_915 + 15 * 2_669 + 220_000
    assert found["n1-standard-4-t4x1", "reserved", 36] == 4 * 14_225 + 15 * 1_907 + 160_000


def test_refusals_and_other_replies_name_the_remedy(
    server: str, machines: Mapping[str, Offer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_API_KEY", "a-wrong-key")
    with pytest.raises(NeedsLogin, match=r"HTTP 403.*GOOGLE_API_KEY"):
        fetch(server, machines)
    monkeypatch.setenv("GOOGLE_API_KEY", "a-key")
    with pytest.raises(PriceError, match="no price of a known machine"):
        fetch(server, {})


def test_a_refresh_adds_google_s_commitments_and_keeps_its_other_prices(
    server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path))
    monkeypatch.setenv("GOOGLE_API_KEY", "a-key")
    monkeypatch.setattr(prices, "list_sources", lambda: {"gcp": GcpPrices(base=server)})
    with CatalogSnapshot.open() as old:
        before = {each.key: each for each in old.all_offers() if each.provider == "gcp"}
    run = CliRunner()
    done = run.invoke(cli, ["catalog", "refresh", "--provider", "gcp"], prog_name="cavvy")
    assert done.exit_code == 0, done.output
    with CatalogSnapshot.open() as new:
        after = {each.key: each for each in new.all_offers() if each.provider == "gcp"}
        missing = new.unpriced()
    assert before.keys() < after.keys(), "no machine is lost"
    added = [each for key, each in after.items() if key not in before]
    assert {(each.purchase, each.term_months) for each in added} == {
        (Purchase.RESERVED, 12),
        (Purchase.RESERVED, 36),
    }
    assert {each.as_of for each in added if "Cloud Billing" in each.source} != {None}
    assert ("gcp", Purchase.SPOT) not in missing
    shown = run.invoke(
        cli, ["offers", "--instance", "n1-standard-4-t4x1", "--reserved", "3y", "-o", "json"]
    )
    (offer,) = [each for each in json.loads(shown.stdout) if each["purchase"] == "reserved"]
    assert offer["term_months"] == 36
    assert offer["price_usd_hr"] == pytest.approx(0.245505)
