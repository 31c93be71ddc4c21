"""EC2's public price files, as a web server without credentials serves them."""

import json
import threading
from collections.abc import Iterator
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from cavvy.domain.offers import Purchase
from cavvy.domain.units import parse_rate
from cavvy.providers.aws.prices import AwsPrices
from cavvy.providers.base import Refused
from cavvy.providers.prices import NeedsLogin, PriceError, PriceQuery
from cavvy.store.snapshot import CatalogSnapshot
from cavvy.store.snapshot.choose import SHIPPED

HEAD = (
    "SKU,TermType,Unit,PricePerUnit,Currency,LeaseContractLength,PurchaseOption,OfferingClass,"
    "Instance Type,Tenancy,Operating System,CapacityStatus,Pre Installed S/W,MarketOption"
)
LINUX = "Shared,Linux,Used,NA,OnDemand"
ROWS = f"""\
"FormatVersion","v1.0"
"Publication Date","2026-11-20T00:00:00Z"
"OfferCode","AmazonEC2"
{HEAD}
A,OnDemand,Hrs,0.5260000000,USD,,,,g4dn.xlarge,{LINUX}
A,Reserved,Hrs,0.3310000000,USD,1yr,No Upfront,standard,g4dn.xlarge,{LINUX}
A,Reserved,Hrs,0.2270000000,USD,3 yr,No Upfront,standard,g4dn.xlarge,{LINUX}
A,Reserved,Quantity,1900,USD,1yr,All Upfront,standard,g4dn.xlarge,{LINUX}
A,Reserved,Hrs,0.0000000000,USD,1yr,All Upfront,standard,g4dn.xlarge,{LINUX}
A,Reserved,Hrs,0.3700000000,USD,1yr,No Upfront,convertible,g4dn.xlarge,{LINUX}
B,OnDemand,Hrs,0.7100000000,USD,,,,g4dn.xlarge,Shared,Windows,Used,NA,OnDemand
C,OnDemand,Hrs,0.5800000000,USD,,,,g4dn.xlarge,Dedicated,Linux,Used,NA,OnDemand
D,OnDemand,Hrs,9.0,USD,,,,unknown.xlarge,{LINUX}
E,OnDemand,Hrs,nonsense,USD,,,,g5.xlarge,{LINUX}
F,OnDemand
"""


class Handler(BaseHTTPRequestHandler):
    files: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        body = self.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    url = "/offers/v1.0/aws/AmazonEC2/20261120/us-east-1/index"
    index = {"regions": {"us-east-1": {"currentVersionUrl": f"{url}.json"}}}
    monkeypatch.setattr(
        Handler,
        "files",
        {
            "/offers/v1.0/aws/AmazonEC2/current/region_index.json": json.dumps(index),
            f"{url}.csv": ROWS,
        },
    )
    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{served.server_address[1]}"
    served.shutdown()
    served.server_close()
    thread.join()


@pytest.fixture(scope="module")
def query() -> PriceQuery:
    with CatalogSnapshot.open(SHIPPED) as snapshot:
        machines = snapshot.machines("aws")
    return PriceQuery(
        machines=machines,
        large=True,
        today=date(2026, 11, 27),
        progress=lambda text: None,
        pause=lambda seconds: None,
    )


def without_credentials() -> object:
    raise Refused("no AWS credentials were found")


def make_source(server: str) -> AwsPrices:
    return AwsPrices(files=server, account=without_credentials)  # type: ignore[arg-type] # raises


def test_prices_are_read_without_credentials(server: str, query: PriceQuery) -> None:
    prices = make_source(server).fetch(query)
    assert {(each.key, each.purchase, each.rate) for each in prices.offers} == {
        ("aws/us-east-1/g4dn.xlarge:1/on-demand", Purchase.ON_DEMAND, parse_rate("0.526")),
        ("aws/us-east-1/g4dn.xlarge:1/reserved-12m", Purchase.RESERVED, parse_rate("0.331")),
        ("aws/us-east-1/g4dn.xlarge:1/reserved-36m", Purchase.RESERVED, parse_rate("0.227")),
    }
    assert not prices.complete  # the catalog's spot prices stay
    assert prices.unknown_types == 1
    assert all(
        each.as_of == query.today and "EC2 price file" in each.source for each in prices.offers
    )


def test_large_files_are_read_only_if_the_user_named_the_provider(
    server: str, query: PriceQuery
) -> None:
    from cavvy.domain.values import replace

    with pytest.raises(NeedsLogin, match="cavvy catalog refresh --provider aws"):
        make_source(server).fetch(replace(query, large=False))


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/offers/v1.0/aws/AmazonEC2/20261120/us-east-1/index.csv", None, "HTTP 404"),
        ("/offers/v1.0/aws/AmazonEC2/20261120/us-east-1/index.csv", "hello\n", "no column"),
        ("/offers/v1.0/aws/AmazonEC2/current/region_index.json", "{}", "documented form"),
        (
            "/offers/v1.0/aws/AmazonEC2/current/region_index.json",
            '{"regions": {"us-east-1": {"currentVersionUrl": "@example.com/index.json"}}}',
            "leads to another server",
        ),
    ],
)
def test_files_of_another_form_change_nothing(
    server: str, query: PriceQuery, path: str, body: str | None, said: str
) -> None:
    if body is None:
        del Handler.files[path]
    else:
        Handler.files[path] = body
    with pytest.raises(PriceError, match=said):
        make_source(server).fetch(query)
