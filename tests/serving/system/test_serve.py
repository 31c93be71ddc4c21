"""`cavvy serve`: a cold service answers all requests, grows, loses its replicas, and ends."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from tests.system.ports import free_port
from tests.system.trust import User, check_clean, environment, serving_user_at
from tests.waits import START_S, wait_until

from cavvy.capabilities.serving.wire import LevelShares, ServedView, find_service

pytestmark = pytest.mark.system
EXAMPLE = Path(__file__).parents[3] / "examples" / "serve-hello"


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with serving_user_at(tmp_path) as user:
        yield user


def call(url: str) -> int:
    with urlopen(url, timeout=START_S) as answer:
        answer.read()
        return int(answer.status)


def answers(url: str) -> bool:
    """Whether a gateway listens."""
    try:
        return call(url) == 200
    except OSError:
        return False


def refusal(url: str) -> tuple[int, str]:
    """The status and the code of an answer of the gateway's own."""
    try:
        return call(url), ""
    except HTTPError as error:
        return error.code, json.load(error)["error"]["code"]


def read_command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


def read_service(user: User) -> ServedView:
    with environment(user.environ):
        return find_service(user.api, "default", "hello")


def read_level(user: User) -> LevelShares:
    """What the service has reached in the last hour, which is its first."""
    slo = read_service(user).slo
    assert slo is not None
    assert slo.hour == slo.day
    return slo.hour


def find_gateway(user: User) -> int:
    """The gateway's process ID."""
    config = f"{user.home}/gateway/gateway.json".encode()
    found = [int(each) for each in os.listdir("/proc") if each.isdigit()]
    [pid] = [pid for pid in found if config in read_command(pid)]
    return pid


def check_verbs(user: User) -> None:
    """The commands of jobs take the name of a service."""
    logs = user.output("logs", "hello")
    assert {"hello.1: listening", "hello.2: listening"} <= {
        each.partition(" on ")[0] for each in logs.splitlines()
    }
    assert user.output("logs", "hello", "--replica", "1").startswith("listening")
    events = user.json("events", "hello")
    assert {"hello.1", "hello.2"} <= {each["replica"] for each in events}
    assert [each["at"] for each in events] == sorted(each["at"] for each in events)
    page = user.output("status", "hello")
    assert page.partition("\n")[0] == user.output("services", "show", "hello").partition("\n")[0]
    assert user.json("status", "hello")["name"] == "hello"


def test_a_cold_service_answers_grows_recovers_and_ends(user: User) -> None:
    shutil.copytree(EXAMPLE, user.work, dirs_exist_ok=True)
    user.settings("[providers.local]\nprice_usd_hr = 3.6\n")
    file = user.work / "service.yaml"
    more = "port: 8000\n  price_header: true\n  slo: {p95: 1m, availability: 90%}"
    file.write_text(file.read_text().replace("port: 8000", more))
    assert "--yes" in user.cli("serve", "service.yaml", code=2), "replicas cost money"
    url = user.json("serve", "--yes", "service.yaml")["url"]
    assert read_service(user).state == "idle"
    assert read_level(user) == LevelShares(requests=0, availability=None, in_time=None)
    with ThreadPoolExecutor(50) as pool:
        assert list(pool.map(call, [f"{url}/{number}" for number in range(50)])) == [200] * 50
    wait_until(lambda: read_service(user).ready > 1)
    with urlopen(url, timeout=START_S) as answer:
        assert int(answer.headers["Cavvy-Price-Micros"]) >= 0
    check_verbs(user)
    programs = [pid for pid in user.worked() if b"hello.py" in read_command(pid)]
    os.kill(programs[0], signal.SIGKILL)
    assert [call(url) for _ in range(10)] == [200] * 10, "the others answer"

    os.kill(find_gateway(user), signal.SIGKILL)
    wait_until(lambda: answers(url))  # another gateway on the same port
    gateway = find_gateway(user)
    user.kill_server()
    assert call(url) == 200, "the gateway needs no server"
    assert '"hello": "ada"' in user.output("call", "hello", "/", "-d", "ada"), "another server"
    assert find_gateway(user) == gateway

    file.write_text(file.read_text().replace("idle: 5m", "idle: 10s"))
    assert user.json("serve", "--yes", "service.yaml")["revision"] == 2
    wait_until(lambda: read_service(user).state == "idle")
    assert read_level(user).in_time == 1
    assert call(url) == 200, "from zero again"
    user.cli("budget", "set", "small", "0.0001", "--service", "hello", "--hard", "100%")
    wait_until(lambda: refusal(url) == (402, "budget-spent"))
    wait_until(lambda: read_service(user).state == "idle")
    user.cli("budget", "remove", "small")
    wait_until(lambda: answers(url))
    user.cli("unserve", "hello")
    assert user.json("services") == []
    check_clean(user)
    assert not answers(url)
    assert "pass failed" not in (user.home / "server.log").read_text()
    [bill] = user.json("cost", "--by", "service")
    assert (bill["service"], bill["spent_micros"] > 0) == ("hello", True)

    def sums() -> dict[str, int]:
        return {row["kind"]: row["spent_micros"] for row in user.json("cost", "--by", "kind")}

    # all of it is divided, whatever was killed
    wait_until(lambda: sums().get("node", 0) + sums().get("correction", 0) == 0)
    parts = {kind: spent for kind, spent in sums().items() if kind not in ("node", "correction")}
    assert {kind for kind, spent in parts.items() if spent > 0} == {"request", "idle", "cold start"}
    assert sum(parts.values()) == bill["spent_micros"]
    [replicas] = user.json("cost", "--by", "tag:service")
    assert replicas["spent_micros"] == bill["spent_micros"]


