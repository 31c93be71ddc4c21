"""The regions of buckets are looked up, so that a task that allows only some regions is not planned
with a bucket elsewhere.
"""

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from click.testing import CliRunner

from cavvy.cli.main import cli
from cavvy.store.objects.azure import AzureDirectory
from cavvy.store.objects.base import ObjectDenied, ObjectMissing
from cavvy.store.objects.locations import find_region, find_regions
from cavvy.store.objects.s3 import AmazonKey, XmlBucket

KEY = AmazonKey(key_id="AKIDTEST", secret="secret")
AMAZON = {"AWS_ACCESS_KEY_ID": "AKIDTEST", "AWS_SECRET_ACCESS_KEY": "secret"}
FILE = """
name: t
run: "true"
resources: {regions: [eu], cpu: 1}
inputs:
  - {source: "gs://data/", target: data, size: 200GB}
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own server, if one runs, answers nothing here."""
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))


class Storages(ThreadingHTTPServer):
    """Amazon's and Google's answers about the locations of buckets, in their documented forms:
    docs.aws.amazon.com/AmazonS3/latest/API/API_HeadBucket.html and
    cloud.google.com/storage/docs/xml-api/get-bucket-location
    """

    location = "EU"
    silent = threading.Event()  # set while requests get no answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Storages

    def do_HEAD(self) -> None:
        if self.path == "/none/":
            self.send_response(404)
        else:  # Amazon names the region also when it refuses a request
            self.send_response(403)
            if self.path != "/other/":
                self.send_header("x-amz-bucket-region", "us-west-2")
        self.end_headers()

    def do_GET(self) -> None:
        if self.path.startswith("/subscriptions/"):
            self._list_accounts()
            return
        if self.path != "/data/?location=":  # a listing
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.server.silent.wait()
        body = f"<LocationConstraint>{self.server.location}</LocationConstraint>".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """Azure's login, which knows one service principal."""
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        good = self.path == "/tenant/oauth2/v2.0/token" and form["client_secret"] == ["secret"]
        told = {"access_token": "t"} if good else {"error": "invalid_client"}
        self._send(200 if good else 401, told)

    def _list_accounts(self) -> None:
        """Azure's storage accounts, on two pages."""
        assert self.headers["Authorization"] == "Bearer t"
        if "page=2" in self.path:
            told: dict[str, object] = {"value": [{"name": "ours", "location": "West US 2"}]}
        else:
            other = f"{self.server.url}{self.path}&page=2"
            told = {"value": [{"name": "other", "location": "westeurope"}], "nextLink": other}
        self._send(200, told)

    def _send(self, status: int, told: object) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storages]:
    server = Storages(("127.0.0.1", 0), Handler)
    server.silent.set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    yield server
    server.silent.set()
    server.shutdown()
    server.server_close()


def now() -> datetime:
    return datetime.now(UTC)


def plan(path: Path) -> tuple[int, str]:
    file = path / "task.yaml"
    file.write_text(FILE)
    done = CliRunner().invoke(cli, ["plan", str(file)], prog_name="cavvy")
    return done.exit_code, " ".join(done.output.split())


def test_amazon_tells_the_region_even_if_it_refuses_the_request(storages: Storages) -> None:
    def bucket(name: str) -> XmlBucket:
        return XmlBucket(name, KEY, now, endpoint=storages.url)

    assert bucket("data").region() == "us-west-2"
    with pytest.raises(ObjectMissing):
        bucket("none").region()
    with pytest.raises(ObjectDenied, match="does not report the region of the bucket other"):
        bucket("other").region()


def test_a_bucket_with_dots_in_its_name_is_asked_in_its_own_region(storages: Storages) -> None:
    bucket = XmlBucket("my.data", KEY, now, endpoint=storages.url, regional=True)
    url = bucket.sign_get("key", 60).url
    assert url.startswith("https://s3.us-west-2.amazonaws.com/my.data/key?")
    assert "%2Fus-west-2%2Fs3%2F" in url


def test_a_storage_of_another_operator_says_nothing_about_regions(storages: Storages) -> None:
    with pytest.raises(ObjectDenied, match="does not belong to AWS"):
        find_region("s3://data/", AMAZON | {"AWS_ENDPOINT_URL": storages.url}, now)
    keys = {"AZURE_STORAGE_ACCOUNT": "a", "AZURE_STORAGE_KEY": "aaaa"}
    keys["AZURE_STORAGE_ENDPOINT"] = storages.url
    with pytest.raises(ObjectDenied, match="does not belong to Azure"):
        find_region("az://data/", keys, now)


def test_storages_without_an_answer_are_told_as_such(storages: Storages) -> None:
    storages.silent.clear()
    found = find_regions(["gs://data/"], {"STORAGE_EMULATOR_HOST": storages.url}, now, 0.01)
    assert found.regions == {}
    assert found.problems == {"gs://data/": "the storage did not answer within 0.01 s"}


@pytest.mark.parametrize("place", ["US", "us-central1", "ASIA"])
def test_a_bucket_elsewhere_is_refused(storages: Storages, tmp_path: Path, place: str) -> None:
    storages.location = place
    code, shown = plan(tmp_path)
    assert code == 2
    assert f"gs://data/ is in {place.lower()}, but `resources.regions` allows only eu" in shown


@pytest.mark.parametrize("place", ["EU", "EUROPE-WEST4"])
def test_a_bucket_inside_is_planned_without_a_warning(
    storages: Storages, tmp_path: Path, place: str
) -> None:
    storages.location = place
    code, shown = plan(tmp_path)
    assert code == 0
    assert "Cavvy does not know whether" not in shown


def test_a_region_whose_place_is_unknown_is_reported(storages: Storages, tmp_path: Path) -> None:
    storages.location = "NOWHERE9"
    code, shown = plan(tmp_path)
    assert code == 0
    assert "gs://data/ (the bucket is in nowhere9, whose location Cavvy does not know)" in shown


AZURE = {
    "AZURE_TENANT_ID": "tenant",
    "AZURE_CLIENT_ID": "client",
    "AZURE_CLIENT_SECRET": "secret",
    "AZURE_SUBSCRIPTION_ID": "subscription",
}


def test_azure_tells_the_region_of_an_account_to_a_service_principal(storages: Storages) -> None:
    azure = AzureDirectory(login=storages.url, manager=storages.url)
    assert azure.find_region("ours", AZURE) == "westus2"
    assert azure.find_region("OTHER", AZURE) == "westeurope"
    with pytest.raises(ObjectMissing, match="has no storage account none"):
        azure.find_region("none", AZURE)
    with pytest.raises(ObjectDenied, match="HTTP 401, invalid_client"):
        azure.find_region("ours", {**AZURE, "AZURE_CLIENT_SECRET": "wrong"})
    with pytest.raises(ObjectDenied, match="another server"):
        AzureDirectory(login=storages.url, manager=f"{storages.url}/").find_region("ours", AZURE)


def test_a_container_without_a_service_principal_has_an_unknown_region() -> None:
    keys = {"AZURE_STORAGE_ACCOUNT": "ours", "AZURE_STORAGE_KEY": "a2V5"}
    found = find_regions(["az://data/x"], keys, now, 5)
    assert not found.regions
    assert "set AZURE_TENANT_ID, AZURE_CLIENT_ID" in found.problems["az://data/x"]
