"""What the agent stores in the bucket: everything that is undelivered, in one sequence of bytes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cavvy.agent.data.deposit import Results, SignedUploads, store
from cavvy.agent.data.transfer import ObjectUpload
from cavvy.agent.http_client import TransferFailed
from cavvy.agent.log import LogSpool
from cavvy.agent.outbox import MessageOutbox


def make_results(home: Path, log: LogSpool) -> Results:
    config = SimpleNamespace(
        gang="g", rank=0, home=str(home), private=str(home), folder=str(home / "work"), placed=[]
    )
    return Results(cast(Any, config), cast(Any, None), ['{"seq": 1}'], log, "", [])


def test_only_undelivered_output_is_stored_and_gaps_are_described(tmp_path: Path) -> None:
    log = LogSpool(str(tmp_path / "log"), 1)
    for number in range(40):
        log.write(bytes([number]) * 65536)
    log.acknowledge(10)
    results = make_results(tmp_path, log)
    results.collect()
    manifest = json.loads(results.make_manifest(1 << 24))
    at, expected = 10, b""
    for piece in manifest["pieces"]:
        assert piece["offset"] == at + piece["lost"]
        at = piece["offset"] + piece["bytes"]
        bytes_of = (bytes([each // 65536]) for each in range(piece["offset"], at))
        expected += b"".join(bytes_of)
    assert at == log.size
    assert any(piece["lost"] for piece in manifest["pieces"])
    assert results.read(0, len(expected)) == expected
    assert results.read(65530, 20) == expected[65530:65550]
    assert log.chunk()[0] == 10  # nothing was deleted
    assert manifest["messages"] == [{"seq": 1}]


def test_the_exit_follows_the_undelivered_messages_and_is_not_queued(tmp_path: Path) -> None:
    outbox = MessageOutbox(str(tmp_path / "outbox"))
    outbox.put("running")
    outbox.put("event", name="a", text="b")
    outbox.acknowledge(1)
    outbox.put("progress", values={"step": 7})
    told = [json.loads(each) for each in outbox.finish({"outcome": "exit", "exit_code": 3})]
    assert [(each["seq"], each["kind"]) for each in told] == [
        (2, "event"),
        (3, "progress"),
        (4, "exited"),
    ]
    assert told[-1]["exit_code"] == 3
    assert not outbox.has("exited")
    outbox.put("exited", outcome="exit", exit_code=3)
    assert len(outbox.finish({})) == 3


def test_parts_of_a_deposit_go_to_the_uploads_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[object, bytes]] = []

    def put(self: ObjectUpload, part: dict[str, object], data: bytes) -> str:
        sent.append((self._transfers.read("POST", "/parts", part)["url"], data))
        return "tag"

    monkeypatch.setattr(ObjectUpload, "_put", put)
    uploads: list[dict[str, object]] = [{"url": "first"}, {"url": "second"}, {"url": "third"}]
    upload = ObjectUpload(SignedUploads(uploads, 4), {}, "results", None)
    upload.send(6, lambda offset, length: b"abcdef"[offset : offset + length])
    assert sent == [("first", b"abcd"), ("second", b"ef")]
    with pytest.raises(TransferFailed):
        SignedUploads(uploads, 4).ask("PUT", "/bytes")


def test_an_earlier_manifest_is_emptied_before_its_parts_are_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[tuple[object, bytes]] = []

    def put(self: ObjectUpload, part: dict[str, object], data: bytes) -> str:
        sent.append((self._transfers.read("POST", "/parts", part)["url"], data))
        if data == b"new":
            raise TransferFailed("the bucket refuses")
        return "tag"

    monkeypatch.setattr(ObjectUpload, "_put", put)
    (tmp_path / "claim").write_text("n")
    uploads: list[dict[str, object]] = [{"url": "manifest"}, {"url": "first"}]
    log = LogSpool(str(tmp_path / "log"), 1)
    log.write(b"old")
    assert store(make_results(tmp_path, log), uploads, 1 << 28) == 0
    assert [url for url, _ in sent] == ["manifest", "first", "manifest"]
    log.acknowledge(3)
    log.write(b"new")
    sent.clear()
    assert store(make_results(tmp_path, log), uploads, 1 << 28) == 1
    assert sent == [("manifest", b""), ("first", b"new")]
