"""Uploads: small blobs go in packs, larger ones alone, and everything alone to a server that
knows no packs.
"""

from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import cast

import pytest

from cavvy.client import ApiClient, ApiError
from cavvy.client.blobs import (
    PACK_BLOBS,
    PACK_BYTES,
    SMALL,
    Source,
    TornPack,
    make_pack,
    read_pack,
    upload,
)
from cavvy.client.errors import SourceChanged
from cavvy.spec.workdir import FrozenFile


class Server:
    """What a client's connection reaches: takes packs, or is from before them."""

    def __init__(self, *, refusal: ApiError | None = None) -> None:
        self.stored: dict[str, bytes] = {}
        self.packs: list[bytes] = []
        self.refusal = refusal

    def missing_blobs(self, project: str, names: list[str]) -> list[str]:
        return [name for name in names if name not in self.stored]

    def sibling(self) -> "Server":
        return self

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *what: object) -> None:
        pass

    def send(self, method: str, target: str, body: bytes | Iterable[bytes], **more: object) -> None:
        data = body if isinstance(body, bytes) else b"".join(body)
        name = target.rpartition("/")[2]
        if name != "pack":
            self._store({name: data})
        elif self.refusal is not None:
            raise self.refusal
        else:
            self.packs.append(data)
            self._store(read_pack(data))

    def repeat(self, send: Callable[[], None]) -> None:
        send()

    def _store(self, blobs: Mapping[str, bytes]) -> None:
        for name, data in blobs.items():
            if sha256(data).hexdigest() != name:
                raise ApiError("blob-mismatch", name, status=422)
            self.stored[name] = data


def send(server: Server, *blobs: bytes, steps: list[tuple[int, int]] | None = None) -> int:
    named: dict[str, Source] = {sha256(data).hexdigest(): data for data in blobs}
    progress = None if steps is None else lambda sent, total: steps.append((sent, total))
    return upload(cast(ApiClient, server), "default", named, progress)


def test_small_blobs_go_in_packs_and_larger_ones_alone() -> None:
    server, steps = Server(), list[tuple[int, int]]()
    small = [b"%d" % number for number in range(PACK_BLOBS + 5)]
    large = [bytes(SMALL + 1)]
    total = sum(map(len, small + large))
    assert send(server, *small, *large, steps=steps) == total
    assert set(server.stored.values()) == {*small, *large}
    assert sorted(len(read_pack(pack)) for pack in server.packs) == [5, PACK_BLOBS]
    assert (steps[0], steps[-1], len(steps)) == ((0, total), (total, total), 4)
    assert send(server, *small, *large) == 0


def test_no_pack_is_larger_than_the_server_takes() -> None:
    server = Server()
    blobs = [bytes([number]) * SMALL for number in range(100)]
    send(server, *blobs)
    assert set(server.stored.values()) == set(blobs)
    assert max(map(len, server.packs)) <= PACK_BYTES


@pytest.mark.parametrize(
    ("code", "status"), [("not-found", 404), ("wrong-method", 405), ("invalid-request", 422)]
)
def test_an_older_server_gets_every_blob_alone(code: str, status: int) -> None:
    server, steps = Server(refusal=ApiError(code, "no", status=status)), list[tuple[int, int]]()
    assert send(server, b"a", b"bc", steps=steps) == 3
    assert set(server.stored.values()) == {b"a", b"bc"}
    assert steps[-1] == (3, 3)


def test_another_refusal_is_told() -> None:
    with pytest.raises(ApiError, match="full"):
        send(Server(refusal=ApiError("disk-full", "full", status=507)), b"a", b"bc")


def freeze(folder: Path, *contents: bytes) -> dict[str, Source]:
    """Files of these contents, named by their number, as a snapshot lists them."""
    for number, data in enumerate(contents):
        (folder / str(number)).write_bytes(data)
    return {
        sha256(data).hexdigest(): FrozenFile(folder / str(number), len(data))
        for number, data in enumerate(contents)
    }


@pytest.mark.parametrize("size", [3, SMALL + 1])
def test_a_file_that_changed_is_named(tmp_path: Path, size: int) -> None:
    named = freeze(tmp_path, b"one", b"x" * size)
    (tmp_path / "1").write_bytes(b"y" * size)
    with pytest.raises(SourceChanged, match=f"{tmp_path}/1 changed"):
        upload(cast(ApiClient, Server()), "default", named, None)


@pytest.mark.parametrize("size", [3, SMALL + 1])
def test_a_file_that_was_cut_or_removed_is_named_at_once(tmp_path: Path, size: int) -> None:
    named = freeze(tmp_path, b"one", b"x" * size)
    (tmp_path / "1").write_bytes(b"")
    with pytest.raises(SourceChanged, match=f"{tmp_path}/1 changed"):
        upload(cast(ApiClient, Server()), "default", named, None)
    (tmp_path / "1").unlink()
    with pytest.raises(SourceChanged, match=f"{tmp_path}/1 changed"):
        upload(cast(ApiClient, Server()), "default", named, None)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match=f"cannot read {tmp_path}: Is a directory"):
        upload(cast(ApiClient, Server()), "default", {"0" * 64: FrozenFile(tmp_path, 5)}, None)


@pytest.mark.parametrize("size", [3, SMALL + 1])
def test_what_a_program_appends_to_a_file_is_left_out(tmp_path: Path, size: int) -> None:
    named = freeze(tmp_path, b"one", b"x" * size)
    with (tmp_path / "1").open("ab") as log:
        log.write(b"more")
    server = Server()
    assert upload(cast(ApiClient, server), "default", named, None) == 3 + size
    assert set(server.stored.values()) == {b"one", b"x" * size}


def test_a_pack_is_read_as_it_was_made() -> None:
    blobs = {sha256(data).hexdigest(): data for data in (b"", b"\n", b"0" * 200)}
    pack = make_pack(blobs.items())
    assert read_pack(pack) == blobs
    whole = {len(make_pack(list(blobs.items())[:count])) for count in range(3)}
    for end in set(range(len(pack))) - whole:
        with pytest.raises(TornPack, match="byte"):
            read_pack(pack[:end])
    with pytest.raises(TornPack, match="a pack holds at most"):
        read_pack(b"0" * 64 + b"%d\n" % (SMALL + 1) + bytes(SMALL + 1))
