"""What a device trusts: the attacks that The Update Framework lists, against the program of a device
with the lists of a real repository."""

import io
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tuf", reason="the extra `edge` is not installed: make setup-dev")

from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata, TargetFile

from cavvy.capabilities.edge.on_device import update
from cavvy.capabilities.edge.on_device.server_calls import ServerFileMissing
from cavvy.capabilities.edge.on_device.update import read_manifest
from cavvy.capabilities.models import repository as model_repository
from cavvy.capabilities.models.repository import (
    ROLES,
    add_target,
    make_repository,
    must_renew,
    renew,
    rotate,
)
from cavvy.domain.values import replace
from cavvy.packages import extra_command

NOW = datetime.now(UTC)  # python-tuf compares with the machine's clock


class ServerReply(io.BytesIO):
    """A server's answer. `step` is called before each piece, which has at most `piece` bytes."""

    length = 0
    piece, step = 1 << 20, staticmethod(lambda: None)

    def __init__(self, content: bytes, status: int) -> None:
        super().__init__(content)
        self.status = status

    def read1(self, size: int | None = -1, /) -> bytes:
        self.step()
        return super().read1(self.piece)


class Site:
    """A repository, and a server that a device asks, which may lie."""

    def __init__(self, now: datetime = NOW) -> None:
        self.repository, self.private = make_repository("p", now)
        self.manifests: dict[str, bytes] = {}
        self.files: dict[str, str] = {}
        self.blobs: dict[str, bytes] = {}
        self.sent: list[str] = []  # SHA-256 of the files that were asked for
        self.serve()

    def publish(
        self,
        number: int,
        main: str = "m.onnx",
        now: datetime = NOW,
        contents: Mapping[str, bytes] | None = None,
        deltas: Mapping[str, tuple[bytes, bytes]] | None = None,
        model: str = "m",
    ) -> None:
        """`deltas` are, by path, the former content of a file and its delta."""
        files: list[dict[str, Any]] = []
        for path, data in (contents or {}).items():
            file = {"path": path, "sha256": self.keep(data), "size": len(data)}
            if deltas and path in deltas:
                old, delta = deltas[path]
                told = {"old": self.keep(old), "sha256": self.keep(delta), "size": len(delta)}
                file["deltas"] = [told]
            files.append(file)
        content = json.dumps({"number": number, "main": main, "files": files}).encode()
        path = f"{model}/{number}.json"
        self.manifests[f"{model}/{number}"] = content
        self.repository, self.private = add_target(
            self.repository, self.private, path, content, {}, now
        )
        self.serve()

    def keep(self, data: bytes) -> str:
        digest = sha256(data).hexdigest()
        self.blobs[digest] = data
        return digest

    def serve(self) -> None:
        self.files = dict(self.repository.files)

    def root(self) -> str:
        return model_repository.newest_root(self.repository)

    def open(self, path: str, offset: int) -> Any:
        return ServerReply(self.call("GET", path)[offset:], 206 if offset else 200)

    def call(self, method: str, path: str) -> bytes:
        kind, _, name = path.removeprefix("/edge/v1/").partition("/")
        if kind == "files":
            self.sent.append(name)
            if name not in self.blobs:
                raise ServerFileMissing(name)
            return self.blobs[name]
        if kind == "manifests":
            return self.manifests[name]
        if name == "root.json":
            return self.root().encode()
        if name not in self.files:
            raise ServerFileMissing(name)
        return self.files[name].encode()


def ask(site: Site, folder: Path, number: int, model: str = "m") -> dict[str, Any]:
    return read_manifest(str(folder), site, model, number)  # type: ignore[arg-type]


def test_a_device_reads_what_was_published(tmp_path: Path) -> None:
    site = Site()
    site.publish(1)
    assert ask(site, tmp_path, 1)["main"] == "m.onnx"
    site.publish(2)
    assert ask(site, tmp_path, 2)["number"] == 2
    with pytest.raises(ValueError, match="no version 3 of m"):
        ask(site, tmp_path, 3)


def test_a_changed_manifest_is_refused(tmp_path: Path) -> None:
    site = Site()
    site.publish(1)
    site.manifests["m/1"] = site.manifests["m/1"].replace(b"m.onnx", b"x.onnx")
    with pytest.raises(RepositoryError):
        ask(site, tmp_path, 1)


def test_an_older_list_is_refused(tmp_path: Path) -> None:
    site = Site()
    site.publish(1)
    older = dict(site.files)
    site.publish(2)
    ask(site, tmp_path, 2)
    site.files = older
    with pytest.raises(RepositoryError):
        ask(site, tmp_path, 1)


