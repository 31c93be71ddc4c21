"""What the Kubernetes provider says to API servers, over TLS, through proxies, and what it makes
of their answers.
"""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from tests.providers.kubernetes.unit.test_kubernetes_reading import make_node
from tests.records import make_gang_spec

from cavvy.providers import base
from cavvy.providers.kubernetes import MANIFEST, wire
from cavvy.providers.kubernetes.api import ApiServerRefused, KubernetesApi
from cavvy.providers.kubernetes.kubeconfig import KubeLogin, read_contexts
from cavvy.providers.kubernetes.provider import KubernetesProvider
from cavvy.providers.kubernetes.whoami import make_policy
from cavvy.providers.registry import check_settings
from cavvy.server.node_tls import load_certificate

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
Object = dict[str, Any]
Answer = tuple[int, Object | bytes]
PODS = "/api/v1/namespaces/default/pods"
MISSING: Answer = 404, {"reason": "NotFound", "message": "no such"}
REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class Server:
    """An API server that knows certain answers and refuses all else; who shows another token
    than `token` is denied.
    """

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], Answer] = {}
        self.asked: list[tuple[str, str]] = []
        self.sent: dict[str, bytes] = {}  # by path, the last
        self.missing: list[str] = []  # rights that are not given, as VERB RESOURCE
        self.token = ""
        self.sticky = (
            False  # who a connection is of is what its first request says, as with certificates
        )
        self.port = 0

    @asynccontextmanager
    async def serving(self, certificate: str = "") -> AsyncIterator["Server"]:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if certificate else None
        if tls is not None:
            tls.load_cert_chain(certificate)
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = ""
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                first = first or head
                method, path, _ = head.split(" ", 2)
                lower = head.lower()
                self.asked.append((method, path.partition("?")[0]))
                sent = b""
                if "content-length: " in lower:
                    length = int(lower.partition("content-length: ")[2].split("\r\n")[0])
                    self.sent[self.asked[-1][1]] = sent = await reader.readexactly(length)
                status, body = self.answer(method, path, sent)
                if self.asked[-1][1] == REVIEW and self._unsupported(json.loads(self.sent[REVIEW])):
                    body = {"status": {"allowed": False}}
                if self.token and f"Authorization: Bearer {self.token}\r\n" not in (
                    first if self.sticky else head
                ):
                    status, body = 401, {"reason": "Unauthorized", "message": "Unauthorized"}
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                writer.write(
                    f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def answer(self, method: str, path: str, sent: bytes) -> Answer:
        return self.answers.get((method, path.partition("?")[0]), MISSING)

    def _unsupported(self, review: Object) -> bool:
        asked = review["spec"]["resourceAttributes"]
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        return f"{asked['verb']} {resource}" in self.missing


def write_config(path: Path, cluster: Object, user: Object, name: str = "x") -> str:
    config = {
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }
    path.write_text(json.dumps(config))
    return str(path)


def make_api(config: str, home: Path) -> KubernetesApi:
    (context,) = read_contexts(config, [])
    return KubernetesApi(context, KubeLogin(context, home, lambda: NOW))


async def ask(config: str, home: Path) -> Object:
    api = make_api(config, home)
    try:
        return await api.get("/version")
    finally:
        await api.close()


@pytest.mark.parametrize("way", ["straight", "proxy", "proxy refuses"])
def test_names_of_certificates_and_proxies_are_as_the_kubeconfig_says(
    tmp_path: Path, way: str
) -> None:
    certificate = load_certificate(str(tmp_path / "tls.pem")).file  # of the name "cavvy"
    told: list[bytes] = []

    async def dig(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told.append(await reader.readuntil(b"\r\n\r\n"))
        if way == "proxy refuses":
            writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            writer.close()
            return
        remote_reader, remote_writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(pump(reader, remote_writer), pump(remote_reader, writer))

    async def scenario() -> None:
        proxy = await asyncio.start_server(dig, "127.0.0.1", 0)
        async with server.serving(certificate), proxy:
            cluster: Object = {
                "server": f"https://127.0.0.1:{server.port}",
                "certificate-authority": "tls.pem",
                "tls-server-name": "cavvy",
            }
            if way != "straight":
                cluster["proxy-url"] = (
                    f"http://ann:p%40ss@127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
                )
            config = write_config(tmp_path / "config", cluster, {})
            if way == "proxy refuses":
                with pytest.raises(base.TryAgain, match=r"the proxy .* answered .*403 Forbidden"):
                    await ask(config, tmp_path)
                return
            assert await ask(config, tmp_path) == {"gitVersion": "v1.33.0"}
            if way == "proxy":
                assert told[0].startswith(f"CONNECT 127.0.0.1:{server.port} HTTP/1.1\r\n".encode())
                assert b"Proxy-Authorization: Basic YW5uOnBAc3M=\r\n" in told[0]
            del cluster["tls-server-name"]
            with pytest.raises(base.TryAgain, match="certificate"):
                await ask(write_config(tmp_path / "config", cluster, {}), tmp_path)
            del cluster["certificate-authority"]
            cluster["insecure-skip-tls-verify"] = True
            assert await ask(write_config(tmp_path / "config", cluster, {}), tmp_path) == {
                "gitVersion": "v1.33.0"
            }

    server = Server()
    server.answers["GET", "/version"] = 200, {"gitVersion": "v1.33.0"}
    asyncio.run(scenario())


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


def test_a_scheme_in_capitals_is_encrypted_too(tmp_path: Path) -> None:
    config = write_config(tmp_path / "c", {"server": "HTTPS://127.0.0.1:6443"}, {"token": "secret"})
    (context,) = read_contexts(config, [])
    proof = asyncio.run(KubeLogin(context, tmp_path, lambda: NOW).proof())
    assert proof.tls is not None


async def test_a_line_that_the_network_has_forgotten_breaks() -> None:
    async with Server().serving() as server:
        line = await wire.ServerEndpoint(url=f"http://127.0.0.1:{server.port}", tls=None).connect()
        found = line._writer.get_extra_info("socket")
        assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        await line.close()


def test_authorities_are_judged_as_others_judge_them(tmp_path: Path) -> None:
    load_certificate(str(tmp_path / "tls.pem"))
    cluster = {"server": "https://h", "certificate-authority": "tls.pem"}
    (context,) = read_contexts(write_config(tmp_path / "config", cluster, {}), [])
    tls = asyncio.run(KubeLogin(context, tmp_path, lambda: NOW).proof()).tls
    assert tls is not None
    assert not tls.verify_flags & ssl.VERIFY_X509_STRICT
    assert tls.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize("sticky", [False, True])
async def test_who_logs_in_anew_is_known_at_the_next_request(tmp_path: Path, sticky: bool) -> None:
    """As `oc login` and others do it, who write the new token or certificate into the
    kubeconfig.
    """
    server = Server()
    server.sticky = sticky
    server.answers["GET", "/version"] = 200, {"gitVersion": "v1.33.0"}
    async with server.serving():
        cluster = {"server": f"http://127.0.0.1:{server.port}"}
        server.token = "one"
        api = make_api(write_config(tmp_path / "config", cluster, {"token": "one"}), tmp_path)
        await api.get("/version")
        server.token = "two"
        with pytest.raises(ApiServerRefused, match="the user of the context x; log in again"):
            await api.get("/version")
        write_config(tmp_path / "config", cluster, {"token": "two"})
        assert await api.get("/version")
        server.token = "three"
        write_config(tmp_path / "config", cluster, {"token": "three"})
        assert (
            len(await asyncio.gather(api.get("/version"), api.get("/version"))) == 2
        )  # both are denied first
        await api.close()


async def test_a_watch_that_breaks_off_within_a_line_is_a_passing_fault(tmp_path: Path) -> None:
    server = Server()
    server.answers["GET", "/pods"] = 200, b'{"type": "ADDED", "object": {}}\n{"type": "MOD'
    async with server.serving():
        api = make_api(
            write_config(tmp_path / "config", {"server": f"http://127.0.0.1:{server.port}"}, {}),
            tmp_path,
        )
        events = api.watch("/pods", {})
        assert (await anext(events))["type"] == "ADDED"
        with pytest.raises(base.TryAgain):
            await anext(events)


def test_several_kubeconfigs_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/token").write_text("t")
    (tmp_path / "empty").write_text("")
    first = write_config(tmp_path / "a", {"server": "https://a"}, {"token": "a"}, "east")
    second = write_config(
        tmp_path / "b/config", {"server": "https://b"}, {"tokenFile": "token"}, "west"
    )
    monkeypatch.setenv("KUBECONFIG", f"{first}:{tmp_path / 'none'}:{tmp_path / 'empty'}:{second}")
    (current,) = read_contexts("", [])
    east, west = read_contexts("", ["east", "west"])
    assert (current.name, east.cluster.server, west.cluster.server) == (
        "east",
        "https://a",
        "https://b",
    )
    assert west.login.token_file == str(tmp_path / "b/token")


@pytest.mark.parametrize(
    ("status", "reason", "message", "what"),
    [
        (
            422,
            "Invalid",
            "ValidatingAdmissionPolicy 'gpu' with binding 'gpu' denied request: no",
            base.Refused,
        ),
        (403, "Forbidden", 'admission webhook "x" denied the request: no', base.Refused),
        (429, "TooManyRequests", "the server is overloaded", base.TryAgain),
        (409, "Conflict", 'Operation cannot be fulfilled on resourcequotas "q"', base.TryAgain),
        (500, "InternalError", 'failed calling webhook "x": timeout', base.TryAgain),
        (410, "Expired", "too old resource version", base.TryAgain),
    ],
)
def test_what_an_api_server_refuses_is_sorted_by_what_can_be_done(
    status: int, reason: str, message: str, what: type[base.ProviderError]
) -> None:
    assert type(ApiServerRefused(status, reason, message).provider_error) is what


def make_provider(tmp_path: Path, port: int, **settings: str) -> KubernetesProvider:
    config = write_config(tmp_path / "config", {"server": f"http://127.0.0.1:{port}"}, {})
    context = base.ProviderContext(
        installation="i",
        home=tmp_path,
        settings=check_settings(MANIFEST, {"kubeconfig": config, **settings}),
        now=lambda: NOW,
        agent_archive=lambda: b"PK\x05\x06" + bytes(18),  # an archive of nothing
    )
    return KubernetesProvider(MANIFEST, context)


def make_server() -> Server:
    """A server with one node, which allows everything and takes every pod."""
    server = Server()
    server.answers["GET", "/api/v1/nodes"] = (
        200,
        {"items": [make_node("n", {"nvidia.com/gpu": "8"})]},
    )
    for path in ("/api/v1/pods", "/api/v1/namespaces/default/resourcequotas"):
        server.answers["GET", path] = 200, {"items": []}
    server.answers["GET", "/version"] = 200, {"gitVersion": "v1.33.0"}
    server.answers["POST", REVIEW] = 201, {"status": {"allowed": True}}
    server.answers["POST", PODS] = 201, {}
    return server


FORBIDDEN = 'pods "cavvy-check-" is forbidden: '


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (404, 'namespaces "default" not found'),
        (403, f"{FORBIDDEN}no PriorityClass with name urgent was found"),
        (403, f'{FORBIDDEN}pod rejected: RuntimeClass "nvidia" not found'),
        (
            403,
            f'{FORBIDDEN}error looking up service account default/x: serviceaccount "x" not found',
        ),
        (403, f"{FORBIDDEN}failed quota: few: must specify limits.cpu for: work"),
        (403, f'{FORBIDDEN}violates PodSecurity "restricted:latest": runAsNonRoot != true'),
    ],
)
async def test_what_refuses_every_pod_is_told_before_a_job_finds_it(
    tmp_path: Path, status: int, message: str
) -> None:
    server = make_server()
    server.answers["POST", PODS] = status, {"reason": "Forbidden", "message": message}
    async with server.serving():
        provider = make_provider(tmp_path, server.port)
        with pytest.raises(base.Refused, match=f"would be refused: {message}"):
            await provider.whoami()
        await provider.close()


