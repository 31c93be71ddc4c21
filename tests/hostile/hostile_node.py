"""A node that lies to a running server: the token, claim and address of a real agent, in the hands
of its task.

Each attack returns what went through that must not; `ATTACKS` says what is tried and what refuses
it.
"""

import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
from tests.api.hostile_agent import make_attacks
from tests.system.server_state import home_with_jobs
from tests.waits import wait_until

from cavvy.client.state import read_server
from cavvy.domain.messages import PROTOCOL

CAVVY = str(Path(sys.executable).with_name("cavvy"))
MIB = 1 << 20
LOG_MIB = 4
SECRET = "only-project-a-may-read-this"
VICTIM = f"name: victim\nworkdir: .\nrun: echo {SECRET}; sleep 3600\n"
ATTACKER = "name: attacker\nnodes: 2\nresources: {cpu: 0.1}\ncheckpoint: state\ngrace: 1s\nrun: sleep 3600\n"
PATHS = ("../x", "/x", "a/../../x", "", ".", "a\0b", "a//b", "x" * 5000, "a/" * 3000 + "a")


@dataclass(kw_only=True)
class World:
    """A server, a job of another project, and the credentials that a node of `attacker` holds."""

    folder: Path
    seed: int
    scale: int  # 1 in CI
    user: httpx.Client
    config: dict[str, Any]
    nonce: str
    victim: str  # its gang
    hashes: list[str]  # the victim's files
    seen: Counter[int] = field(default_factory=Counter)
    seq: int = 0

    @property
    def gang(self) -> str:
        return str(self.config["gang"])

    def ask(self, method: str, path: str, *, token: str = "", **parts: Any) -> httpx.Response:
        """A request with the node's token; its own gang and rank where none are given."""
        heads = {
            "Authorization": f"Bearer {token or self.config['token']}",
            "Cavvy-Agent-Protocol": str(PROTOCOL),
        }
        query = {"gang": self.gang, "rank": 0, **parts.pop("params", {})}
        if (body := parts.pop("json", None)) is not None:
            parts["content"] = json.dumps({"gang": self.gang, "rank": 0, **body}).encode()
        answer = self.user.request(method, path, params=query, headers=heads, **parts)
        self.seen[answer.status_code] += 1
        return answer

    def report(self, *messages: dict[str, Any], nonce: str = "", rank: int = 0) -> httpx.Response:
        body = {"nonce": nonce or self.nonce, "rank": rank, "messages": list(messages)}
        answer = self.ask("POST", "/agent/v1/messages", json=body)
        if answer.status_code == 200:
            self.seq = max(self.seq, answer.json()["ack"])
        return answer

    def routes(self, mine: bool) -> Iterator[tuple[str, str]]:
        """The agents' routes, or the others that need a token."""
        paths = self.user.get("/v1/openapi.json").json()["paths"]
        for path, methods in paths.items():
            if path.startswith("/agent/v1/") != mine or path.startswith(("/boot", "/nodes")):
                continue
            for name, value in {"blob": "0" * 64, "index": "0", "rank": "0"}.items():
                path = path.replace(f"{{{name}}}", value)
            yield from (
                (method.upper(), path.replace("{", "").replace("}", "")) for method in methods
            )


def refused(answer: httpx.Response, *statuses: int) -> list[str]:
    """What went through, as a list of at most one sentence."""
    if answer.status_code in statuses:
        return []
    request = answer.request
    return [f"{request.method} {request.url.path}: {answer.status_code} {answer.text[:200]!r}"]


# Where a device that has no token yet begins; the proof for a token is checked by its own tests.
_OF_DEVICES = ("/edge/v1/script", "/edge/v1/nonce", "/edge/v1/token")


def user_routes(world: World) -> list[str]:
    token = {"Authorization": f"Bearer {world.config['token']}"}
    wrong = []
    for method, path in world.routes(mine=False):
        # open to all, without a token: OPTIONS is the handshake of webhooks, which tells nothing
        open_to_all = path in ("/v1/health", "/v1/sign-in") or path in _OF_DEVICES
        if not open_to_all and method != "OPTIONS":
            wrong += refused(world.user.request(method, path, headers=token), 401, 403)
    return wrong


def other_gangs(world: World) -> list[str]:
    ask = {"gang": world.victim, "nonce": "n", "address": "a", "messages": [], "blobs": []}
    ask |= {"made_at": "2026-01-01T00:00:00Z", "files": [], "upload": "u", "tags": [], "size": 1}
    ask |= {"path": "a", "part": 1}
    query = {"gang": world.victim, "offset": 0, "size": 1, "length": 1, "path": "a"}
    wrong = []
    for method, path in world.routes(mine=True):
        wrong += refused(world.ask(method, path, params=query, json=ask), 401, 403)
    return wrong