def test_a_frozen_list_is_refused_when_it_has_expired(tmp_path: Path) -> None:
    site = Site(NOW - timedelta(days=8))
    site.publish(1, now=NOW - timedelta(days=8))
    with pytest.raises(RepositoryError, match="expired"):
        ask(site, tmp_path, 1)
    assert must_renew(site.repository, NOW)
    site.repository = renew(site.repository, site.private, NOW)
    site.serve()
    assert not must_renew(site.repository, NOW)
    assert ask(site, tmp_path, 1)["number"] == 1


def test_targets_are_signed_again_after_half_of_their_time() -> None:
    site = Site()
    site.publish(1)
    for days, version in ((100, 2), (200, 3)):
        now = NOW + timedelta(days=days)
        files = renew(site.repository, site.private, now).files
        newest = max(int(name.split(".")[0]) for name in files if name.endswith("targets.json"))
        expires = Metadata.from_bytes(files[f"{newest}.targets.json"].encode()).signed.expires
        assert newest == version
        assert expires - now > timedelta(days=182)


def test_lists_of_different_times_are_refused(tmp_path: Path) -> None:
    site = Site()
    site.publish(1)
    older = site.files["1.model-m.json"]
    site.publish(2)
    mixed = json.loads(older)
    site.files["2.model-m.json"] = json.dumps(mixed)
    with pytest.raises(RepositoryError):
        ask(site, tmp_path, 2)


@pytest.mark.parametrize("stolen", ["timestamp", "snapshot"])
def test_a_stolen_key_of_one_role_signs_no_model(tmp_path: Path, stolen: str) -> None:
    site = Site()
    site.publish(1)
    ask(site, tmp_path, 1)
    forged = json.dumps({"number": 2, "main": "evil.onnx", "files": []}).encode()
    thief = {role: site.private[stolen] for role in site.private}
    site.repository, _ = add_target(site.repository, thief, "m/2.json", forged, {}, NOW)
    site.manifests["m/2"] = forged
    site.serve()
    with pytest.raises(RepositoryError):
        ask(site, tmp_path, 2)


@pytest.mark.parametrize("role", ["model-other", "model-m", "targets"])
def test_the_key_of_one_model_signs_no_other_model(tmp_path: Path, role: str) -> None:
    """Even with the keys of the lists of lists."""
    site = Site()
    for model in ("m", "other"):
        site.publish(1, model=model)
        ask(site, tmp_path, 1, model)
    forged = json.dumps({"number": 2, "main": "evil.onnx", "files": []}).encode()
    stolen = dict.fromkeys(site.private, site.private["model-other"])
    stolen |= {each: site.private[each] for each in ("snapshot", "timestamp")}
    tuf, good = model_repository._load(), site.repository
    signed = model_repository._read_newest(tuf, good.files, role).signed
    signed.targets["m/2.json"] = TargetFile.from_data("m/2.json", forged, ["sha256"])
    signed.version += 1
    signers = model_repository._read_signers(tuf, stolen)
    files = model_repository._publish(tuf, {role: signed}, signers, good.files, NOW)
    site.repository, site.manifests["m/2"] = replace(good, files=files), forged
    site.serve()
    with pytest.raises((RepositoryError, ValueError)):
        ask(site, tmp_path, 2)


def test_a_repository_without_keys_of_models_gets_them_and_old_versions_stay(
    tmp_path: Path,
) -> None:
    site = Site()
    tuf, own = model_repository._load(), {role: site.private[role] for role in ROLES}
    old = json.dumps({"number": 1, "main": "old.onnx", "files": []}).encode()
    signed = model_repository._read_newest(tuf, site.repository.files, "targets").signed
    signed.targets["m/1.json"] = TargetFile.from_data("m/1.json", old, ["sha256"])
    signed.version += 1
    signers = model_repository._read_signers(tuf, own)
    files = model_repository._publish(tuf, {"targets": signed}, signers, site.repository.files, NOW)
    site.repository, site.manifests["m/1"] = replace(site.repository, files=files), old
    site.serve()
    assert ask(site, tmp_path, 1)["main"] == "old.onnx"
    site.publish(2)
    for _ in range(2):
        assert [ask(site, tmp_path, each)["number"] for each in (1, 2)] == [1, 2]
        turn_keys(site)


def test_another_root_of_the_server_is_not_trusted_later(tmp_path: Path) -> None:
    site = Site()
    site.publish(1)
    ask(site, tmp_path, 1)
    other = Site()
    other.publish(1)
    with pytest.raises(RepositoryError):
        ask(other, tmp_path, 1)


def test_endless_lists_are_cut(tmp_path: Path) -> None:
    site = Site()
    site.publish(1)
    site.files["timestamp.json"] = " " * 10_000_000 + site.files["timestamp.json"]
    with pytest.raises(Exception, match=r"length|bytes|large"):
        ask(site, tmp_path, 1)


def turn_keys(site: Site) -> None:
    site.repository, site.private = rotate(site.repository, site.private, NOW)
    site.serve()