@pytest.mark.parametrize(
    ("status", "message", "told"),
    [
        (403, f"{FORBIDDEN}minimum memory usage per Container is 1Gi, but request is 256Mi", True),
        (
            400,
            'admission webhook "x" denied the request: images must specify the registry '
            "ours.example",
            True,
        ),
        (403, f"{FORBIDDEN}exceeded quota: few, requested: pods=1", False),
        (400, "admission webhook x does not support dry run", False),
    ],
)
async def test_what_another_pod_may_not_meet_hides_nothing(
    tmp_path: Path, status: int, message: str, told: bool
) -> None:
    server = make_server()
    server.answers["POST", PODS] = status, {"reason": "Forbidden", "message": message}
    async with server.serving():
        provider = make_provider(tmp_path, server.port)
        facts = dict(await provider.whoami())
        assert facts["nodes"] == "1 of 1 usable"
        assert facts.get("a plain pod would be refused") == (message if told else None)
        await provider.close()


KUEUE = {"preferredVersion": {"groupVersion": "kueue.x-k8s.io/v1beta2", "version": "v1beta2"}}
QUEUE = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/localqueues/gold"
DENIED = 403, {"reason": "Forbidden", "message": 'localqueues "gold" is forbidden'}


def show_queue(server: Server, answer: Answer | None) -> None:
    server.answers["GET", "/apis/kueue.x-k8s.io"] = 200, KUEUE
    if answer is not None:
        server.answers["GET", QUEUE] = answer


