"""HAProxy with TLS: clients may speak HTTP/2."""

import shutil
import subprocess
from collections.abc import Iterator

import pytest
from tests.certificates import Authority
from tests.contract.gateway_process import OWNER_TOKEN
from tests.contract.gateway_suite import (
    ACCOUNT,
    COOKIES,
    KEY,
    KEYED,
    MADE,
    SERVICE,
    SMALL,
    holds_secret,
    list_secret_places,
    replicas,
)
from tests.contract.haproxy_process import HaproxyPlaneProcess
from tests.contract.replica_stand_in import ReplicaStandIn

from cavvy.capabilities.serving.gateway.haproxy.runtime import find_haproxies, may_use_http2

__all__ = ["replicas"]  # a fixture


@pytest.fixture(scope="module", params=find_haproxies(), ids=str)
def plane(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HaproxyPlaneProcess]:
    """HAProxy in each version that is installed."""
    if not shutil.which("curl"):
        pytest.skip("curl is missing")
    certificate, key = Authority(tmp_path_factory.mktemp("tls")).issue()
    tls = {"certificate": str(certificate), "key": str(key)}
    plane = HaproxyPlaneProcess(request.param, tls, services=(SERVICE, KEYED, SMALL))
    yield plane
    plane.remove()


def curl(
    plane: HaproxyPlaneProcess,
    path: str,
    *more: str,
    host: str = "svc.example",
    body: str | None = None,
) -> subprocess.CompletedProcess[str]:
    url = f"https://{host}:{plane.port}{path}"
    to = f"{host}:{plane.port}:127.0.0.1"
    command = ["curl", "-sk", "--http2", "--resolve", to, *more, url]
    return subprocess.run(
        command, input=body, capture_output=True, text=True, timeout=60, check=False
    )


def test_http2_clients_see_that_a_response_broke_off(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn]
) -> None:
    plane.set_replicas("svc", replicas[:1])
    version = curl(plane, "/echo", "-o", "/dev/null", "-w", "%{http_version}")
    assert version.stdout == ("2" if may_use_http2(plane.program) else "1.1")
    assert curl(plane, "/chunks?n=2").returncode == 0
    for path in ("/partial", "/chunks?n=2&breaks=1"):
        assert curl(plane, path).returncode != 0, path


@pytest.mark.parametrize("service", ["svc", "keyed"])
def test_replicas_learn_that_clients_use_tls(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn], service: str
) -> None:
    """Also the replicas of services whose requests pass the gateway."""
    plane.set_replicas(service, replicas[:1])
    key = f"X-API-Key: {KEY}"
    assert curl(plane, "/echo", "-H", key, host=f"{service}.example").returncode == 0
    assert replicas[0].seen[-1].get("x-forwarded-proto") == "https"


@pytest.mark.parametrize(("size", "status"), [(100, "200"), (101, "413")])
@pytest.mark.parametrize("upload", [("--data-binary", "@-"), ("-X", "POST", "-T", "-")])
def test_a_body_may_have_no_length(
    plane: HaproxyPlaneProcess,
    replicas: list[ReplicaStandIn],
    upload: tuple[str, ...],
    size: int,
    status: str,
) -> None:
    """In HTTP/2, such a body is not chunked."""
    replicas[0].reset()
    plane.set_replicas("small", replicas[:1])
    where = ("-o", "/dev/null", "-w", "%{http_code}")
    reply = curl(plane, "/echo", *upload, *where, host="small.example", body="x" * size)
    assert reply.stdout == status
    assert [len(each.body) for each in replicas[0].seen] == ([size] if status == "200" else [])


def test_grpc_is_refused_with_the_reason(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn]
) -> None:
    """A client of gRPC reads the status and the message from the fields of the response."""
    replicas[0].reset()
    plane.set_replicas("svc", replicas[:1])
    for kind, refused in (("grpc", True), ("grpc+proto", True), ("grpc-web", False)):
        fields = ("-H", "TE: trailers", "-H", f"Content-Type: application/{kind}")
        reply = curl(plane, "/p.Service/Call", *fields, "-i", "-X", "POST")
        head = reply.stdout.lower()
        assert ("grpc-status: 12" in head) == ("grpc-message: services of cavvy" in head) == refused
        assert ("content-type: application/grpc\n" in head) == refused
    assert len(replicas[0].seen) == 1


@pytest.mark.parametrize("secret", [MADE, ACCOUNT, OWNER_TOKEN], ids=["key", "account", "owner"])
@pytest.mark.parametrize("place", list_secret_places(MADE))
def test_no_program_gets_a_key_or_token_of_cavvy(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn], secret: str, place: str
) -> None:
    replicas[0].reset()
    plane.set_replicas("svc", replicas[:1])
    target, lines = list_secret_places(secret)[place]
    fields = [each for line in lines for each in ("-H", line)]
    assert curl(plane, target, "-g", "--path-as-is", *fields, "-H", "X-Custom: a").returncode == 0
    [seen] = replicas[0].seen
    for text in (seen.path, *(part for line in seen.headers for part in line)):
        assert not holds_secret(text, secret), text
    assert seen.get("x-custom") == "a"


@pytest.mark.parametrize("sent", COOKIES)
def test_no_program_gets_the_cookie_of_the_console(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn], sent: str
) -> None:
    """In HTTP/2, each cookie may be a field of its own."""
    replicas[0].reset()
    plane.set_replicas("svc", replicas[:1])
    fields = [each for line in sent.split("\r\n") for each in ("-H", line)]
    assert curl(plane, "/echo", *fields).returncode == 0
    cookies = [v for name, v in replicas[0].seen[-1].headers if name.lower() == "cookie"]
    found = "; ".join(cookies).replace("|", "; ") or None
    assert found == (COOKIES[sent] and COOKIES[sent].replace("|", "; "))


@pytest.mark.parametrize(("origin", "status"), [("https://evil.example", "403"), ("null", "403")])
def test_pages_of_other_sites_do_not_reach_a_service(
    plane: HaproxyPlaneProcess, replicas: list[ReplicaStandIn], origin: str, status: str
) -> None:
    replicas[0].reset()
    plane.set_replicas("svc", replicas[:1])
    where = ("-o", "/dev/null", "-w", "%{http_code}", "-H", f"Origin: {origin}")
    assert curl(plane, "/echo", *where, "-X", "POST").stdout == status
    assert replicas[0].seen == []
    own = (
        "-o",
        "/dev/null",
        "-w",
        "%{http_code}",
        "-H",
        f"Origin: https://svc.example:{plane.port}",
    )
    assert curl(plane, "/echo", *own, "-X", "POST").stdout == "200"
