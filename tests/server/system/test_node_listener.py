"""Nodes that come from anywhere: the bootstrap script, files by hash, a pinned certificate, a
token for one claim.
"""

import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.system.server_state import follow_to_end, home_at, wait_until

from cavvy.agent.bundle import make_archive
from cavvy.api.app_state import NodeDownloads
from cavvy.api.tokens import load_tokens
from cavvy.client import ApiClient, connect
from cavvy.domain.values import replace
from cavvy.providers.base import NodeEndpoint
from cavvy.providers.hosts.userdata import make_preamble
from cavvy.server.node_tls import load_certificate

pytestmark = pytest.mark.system

CLOUD = (
    """
[[offers]]
instance_type = "free"
price_usd_hr = 0.0
cpus = 4
memory_gib = 8
capacity = 9
"""
    + "[[launches]]\nlatency_s = 0.0\nboots = false\n" * 9
    + "[[removals]]\nlatency_s = 0.0\ntakes_s = 0.0\n" * 9
)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[ApiClient]:
    (tmp_path / "cloud.toml").write_text(CLOUD)
    with home_at(tmp_path / "home") as _:
        (tmp_path / "settings.toml").write_text(
            "[server]\ntls_listen = '127.0.0.1:0'\n[providers.local]\nenabled = false\n"
            f"[providers.fake]\nscript = '{tmp_path}/cloud.toml'\n"
        )
        with connect() as client:
            yield client


def node_endpoint_of(client: ApiClient, home: Path) -> NodeEndpoint:
    """What a provider of that server is told."""
    address = client.server().node_endpoint
    assert address is not None
    certificate, downloads = (
        load_certificate(str(home / "tls.pem")),
        NodeDownloads(home / "downloads"),
    )
    return NodeEndpoint(
        address=address,
        pin=certificate.pin,
        key_pin=certificate.key_pin,
        agent=lambda: downloads.put(make_archive()),
        pythons=dict,
        publish=downloads.put,
        claim_token=load_tokens(str(home / "agents.key")).of_claim,
    )


def gang_of(client: ApiClient, name: str) -> str:
    def look() -> str:
        attempts = client.job("default", name).attempts
        return attempts[-1].gang if attempts and attempts[-1].launched_at else ""

    wait_until(look)
    return look()


def make_script(node_endpoint: NodeEndpoint, gang: str, folder: Path) -> str:
    """What a place would have a new machine run."""
    config = {
        "gang": gang,
        "rank": 0,
        "address": node_endpoint.address,
        "pin": node_endpoint.pin,
        "token": node_endpoint.claim_token(gang, 0),
        "home": f"{folder}/{gang}/0",
    }
    agent = node_endpoint.agent()
    return f"""{make_preamble(node_endpoint, str(folder))}
cavvy_start && cavvy_fetch {agent} {agent}.pyz || exit 1
cat > "$CAVVY_FOLDER/config.json" <<'CONFIG'
{json.dumps(config)}
CONFIG
exec $CAVVY_PYTHON -I -S "$CAVVY_FOLDER/{agent}.pyz" "$CAVVY_FOLDER/config.json"
"""