def make_queue(active: str, reason: str, message: str) -> Object:
    return {
        "status": {
            "conditions": [
                {"type": "Active", "status": active, "reason": reason, "message": message}
            ]
        }
    }


@pytest.mark.parametrize(
    ("kueue", "answer", "problem", "shown"),
    [
        (False, None, "names gold, but this cluster has no Kueue: install Kueue", ""),
        (
            True,
            None,
            "namespace default has no Kueue local queue with this name, .* `kubectl -n default get "
            "localqueues` lists",
            "",
        ),
        (
            True,
            (200, make_queue("False", "ClusterQueueDoesNotExist", "no")),
            "admits no jobs now: ClusterQueueDoes",
            "",
        ),
        (True, (200, make_queue("True", "Ready", "it takes work")), "", "gold"),
        (
            True,
            (200, {"metadata": {"name": "gold"}}),
            "",
            "gold",
        ),  # Kueue has not said anything of it yet
        (True, DENIED, "", 'gold: could not be checked: localqueues "gold" is forbidden'),
    ],
)
async def test_a_queue_through_which_nothing_starts_is_not_ready(
    tmp_path: Path, kueue: bool, answer: Answer | None, problem: str, shown: str
) -> None:
    server = make_server()
    if kueue:
        show_queue(server, answer)
    async with server.serving():
        provider = make_provider(tmp_path, server.port, queue="gold")
        if problem:
            with pytest.raises(base.Refused, match=problem):
                await provider.whoami()
        else:
            assert dict(await provider.whoami())["queue"] == shown
        await provider.close()