def other_claims(world: World) -> list[str]:
    end = {"seq": 1, "kind": "exited", "outcome": "succeeded", "exit_code": 0}
    wrong = refused(world.report(end, nonce="guessed"), 409)
    wrong += refused(world.report(end, rank=1), 409)
    wrong += refused(world.report(end, rank=2), 404, 409, 422)
    ask = {"nonce": "mine", "address": "a", "host": {}}
    return wrong + refused(world.ask("POST", "/agent/v1/claim", json=ask), 409)


def foreign_blobs(world: World) -> list[str]:
    wrong = []
    for name in world.hashes:
        wrong += refused(world.ask("GET", f"/agent/v1/blobs/{name}"), 404)
    pack = world.ask("POST", "/agent/v1/blobs/pack", json={"blobs": world.hashes})
    return wrong + ["a pack holds the file"] * (SECRET.encode() in pack.content)


def bad_blobs(world: World) -> list[str]:
    name, path = sha256(b"good").hexdigest(), "/agent/v1/blobs/"
    wrong = refused(
        world.ask("PUT", path + name, params={"offset": 0, "size": 4}, content=b"evil"), 409, 422
    )
    for offset, size in ((-1, 4), (1 << 62, 4), (0, -1), (0, 1 << 62)):
        query = {"offset": offset, "size": size}
        answer = world.ask("PUT", path + name, params=query, content=b"good")
        wrong += refused(answer, 200, 409, 422, 507)
    for bad in ("..%2f..%2fx", "X" * 64, "0" * 63):
        wrong += refused(
            world.ask("PUT", path + bad, params={"offset": 0, "size": 1}), 404, 405, 422
        )
    return wrong


def checkpoints(world: World) -> list[str]:
    data = b"state"
    name = sha256(data).hexdigest()
    query = {"offset": 0, "size": len(data)}
    world.ask("PUT", f"/agent/v1/blobs/{name}", params=query, content=data)
    good = {"path": "a", "sha256": name, "size": len(data), "mode": 0o644, "mtime_ns": 1}
    lies: list[dict[str, Any]] = [{"path": path} for path in PATHS]
    lies += [{"sha256": "X" * 64}, {"size": -1}, {"mode": -1}, {"mtime_ns": 1 << 70}]
    lies += [{"sha256": None, "link": target} for target in ("../../x", "/etc/passwd", "a\0")]
    wrong = []
    for lie in lies:
        ask = {"nonce": world.nonce, "made_at": "9999-12-31T23:59:59Z", "files": [{**good, **lie}]}
        answer = world.ask("POST", "/agent/v1/checkpoints", json=ask)
        if answer.status_code == 200 and "state" in answer.text and "missing" not in answer.text:
            wrong.append(f"accepted {lie!s:.80}")
        wrong += ["5xx"] * (answer.status_code >= 500)
    return wrong + [f"{each} exists" for each in world.folder.rglob("x")]


def messages(world: World) -> list[str]:
    wrong = []
    for requests in make_attacks(15 * world.scale, world.seed):
        for each in requests:
            if isinstance(each, list):
                said = [{**one, "seq": one["seq"] + world.seq} for one in each]
                said = [one for one in said if one["kind"] != "exited"]
                wrong += refused(world.report(*said), 200, 400, 413, 422)
    answer = world.report({"seq": world.seq + 1, "kind": "progress", "values": {"a": 1}})
    return wrong + refused(answer, 200)


def log_flood(world: World) -> list[str]:
    path, wrong = "/agent/v1/log", []
    for offset, lost in ((-1, 0), (1 << 63, 0), (0, 1 << 62), (1 << 62, 1 << 62), (10, -5)):
        query = {"offset": offset, "lost": lost}
        answer = world.ask("POST", path, params=query, content=b"x")
        wrong += ["5xx"] * (answer.status_code >= 500)
    at = world.ask("POST", path, params={"offset": 0}, content=b"").json().get("offset", 0)
    for _ in range(4 * world.scale):
        query = {"offset": at, "lost": 0}
        answer = world.ask("POST", path, params=query, content=b"y" * MIB)
        at = answer.json().get("offset", at)
    for _ in range(20 * world.scale):  # gaps make short segments
        query = {"offset": at + 10, "lost": 10}
        at = world.ask("POST", path, params=query, content=b"z").json().get("offset", at)
    size = sum(each.stat().st_size for each in world.folder.rglob("*.log*") if each.is_file())
    files = sum(1 for each in world.folder.rglob("*.0.log*"))
    wrong += [f"{size} bytes of log"] * (size > 3 * LOG_MIB * MIB)
    return wrong + [f"{files} files of logs"] * (files > 300)


