"""Keys of users: what a server that was broken into can do to devices, and what it cannot."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tuf", reason="the extra `edge` is not installed: make setup-dev")

from tests.edge.unit.test_model_repository import NOW, Site, ask
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import TargetFile

from cavvy.capabilities.models import repository as model_repository
from cavvy.capabilities.models.model_keys import (
    KeyRefused,
    ListChange,
    SigningKey,
    check_files,
    make_key,
    read_key,
)
from cavvy.capabilities.models.repository import (
    ListRefused,
    SignedElsewhere,
    accept,
    add_target,
    list_signed,
    newest_lists,
    renew,
    rotate,
)
from cavvy.domain.values import replace


def no_passphrase() -> str:
    raise AssertionError("no passphrase is needed")


class OwnedSite(Site):
    """A project whose server holds `private`, and keys of a team and an owner elsewhere."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.team, self.owner = (make_key(folder / name, "") for name in ("team", "owner"))

    def change(self) -> ListChange:
        return ListChange(newest_lists(self.repository), self.private)

    def put(self, change: ListChange) -> None:
        lists, keys = change.result()
        made = {f"{each}.json": content for each, content in self.manifests.items()}
        self.repository, private = accept(self.repository, self.private, lists, keys, made, NOW)
        self.private = dict(private)
        self.repository = replace(self.repository, keys=dict.fromkeys(private, "sealed"))
        self.serve()

    def take(self, key: SigningKey, former: SigningKey | None = None) -> None:
        change = self.change()
        change.take_keys(key, former)
        self.put(change)

    def set_key(self, key: SigningKey | None, owner: SigningKey | None, model: str = "m") -> None:
        change = self.change()
        change.set_key(model, key, owner)
        self.put(change)

    def sign(self, number: int, key: SigningKey, model: str = "m") -> None:
        manifest = json.dumps(
            {"model": model, "number": number, "main": "m.onnx", "files": []}
        ).encode()
        self.manifests[f"{model}/{number}"] = manifest
        change = self.change()
        change.sign_version(model, f"{model}/{number}.json", manifest, key)
        self.put(change)


@pytest.fixture
def site(tmp_path: Path) -> OwnedSite:
    made = OwnedSite(tmp_path)
    made.publish(1)
    made.publish(1, model="free")
    return made


def test_devices_follow_a_key_of_a_team_and_of_an_owner(site: OwnedSite, tmp_path: Path) -> None:
    device, late = tmp_path / "device", tmp_path / "late"
    for folder in (device, late):
        folder.mkdir()
        assert ask(site, folder, 1)["number"] == 1
    site.set_key(site.team, None)
    assert sorted(site.private) == ["model-free", "root", "snapshot", "targets", "timestamp"]
    with pytest.raises(SignedElsewhere):
        site.publish(2)
    site.sign(2, site.team)
    site.publish(2, model="free")
    assert [ask(site, device, each)["number"] for each in (1, 2)] == [1, 2]
    site.take(site.owner)
    assert sorted(site.private) == ["model-free", "snapshot", "timestamp"]
    site.sign(3, site.team)
    site.publish(3, model="free")
    for folder in (device, late):
        assert [ask(site, folder, each)["number"] for each in (1, 2, 3)] == [1, 2, 3]
        assert ask(site, folder, 3, "free")["number"] == 3
    for number in range(4, 7):  # other keys of all, also for who was offline meanwhile
        site.team = make_key(tmp_path / f"team{number}", "")
        site.set_key(site.team, site.owner)
        former, site.owner = site.owner, make_key(tmp_path / f"owner{number}", "")
        site.take(site.owner, former)
        site.sign(number, site.team)
        assert ask(site, device, number)["number"] == number
    assert ask(site, late, 6)["number"] == 6
    site.set_key(None, site.owner)
    site.publish(7)
    assert ask(site, late, 7)["number"] == 7
    site.set_key(site.team, site.owner, "new")  # a model that nobody has published
    site.sign(1, site.team, "new")
    assert ask(site, late, 1, "new")["number"] == 1


def forge(site: OwnedSite, role: str, thief: dict[str, str]) -> None:
    """Publish a bad version of m by a list of `role` with the server's snapshot and timestamp."""
    tuf, good = model_repository._load(), site.repository
    forged = json.dumps({"model": "m", "number": 9, "main": "evil", "files": []}).encode()
    signed = model_repository._read_newest(tuf, good.files, role).signed
    signed.targets["m/9.json"] = TargetFile.from_data("m/9.json", forged, ["sha256"])
    signed.version += 1
    lists = {role: signed}
    if role == "targets":  # it also names a key of the thief for the model
        signed.delegations.roles["model-m"].keyids = []
        signer = model_repository._read_signers(tuf, thief)["model-m"]
        signed.add_key(signer.public_key, "model-m")
        own = model_repository._read_newest(tuf, good.files, "model-m").signed
        own.version += 1
        lists["model-m"] = own
    signers = model_repository._read_signers(tuf, thief)
    files = model_repository._publish(tuf, lists, signers, good.files, NOW)
    site.repository, site.manifests["m/9"] = replace(good, files=files), forged
    site.serve()