@pytest.mark.parametrize(
    ("answer", "problem", "told", "goes_on"),
    [
        (None, base.Refused, "no Kueue local queue with this name", False),
        (
            (200, make_queue("False", "Stopped", "held")),
            base.NoCapacity,
            "admits no jobs now: Stopped: held",
            False,
        ),
        ((200, make_queue("True", "Ready", "")), base.Refused, "no more objects", True),
        (DENIED, base.Refused, "no more objects", True),
    ],
)
async def test_no_gang_is_put_into_a_queue_that_would_keep_it(
    tmp_path: Path,
    answer: Answer | None,
    problem: type[base.ProviderError],
    told: str,
    goes_on: bool,
) -> None:
    server = make_server()
    show_queue(server, answer)
    records = "/api/v1/namespaces/default/configmaps"
    server.answers["POST", records] = 422, {"reason": "Invalid", "message": "no more objects"}
    async with server.serving():
        provider = make_provider(tmp_path, server.port, queue="gold")
        (offer,) = [each for each in await provider.offers() if each.accelerator_count == 8]
        agent_endpoint = base.AgentEndpoint(address="http://127.0.0.1:9", token="t")
        gang = make_gang_spec(offer, name="g", agent_endpoint=agent_endpoint)
        with pytest.raises(base.ProviderError, match=told) as raised:
            await provider.launch(gang)
        assert type(raised.value) is problem
        assert (("POST", records) in server.asked) is goes_on
        await provider.close()


async def test_the_pod_that_is_tried_carries_what_every_pod_does(tmp_path: Path) -> None:
    server = make_server()
    show_queue(server, (200, {}))
    async with server.serving():
        provider = make_provider(tmp_path, server.port, queue="gold")
        await provider.whoami()
        labels, annotations = (
            json.loads(server.sent[PODS])["metadata"][key] for key in ("labels", "annotations")
        )
        assert labels["app.kubernetes.io/managed-by"] == "cavvy"
        assert labels["cavvy/installation"] == provider.mark
        assert labels["cavvy/rank"] == "0"
        assert labels["kueue.x-k8s.io/queue-name"] == "gold"
        assert annotations["kueue.x-k8s.io/pod-group-total-count"] == "1"
        await provider.close()