def event_flood(world: World) -> list[str]:
    text = "\x1b[2J" + "e" * 8000
    for _ in range(3 * world.scale):
        many = [
            {"seq": world.seq + 1 + n, "kind": "event", "name": "x", "text": text}
            for n in range(1000)
        ]
        world.report(*many)
    rows = world.user.get("/v1/projects/b/jobs/attacker/events").json()["events"]
    size = sum(len(each["text"]) for each in rows)
    return [f"{size} bytes of events"] * (size > 17 * MIB)


def terminals(world: World) -> list[str]:
    bad = "\x1b]0;owned\x07\x1b[2J\x9b31m"
    world.report(
        {"seq": world.seq + 1, "kind": "progress", "values": {f"a{bad}": bad, "fraction": 0.5}},
        {"seq": world.seq + 2, "kind": "notice", "seconds": 3600, "source": bad},
    )
    commands = (["status", "attacker"], ["events", "attacker"], ["ps"], ["nodes"])
    wrong = []
    for command in commands:
        out = cavvy(*command, *(() if command == ["nodes"] else ("--project", "b")))
        wrong += [f"cavvy {command[0]} prints a control character"] * any(
            each in out for each in "\x1b\x07\x9b"
        )
    return wrong


def transfers(world: World) -> list[str]:
    wrong = []
    for index in ("0", "-1", str(10**30)):
        for path in PATHS:
            asks = [
                world.ask(
                    "POST", f"/agent/v1/data/outputs/{index}", json={"path": path, "size": 1}
                ),
                world.ask("GET", f"/agent/v1/data/inputs/{index}/bytes", params={"path": path}),
            ]
            wrong += [found for answer in asks for found in refused(answer, 403, 404, 409, 422)]
    return wrong


def other_execs(world: World) -> list[str]:
    made = world.user.post(
        "/v1/projects/a/jobs/victim/exec", json={"command": ["sleep", "20"], "rank": 0}
    )
    name = made.json().get("id", "none")
    world.ask(
        "POST", f"/agent/v1/execs/{name}", params={"offset": 0, "exit_code": 0}, content=b"lie"
    )
    out = world.user.get(f"/v1/execs/{name}", params={"offset": 0, "wait_s": 0})
    heard = world.ask("GET", f"/agent/v1/execs/{name}/input", params={"offset": 0})
    wrong = ["another node's output was forged"] * ("lie" in out.text or "bGll" in out.text)
    return wrong + ["another node's input was read"] * bool(
        heard.is_success and heard.json()["data"]
    )


def connections(world: World) -> list[str]:
    path = world.config["address"].removeprefix("unix:")
    wrong = []
    with ExitStack() as stack:
        held = []
        for _ in range(100 * world.scale):
            made = stack.enter_context(socket.socket(socket.AF_UNIX))
            made.settimeout(30)
            try:
                made.connect(path)
                made.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\nA: ")
            except OSError:
                break  # too many: refused
            held.append(made)
        for each in held[: 2 * world.scale]:
            try:
                for _ in range(8 * world.scale):
                    each.sendall(b"a" * MIB)
            except OSError:
                continue
            wrong.append("a head of 8 MiB was taken")
        wrong += refused(world.user.get("/v1/health"), 200)
    return wrong


def after_the_end(world: World) -> list[str]:
    """Last: the user stops the job of a node that has announced its end for a month and is silent."""
    end = {"seq": world.seq + 2, "kind": "exited", "outcome": "preempted", "exit_code": 1}
    world.report({"seq": world.seq + 1, "kind": "notice", "seconds": 30 * 86400})
    job = "/v1/projects/b/jobs/attacker"
    world.user.post(job + "/stop")
    # A loss that the node made up may have been repaired, so that its gang has a later attempt.
    wait_until(
        lambda: all(each["phase"] == "ended" for each in world.user.get(job).json()["attempts"])
    )
    before = world.user.get(job + "/logs").content
    wrong = refused(world.ask("POST", "/agent/v1/log", params={"offset": 0}, content=b"x"), 409)
    wrong += refused(world.report(end), 409)
    wrong += refused(world.ask("POST", "/agent/v1/blobs/missing", json={"blobs": []}), 409)
    return wrong + ["the log changed"] * (world.user.get(job + "/logs").content != before)


@dataclass(frozen=True, kw_only=True)
class Attack:
    run: Callable[[World], list[str]]
    tried: str
    refused_by: str