@pytest.mark.parametrize("role", ["model-m", "model-free", "targets"])
def test_a_server_that_was_broken_into_publishes_no_version_of_a_team(
    site: OwnedSite, tmp_path: Path, role: str
) -> None:
    """With all keys that the server has, and those that it had before."""
    former = dict(site.private)
    site.set_key(site.team, None)
    site.take(site.owner)
    site.sign(2, site.team)
    ask(site, tmp_path, 2)
    good, held = site.repository, dict(site.private)
    forge(site, role, {**former, **held})
    with pytest.raises((RepositoryError, ValueError)):
        ask(site, tmp_path, 9)
    site.repository = good
    with pytest.raises(SignedElsewhere):
        rotate(good, {**held}, NOW)
    other = {**former, **held}
    for private in (other, {**Site().private, **other}):
        lists, keys = rotate(good, {**private}, NOW)
        site.repository, _ = add_target(lists, keys, "m/9.json", site.manifests["m/9"], {}, NOW)
        site.serve()
        with pytest.raises((RepositoryError, ValueError)):
            ask(site, tmp_path, 9)


def test_with_the_list_of_keys_a_server_that_was_broken_into_can_name_another_key(
    site: OwnedSite, tmp_path: Path
) -> None:
    """So a key of a team alone is no protection from that, and the documentation says so."""
    site.set_key(site.team, None)
    ask(site, tmp_path, 1)
    forge(site, "targets", {**site.private, "model-m": Site().private["root"]})
    assert ask(site, tmp_path, 9)["main"] == "evil"


def made_by(site: OwnedSite, thief: SigningKey) -> dict[str, Callable[[ListChange], object]]:
    """Changes that are not valid. `m/2` is published, but not signed."""
    content, days = site.manifests["m/2"], model_repository.timedelta

    def again(made: ListChange) -> None:
        made._changed["model-m"].sign(site.team.signer)

    def sign(made: ListChange, manifest: bytes = content) -> Any:
        made.sign_version("m", "m/2.json", manifest, site.team)
        return made._changed["model-m"].signed

    def invent(made: ListChange) -> None:
        targets = sign(made).targets
        targets["m/3.json"] = targets["m/2.json"]
        again(made)

    def skip(made: ListChange) -> None:
        sign(made).version += 1
        again(made)

    def drop(made: ListChange) -> None:
        sign(made).targets.pop("m/1.json")
        again(made)

    def steal(made: ListChange) -> None:
        made.set_key("m", thief, site.owner)
        made._changed["targets"].sign(thief.signer)

    def keep_no_keys(made: ListChange) -> None:
        made.take_keys(site.owner, site.owner)
        made._keys.clear()

    def steal_all(made: ListChange) -> None:
        made.take_keys(thief, site.owner)
        made._changed["root"].sign(thief.signer)

    return {
        "another key": lambda made: made._change("model-m", days(30)).sign(thief.signer),
        "for ever": lambda made: made._change("model-m", days(9999)).sign(site.team.signer),
        "a version less": drop,
        "no version": invent,
        "other content": lambda made: sign(made, content.replace(b"x", b"y")),
        "a number skipped": skip,
        "a key of a thief": steal,
        "a key for all models": lambda made: made.set_key("*", thief, site.owner),
        "no keys for the server": keep_no_keys,
        "a root of a thief": steal_all,
    }


@pytest.mark.parametrize("change", ["another key", "for ever", "a version less", "no version",
    "other content", "a number skipped", "a key of a thief", "a key for all models",
    "no keys for the server", "a root of a thief"])  # fmt: skip
def test_a_server_takes_no_lists_that_devices_would_refuse(
    site: OwnedSite, tmp_path: Path, change: str
) -> None:
    site.set_key(site.team, None)
    site.take(site.owner)
    manifest = {"model": "m", "number": 2, "main": "x", "files": []}
    site.manifests["m/2"] = json.dumps(manifest).encode()
    before, made = site.repository, site.change()
    made_by(site, make_key(tmp_path / "thief", ""))[change](made)
    with pytest.raises(ListRefused):
        site.put(made)
    assert site.repository == before
    site.sign(2, site.team)


def test_a_server_takes_no_lists_without_a_form(site: OwnedSite) -> None:
    for lists in ({"timestamp": "{}"}, {"model-m": "["}, {"model-x": "{}"}, {"root": "{}"}):
        with pytest.raises(ListRefused):
            accept(site.repository, site.private, lists, {}, {}, NOW)
    newest = newest_lists(site.repository)
    with pytest.raises(ListRefused, match="has the type"):
        accept(site.repository, site.private, {"root": newest["targets"]}, {}, {}, NOW)
    with pytest.raises(ListRefused):
        accept(site.repository, site.private, {}, {"snapshot": "no key"}, {}, NOW)