@pytest.mark.parametrize(
    "missing",
    [
        ["create pods"],
        ["create secrets"],
        ["patch configmaps"],
        ["create pods/exec", "get pods/exec"],
    ],
)
async def test_who_can_run_nothing_is_not_ready(tmp_path: Path, missing: list[str]) -> None:
    server = make_server()
    server.missing = missing
    async with server.serving():
        provider = make_provider(tmp_path, server.port)
        with pytest.raises(
            base.Refused, match=f"x does not have the rights to {', '.join(missing)}; .* --policy"
        ):
            await provider.whoami()
        await provider.close()


async def test_what_can_be_done_without_hides_nothing_that_refuses_every_pod(
    tmp_path: Path,
) -> None:
    server = make_server()
    server.missing = ["get pods", "watch pods", "get pods/exec", "list resourcequotas"]
    async with server.serving():
        provider = make_provider(tmp_path, server.port)
        assert dict(await provider.whoami())["missing rights"].startswith("get pods, watch pods, ")
        server.answers["POST", PODS] = (
            404,
            {"reason": "NotFound", "message": 'namespaces "default" not found'},
        )
        with pytest.raises(base.Refused, match="would be refused"):
            await provider.whoami()
        await provider.close()


def test_a_context_that_does_not_answer_hides_no_other(tmp_path: Path) -> None:
    server = make_server()

    async def scenario() -> None:
        async with server.serving():
            east = write_config(
                tmp_path / "east", {"server": f"http://127.0.0.1:{server.port}"}, {}, "east"
            )
            west = write_config(tmp_path / "west", {"server": "http://127.0.0.1:9"}, {}, "west")
            monkeypatch.setenv("KUBECONFIG", f"{east}:{west}")
            context = base.ProviderContext(
                installation="i",
                home=tmp_path,
                settings=check_settings(MANIFEST, {"contexts": "west, east"}),
            )
            provider = KubernetesProvider(MANIFEST, context)
            assert {offer.region for offer in await provider.offers()} == {"east"}
            assert [each.partition(":")[0] for each in provider.silent()] == ["west"]
            facts = await provider.whoami()
            assert [value.partition(",")[0] for what, value in facts if what == "context"] == [
                "east"
            ]
            assert [value.partition(":")[0] for what, value in facts if what == "silent"] == [
                "west"
            ]
            await provider.close()

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(scenario())


def show_gang(server: Server, provider: KubernetesProvider, pods: Iterable[Object]) -> None:
    labels = {"cavvy/installation": provider.mark, "cavvy/gang": "g", "cavvy/rank": "0"}
    data = {"nodes": "1", "asked_at": (NOW - timedelta(hours=1)).isoformat()}
    record = {
        "metadata": {"name": "g", "uid": "u", "labels": labels, "resourceVersion": "1"},
        "data": data,
    }
    core = "/api/v1/namespaces/default"
    made = [
        {**pod, "metadata": {"name": "g-0", "uid": "p", "labels": labels, **pod["metadata"]}}
        for pod in pods
    ]
    server.answers["GET", f"{core}/configmaps/g"] = 200, record
    server.answers["PATCH", f"{core}/configmaps/g"] = 200, record
    server.answers["GET", f"{core}/pods"] = 200, {"items": made}


GATED = {
    "metadata": {},
    "spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}], "containers": []},
    "status": {
        "phase": "Pending",
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "SchedulingGated",
                "message": "gated",
            }
        ],
    },
}


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2", ""])
async def test_a_gang_that_kueue_has_not_admitted_waits_and_leaves_the_queue_when_it_is_removed(
    tmp_path: Path, version: str
) -> None:
    server = Server()
    async with server.serving():
        provider = make_provider(tmp_path, server.port, queue="gold")
        show_gang(server, provider, [GATED])
        if version:
            known = {
                "preferredVersion": {
                    "groupVersion": f"kueue.x-k8s.io/{version}",
                    "version": version,
                }
            }
            server.answers["GET", "/apis/kueue.x-k8s.io"] = 200, known
        (seen,) = await provider.gangs("g")
        assert (seen.state, seen.reason) == (base.GangState.QUEUED, "SchedulingGated: gated")
        await provider.remove("g")
        workload = f"/apis/kueue.x-k8s.io/{version}/namespaces/default/workloads/g"
        assert (("DELETE", workload) in server.asked) is bool(version)
        assert ("DELETE", "/api/v1/namespaces/default/pods/g-0") in server.asked
        await provider.close()


RUNS = {
    "metadata": {},
    "spec": {"nodeName": "n1", "containers": []},
    "status": {
        "phase": "Running",
        "containerStatuses": [
            {"name": "work", "state": {"running": {"startedAt": NOW.isoformat()}}}
        ],
    },
}


