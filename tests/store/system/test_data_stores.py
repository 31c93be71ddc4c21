"""Every storage by its own requests and by signed ones: the same promises, kept by real servers
where there are any.
"""

import hashlib
import threading
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import token_hex

import pytest
from tests.system.storages import (
    servers,
    start_azure,
    start_google,
    start_s3,
    start_sftp,
    start_web,
)

from cavvy.store.objects.base import (
    ObjectBucket,
    ObjectDenied,
    ObjectError,
    ObjectMissing,
    RelayedObjects,
    SignedRequest,
)
from cavvy.store.objects.locations import open_place

__all__ = ["servers"]
pytestmark = pytest.mark.system
NAMES = ["s3", "gs", "az"]


def keys_of(name: str, folder: Path) -> dict[str, str]:
    """The storage's keys; it is started at its first use."""
    if name == "s3":
        return start_s3(folder / "s3")
    return start_azure(folder / "az") if name == "az" else start_google()


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def keys(name: str, servers: Path) -> dict[str, str]:
    return keys_of(name, servers)


@pytest.fixture
def bucket(name: str, keys: dict[str, str]) -> ObjectBucket:
    found = open_place(f"{name}://data/x", keys, lambda: datetime.now(UTC))
    assert found.key == "x"
    assert isinstance(found.place, ObjectBucket)
    return found.place


def send(signed: SignedRequest, data: bytes | None = None) -> tuple[int, bytes, str]:
    headers = dict(signed.headers) | (
        {"Content-Type": "application/octet-stream"} if data is not None else {}
    )
    request = urllib.request.Request(signed.url, data=data, method=signed.method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.read(), reply.headers.get("ETag", "")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), ""


def test_objects_come_back_as_they_were(bucket: ObjectBucket) -> None:
    data = bytes(range(256)) * 40
    bucket.put("one/ä b+c&d.bin", data)
    found = bucket.head("one/ä b+c&d.bin")
    assert found is not None
    assert (found.size, found.md5) == (len(data), hashlib.md5(data).hexdigest())
    assert bucket.get("one/ä b+c&d.bin") == data
    assert bucket.get("one/ä b+c&d.bin", 250, 12) == data[250:262]
    assert bucket.head("one/none") is None
    with pytest.raises(ObjectMissing):
        bucket.get("one/none")
    bucket.delete("one/ä b+c&d.bin")
    bucket.delete("one/ä b+c&d.bin")
    assert bucket.head("one/ä b+c&d.bin") is None


def test_listings_come_in_pages(bucket: ObjectBucket) -> None:
    names = [f"many/{number:02} &<é" for number in range(7)]
    for each in names:
        bucket.put(each, each.encode())
    found, after = [], ""
    for _ in range(7):
        page, after = bucket.list("many/", after, 3)
        found += page
        if not after:
            break
    assert [each.key for each in found] == names
    assert [each.size for each in found] == [len(each.encode()) for each in names]
    assert bucket.list("nothing/") == ([], "")


def test_a_signed_request_is_for_one_object_one_deed_and_a_while(bucket: ObjectBucket) -> None:
    bucket.put("two/a", b"secret a")
    bucket.put("two/b", b"secret b")
    signed = bucket.sign_get("two/a", 60)
    assert send(signed)[:2] == (200, b"secret a")
    assert (
        send(
            SignedRequest(
                method="GET", url=signed.url.replace("two/a", "two/b"), headers=signed.headers
            )
        )[0]
        == 403
    )
    assert (
        send(
            SignedRequest(method="PUT", url=signed.url, headers={"x-ms-blob-type": "BlockBlob"}),
            b"x",
        )[0]
        == 403
    )
    assert bucket.get("two/a") == b"secret a"
    assert send(bucket.sign_put("two/c", 60), b"new")[0] in (200, 201)
    assert bucket.get("two/c") == b"new"
    brief = bucket.sign_get("two/a", 1)
    time.sleep(2.5)
    assert send(brief)[0] in (400, 401, 403)


