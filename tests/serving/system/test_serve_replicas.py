"""Services with several servers on one PostgreSQL: each server's gateway has all replicas, and the
service goes on when the server that reconciles it is killed.
"""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from tests.system.replica_site import ReplicaSite
from tests.waits import START_S, wait_until

from cavvy.capabilities.serving.wire import (
    ServedView,
    ServiceKeyAsk,
    create_service_key,
    find_service,
    revoke_service_key,
)
from cavvy.client import ApiClient
from cavvy.client.connection import ensure_server
from cavvy.client.service_wire import end_service, put_service
from cavvy.store.leases import shard_of

pytestmark = pytest.mark.system
_TASK = """
name: pages
run: exec python3 -c "$PAGES" $PORT
env:
  PAGES: |
    import sys
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), SimpleHTTPRequestHandler).serve_forever()
resources: {cpu: 0.1, memory: 32MiB}
service: {port: 8000, replicas: {min: 0, max: 2, idle: 10m}, concurrency: 8}
"""


_MODEL = """
name: pages
run: exec python3 -c "$MODEL"
env:
  MODEL: |
    import json, os
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Model(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}"
            used = json.loads(asked).get("seed", 1)
            usage = {"prompt_tokens": used, "completion_tokens": 0, "total_tokens": used}
            text = json.dumps({"object": "chat.completion", "choices": [], "usage": usage})
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST  # of the probe

    ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Model).serve_forever()
resources: {cpu: 0.1, memory: 32MiB}
service: {port: 8000, replicas: 1, models: [m], keys: true}
"""


def call(url: str, key: str = "") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urlopen(Request(url, headers=headers), timeout=START_S) as answer:
            answer.read()
            return int(answer.status)
    except HTTPError as error:
        return error.code


def find_urls(site: ReplicaSite) -> dict[str, str]:
    """The service's URL at each server's gateway."""

    def find(name: str) -> str:
        with site.connect(name) as client:
            return read(client).url

    wait_until(lambda: all(find(name) for name in site.homes))
    return {name: find(name) for name in site.homes}


def read(client: ApiClient) -> ServedView:
    return find_service(client, "default", "pages")


def find_owner(site: ReplicaSite) -> str:
    sql = "SELECT r.folder FROM cavvy_leases l JOIN cavvy_replicas r ON r.id = l.holder WHERE "
    [(folder,)] = site.ask(f"{sql} l.name = '{shard_of('service:default/pages')}'")
    return Path(str(folder)).name


def find_programs(service: ServedView) -> dict[str, int]:
    """The process of each replica that gets requests."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has just ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if len(words) == 5 and b"SimpleHTTPRequestHandler" in words[2]:
                found[words[3]] = int(pid)
    ports = {
        each.job: str(each.port).encode() for each in service.replicas if each.state == "ready"
    }
    return {replica: found[port] for replica, port in ports.items()}


def start(client: ApiClient, text: str = _TASK) -> ServedView:
    return put_service(
        client,
        text,
        project="default",
        name="pages",
        path="service.yaml",
        params={},
        origin=None,
        user="ada",
        consent=True,
    )


def test_each_gateway_serves_and_a_killed_server_takes_no_replica_along(site: ReplicaSite) -> None:
    for name in site.homes:
        ensure_server(home=str(site.homes[name]))
    wait_until(site.shared)
    with site.connect("a") as a:
        start(a)
    urls = find_urls(site)
    assert urls["a"] != urls["b"]
    with ThreadPoolExecutor(20) as pool:  # nothing runs yet, and each gateway has half of these
        asked = [f"{url}/?{number}" for url in urls.values() for number in range(10)]
        assert list(pool.map(call, asked)) == [200] * 20

    owner = find_owner(site)
    other = {"a": "b", "b": "a"}[owner]
    with site.connect(other) as client:
        wait_until(lambda: count_answered(client) == 20, lambda: str(read(client)))
        programs = find_programs(read(client))
        site.kill(owner)
        wait_until(lambda: find_owner(site) == other)
        assert [call(urls[name]) for name in (owner, other) * 5] == [200] * 10
        assert find_programs(read(client)) == programs
        for pid in programs.values():
            os.kill(pid, signal.SIGKILL)
        assert call(urls[other]) == 200, "the new owner orders others"
        assert not find_programs(read(client)).keys() & programs.keys()

        start(client, _TASK.replace("service: {", "service: {keys: true, "))
        key = create_service_key(client, "default", "pages", ServiceKeyAsk())
        ensure_server(home=str(site.homes[owner]))  # it finds its gateway
        with site.connect(owner) as again:
            wait_until(lambda: call(urls[owner], key.key) == 200)
            assert call(urls[owner]) == 401
            revoke_service_key(again, "default", "pages", key.view.id)
            wait_until(lambda: call(urls[other], key.key) == 401)
            end_service(again, "default", "pages")
            wait_until(lambda: not refuses(urls[owner]) and not refuses(urls[other]))


def test_the_tokens_of_a_key_count_at_each_gateway(site: ReplicaSite) -> None:
    for name in site.homes:
        ensure_server(home=str(site.homes[name]))
    wait_until(site.shared)
    with site.connect("a") as a:
        start(a, _MODEL)
        key = create_service_key(a, "default", "pages", ServiceKeyAsk(tokens_per_min=100_000)).key
        urls = find_urls(site)

        def ask(name: str, tokens: int = 1) -> tuple[int, int]:
            """Use tokens of the key; return the status, and the tokens that are left."""
            body = json.dumps({"model": "m", "messages": [], "seed": tokens}).encode()
            url = f"{urls[name]}/v1/chat/completions"
            fields = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            try:
                with urlopen(Request(url, body, fields), timeout=START_S) as answer:
                    return answer.status, int(answer.headers["x-ratelimit-remaining-tokens"])
            except HTTPError as error:
                return error.code, int(error.headers.get("x-ratelimit-remaining-tokens", 0))

        for name in urls:
            wait_until(lambda name=name: ask(name)[0] == 200)
        assert ask("a")[1] > 90_000

        def is_counted() -> bool:  # what is asked of `a` does not use half of its tokens itself
            ask("b", 90_000)
            return ask("a")[1] < 50_000

        wait_until(is_counted, lambda: str(ask("a")), pause_s=0.5)
        end_service(a, "default", "pages")


def count_answered(client: ApiClient) -> int:
    traffic = read(client).traffic
    return 0 if traffic is None else traffic.answered


def refuses(url: str) -> bool:
    """Whether a gateway listens."""
    try:
        return call(url) == 401
    except OSError:
        return False