async def test_a_gang_that_runs_keeps_its_place_in_kueue_until_its_pods_have_ended(
    tmp_path: Path,
) -> None:
    server = Server()
    async with server.serving():
        provider = make_provider(tmp_path, server.port, queue="gold")
        show_gang(server, provider, [RUNS])
        known = {
            "preferredVersion": {"groupVersion": "kueue.x-k8s.io/v1beta2", "version": "v1beta2"}
        }
        server.answers["GET", "/apis/kueue.x-k8s.io"] = 200, known
        await provider.remove("g")
        assert ("DELETE", "/api/v1/namespaces/default/pods/g-0") in server.asked
        assert not [path for _, path in server.asked if "kueue" in path]
        # A pod that never began goes only with Kueue's own object, once the others have ended.
        show_gang(server, provider, [{**GATED, "metadata": {"deletionTimestamp": NOW.isoformat()}}])
        (seen,) = await provider.gangs("g")
        assert seen.state is base.GangState.ENDED
        assert (
            "DELETE",
            "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads/g",
        ) in server.asked
        await provider.close()


def test_the_policy_has_the_rights_of_a_queue_where_there_is_one() -> None:
    assert "workloads" in make_policy("ml", "gold")
    assert "kueue" not in make_policy("ml")


WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"
NAMESPACE = "/api/v1/namespaces/default"
PRIORITIES = {"": 0, "low": 10, "high": 100}