def test_parts_make_one_object_when_completed(bucket: ObjectBucket) -> None:
    three = f"three-{token_hex(4)}"  # the storage stays, for other tests and tries
    parts = [b"a" * (5 << 20), b"b" * (5 << 20), b"tail"]
    upload = bucket.begin(three)
    tags = []
    for number, part in enumerate(parts, 1):
        status, _, tag = send(bucket.sign_put(three, 60, upload, number), part)
        assert status in (200, 201)
        tags.append(tag)
    assert bucket.head(three) is None
    bucket.complete(three, upload, tags)
    bucket.complete(three, upload, tags)  # the answer to the first was lost
    found = bucket.head(three)
    assert found is not None
    assert found.size == sum(map(len, parts))
    assert bucket.get(three, (10 << 20) - 1, 5) == b"btail"


def test_parts_of_an_aborted_upload_are_gone(bucket: ObjectBucket, name: str) -> None:
    upload = bucket.begin("given up")
    bucket.put("given up", b"another's")
    assert send(bucket.sign_put("given up", 60, upload, 1), b"a" * (5 << 20))[0] in (200, 201)
    bucket.abort("given up", upload)
    bucket.abort("given up", upload)  # the answer to the first was lost
    assert bucket.get("given up") == b"another's"
    if name != "az":  # which drops what is never put together by itself, after a week
        assert send(bucket.sign_put("given up", 60, upload, 2), b"tail")[0] == 404


def test_wrong_keys_are_told_without_them(name: str, keys: dict[str, str]) -> None:
    wrong = {
        "s3": {"AWS_SECRET_ACCESS_KEY": "thewrongsecret"},
        "gs": {"GOOGLE_SERVICE_ACCOUNT": '{"client_email": "a", "private_key": "thewrongsecret"}'},
        "az": {
            "AZURE_STORAGE_CONNECTION_STRING": keys.get(
                "AZURE_STORAGE_CONNECTION_STRING", ""
            ).replace("Eby", "Abc")
        },
    }[name]
    place = open_place(f"{name}://data/x", {**keys, **wrong}, lambda: datetime.now(UTC)).place
    with pytest.raises(ObjectDenied) as caught:
        place.list("a")
    assert "thewrongsecret" not in str(caught.value)
    assert "Abc8vdM0" not in str(caught.value)


def test_a_wrong_clock_is_refused(name: str, keys: dict[str, str]) -> None:
    late = datetime.now(UTC) - timedelta(days=1)
    with pytest.raises(ObjectError):
        open_place(f"{name}://data/x", keys, lambda: late).place.list("a")


def test_web_pages(tmp_path: Path) -> None:
    address = start_web(tmp_path)
    (tmp_path / "file.bin").write_bytes(b"0123456789")
    found = open_place(f"{address}/file.bin", {}, lambda: datetime.now(UTC))
    head = found.place.head(found.key)
    assert head is not None
    assert head.size == 10
    assert found.place.get(found.key, 3, 4) == b"3456"
    assert found.place.head("none") is None


def test_a_redirect_to_the_servers_own_link_is_not_followed() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/latest/meta-data/")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        found = open_place(
            f"http://127.0.0.1:{server.server_address[1]}/x", {}, lambda: datetime.now(UTC)
        )
        for ask in (found.place.head, found.place.get):
            with pytest.raises(ObjectDenied, match="link-local"):
                ask(found.key)
    finally:
        server.shutdown()
        server.server_close()


def test_sftp_reads_and_writes_whole_files(servers: Path, tmp_path: Path) -> None:
    keys = start_sftp(servers / "sftp")
    found = open_place(f"sftp://{keys['where']}{tmp_path}/in", keys, lambda: datetime.now(UTC))
    place = found.place
    assert isinstance(place, RelayedObjects)
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "a").write_bytes(b"hello world")
    assert place.head(found.key) is None
    files, after = place.list(found.key)
    assert ([(each.key, each.size) for each in files], after) == (
        [(f"{tmp_path}/in/sub/a", 11)],
        "",
    )
    assert place.get(f"{tmp_path}/in/sub/a", 6, 100) == b"world"
    out = tmp_path / "out" / "b"
    place.write(str(out), 0, b"first ", 12)
    assert not out.exists()
    place.write(str(out), 6, b"second", 12)
    assert out.read_bytes() == b"first second"
    with pytest.raises(ObjectMissing):
        place.get(f"{tmp_path}/none")