def test_a_device_that_was_offline_follows_all_new_keys(tmp_path: Path) -> None:
    site = Site()
    site.publish(1)
    offline, online, fresh = (tmp_path / each for each in ("offline", "online", "fresh"))
    for each in (offline, online):
        each.mkdir()
        assert ask(site, each, 1)["number"] == 1
    used = [site.private]
    for number in (2, 3):
        turn_keys(site)
        assert ask(site, online, 1)["number"] == 1, "what was published before is signed again"
        site.publish(number)
        assert ask(site, online, number)["number"] == number
        used.append(site.private)
    fresh.mkdir()
    for folder in (offline, fresh):
        assert [ask(site, folder, each)["number"] for each in (1, 2, 3)] == [1, 2, 3]
    keys = {each[role] for each in used for role in model_repository.ROLES}
    assert len(keys) == 12, "no key is used twice"


@pytest.mark.parametrize("stolen", [("root",), ("targets", "snapshot", "timestamp"), ROLES])
def test_stolen_former_keys_deceive_no_device_that_has_followed(
    tmp_path: Path, stolen: tuple[str, ...]
) -> None:
    site = Site()
    site.publish(1)
    ask(site, tmp_path, 1)
    before, former = site.repository, dict(site.private)
    turn_keys(site)
    ask(site, tmp_path, 1)
    good = site.repository
    own_keys = {**Site().private, "model-m": Site().private["targets"]}
    thief = {**own_keys, **{role: former[role] for role in stolen}}
    forged = json.dumps({"number": 9, "main": "evil.onnx", "files": []}).encode()
    site.manifests["m/9"] = forged
    own, keys = rotate(good, thief, NOW)  # a list of keys of their own
    for lists, private in ((good, thief), (own, keys), (before, thief)):
        site.repository, _ = add_target(lists, private, "m/9.json", forged, {}, NOW)
        site.serve()
        with pytest.raises((RepositoryError, ValueError)):
            ask(site, tmp_path, 9)
    site.repository = good
    site.publish(2)
    assert ask(site, tmp_path, 2)["number"] == 2


@pytest.mark.parametrize("withheld", ["2.root.json", "3.root.json"])
def test_new_lists_without_the_new_keys_are_refused(tmp_path: Path, withheld: str) -> None:
    site = Site()
    site.publish(1)
    ask(site, tmp_path, 1)
    turn_keys(site)
    turn_keys(site)
    site.publish(2)
    kept = site.files.pop(withheld)
    with pytest.raises(RepositoryError):
        ask(site, tmp_path, 2)
    site.files[withheld] = kept
    assert ask(site, tmp_path, 2)["number"] == 2


@pytest.mark.parametrize("days", [-400, 400])
def test_a_wrong_clock_fails_an_update_but_refuses_no_version(
    tmp_path: Path, days: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = NOW + timedelta(days=days)
    site = Site(made)
    site.publish(1, now=made)
    (tmp_path / "card.json").write_text("{}")
    monkeypatch.setattr(update, "DeviceCalls", lambda *_: site)
    assert update.main([str(tmp_path), "m", "1"]) == (1 if days < 0 else 0)
    assert ("the clock of this device says" in capsys.readouterr().err) is (days < 0)


def test_only_a_version_that_is_not_what_was_signed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site()
    site.publish(1)
    (tmp_path / "card.json").write_text("{}")
    monkeypatch.setattr(update, "DeviceCalls", lambda *_: site)
    right = site.manifests["m/1"]
    site.manifests["m/1"] = right.replace(b"m.onnx", b"x.onnx")
    assert update.main([str(tmp_path), "m", "1"]) == 3
    site.manifests["m/1"] = right
    site.files["timestamp.json"] = Site().files["timestamp.json"]
    assert update.main([str(tmp_path), "m", "1"]) == 1
    assert "the signed lists are not trusted" in capsys.readouterr().err


def test_old_lists_are_dropped(tmp_path: Path) -> None:
    site = Site()
    for number in range(1, 12):
        site.publish(number)
    assert len([name for name in site.files if name.endswith("model-m.json")]) == 3
    assert ask(site, tmp_path, 11)["number"] == 11
    newest = Metadata.from_bytes(site.files["11.model-m.json"].encode())
    target = newest.signed.targets["m/4.json"]  # type: ignore[attr-defined]
    assert isinstance(target, TargetFile)


def test_the_keys_are_not_in_the_lists() -> None:
    site = Site()
    text = "".join(site.files.values())
    assert all(key.strip().splitlines()[1] not in text for key in site.private.values())
    assert replace(site.repository, keys={}).keys == {}


def test_a_server_without_the_packages_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tuf.api", None)
    with pytest.raises(model_repository.RepositoryMissing, match=re.escape(extra_command("edge"))):
        make_repository("p", NOW)