def boot(
    node_endpoint: NodeEndpoint, gang: str, folder: Path, *, path: str | None = None
) -> "subprocess.CompletedProcess[str]":
    script = make_script(node_endpoint, gang, folder)
    env = {**os.environ, **({"PATH": path} if path else {})}
    return subprocess.run(
        ["/bin/sh"], input=script, env=env, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("tool", ["curl", "wget", "python3"])
def test_a_node_boots_from_outside_with_one_tool_alone(
    client: ApiClient, tmp_path: Path, tool: str
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in {
        tool,
        "python3",
        "mkdir",
        "chmod",
        "mv",
        "rm",
        "cat",
        "uname",
        "sha256sum",
        "cut",
        "sleep",
        "sh",
    }:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"this machine has no {name}")
        if name == "python3":
            (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
            (tools / name).chmod(0o755)
        else:
            (tools / name).symlink_to(found)
    made = client.submit("{name: far, run: 'echo from far away', workdir: null}")
    node_endpoint = node_endpoint_of(client, tmp_path / "home")
    done = boot(node_endpoint, gang_of(client, "far"), tmp_path / "node", path=str(tools))
    assert done.returncode == 0, done.stderr
    follow_to_end(client, made.name)
    assert b"".join(client.logs("default", made.name)) == b"from far away\n"
    wait_until(lambda: client.job("default", "far").phase == "done")


def test_a_bootstrap_token_is_good_for_one_claim_and_nothing_else(
    client: ApiClient, tmp_path: Path
) -> None:
    client.submit(
        f"{{name: once, run: 'while [ ! -e {tmp_path}/go ]; do sleep 0.05; done', workdir: null}}"
    )
    node_endpoint = node_endpoint_of(client, tmp_path / "home")
    gang = gang_of(client, "once")
    with ThreadPoolExecutor() as threads:
        first = threads.submit(boot, node_endpoint, gang, tmp_path / "first")
        try:
            kept = tmp_path / f"first/{gang}/0/token"
            wait_until(lambda: client.job("default", "once").phase == "running")
            token = json.loads((tmp_path / "first/config.json").read_text())["token"]
            assert token == node_endpoint.claim_token(gang, 0)
            assert kept.read_text() not in ("", token)
            assert kept.stat().st_mode & 0o077 == 0
            assert _status(node_endpoint, f"/agent/v1/orders?gang={gang}&rank=0", token) == 403
            assert (
                _status(node_endpoint, f"/agent/v1/orders?gang={gang}&rank=0", kept.read_text())
                == 200
            )
            claim = {"gang": gang, "rank": 0, "nonce": "another", "address": "x"}
            assert _status(node_endpoint, "/agent/v1/claim", token, claim) == 409
            assert _status(node_endpoint, "/agent/v1/claim", token, {**claim, "rank": 1}) == 403
            assert (
                boot(node_endpoint, gang, tmp_path / "second").returncode == 0
            )  # dismissed: it leaves and does nothing
            assert not (tmp_path / f"second/{gang}/0/token").exists()
            assert client.job("default", "once").phase == "running"
        finally:
            (tmp_path / "go").touch()
        assert first.result().returncode == 0
    wait_until(lambda: client.job("default", "once").phase == "done")


def test_users_routes_are_not_outside(client: ApiClient, tmp_path: Path) -> None:
    node_endpoint = node_endpoint_of(client, tmp_path / "home")
    token = (tmp_path / "home/token").read_text().strip()
    assert _status(node_endpoint, "/v1/server", token) == 404
    assert _status(node_endpoint, "/v1/health", None) == 200
    assert _status(node_endpoint, f"/boot/v1/{'0' * 64}", None) == 404
    assert _status(node_endpoint, "/boot/v1/..%2ftoken", None) in (404, 422)


def test_busybox_may_fetch_files_by_hash_and_nothing_else(
    client: ApiClient, tmp_path: Path
) -> None:
    busybox = shutil.which("busybox")
    if busybox is None or os.getuid() != 0:
        pytest.skip(
            "needs busybox (apt-get install busybox-static) and root, since it runs in a root of "
            "its own"
        )
    for name in ("dev", "bin"):
        (tmp_path / "root" / name).mkdir(parents=True)
    for name in ("wget", "ssl_client"):
        shutil.copy(busybox, tmp_path / "root/bin" / name)
    for device, number in {"null": 3, "urandom": 9}.items():
        os.mknod(tmp_path / "root/dev" / device, 0o666 | 0o020000, os.makedev(1, number))
    node_endpoint = node_endpoint_of(client, tmp_path / "home")

    def fetch(path: str) -> "subprocess.CompletedProcess[bytes]":
        command = [
            "/bin/wget",
            "-q",
            "--no-check-certificate",
            "-O",
            "-",
            node_endpoint.address + path,
        ]
        command = ["chroot", str(tmp_path / "root"), *command]
        return subprocess.run(command, capture_output=True, timeout=60)

    assert fetch(f"/boot/v1/{node_endpoint.agent()}").stdout == make_archive()
    refused = fetch("/v1/health")
    assert (refused.returncode, refused.stdout) == (1, b"")
    assert b"404" in refused.stderr
    assert b"404" in fetch("/agent/v1/orders?gang=a&rank=0").stderr


def test_weak_tls_is_refused_but_for_what_busybox_needs(client: ApiClient, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl's client")
    where = node_endpoint_of(client, tmp_path / "home").address.removeprefix("https://")
    sha1 = "-tls1_2 -cipher ALL:@SECLEVEL=0 -sigalgs ECDSA+SHA1"

    def shakes(options: str) -> bool:
        command = [openssl, "s_client", "-connect", where, *options.split()]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
        return "Cipher is (NONE)" not in done.stdout and done.returncode == 0

    assert shakes("-noservername -tls1_2")
    assert shakes("-noservername -tls1_3")
    assert not shakes("-noservername -tls1_1 -cipher ALL:@SECLEVEL=0")
    assert not shakes("-noservername -tls1_2 -cipher ECDHE-ECDSA-AES128-SHA256")
    assert not shakes(f"-noservername {sha1}")
    assert shakes(f"-servername 127.0.0.1 {sha1}")


def test_an_agent_says_nothing_to_another_certificate(client: ApiClient, tmp_path: Path) -> None:
    client.submit("{name: mitm, run: 'echo no', workdir: null}")
    node_endpoint = replace(node_endpoint_of(client, tmp_path / "home"), pin="0" * 64)
    gang = gang_of(client, "mitm")
    script = make_script(node_endpoint, gang, tmp_path / "node")
    node = subprocess.Popen(["/bin/sh"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert node.stdin is not None
    assert node.stderr is not None
    node.stdin.write(script)
    node.stdin.close()
    try:
        assert "unexpected certificate from the control plane" in node.stderr.readline()
        assert client.job("default", "mitm").attempts[-1].nodes[0].claimed_at is None
    finally:
        node.kill()
        node.wait()
        node.stderr.close()


def _status(node_endpoint: NodeEndpoint, path: str, token: str | None, body: Any = None) -> int:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    headers = {
        "Cavvy-Agent-Protocol": "1",
        **({"Authorization": f"Bearer {token}"} if token else {}),
    }
    request = urllib.request.Request(
        node_endpoint.address + path,
        headers=headers,
        data=None if body is None else json.dumps(body).encode(),
    )
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