class KueueCluster(Server):
    """An API server that keeps objects, with one node, and the strictest stand-in of Kueue that its
    documentation allows, for groups of plain pods and one queue with a quota of GPUs.

    Its webhook refuses a pod whose group is not described, and closes the others by a gate and a
    finalizer. A complete group becomes a workload, which waits with Kueue's own words, is admitted
    as a whole with the labels of its flavor, by priority and then by age, and is evicted for a
    workload of higher priority: its pods get the condition of an end and are deleted, and the quota
    is free once none of them runs. The pods of a workload that was not admitted go only with it.
    """

    def __init__(self, quota: int) -> None:
        super().__init__()
        self.answers = make_server().answers
        del self.answers["POST", PODS]
        node = make_node("n", {"nvidia.com/gpu": "8"})
        node["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
        self.answers["GET", "/api/v1/nodes/n"] = 200, node
        show_queue(self, (200, make_queue("True", "Ready", "it takes work")))
        self.objects: dict[str, Object] = {}
        self.quota = quota
        self.made = 0

    def answer(self, method: str, path: str, sent: bytes) -> Answer:
        path, _, query = path.partition("?")
        if (method, path) in self.answers:
            return self.answers[method, path]
        body = json.loads(sent) if sent else {}
        if method == "POST":
            answer = self._make(f"{path}/{body['metadata']['name']}", body)
        elif path in (PODS, f"{NAMESPACE}/configmaps"):
            wanted = parse_qs(query).get("labelSelector", [""])[0].split(",")
            found = [each for each in self._list(path) if set(wanted) <= _list_labels(each)]
            return 200, {"items": found}
        elif path not in self.objects:
            return MISSING
        elif method == "PATCH":
            self.objects[path].setdefault("data", {}).update(body["data"])
            answer = 200, self.objects[path]
        elif method == "DELETE":
            answer = self._delete(path)
        else:
            return 200, self.objects[path]
        self.control()
        return answer

    def _make(self, path: str, body: Object) -> Answer:
        if path in self.objects:
            return 409, {"reason": "AlreadyExists", "message": "it exists"}
        self.made += 1
        body["metadata"] |= {"uid": f"u{self.made}", "resourceVersion": str(self.made)}
        if path.startswith(PODS):
            if refused := self._close(body):
                return 403, {"reason": "Forbidden", "message": refused}
            body["status"] = {"phase": "Pending", "conditions": [_CLOSED]}
        self.objects[path] = body
        return 201, body

    def _close(self, pod: Object) -> str:
        labels, notes = pod["metadata"]["labels"], pod["metadata"].get("annotations", {})
        group, total = (
            labels.get(f"{_KUEUE}pod-group-name"),
            notes.get(f"{_KUEUE}pod-group-total-count"),
        )
        if labels.get(f"{_KUEUE}queue-name") != "gold" or not group or not str(total).isdigit():
            return "admission webhook mpod.kb.io denied the request: the group is not described"
        if len(self._list_group(group)) >= int(total):
            return f"the group {group} has all of its pods"
        pod["spec"]["schedulingGates"] = [{"name": f"{_KUEUE}admission"}]
        pod["metadata"]["finalizers"] = [f"{_KUEUE}managed"]
        return ""

    def _delete(self, path: str) -> Answer:
        each = self.objects[path]
        if path.startswith(WORKLOADS):
            self._let_go(each["metadata"]["name"])
            del self.objects[path]
        elif path.startswith(PODS):
            each["metadata"].setdefault("deletionTimestamp", NOW.isoformat())
        else:
            del self.objects[path]
        return 200, {}

    def control(self) -> None:
        """Do what Kueue's controller does after a change."""
        for group in {
            each["metadata"]["labels"][f"{_KUEUE}pod-group-name"] for each in self._list(PODS)
        }:
            pods, path = self._list_group(group), f"{WORKLOADS}/{group}"
            total = int(pods[0]["metadata"]["annotations"][f"{_KUEUE}pod-group-total-count"])
            if path in self.objects:
                if all(each["status"]["phase"] in ("Succeeded", "Failed") for each in pods):
                    self.objects[path]["status"]["conditions"] = [_say("Finished", "True", "done")]
                    self._let_go(group)
            elif len(pods) == total and not any(
                "deletionTimestamp" in each["metadata"] for each in pods
            ):
                self.made += 1
                self.objects[path] = {
                    "metadata": {"name": group, "order": self.made},
                    "priority": PRIORITIES[pods[0]["spec"].get("priorityClassName", "")],
                    "gpus": sum(_count_gpus(each) for each in pods),
                    "status": {"conditions": [_say("QuotaReserved", "False", "Pending")]},
                }
        self._admit_all()

    def _admit_all(self) -> None:
        waiting = [each for each in self._list(WORKLOADS) if _says(each, "QuotaReserved", "False")]
        for each in sorted(waiting, key=lambda one: (-one["priority"], one["metadata"]["order"])):
            holders = [one for one in self._list(WORKLOADS) if _says(one, "QuotaReserved", "True")]
            lacks = sum(one["gpus"] for one in holders) + each["gpus"] - self.quota
            if lacks <= 0:
                each["status"]["conditions"] = [
                    _say("QuotaReserved", "True", "reserved"),
                    _say("Admitted", "True", "The workload is admitted"),
                ]
                for pod in self._list_group(each["metadata"]["name"]):
                    self._start(pod)
                continue
            each["status"]["conditions"] = [
                _say(
                    "QuotaReserved",
                    "False",
                    "couldn't assign flavors to pod set main: insufficient unused quota for "
                    f"nvidia.com/gpu in flavor h100, {lacks} more needed",
                )
            ]
            lower = [one for one in holders if one["priority"] < each["priority"]]
            if sum(one["gpus"] for one in lower) >= lacks:
                self._evict(lower[-1]["metadata"]["name"])
                return

    def _evict(self, group: str) -> None:
        told = "Preempted to accommodate a workload due to prioritization in the ClusterQueue"
        self.objects[f"{WORKLOADS}/{group}"]["status"]["conditions"].append(
            _say("Evicted", "True", told)
        )
        for pod in self._list_group(group):
            pod["status"]["conditions"] = [_say("TerminationTarget", "True", told)]
            self._delete(f"{PODS}/{pod['metadata']['name']}")

    def stop_deleted(self) -> None:
        """End the programs of the deleted pods, as kubelets do after the grace period."""
        for pod in self._list(PODS):
            if "deletionTimestamp" in pod["metadata"] and pod["status"]["phase"] == "Running":
                self.end(pod["metadata"]["name"], 143)

    def _start(self, pod: Object) -> None:
        pod["spec"] |= {"schedulingGates": [], "nodeName": "n"}
        pod["spec"]["nodeSelector"] = {**pod["spec"].get("nodeSelector", {}), "flavor": "h100"}
        pod["status"] = {"phase": "Running", **_containers({"running": {}})}

    def end(self, name: str, code: int) -> None:
        """End the program of a pod."""
        pod = self.objects[f"{PODS}/{name}"]
        pod["status"] |= {"phase": "Failed" if code else "Succeeded"}
        pod["status"] |= _containers(
            {"terminated": {"exitCode": code, "finishedAt": NOW.isoformat()}}
        )
        self.control()

    def _let_go(self, group: str) -> None:
        for pod in self._list_group(group):
            pod["metadata"]["finalizers"] = []
            if "deletionTimestamp" in pod["metadata"]:
                del self.objects[f"{PODS}/{pod['metadata']['name']}"]

    def _list(self, path: str) -> list[Object]:
        return [each for known, each in self.objects.items() if known.startswith(f"{path}/")]

    def _list_group(self, group: str) -> list[Object]:
        wanted = (f"{_KUEUE}pod-group-name", group)
        return [each for each in self._list(PODS) if wanted in each["metadata"]["labels"].items()]


_KUEUE = "kueue.x-k8s.io/"
_CLOSED = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "SchedulingGated",
    "message": "Scheduling is blocked due to non-empty scheduling gates",
}


