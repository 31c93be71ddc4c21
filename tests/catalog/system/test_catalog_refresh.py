"""Refreshing the catalog from files, servers and a price list; whatever goes wrong, the old one
stays in use.
"""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.waits import PATIENCE_S, wait_until

from cavvy.domain.offers import Purchase
from cavvy.providers.azure.price_list import AzurePrices
from cavvy.providers.prices import PriceError, PriceQuery
from cavvy.store.snapshot import CatalogSnapshot
from cavvy.store.snapshot.choose import SHIPPED, path_in_use, problem_of_refreshed, refreshed_path
from cavvy.store.snapshot.layout import SnapshotError
from cavvy.store.snapshot.refresh import compare, refresh_from, refresh_offers

pytestmark = pytest.mark.system
Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("CAVVY_HOME", str(folder))
    return folder


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send(
    handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, promised: int | None = None
) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if promised is None else promised))
    handler.end_headers()
    handler.wfile.write(body)


def changed_copy(path: Path, *statements: str) -> Path:
    shutil.copyfile(SHIPPED, path)
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
    return path


def test_a_file_a_folder_and_a_url_are_taken(tmp_path: Path) -> None:
    dearer = changed_copy(
        tmp_path / "catalog.db", "UPDATE offer SET rate = rate * 2 WHERE rate = 55040000"
    )
    assert path_in_use() == SHIPPED
    assert refresh_from(str(dearer)) == refreshed_path()
    assert path_in_use() == refreshed_path()
    refresh_from(str(tmp_path))
    with serving(lambda request: send(request, dearer.read_bytes())) as url:
        refresh_from(f"{url}/catalog.db", sha256=sha256(dearer.read_bytes()).hexdigest())
    with CatalogSnapshot.open(SHIPPED) as old, CatalogSnapshot.open() as new:
        assert new.path == refreshed_path()
        changes = compare(old, new)
    assert changes
    assert {(change.kind, change.ratio) for change in changes} == {("dearer", 2.0)}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
            "not a usable catalog|damaged",
        ),
        (lambda path: path.write_bytes(path.read_bytes()[:-8192]), "not a usable catalog|damaged"),
        (lambda path: path.write_bytes(b""), "not a usable catalog"),
        (lambda path: path.write_text("{}"), "not a usable catalog"),
        (lambda path: changed_copy(path, "DELETE FROM offer WHERE rate > 500000"), "incomplete"),
        (
            lambda path: changed_copy(
                path,
                "DELETE FROM offer WHERE rate > 500000",
                "UPDATE meta SET value = (SELECT COUNT(*) FROM offer) WHERE key = 'rows'",
                "UPDATE meta SET value = (SELECT COUNT(accelerator) FROM offer JOIN shape ON "
                "shape.id = shape "
                "JOIN pack ON pack.id = pack) WHERE key = 'rows_with_accelerator'",
            ),
            "looks incomplete",
        ),
        (
            lambda path: changed_copy(
                path, "UPDATE meta SET value = '99' WHERE key = 'schema_version'"
            ),
            "format 99",
        ),
        (lambda path: changed_copy(path, "DELETE FROM place WHERE id = 3"), "inconsistent"),
    ],
    ids=[
        "half",
        "last page gone",
        "empty",
        "not a database",
        "rows gone",
        "collapsed",
        "other format",
        "orphans",
    ],
)
def test_a_wrong_snapshot_leaves_the_old_one(
    tmp_path: Path, home: Path, spoil: Callable[[Path], object], said: str
) -> None:
    refresh_from(str(SHIPPED))
    before = refreshed_path().read_bytes()
    wrong = tmp_path / "wrong.db"
    shutil.copyfile(SHIPPED, wrong)
    spoil(wrong)
    with pytest.raises(SnapshotError, match=said):
        refresh_from(str(wrong))
    assert refreshed_path().read_bytes() == before
    assert [path.name for path in home.iterdir()] == ["catalog.db"], "nothing is left behind"


