"""Results that a node stored in a bucket while the server was away: applied once, as if its agent
had sent them; and refused if the node lies.
"""

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.api.api.test_api_agents import JOB, claim, report, start, write_log
from tests.api.api_state import Api, open_api, until
from tests.system.storages import GoogleStandIn, start_google

from cavvy.agent.config import AgentConfig, ConfigFields, read_work
from cavvy.agent.data.deposit import Results, store
from cavvy.agent.log import LogSpool
from cavvy.agent.outbox import MessageOutbox
from cavvy.control.agents import bucket_checkpoints, transfers
from cavvy.control.agents.bucket_checkpoints import BucketCheckpointOpener
from cavvy.control.agents.deposit_records import PARTS, DepositReader
from cavvy.control.garbage_collector import SWEEP
from cavvy.control.reconcile import UPLOADS
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite
from cavvy.store.objects.base import ObjectBucket, ObjectDenied
from cavvy.store.objects.locations import open_place

TASK = """
name: t
run: 'true'
outputs: [{source: out, target: 'gs://data/out'}]
checkpoint: {path: state, STORAGE}
retry: {node: 0, exit: 0}
"""
IN_BUCKET = TASK.replace("STORAGE", "storage: 'gs://data/kept'")
EXIT: dict[str, object] = {"outcome": "succeeded", "exit_code": 0, "reason": ""}
LARGE = bytes(range(256)) * (17 << 12)  # 17 MiB: more than one part


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    """A server with a bucket, which all tasks can use."""
    keys = start_google()
    GoogleStandIn.objects.clear()
    GoogleStandIn.failures.clear()
    for module in (transfers, bucket_checkpoints):
        monkeypatch.setattr(
            module, "open_place", lambda url, given, now: open_place(url, keys, now)
        )
    values = {"CAVVY_SERVER_RESULTS_URL": "gs://data/results"}
    async with open_api("memory", tmp_path, values=values) as opened:
        yield opened
        GoogleStandIn.answers.set()


async def begin(api: Api, text: str = IN_BUCKET) -> tuple[str, dict[str, Any]]:
    """A job whose agent has reported its start and a first line; its gang and its work."""
    gang = await start(api, text)
    work = (await claim(api, gang)).json()["work"]
    assert (await report(api, gang, {"seq": 1, "kind": "running"})).json()["ack"] == 1
    assert (await write_log(api, gang, b"hello\n", 0)).json() == {"offset": 6}
    return gang, work


def end_work(
    home: Path,
    gang: str,
    work: dict[str, Any],
    exit: dict[str, object],
    large: bytes = b"x",
    rank: int = 0,
) -> Results:
    """What the agent of this work has when it ends while the server is away."""
    for path, data in {"out/deep/a": b"result", "out/large": large, "state/step": b"7"}.items():
        (home / "work" / path).parent.mkdir(parents=True, exist_ok=True)
        (home / "work" / path).write_bytes(data)
    (home / "claim").write_text(f"n{rank + 1}")
    where = {"home": str(home), "private": str(home), "folder": str(home / "work"), "hides": ""}
    where["separates"] = ""
    config = SimpleNamespace(gang=gang, rank=rank, placed=[], **where)
    log, outbox = LogSpool(str(home / "log"), 1024), MessageOutbox(str(home / "outbox"))
    log.write(b"hello\nthe end\n")
    log.acknowledge(6)
    outbox.put("running")
    outbox.acknowledge(1)
    outbox.put("progress", values={"loss": float("nan"), "step": 7})
    assigned = read_work(ConfigFields(work, "work"))
    messages = outbox.finish(exit)
    folder = "" if rank else str(home / "work" / "state")
    return Results(cast(AgentConfig, config), assigned, messages, log, folder, [0])


async def deposit(api: Api, gang: str, results: Results, rank: int = 0) -> None:
    """Store the results by the uploads that the server signs."""
    query = {"gang": gang, "rank": rank}
    answer = await api.http.get("/agent/v1/data/deposit", params=query, headers=api.agent(gang))
    signed = answer.json()
    assert len(signed["uploads"]) == PARTS + 1
    code = await asyncio.to_thread(store, results, signed["uploads"], signed["most_bytes"])
    assert code == 0


