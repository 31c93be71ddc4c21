"""The same conversation over TCP and TLS, as agents on other machines have it."""

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import pytest
from tests.system.agent_server import make_rig

from cavvy.agent.http_client import connect
from cavvy.agent.wire import ServerAddress

pytestmark = pytest.mark.system


@contextmanager
def forward(target: str, tls: ssl.SSLContext | None) -> Iterator[int]:
    """A TCP port of loopback that leads to a Unix socket, in TLS where wanted."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=join, args=(connection,), daemon=True).start()

    def join(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            near = tls.wrap_socket(connection, server_side=True) if tls else connection
            with near, socket.socket(socket.AF_UNIX) as far:
                far.connect(target)
                threading.Thread(target=copy, args=(far, near), daemon=True).start()
                copy(near, far)

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError), source, sink:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def make_certificate(folder: Path) -> Path:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl here to make a certificate with")
    path = folder / "tls.pem"
    command = [
        openssl,
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    names = ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(
        [*command, *names, "-keyout", path, "-out", folder / "cert.pem"],
        check=True,
        capture_output=True,
    )
    path.write_text(path.read_text() + (folder / "cert.pem").read_text())
    return path


def test_over_tcp() -> None:
    with (
        make_rig(run="cat a; head -c 700000 /dev/zero") as rig,
        forward(rig.stub.path, None) as port,
    ):
        rig.config["address"] = f"http://127.0.0.1:{port}"
        rig.stub.work["workdir"] = {"snapshot": rig.stub.add_folder({"a": b"content"})}
        assert rig.finish() == 0
        assert rig.stub.log_size == 700007
        assert rig.exited()["outcome"] == "succeeded"


def test_over_tls_with_a_certificate_that_is_checked(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with (
        make_rig(run="cat a; head -c 700000 /dev/zero; sleep 1") as rig,
        forward(rig.stub.path, context) as port,
    ):
        rig.config["address"] = f"https://localhost:{port}"
        rig.stub.work["workdir"] = {"snapshot": rig.stub.add_folder({"a": b"content"})}
        stranger = rig.launch()
        rig.until(lambda: "certificate verify failed" in rig.said())
        stranger.terminate()
        stranger.wait()
        assert rig.stub.requests == []
        rig.environ["SSL_CERT_FILE"] = str(tmp_path / "cert.pem")
        assert rig.finish() == 0
        assert rig.stub.log_size == 700007
        assert rig.exited()["outcome"] == "succeeded"


def test_processes_beside_the_work_know_the_certificate_by_its_hash_too(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(make_certificate(tmp_path))
    known = sha256(ssl.PEM_cert_to_DER_cert((tmp_path / "cert.pem").read_text())).hexdigest()
    with make_rig(run="true") as rig, forward(rig.stub.path, context) as port:
        connect(ServerAddress(f"https://127.0.0.1:{port}", known)).close()
        with pytest.raises(OSError, match="unexpected certificate from the control plane"):
            connect(ServerAddress(f"https://127.0.0.1:{port}", "0" * 64))