def test_two_programs_do_not_share_a_port_of_the_servers_machine(user: User) -> None:
    port = free_port()
    text = f"resources: {{ports: {port}}}\nrun: exec python3 -m http.server {port}\n"
    text += "service: {readiness_probe: /}\n"  # a file of SkyPilot, whose program has its own port
    for name in ("first", "second"):
        (user.work / name).mkdir()
        (user.work / f"{name}.yaml").write_text(f"name: {name}\nworkdir: {name}\n{text}")
    url = user.json("serve", "--yes", "first.yaml")["url"]
    wait_until(lambda: answers(url))
    user.json("serve", "--yes", "second.yaml")

    def find_second() -> ServedView:
        with environment(user.environ):
            return find_service(user.api, "default", "second")

    wait_until(lambda: find_second().problem or find_second().ready)
    assert "is used by a replica of first" in find_second().problem
    assert (find_second().ready, find_second().replicas) == (0, [])
    assert "service first has ended" in user.output("stop", "first")
    wait_until(lambda: find_second().ready)
    assert find_second().problem == ""
    (user.work / "third.yaml").write_text((user.work / "second.yaml").read_text())
    user.json("serve", "--yes", "--name", "third", "third.yaml")
    user.cli("unserve", "second", "thrid", code=1)  # a wrong name: neither ends
    user.cli("unserve", code=2)
    assert {each["name"] for each in user.json("services")} == {"second", "third"}
    user.cli("unserve", "--all")
    assert user.json("services") == []


def test_a_router_has_the_workers_that_live(user: User) -> None:
    here = Path(__file__).parents[2] / "system"
    engine = Path(__file__).parents[3] / "benchmarks" / "engine_stand_in.py"
    user.settings("[providers.local]\nprice_usd_hr = 3.6\n")
    (user.work / "roles.yaml").write_text(f"""
name: hello
run: exec {sys.executable} {engine} $PORT
resources: {{cpu: 0.1, memory: 32MiB}}
service:
  concurrency: 4
  drain: 1s
  groups:
    router: {{run: exec {sys.executable} {here / "role_router.py"} $PORT}}
    prefill: {{replicas: {{min: 0, max: 2}}}}
    decode: {{replicas: {{min: 0, max: 1}}}}
""")
    url = user.json("serve", "--yes", "roles.yaml")["url"]
    assert read_service(user).state == "idle"
    ask = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()

    def say() -> int:
        request = Request(f"{url}/v1/chat/completions", ask, {"Content-Type": "application/json"})
        with urlopen(request, timeout=START_S) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 2
            return int(answer.status)

    def find(role: str) -> list[int]:
        found = read_service(user).replicas
        return [each.port for each in found if each.role == role and each.state == "ready"]

    def list_workers() -> set[str]:
        with urlopen(f"http://127.0.0.1:{find('router')[0]}/workers") as answer:
            return {each["url"] for each in json.load(answer)["workers"]}

    assert say() == 200, "from zero"
    [lost] = find("decode")
    words = f"engine_stand_in.py\0{lost}".encode()
    [program] = [pid for pid in user.worked() if words in read_command(pid)]
    os.kill(program, signal.SIGKILL)
    wait_until(lambda: lost not in find("decode"))
    assert say() == 200, "the request waits for another decode"
    ports = [*find("prefill"), *find("decode")]
    assert lost not in ports
    assert list_workers() == {f"http://127.0.0.1:{port}" for port in ports}
    assert "(decode, revision 1) ready" in user.cli("services", "show", "hello")
    user.cli("unserve", "hello")
    check_clean(user)

    def sums() -> dict[tuple[str, str], int]:
        rows = user.json("cost", "--by", "tag:role,kind")
        return {(row["tag:role"], row["kind"]): row["spent_micros"] for row in rows}

    wait_until(lambda: not any(each for (_, kind), each in sums().items() if kind == "node"))
    for role in ("router", "prefill", "decode"):
        assert sums()[role, "request"] > 0, "workers work while the router has requests"
        assert sums()[role, "cold start"] > 0