async def end_node(api: Api, gang: str, silence: timedelta = timedelta(minutes=1)) -> None:
    """The node shuts itself down; the server last received a message before this silence."""
    attempt = await api.app_state.store.attempt_of_gang(gang)
    node = await api.app_state.store.node(attempt.id, 0)
    before = datetime.now(UTC) - silence
    await api.app_state.store.commit(AtomicWrite(nodes=[replace(node, heard_at=before)]))
    api.app_state.control_plane.agents.forget(attempt)
    await api.app_state.control_plane.pool.remove("fake", gang)


async def _is_over(api: Api) -> dict[str, Any] | None:
    found: dict[str, Any] = (await api.http.get(JOB)).json()
    return found if found["phase"] in ("done", "failed", "stopped") else None


async def _is_over_after_a_pass(api: Api) -> dict[str, Any] | None:
    """Like `_is_over`; reconciles the job at once instead of after the polling interval."""
    found = await _is_over(api)
    if found is None:
        api.app_state.control_plane.hint((await api.http.get(JOB)).json()["id"])
        await asyncio.sleep(0.05)
    return found


async def _is_swept(api: Api) -> bool:
    return not list_results()


def list_results() -> list[str]:
    return [key for key in GoogleStandIn.objects if "/results/" in key]


async def list_events(api: Api, kind: str) -> list[str]:
    events = (await api.http.get(JOB + "/events")).json()["events"]
    return [each["text"] for each in events if each["kind"] == kind]


@pytest.mark.parametrize("storage", ["storage: 'gs://data/kept'", "every: 60s"])
async def test_the_server_finishes_a_job_from_the_bucket(
    api: Api, tmp_path: Path, storage: str
) -> None:
    gang, work = await begin(api, TASK.replace("STORAGE", storage))
    assert work["deposit_after_s"] == 60
    await deposit(api, gang, end_work(tmp_path / "node", gang, work, EXIT, LARGE))
    await end_node(api, gang)
    job = await until(lambda: _is_over(api))
    assert (job["phase"], job["attempts"][0]["exit_code"]) == ("done", 0)
    assert (await api.http.get(JOB + "/logs")).content == b"hello\nthe end\n"
    assert GoogleStandIn.objects["data/out/deep/a"] == b"result"
    assert GoogleStandIn.objects["data/out/large"] == LARGE
    [saved] = await api.app_state.store.checkpoints(job["id"])
    assert (saved.files, saved.bytes) == (1, 1)
    # The collection is no sighting of the node, which would be billed until then.
    node = await api.app_state.store.node((await api.app_state.store.attempt_of_gang(gang)).id, 0)
    assert node.heard_at is not None
    assert node.heard_at < datetime.now(UTC) - timedelta(seconds=50)
    assert await until(lambda: _is_swept(api))


async def test_work_that_failed_keeps_its_exit_code(api: Api, tmp_path: Path) -> None:
    gang, work = await begin(api)
    exit: dict[str, object] = {"outcome": "exit", "exit_code": 3, "reason": "exit code 3"}
    await deposit(api, gang, end_work(tmp_path / "node", gang, work, exit))
    await end_node(api, gang)
    job = await until(lambda: _is_over(api))
    assert (job["phase"], job["attempts"][0]["exit_code"]) == ("failed", 3)


@pytest.mark.parametrize("codes", [(0, 0), (0, 3), (None, 3), (0, None)])
async def test_a_gang_is_judged_by_the_results_of_all_ranks(
    api: Api, tmp_path: Path, codes: tuple[int | None, int | None]
) -> None:
    """Each rank left its exit code in the bucket, or, with None, nothing."""
    gang = await start(api, IN_BUCKET + "grace: 1s\nnodes: 2")
    await claim(api, gang)
    work = (await claim(api, gang, rank=1, nonce="n2")).json()["work"]
    for rank, code in enumerate(codes):
        if code is None:
            continue
        outcome = "exit" if code else "succeeded"
        exit: dict[str, object] = {"outcome": outcome, "exit_code": code, "reason": ""}
        results = end_work(tmp_path / f"{rank}", gang, work, exit, rank=rank)
        await deposit(api, gang, results, rank)
    await end_node(api, gang)
    job = await until(lambda: _is_over(api))
    assert job["phase"] == ("done" if codes == (0, 0) else "failed")
    expected = None if None in codes and 3 not in codes else max(each or 0 for each in codes)
    assert job["attempts"][0]["exit_code"] == expected
    assert await until(lambda: _is_swept(api))