def _say(kind: str, status: str, message: str) -> Object:
    return {"type": kind, "status": status, "reason": message.split()[0], "message": message}


def _says(workload: Object, kind: str, status: str) -> bool:
    found = workload["status"]["conditions"]
    return any((each["type"], each["status"]) == (kind, status) for each in found)


def _containers(state: Object) -> Object:
    (told,) = state.values()
    told["startedAt"] = NOW.isoformat()
    return {"containerStatuses": [{"name": "work", "state": state}]}


def _list_labels(each: Object) -> set[str]:
    return {"", *(f"{name}={value}" for name, value in each["metadata"]["labels"].items())}


def _count_gpus(pod: Object) -> int:
    return int(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])


async def test_a_gang_waits_for_kueue_runs_is_evicted_and_leaves_nothing(tmp_path: Path) -> None:
    cluster = KueueCluster(quota=8)
    async with cluster.serving():
        low, high = (
            make_provider(tmp_path, cluster.port, queue="gold", priority_class=name)
            for name in ("low", "high")
        )
        offers = {each.accelerator_count: each for each in await low.offers()}

        async def launch(
            provider: KubernetesProvider, name: str, gpus: int, nodes: int = 1
        ) -> None:
            await provider.launch(
                make_gang_spec(
                    offers[gpus],
                    name=name,
                    nodes=nodes,
                    agent_endpoint=base.AgentEndpoint(address="http://127.0.0.1:9", token="t"),
                )
            )

        async def look(provider: KubernetesProvider, name: str) -> tuple[base.GangState, bool, str]:
            (seen,) = await provider.gangs(name)
            return seen.state, seen.preempted, seen.reason

        await launch(low, "first", 4)
        assert await look(low, "first") == (base.GangState.RUNNING, False, "")
        assert cluster.objects[f"{PODS}/first-0"]["spec"]["nodeSelector"]["flavor"] == "h100"
        await launch(low, "pair", 4, nodes=2)  # both of its pods start, or none
        waits = (
            "waits in Kueue's queue gold: couldn't assign flavors to pod set main: insufficient "
            "unused quota for nvidia.com/gpu in flavor h100, 4 more needed"
        )
        assert await look(low, "pair") == (base.GangState.QUEUED, False, waits)
        assert cluster.objects[f"{PODS}/pair-0"]["spec"]["schedulingGates"]

        await launch(high, "urgent", 8)
        evicted = (
            "Kueue: Preempted to accommodate a workload due to prioritization in the ClusterQueue"
        )
        assert await look(low, "first") == (base.GangState.RUNNING, False, evicted)
        assert (await look(high, "urgent"))[0] is base.GangState.QUEUED  # until the quota is free
        cluster.stop_deleted()
        assert await look(low, "first") == (base.GangState.ENDED, True, evicted)
        assert await look(high, "urgent") == (base.GangState.RUNNING, False, "")
        await launch(low, "again", 4)  # as the engine does for the preempted job
        assert (await look(low, "again"))[:2] == (base.GangState.QUEUED, False)

        cluster.end("urgent-0", 0)
        assert await look(high, "urgent") == (base.GangState.ENDED, False, "the agents exited")
        assert (await look(low, "pair"))[0] is base.GangState.RUNNING  # it waited for longer
        assert (await look(low, "again"))[0] is base.GangState.QUEUED
        await low.remove("again")  # while it waits
        assert await look(low, "again") == (base.GangState.ENDED, False, "removed")
        await low.remove("pair")  # while it runs
        cluster.stop_deleted()
        assert await look(low, "pair") == (base.GangState.ENDED, False, "removed")
        left = {path for path in cluster.objects if path.startswith((PODS, f"{NAMESPACE}/secrets"))}
        assert left == set()
        assert not [each for each in cluster._list(WORKLOADS) if _says(each, "Admitted", "True")]
        await low.close()
        await high.close()
