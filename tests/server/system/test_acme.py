"""A certificate from an ACME server, as docs/guides/install.md says: certbot gets and renews it,
the hook gives it to the server, and the server uses it without a restart.
"""

import json
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.certificates import Authority
from tests.conftest import ROOT
from tests.system.packages import install_packages
from tests.system.ports import free_port
from tests.system.server_state import home_at
from tests.system.tied import start_tied
from tests.waits import START_S, wait_until

from cavvy.client.connection import ensure_server, stop_server

pytestmark = pytest.mark.system
NAME = "cavvy.example.com"
HOOK = ROOT / "deploy" / "systemd" / "certbot-hook"


class AcmeServer:
    """Pebble, the ACME server that Let's Encrypt tests clients with; all names are 127.0.0.1."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        certificate, key = (authority := Authority(folder)).issue("pebble")
        self.trust = authority.ca
        self.challenge = free_port()
        ports = {name: free_port() for name in ("listen", "management", "dns", "unused")}
        settings = {
            "listenAddress": f"127.0.0.1:{ports['listen']}",
            "managementListenAddress": f"127.0.0.1:{ports['management']}",
            "certificate": str(certificate),
            "privateKey": str(key),
            "httpPort": self.challenge,
            "tlsPort": ports["unused"],
        }
        (folder / "pebble.json").write_text(json.dumps({"pebble": settings}))
        self.url = f"https://127.0.0.1:{ports['listen']}/dir"
        self._roots = f"https://127.0.0.1:{ports['management']}/roots/0"
        dns = f"127.0.0.1:{ports['dns']}"
        names = ["pebble-challtestsrv", "-dns01", dns, "-defaultIPv4", "127.0.0.1"]
        names += ["-defaultIPv6", "", "-http01", "", "-https01", "", "-tlsalpn01", ""]
        names += ["-management", f"127.0.0.1:{free_port()}"]
        # Without these variables, Pebble waits for seconds and refuses some requests at random.
        environ = {**os.environ, "PEBBLE_VA_NOSLEEP": "1", "PEBBLE_WFE_NONCEREJECT": "0"}
        log = stack.enter_context((folder / "pebble.log").open("wb"))
        pebble = ["pebble", "-strict", "-config", folder / "pebble.json", "-dnsserver", dns]
        for command in (names, pebble):
            process = start_tied(
                command, signal.SIGKILL, env=environ, stdout=log, stderr=subprocess.STDOUT
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        wait_until(self._answers, (folder / "pebble.log").read_text, START_S)

    def root(self) -> str:
        """The certificate of the authority that signs."""
        trusted = ssl.create_default_context(cafile=str(self.trust))
        with urlopen(self._roots, context=trusted, timeout=5) as answer:
            text: bytes = answer.read()
        return text.decode()

    def _answers(self) -> bool:
        try:
            return bool(self.root())
        except OSError:
            return False


@pytest.fixture
def acme(tmp_path: Path) -> Iterator[AcmeServer]:
    needed = ("pebble", "certbot")
    if not all(map(shutil.which, needed)):
        why = install_packages(needed)
        if not all(map(shutil.which, needed)):
            pytest.skip(f"no ACME server and client: {why}")
    with ExitStack() as stack:
        yield AcmeServer(tmp_path, stack)


def run_certbot(acme: AcmeServer, folder: Path, *arguments: str) -> None:
    own = [f"--{each}-dir={folder}/certbot" for each in ("config", "work", "logs")]
    challenge = ["--http-01-port", str(acme.challenge), "--server", acme.url]
    environ = {
        **os.environ,
        "REQUESTS_CA_BUNDLE": str(acme.trust),
        "CAVVY_TLS": str(folder / "tls"),
    }
    done = subprocess.run(
        ["certbot", *arguments, "--non-interactive", *own, *challenge],
        env=environ,
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def served_serial(listen: str, root: str) -> int:
    """The serial number of the certificate that the server shows for NAME, after a check of it."""
    import socket

    from cryptography import x509

    trusted = ssl.create_default_context(cadata=root)
    host, _, port = listen.partition(":")
    with (
        socket.create_connection((host, int(port)), timeout=5) as raw,
        trusted.wrap_socket(raw, server_hostname=NAME) as tls,
    ):
        data = tls.getpeercert(binary_form=True)
    assert data is not None
    return x509.load_der_x509_certificate(data).serial_number


def test_certbot_gets_and_renews_the_servers_certificate(acme: AcmeServer, tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    (tmp_path / "one").mkdir()
    login = ("--agree-tos", "--register-unsafely-without-email", "--deploy-hook", str(HOOK))
    run_certbot(acme, tmp_path, "certonly", "--standalone", "-d", NAME, *login)
    certificate, key = tmp_path / "tls/fullchain.pem", tmp_path / "tls/key.pem"
    assert key.stat().st_mode & 0o077 == 0
    listen = f"127.0.0.1:{free_port()}"
    variables = {"LISTEN": listen, "TLS_CERT": str(certificate), "TLS_KEY": str(key)}
    settings = {f"CAVVY_SERVER_{name}": text for name, text in variables.items()}
    with home_at(tmp_path / "one" / "home", **settings):
        server = ensure_server()
        root = acme.root()
        first = served_serial(listen, root)
        run_certbot(acme, tmp_path, "renew", "--force-renewal", "--no-random-sleep-on-renew")
        wait_until(lambda: served_serial(listen, root) != first)
        assert ensure_server() == server, "it was not restarted"
        stop_server()