async def test_a_report_of_the_agent_comes_before_its_deposit(api: Api, tmp_path: Path) -> None:
    gang, work = await begin(api)
    failed: dict[str, object] = {"outcome": "exit", "exit_code": 3, "reason": "exit code 3"}
    await deposit(api, gang, end_work(tmp_path / "node", gang, work, failed))
    assert (await report(api, gang, {"seq": 2, "kind": "exited", **EXIT})).json()["ack"] == 2
    job = await until(lambda: _is_over(api))
    assert (job["phase"], job["attempts"][0]["exit_code"]) == ("done", 0)
    assert (await api.http.get(JOB + "/logs")).content == b"hello\n"
    assert await until(lambda: _is_swept(api))


async def test_a_node_that_was_heard_just_before_its_end_has_results(
    api: Api, tmp_path: Path
) -> None:
    """The server received the agent's requests, but its answers were lost."""
    gang, work = await begin(api)
    await deposit(api, gang, end_work(tmp_path / "node", gang, work, EXIT))
    await end_node(api, gang, silence=timedelta(0))
    assert (await until(lambda: _is_over(api)))["phase"] == "done"


async def test_a_stop_does_not_wait_for_a_silent_bucket(api: Api, tmp_path: Path) -> None:
    gang, work = await begin(api, IN_BUCKET + "grace: 1s")
    await deposit(api, gang, end_work(tmp_path / "node", gang, work, EXIT))
    [manifest] = [key for key in list_results() if key.endswith("/0/0")]
    GoogleStandIn.objects[manifest.removesuffix("0/0") + "7/1"] = b"of no rank"
    GoogleStandIn.answers.clear()
    await end_node(api, gang)
    assert (await api.http.post(JOB + "/stop")).status_code < 300
    job = await until(lambda: _is_over(api))
    assert job["phase"] == "stopped"
    assert not await list_events(api, "stop")  # the node has ended: there is no agent to stop
    GoogleStandIn.answers.set()
    assert await until(lambda: _is_without(manifest.removesuffix("0/0") + "7/1"))
    assert manifest in GoogleStandIn.objects  # results that were not read stay there


async def _is_without(key: str) -> bool:
    return key not in GoogleStandIn.objects


async def test_a_damaged_upload_of_a_checkpoint_is_replaced(api: Api, tmp_path: Path) -> None:
    """The agent had sent a part of a file, which was damaged when the server's machine crashed."""
    gang, work = await begin(api, TASK.replace("STORAGE", "every: 60s"))
    results = end_work(tmp_path / "node", gang, work, EXIT)
    blobs = await api.app_state.control_plane.checkpoints.blobs(gang)
    assert blobs.append(hashlib.sha256(b"7").hexdigest(), 0, b"8", 2) == 1
    await deposit(api, gang, results)
    await end_node(api, gang)
    job = await until(lambda: _is_over(api))
    assert job["phase"] == "done"
    assert len(await api.app_state.store.checkpoints(job["id"])) == 1


async def test_interrupted_reading_goes_on(api: Api, tmp_path: Path) -> None:
    """The bucket fails at two places, and the server stops reading several times."""
    gang, work = await begin(api)
    await deposit(api, gang, end_work(tmp_path / "node", gang, work, EXIT, LARGE))
    GoogleStandIn.failures += ["/0/0", "/0/2"]
    GoogleStandIn.answers.clear()
    await end_node(api, gang)
    for _ in range(3):
        await _is_over_after_a_pass(api)
        await api.app_state.control_plane.deposits.close()
    GoogleStandIn.answers.set()
    job = await until(lambda: _is_over_after_a_pass(api))
    assert job["phase"] == "done"
    assert GoogleStandIn.failures == []
    assert GoogleStandIn.objects["data/out/large"] == LARGE
    assert (await api.http.get(JOB + "/logs")).content == b"hello\nthe end\n"