ATTACKS = (
    Attack(run=user_routes, tried="the agent's token on every route of users", refused_by="AuthMiddleware"),
    Attack(run=other_gangs, tried="every agent route for another project's gang", refused_by="tokens.check"),
    Attack(run=other_claims, tried="reports and claims for other ranks, guessed nonces", refused_by="find_objection"),
    Attack(run=foreign_blobs, tried="files and manifest of another project by hash, singly and packed", refused_by="the job's own manifest"),
    Attack(run=bad_blobs, tried="wrong content, offsets, sizes and names of blobs", refused_by="BlobStore, types of the route"),
    Attack(run=checkpoints, tried="checkpoints with paths, links, modes, times and sizes that lie", refused_by="find_fault"),
    Attack(run=messages, tried="messages that are valid by type, absurd by value", refused_by="read_batch, apply_messages"),
    Attack(run=log_flood, tried="log without end, absurd offsets, a thousand gaps", refused_by="LogStore"),
    Attack(run=event_flood, tried="thousands of long events", refused_by="apply_messages"),
    Attack(run=terminals, tried="control characters in progress, notices and events, shown by the CLI", refused_by="the CLI's escapes"),
    Attack(run=transfers, tried="inputs and outputs that the task does not have, paths outside", refused_by="Transfers"),
    Attack(run=other_execs, tried="output and input of another node's command", refused_by="Execs"),
    Attack(run=connections, tried="half and huge request heads on many connections", refused_by="node listener, doors"),
    Attack(run=after_the_end, tried="a notice of 30 days that outlives a stop; the token after its attempt has ended", refused_by="enter_attempt"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Probe:
    """How long `/v1/health` took, in seconds."""

    quiet: list[float]
    attacked: list[float]

    @property
    def ratio(self) -> float:
        """The median under attack, in quiet medians."""
        return statistics.median(self.attacked) / statistics.median(self.quiet)


@contextmanager
def probing(address: str, found: list[float]) -> Iterator[None]:
    """Ask for the server's health all the time, on connections of one request each."""
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.02):
            began = time.monotonic()
            with httpx.Client(transport=httpx.HTTPTransport(uds=address), timeout=60) as client:
                client.get("http://x/v1/health").raise_for_status()
            found.append(time.monotonic() - began)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def cavvy(*arguments: str) -> str:
    done = subprocess.run([CAVVY, *arguments], capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


@contextmanager
def world_at(folder: Path, *, seed: int, scale: int) -> Iterator[World]:
    """A server in `folder`, with the victim's and the attacker's job running."""
    work = folder / "work"
    work.mkdir(parents=True)
    (work / "secret.txt").write_text(SECRET)
    with home_with_jobs(folder / "home") as home:
        (folder / "settings.toml").write_text(f"[logs]\njob_mib = {LOG_MIB}\n")
        for name, text in (("a", VICTIM), ("b", ATTACKER)):
            (work / f"{name}.yaml").write_text(text)
            said = cavvy("run", "-d", "--project", name, str(work / f"{name}.yaml"))
            assert "cavvy logs -f" in said, said
        found = read_server(str(home))
        assert found is not None
        transport = httpx.HTTPTransport(uds=found.address.removeprefix("unix:"))
        token = {"Authorization": f"Bearer {(home / 'token').read_text().strip()}"}
        with httpx.Client(
            transport=transport, base_url="http://x", headers=token, timeout=60
        ) as user:
            jobs = ("/v1/projects/a/jobs/victim", "/v1/projects/b/jobs/attacker")
            wait_until(lambda: all(user.get(job).json()["phase"] == "running" for job in jobs))
            gangs = [user.get(job).json()["attempts"][0]["gang"] for job in jobs]
            own = next(home.rglob(f"{gangs[1]}/0/config.json")).parent
            config = json.loads((own / "config.json").read_text())
            if (own / "token").exists():
                config["token"] = (own / "token").read_text()
            snapshot = user.get(jobs[0]).json()["origin"]["snapshot"]
            hashes = [snapshot, sha256(SECRET.encode()).hexdigest()]
            yield World(
                folder=folder, seed=seed, scale=scale, user=user, config=config,
                nonce=(own / "claim").read_text(), victim=gangs[0], hashes=hashes,
                seq=user.get(jobs[1]).json().get("seq", 0),
            )  # fmt: skip


def play(
    folder: Path, *, seed: int, scale: int
) -> tuple[dict[Attack, list[str]], Probe, Counter[int]]:
    """Run all attacks in order; returns what went through, and how the server answered meanwhile."""
    with world_at(folder, seed=seed, scale=scale) as world:
        address = world.config["address"].removeprefix("unix:")
        quiet: list[float] = []
        attacked: list[float] = []
        with probing(address, quiet):
            time.sleep(1.0)
        with probing(address, attacked):
            found = {each: each.run(world) for each in ATTACKS}
        victim = world.user.get("/v1/projects/a/jobs/victim").json()
        if victim["phase"] != "running":
            found[ATTACKS[-1]].append(f"the victim's job is {victim['phase']}: {victim['reason']}")
        return found, Probe(quiet=quiet, attacked=attacked), world.seen