def test_a_key_signs_only_what_its_user_asked_for(site: OwnedSite, tmp_path: Path) -> None:
    site.set_key(site.team, None)
    good = json.dumps(
        {"model": "m", "number": 2, "main": "a", "files": [{"path": "a", "sha256": "1"}]}
    ).encode()
    for wrong, told in (
        (good.replace(b'"m"', b'"n"'), "another version"),
        (good.replace(b"2", b"1"), "another version"),
        (b"[]", "not valid"),
        (b"{", "not valid"),
    ):
        with pytest.raises(KeyRefused, match=told):
            site.change().sign_version("m", "m/2.json", wrong, site.team)
    with pytest.raises(KeyRefused, match="signed with the key"):
        site.change().sign_version("m", "m/2.json", good, site.owner)
    with pytest.raises(KeyRefused, match="has no key"):
        site.change().sign_version("x", "x/2.json", good, site.team)
    text = site.repository.files["2.model-m.json"]
    changed = ListChange(
        {**newest_lists(site.repository), "model-m": text.replace("m/1", "m/0")}, ()
    )
    with pytest.raises(KeyRefused, match="not genuine"):
        changed.sign_version("m", "m/2.json", good, site.team)
    check_files(good, {"a": "1"}, "a")
    for files, main in (
        ({"a": "2"}, "a"),
        ({}, "a"),
        ({"a": "1", "b": "1"}, "a"),
        ({"a": "1"}, "b"),
    ):
        with pytest.raises(KeyRefused):
            check_files(good, files, main)


def test_a_key_signs_nothing_that_a_server_has_put_into_a_list(
    site: OwnedSite, tmp_path: Path
) -> None:
    """Also if the server calls a key of its own by the ID of the user's key, or says that it has
    the key itself."""
    site.set_key(site.team, None)
    site.take(site.owner)
    thief, tuf = make_key(tmp_path / "thief", ""), model_repository._load()
    good = site.repository.files
    root, targets, mine = (
        model_repository._read_newest(tuf, good, role) for role in ("root", "targets", "model-m")
    )
    for holder, keys, key in (
        (root, root.signed.keys, site.owner),
        (targets, targets.signed.delegations.keys, site.team),
    ):
        key_id, public = key.key_id, thief.signer.public_key
        keys[key_id] = type(public)(key_id, public.keytype, public.scheme, public.keyval)
        holder.signatures.clear()
    mine.signed.targets["m/9.json"] = mine.signed.targets["m/1.json"]
    for metadata, key in ((root, site.owner), (targets, site.owner), (mine, site.team)):
        made = thief.signer.sign(metadata.signed_bytes)
        metadata.signatures = {key.key_id: type(made)(key.key_id, made.signature)}
    lists = {"root": root, "targets": targets, "model-m": mine}
    content, new = site.manifests["m/1"].replace(b"1", b"2"), make_key(tmp_path / "new", "")
    for held in ([], ["root", "targets"]):
        made = {role: str(each.to_bytes(), "utf-8") for role, each in lists.items()}
        for sign in (
            lambda change: change.sign_version("m", "m/2.json", content, site.team),
            lambda change: change.renew(site.team),
            lambda change: change.renew(site.owner),
            lambda change: change.set_key("free", site.team, site.owner),
            lambda change: change.take_keys(new, site.owner),
        ):
            with pytest.raises(KeyRefused, match="not genuine"):
                sign(ListChange({**newest_lists(site.repository), **made}, held))


def test_what_a_user_signs_is_renewed_by_the_user(site: OwnedSite) -> None:
    site.set_key(site.team, None)
    site.take(site.owner)
    later = NOW + model_repository.timedelta(days=300)
    files = renew(site.repository, site.private, later).files
    assert (
        newest_lists(replace(site.repository, files=files))["model-m"]
        == (newest_lists(site.repository)["model-m"])
    )
    for key, roles in ((site.team, ["model-m"]), (site.owner, ["root", "targets"])):
        change = site.change()
        assert change.renew(key) == roles
        site.put(change)
    rows = {role: (by, expires) for role, _, by, expires, _ in site.change().describe()}
    assert rows["snapshot"] == rows["model-free"] == ("server", None)
    assert rows["model-m"][0] == "user"
    assert rows["model-m"][1] > NOW + model_repository.timedelta(days=700)
    assert list_signed(site.repository, "m") == {"m/1.json"}
    assert list_signed(site.repository, "free") is None


def test_a_key_is_in_a_file_that_only_its_user_can_read(tmp_path: Path) -> None:
    path = tmp_path / "team.pem"
    made = make_key(path, "long words")
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"ENCRYPTED" in path.read_bytes()
    assert read_key(path, lambda: "long words").key_id == made.key_id
    for words in ("other words", ""):
        with pytest.raises(KeyRefused, match="cannot be used"):
            read_key(path, lambda words=words: words)
    with pytest.raises(KeyRefused, match="no key is replaced"):
        make_key(path, "")
    os.chmod(path, 0o644)
    with pytest.raises(KeyRefused, match="other users"):
        read_key(path, no_passphrase)
    with pytest.raises(KeyRefused, match="cannot be read"):
        read_key(tmp_path / "none", no_passphrase)
    (odd := tmp_path / "odd").write_text("x")
    odd.chmod(0o600)
    with pytest.raises(KeyRefused, match="cannot be used"):
        read_key(odd, no_passphrase)