async def test_another_manifest_is_read_from_its_first_piece(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading is interrupted, and meanwhile the agent stores a new manifest."""
    read, bodies = DepositReader.read_manifest, list[bytes]()

    def read_another(reader: DepositReader) -> bytes | None:
        bodies.append((read(reader) or b"").replace(b"deep/a", b"deep/b" if bodies else b"deep/a"))
        return bodies[-1]

    monkeypatch.setattr(DepositReader, "read_manifest", read_another)
    gang, work = await begin(api)
    await deposit(api, gang, end_work(tmp_path / "node", gang, work, EXIT, LARGE))
    GoogleStandIn.failures.append("/0/2")
    await end_node(api, gang)
    assert (await until(lambda: _is_over_after_a_pass(api)))["phase"] == "done"
    assert len(bodies) > 1
    assert GoogleStandIn.objects["data/out/deep/b"] == b"result"


async def test_results_that_a_killed_server_left_are_removed_by_the_next_one(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = api.app_state.control_plane
    monkeypatch.setattr(control.deposits, "note", lambda job, attempt: None)
    gang, work = await begin(api)
    await deposit(api, gang, end_work(tmp_path / "node", gang, work, EXIT))
    await control.reconcile(UPLOADS)  # the attempt is running
    assert list_results()
    await end_node(api, gang)
    await until(lambda: _is_over(api))

    async def is_ended() -> bool:
        return (await api.app_state.store.attempt_of_gang(gang)).phase == "ended"

    await until(is_ended)
    assert list_results()
    await control.reconcile(SWEEP)  # as at the start of a server
    assert await until(lambda: _is_swept(api))
    assert await until(lambda: _is_without_records(api))


async def _is_without_records(api: Api) -> bool:
    return not await api.app_state.store.provider_documents("data transfers", "results")


@pytest.mark.parametrize("signs", [False, True])
async def test_a_removed_job_without_results_needs_no_bucket(
    api: Api, monkeypatch: pytest.MonkeyPatch, signs: bool
) -> None:
    gang, _ = await begin(api, TASK.replace("STORAGE", "every: 60s"))
    if signs:
        query = {"gang": gang, "rank": 0}
        await api.http.get("/agent/v1/data/deposit", params=query, headers=api.agent(gang))
    assert await _is_without_records(api) is not signs
    ended = {"seq": 2, "kind": "exited", "outcome": "exit", "exit_code": 3, "log_bytes": 6}
    assert (await report(api, gang, ended)).json()["ack"] == 2
    await until(lambda: _is_over(api))
    assert await until(lambda: _is_without_records(api))

    async def refuse(*given: object) -> None:
        raise ObjectDenied("the bucket data: status 403")

    monkeypatch.setattr(BucketCheckpointOpener, "open_folder", refuse)
    assert (await until(lambda: _remove_job(api)))["kept"] == ""


@pytest.mark.parametrize("large", ["out/large", "blobs/"])
async def test_the_servers_own_uploads_are_recorded_until_they_are_complete(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: str
) -> None:
    """A server that is killed during an upload in parts leaves a record to abort it by."""
    goes_on = threading.Event()
    send = transfers.ask

    def wait(method: str, url: str, *rest: Any) -> Any:
        goes_on.wait()
        return send(method, url, *rest)

    monkeypatch.setattr(transfers, "ask", wait)
    gang, work = await begin(api)
    results = end_work(tmp_path / "node", gang, work, EXIT, LARGE if "out" in large else b"x")
    if "blobs" in large:
        (tmp_path / "node/work/state/step").write_bytes(LARGE)
    await deposit(api, gang, results)
    await end_node(api, gang)
    store = api.app_state.store

    async def begun() -> bool:
        return len(GoogleStandIn.uploads) == 1

    try:
        await until(begun)
        [upload] = GoogleStandIn.uploads

        async def recorded() -> list[str]:
            found = await store.provider_documents("data transfers", "uploads")
            return [each.body for each in found]

        [record] = await until(recorded)
        assert upload in record
        assert large in record
    finally:
        goes_on.set()
    assert (await until(lambda: _is_over(api)))["phase"] == "done"
    assert await recorded() == []


async def end_with_change(api: Api, tmp_path: Path, change: Callable[[Any], object]) -> Any:
    """A job whose results are in the bucket, where their manifest is changed, before it ends."""
    gang, work = await begin(api)
    await deposit(api, gang, end_work(tmp_path / "node", gang, work, EXIT))
    [key] = [key for key in list_results() if key.endswith("/0/0")]
    manifest = json.loads(GoogleStandIn.objects[key])
    change(manifest)
    GoogleStandIn.objects[key] = json.dumps(manifest).encode()
    await end_node(api, gang)
    return await until(lambda: _is_over(api))


async def test_messages_that_the_server_has_lost_do_not_hide_the_exit(
    api: Api, tmp_path: Path
) -> None:
    """After a crash of its machine, the server may lack messages that it had acknowledged."""

    def lose(manifest: Any) -> None:
        for message in manifest["messages"]:
            message["seq"] += 5

    assert (await end_with_change(api, tmp_path, lose))["phase"] == "done"


async def test_a_log_goes_on_after_output_that_the_server_has_lost(
    api: Api, tmp_path: Path
) -> None:
    """The server's machine crashed after the agent had deleted output that was acknowledged."""
    job = await end_with_change(api, tmp_path, change_piece("log", offset=106))
    assert job["phase"] == "done"
    log, offset = b"", "0"
    for _ in range(3):  # the first output, the gap, and the rest
        answer = await api.http.get(JOB + "/logs", params={"offset": offset})
        log, offset = log + answer.content, answer.headers["Cavvy-Log-Offset"]
    assert log.startswith(b"hello\n")
    assert b"100 bytes" in log
    assert log.endswith(b"the end\n")


async def _remove_job(api: Api) -> dict[str, Any] | None:
    """Remove the job once its last attempt has ended."""
    answer = await api.http.delete(JOB)
    found: dict[str, Any] | None = answer.json() if answer.status_code == 200 else None
    return found


def change(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest.update(fields)


def change_piece(kind: str, **fields: object) -> Callable[[dict[str, Any]], object]:
    def lie(manifest: dict[str, Any]) -> None:
        next(each for each in manifest["pieces"] if each["kind"] == kind).update(fields)

    return lie


@pytest.mark.parametrize(
    "lie",
    [
        change(nonce="guessed"),
        change(part_bytes=0),
        change(part_bytes=1 << 40),
        change(pieces=[{"kind": "log", "bytes": 1 << 60}]),
        change(pieces=[{"kind": "log", "bytes": -1}]),
        change(pieces=[{"kind": "poem", "bytes": 1}]),
        change(messages="none"),
        change(messages=[]),
        change(checkpoint={"made_at": "now", "files": []}),
        change_piece("output", name="../../x"),
        change_piece("output", index=1),
        change_piece("output", bytes=7),
        change_piece("log", offset=-1),
        change_piece("blob", name="../../x"),
        lambda manifest: manifest["checkpoint"]["files"][0].update(path="../x"),
        lambda manifest: manifest["checkpoint"]["files"][0].update(sha256="../../x"),
    ],
)
async def test_a_lying_deposit_is_refused(
    api: Api, tmp_path: Path, lie: Callable[[dict[str, Any]], object]
) -> None:
    job = await end_with_change(api, tmp_path, lie)
    assert job["phase"] == "failed"
    [told] = await list_events(api, "results")
    assert "cannot be used" in told
    assert not [key for key in GoogleStandIn.objects if ".." in key or key.endswith("/x")]
    assert not list(tmp_path.rglob("x"))
    assert list_results()  # they stay until the job is removed
    assert (await until(lambda: _remove_job(api)))["kept"] == ""
    assert list_results() == []


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\xff", b"{}", b"{" + b" " * (17 << 20)])
async def test_an_unreadable_manifest_is_refused(api: Api, tmp_path: Path, content: bytes) -> None:
    gang, work = await begin(api)
    await deposit(api, gang, end_work(tmp_path / "node", gang, work, EXIT))
    [key] = [key for key in list_results() if key.endswith("/0/0")]
    GoogleStandIn.objects[key] = content
    await end_node(api, gang)
    assert (await until(lambda: _is_over(api)))["phase"] == "failed"
    assert bool(await list_events(api, "results")) is bool(content)  # an empty manifest is none


def test_a_manifest_that_is_emptied_while_it_is_read_counts_as_none() -> None:
    keys = start_google()
    bucket = open_place("gs://data", keys, lambda: datetime.now(UTC)).place
    assert isinstance(bucket, ObjectBucket)
    GoogleStandIn.objects["data/results/0"] = b""
    reader = DepositReader(bucket, "results/", lambda position: None)
    assert reader.read_manifest() is None


async def test_a_node_that_stored_nothing_was_lost(api: Api) -> None:
    gang, _ = await begin(api)
    await end_node(api, gang)
    assert (await until(lambda: _is_over(api)))["phase"] == "failed"
    assert await list_events(api, "results") == []