def test_a_download_that_breaks_off_or_has_another_hash_is_refused() -> None:
    body = SHIPPED.read_bytes()
    half = body[: len(body) // 2]
    with (
        serving(lambda request: send(request, half, promised=len(body))) as url,
        pytest.raises(SnapshotError) as cut,
    ):
        refresh_from(url)
    assert "sent only" in str(cut.value)
    with (
        serving(lambda request: send(request, body)) as url,
        pytest.raises(SnapshotError, match="SHA-256"),
    ):
        refresh_from(url, sha256="00" * 32)
    with (
        serving(lambda request: send(request, b"", status=404)) as url,
        pytest.raises(SnapshotError, match="404"),
    ):
        refresh_from(url)
    with pytest.raises(SnapshotError, match="not an http or https"):
        refresh_from(f"file://{SHIPPED}")
    assert not refreshed_path().exists()


def test_a_refresh_killed_in_the_middle_leaves_the_old_one_and_the_next_sweeps_up(
    home: Path,
) -> None:
    refresh_from(str(SHIPPED))
    before = refreshed_path().read_bytes()
    release = threading.Event()

    def dribble(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(before)))
        request.end_headers()
        request.wfile.write(before[: len(before) // 2])
        request.wfile.flush()
        release.wait(PATIENCE_S)

    with serving(dribble) as url:
        arguments = ["catalog", "refresh", "--from", url]
        code = f"from cavvy.cli.main import main; main({arguments!r})"
        with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
            wait_until(
                lambda: (
                    process.poll() is not None
                    or any(path.stat().st_size > 1_000_000 for path in home.glob(".catalog.*.new"))
                )
            )
            assert process.poll() is None
            os.kill(process.pid, signal.SIGKILL)
        release.set()
    assert list(home.glob(".catalog.*.new")), "the killed one left its half"
    assert refreshed_path().read_bytes() == before
    assert path_in_use() == refreshed_path()
    refresh_from(str(SHIPPED))
    assert [path.name for path in home.iterdir()] == ["catalog.db"]


def test_a_damaged_or_older_one_in_the_state_folder_is_not_used(home: Path) -> None:
    home.mkdir()
    refreshed_path().write_bytes(b"not a database")
    assert path_in_use() == SHIPPED
    assert "not a usable catalog" in (problem_of_refreshed() or "")
    changed_copy(refreshed_path(), "UPDATE meta SET value = '2020-01-01' WHERE key = 'as_of'")
    assert path_in_use() == SHIPPED
    assert problem_of_refreshed() == "older than the snapshot shipped with Cavvy"


def item(**changes: object) -> dict[str, object]:
    return {
        "currencyCode": "USD",
        "retailPrice": 3.673,
        "armRegionName": "westeurope",
        "productName": "Virtual Machines NCads A100 v4 Series",
        "skuName": "NC24ads A100 v4",
        "armSkuName": "Standard_NC24ads_A100_v4",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        **changes,
    }


ITEMS = [
    item(),
    item(retailPrice=3.7),  # a second meter of the same price; the lower one counts
    item(skuName="NC24ads A100 v4 Spot", retailPrice=1.2),
    item(skuName="NC24ads A100 v4 Low Priority", retailPrice=0.7),
    item(productName="Virtual Machines NCads A100 v4 Series Windows", retailPrice=5.0),
    item(armRegionName="eastus", retailPrice=3.0),
    item(armRegionName="eastus", skuName="NC24ads A100 v4 Spot", retailPrice=3.0),  # a placeholder
    item(type="Reservation", reservationTerm="1 Year", retailPrice=17_520.0),
    item(armSkuName="Standard_Unheard_Of", retailPrice=1.0),
    item(retailPrice=0.0, armRegionName="uksouth"),
    item(unitOfMeasure="1/Month"),
    item(type="DevTestConsumption", armRegionName="uksouth"),
]


class PriceList:
    """A stand-in for the price API: serves ITEMS two to a page, and misbehaves as told."""

    def __init__(self) -> None:
        self.base = ""
        self.faults: list[int] = []
        self.asked: list[str] = []
        self.elsewhere = False

    def __call__(self, request: BaseHTTPRequestHandler) -> None:
        query = parse_qs(urlsplit(request.path).query)
        self.asked.append(query["$filter"][0])
        if self.faults:
            send(request, b"busy", status=self.faults.pop())
            return
        skip = int(query.get("$skip", ["0"])[0])
        # Azure names the default port in its links, and may not escape the filter:
        # https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices
        base = "http://127.0.0.1:9" if self.elsewhere else self.base.replace("http", "HTTP", 1)
        following = (
            f"{base}/api/retail/prices?$filter=x eq 'y'&$skip={skip + 2}"
            if skip + 2 < len(ITEMS)
            else None
        )
        send(
            request,
            json.dumps({"Items": ITEMS[skip : skip + 2], "NextPageLink": following}).encode(),
        )


@contextmanager
def price_list() -> Iterator[PriceList]:
    stand_in = PriceList()
    with serving(stand_in) as url:
        stand_in.base = url
        yield stand_in


def query(pauses: list[float] | None = None) -> PriceQuery:
    with CatalogSnapshot.open(SHIPPED) as shipped:
        machines = shipped.machines("azure")
    waits = [] if pauses is None else pauses
    return PriceQuery(
        machines=machines, today=date(2027, 1, 2), progress=lambda _: None, pause=waits.append
    )


def test_a_price_list_is_read_page_by_page_and_put_in_use() -> None:
    pauses: list[float] = []
    with price_list() as stand_in:
        stand_in.faults = [503, 429]
        prices = AzurePrices(base=stand_in.base, timeout_s=5).fetch(query(pauses))
    assert pauses == [2.0, 4.0], "passing faults are waited out"
    assert stand_in.asked[0] == "serviceName eq 'Virtual Machines'"
    assert len(stand_in.asked) == 2 + len(ITEMS) // 2
    assert prices.unknown_types == 1
    found = {(offer.region, offer.purchase): offer for offer in prices.offers}
    assert {key: offer.rate.micros_per_hour for key, offer in found.items()} == {
        ("westeurope", Purchase.ON_DEMAND): 3_673_000,
        ("westeurope", Purchase.SPOT): 1_200_000,
        ("westeurope", Purchase.RESERVED): 2_000_000,
        ("eastus", Purchase.ON_DEMAND): 3_000_000,
    }
    assert found["eastus", Purchase.ON_DEMAND].accelerator == "A100"
    assert found["westeurope", Purchase.RESERVED].term_months == 12

    with CatalogSnapshot.open(SHIPPED) as shipped:
        rest = [offer for offer in shipped.all_offers() if offer.provider == "azure"]
    kept = [*prices.offers, *rest[len(prices.offers) :]]
    refresh_offers({"azure": kept}, today=date(2027, 1, 2))
    with CatalogSnapshot.open() as new:
        assert new.path == refreshed_path()
        assert new.info().as_of == date(2027, 1, 2)
        every = [offer for offer in new.all_offers() if offer.purchase is Purchase.RESERVED]
        reserved = [offer for offer in every if offer.provider == "azure"]
        assert [(offer.source, offer.term_months) for offer in reserved] == [
            ("Azure Retail Prices API", 12)
        ]
        assert {"aws", "gcp"} < {offer.provider for offer in every}, "other clouds keep theirs"
        assert reserved[0].key.endswith("/reserved-12m")
        with CatalogSnapshot.open(SHIPPED) as shipped:
            assert new.egress() == shipped.egress()


def test_too_few_prices_do_not_replace_a_provider_s() -> None:
    with price_list() as stand_in:
        prices = AzurePrices(base=stand_in.base, timeout_s=5).fetch(query())
    with pytest.raises(SnapshotError, match="looks incomplete"):
        refresh_offers({"azure": prices.offers}, today=date(2027, 1, 2))
    assert path_in_use() == SHIPPED


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda request: send(request, b"no", status=403), "HTTP 403"),
        (lambda request: send(request, b"busy", status=500), "HTTP 500"),
        (lambda request: send(request, b"<html>"), "cannot be read"),
        (lambda request: send(request, b'{"Items": [1, 2'), "cannot be read"),
        (lambda request: send(request, b'{"Items": []', promised=500), "cannot be read"),
        (lambda request: send(request, b'{"Count": 0}'), "documented form"),
        (lambda request: send(request, b'{"Items": []}'), "no price of a known instance type"),
    ],
    ids=["forbidden", "down", "not json", "cut json", "cut reply", "other form", "empty"],
)
def test_a_price_list_that_fails_is_an_error_not_a_short_list(fault: Answer, said: str) -> None:
    with serving(fault) as url, pytest.raises(PriceError, match=said):
        AzurePrices(base=url, timeout_s=5, tries=2).fetch(query())


def test_a_price_list_does_not_lead_elsewhere() -> None:
    with price_list() as stand_in:
        stand_in.elsewhere = True
        with pytest.raises(PriceError, match="another server"):
            AzurePrices(base=stand_in.base, timeout_s=5).fetch(query())


def test_a_server_that_says_nothing_is_not_waited_for_for_ever() -> None:
    quiet = threading.Event()
    with serving(lambda _: quiet.wait(20) and None) as url:
        with pytest.raises(PriceError, match="timed out"):
            AzurePrices(base=url, timeout_s=0.2, tries=2).fetch(query())
        quiet.set()
