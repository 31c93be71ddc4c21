"""The keys of secrets: where they may be, and how they are changed without losing a secret."""

import asyncio
import base64
import os
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from moto import mock_aws

from cavvy.store import keys
from cavvy.store.base import SealedSecret, StoreUnusable
from cavvy.store.encrypted_files.data_keys import FileKeyPlaces, FileKeys
from cavvy.store.keys import AesKey, KeyPlaceInvalid, KeyRing
from cavvy.store.open import MemoryStore
from cavvy.store.own_tables import state
from cavvy.store.rotation import list_keys, rotate_key
from cavvy.store.secrets import SecretSealer, find_key_id
from cavvy.store.sql import Store

NOW = datetime(2026, 1, 2, tzinfo=UTC)
MATERIAL = bytes(range(32))
TEXT = base64.b64encode(MATERIAL).decode()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return tmp_path / "key"


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    store = MemoryStore()
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def kms(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with mock_aws():
        yield boto3.client("kms", region_name="eu-west-1")


def make_kms_place(kms: Any) -> str:
    return f"aws-kms:{kms.create_key()['KeyMetadata']['Arn']}"


async def put(store: Store, sealer: SecretSealer, **secrets: str) -> None:
    for name, plain in secrets.items():
        await store.put_secret(
            SealedSecret(
                project="p", name=name, sealed=sealer.seal("p", name, plain), updated_at=NOW
            )
        )


async def read(store: Store, sealer: SecretSealer) -> dict[str, str]:
    return {
        each.name: sealer.unseal(each.project, each.name, each.sealed)
        for each in await store.all_secrets()
    }


def write_key(path: Path, material: bytes = MATERIAL) -> Path:
    path.touch(0o600)
    path.write_bytes(material)
    return path


def test_values_of_version_1_open(key: Path) -> None:
    write_key(key)
    nonce = bytes(range(12))
    made = b"\x01" + nonce + AESGCM(MATERIAL).encrypt(nonce, b"s3cret", b"1:p/TOKEN")
    assert SecretSealer(KeyRing(key)).unseal("p", "TOKEN", made) == "s3cret"
    assert find_key_id(made) == ""


def test_each_value_has_a_data_key_of_its_own(key: Path) -> None:
    sealer = SecretSealer(KeyRing(key))
    one, two = (sealer.seal("p", "TOKEN", "x") for _ in range(2))
    assert find_key_id(one) == find_key_id(two) == sealer.keys.current().id
    # Parts of two values do not open together: the data key is bound to the value.
    head = 2 + one[1] + 2 + int.from_bytes(one[2 + one[1] : 4 + one[1]], "big")
    with pytest.raises(StoreUnusable):
        sealer.unseal("p", "TOKEN", one[:head] + two[head:])


@pytest.mark.parametrize("place", ["file", "file:", "vault:x", "aws-kms:alias/x", "env:", ":x"])
def test_an_unknown_place_is_refused(key: Path, place: str) -> None:
    with pytest.raises(KeyPlaceInvalid):
        KeyRing(key, place)
    with pytest.raises(KeyPlaceInvalid):
        KeyRing(key, "", [place])


@pytest.mark.parametrize("text", ["", "short", TEXT + "AAAA", "é" * 44])
def test_a_variable_without_a_key_is_told(key: Path, text: str) -> None:
    ring = KeyRing(key, "env:MASTER", environment={"MASTER": text})
    with pytest.raises(StoreUnusable, match=r"MASTER.*openssl rand"):
        ring.current()
    assert not key.exists()


def test_a_named_file_is_never_created(tmp_path: Path, key: Path) -> None:
    ring = KeyRing(key, f"file:{tmp_path / 'master'}")
    with pytest.raises(StoreUnusable, match="No such file"):
        ring.current()
    assert not list(tmp_path.iterdir())


def test_the_same_key_in_another_place_opens_the_value(tmp_path: Path, key: Path) -> None:
    first = SecretSealer(KeyRing(key, "env:MASTER", environment={"MASTER": TEXT}))
    sealed = first.seal("p", "TOKEN", "x")
    second = SecretSealer(KeyRing(key, f"file:{write_key(tmp_path / 'master')}"))
    assert second.unseal("p", "TOKEN", sealed) == "x"


async def test_keys_are_not_judged_without_all_that_they_protect(store: Store, key: Path) -> None:
    """A key that seems unused would be deleted, and what a capability has encrypted lost."""
    sealer = SecretSealer(KeyRing(key))
    await put(store, sealer, A="1")
    before = sealer.keys.current().id
    _, write = store.database
    await write(lambda session: state(session, "hens", "0001"))
    for asked in (rotate_key, list_keys):
        with pytest.raises(StoreUnusable, match="tables of hens, which is not installed"):
            await asked(store, sealer)
    assert sealer.keys.current().id == before


async def test_a_new_key_protects_everything_and_the_former_one_is_kept(
    store: Store, key: Path
) -> None:
    sealer = SecretSealer(KeyRing(key))
    await put(store, sealer, A="1", B="2")
    before = sealer.keys.current()
    former = {each.name: each.sealed for each in await store.all_secrets()}
    done = await rotate_key(store, sealer)
    assert (done.encrypted, done.unreadable) == (2, [])
    assert done.key.id != before.id
    again = SecretSealer(KeyRing(key))  # as after a restart
    assert await read(store, again) == {"A": "1", "B": "2"}
    uses = await list_keys(store, again)
    assert [(use.id, use.current, use.secrets) for use in uses] == [
        (done.key.id, True, 2),
        (before.id, False, 0),
    ]
    assert again.unseal("p", "A", former["A"]) == "1"  # as from a backup
    for path in key.parent.glob("key*"):
        assert path.stat().st_mode & 0o777 == 0o600
    (key.parent / f"key.{before.id}").unlink()
    assert await read(store, SecretSealer(KeyRing(key))) == {"A": "1", "B": "2"}
    with pytest.raises(StoreUnusable, match=before.id):
        SecretSealer(KeyRing(key)).unseal("p", "A", former["A"])


async def test_the_key_of_files_is_current_too(store: Store, key: Path) -> None:
    old, new = (
        f"file:{write_key(key.with_name(name), name[:1].encode() * 32)}" for name in ("old", "new")
    )
    places = FileKeyPlaces(common=new, former=[old])
    files = FileKeys(key.with_name("file-keys"), key, places)
    files.of("p").current()
    uses = await list_keys(store, SecretSealer(KeyRing(key)), files)
    assert [(use.place, use.current, use.files) for use in uses] == [
        (f"file:{key}", True, 0),
        (new, True, 1),
        (old, False, 0),
    ]


async def test_servers_that_share_the_folder_use_the_key_that_one_of_them_has_renewed(
    store: Store, key: Path
) -> None:
    one, two = SecretSealer(KeyRing(key)), SecretSealer(KeyRing(key))
    await put(store, one, A="1")
    former = two.keys.current().id
    assert await read(store, two) == {"A": "1"}
    done = await rotate_key(store, one)
    assert await read(store, two) == {"A": "1"}
    await put(store, two, B="2")
    assert [use.secrets for use in await list_keys(store, two)] == [2, 0]
    (key.parent / f"key.{former}").unlink()  # as the guide says, when nothing uses it
    assert await read(store, one) == await read(store, two) == {"A": "1", "B": "2"}
    again = two.keys.renew()
    assert one.keys.current().id == again.id
    assert one.keys.find(done.key.id).id == done.key.id


def test_a_key_that_vanishes_is_not_replaced(key: Path) -> None:
    sealer = SecretSealer(KeyRing(key))
    sealed = sealer.seal("p", "S", "x")
    hidden = key.rename(key.with_name("hidden"))  # as if the folder were not mounted
    with pytest.raises(StoreUnusable, match="No such file"):
        sealer.seal("p", "S", "y")
    assert not key.exists()
    hidden.rename(key)
    assert sealer.unseal("p", "S", sealed) == "x"


def test_two_servers_that_renew_the_key_at_once_lose_none(key: Path) -> None:
    rings = [KeyRing(key) for _ in range(4)]
    first = rings[0].current().id
    with ThreadPoolExecutor() as threads:
        made = [each.id for each in threads.map(KeyRing.renew, rings)]
    assert {each.id for each in rings[0].all()} == {first, *made}


@pytest.mark.parametrize("step", ["link", "replace", "flush_path"])
async def test_a_crash_while_the_key_is_changed_loses_no_secret(
    store: Store, key: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    sealer = SecretSealer(KeyRing(key))
    await put(store, sealer, A="1")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(keys if step == "flush_path" else os, step, crash)
        with pytest.raises(KeyboardInterrupt):
            sealer.keys.renew()
    again = SecretSealer(KeyRing(key))
    assert await read(store, again) == {"A": "1"}
    await rotate_key(store, again)
    assert await read(store, SecretSealer(KeyRing(key))) == {"A": "1"}


async def test_a_crash_between_two_secrets_loses_none(store: Store, key: Path) -> None:
    sealer = SecretSealer(KeyRing(key))
    await put(store, sealer, A="1", B="2", C="3")
    reseal, count = store.reseal_secret, 0

    async def fail_at_second(secret: SealedSecret, sealed: bytes) -> bool:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return await reseal(secret, sealed)

    store.reseal_secret = fail_at_second  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        await rotate_key(store, sealer)
    again = SecretSealer(KeyRing(key))
    assert await read(store, again) == {"A": "1", "B": "2", "C": "3"}
    await rotate_key(store, again)
    assert [use.secrets for use in await list_keys(store, again)] == [3, 0, 0]


async def test_a_secret_set_meanwhile_keeps_its_new_value(store: Store, key: Path) -> None:
    sealer = SecretSealer(KeyRing(key))
    await put(store, sealer, A="old")
    unseal = sealer.unseal

    def slow(project: str, name: str, sealed: bytes) -> str:
        plain = unseal(project, name, sealed)
        asyncio.run_coroutine_threadsafe(put(store, sealer, A="new"), loop).result()
        return plain

    loop = asyncio.get_running_loop()
    sealer.unseal = slow  # type: ignore[method-assign]
    done = await rotate_key(store, sealer)
    assert done.encrypted == 0
    assert await read(store, SecretSealer(KeyRing(key))) == {"A": "new"}


async def test_a_damaged_secret_is_named_and_stops_nothing(store: Store, key: Path) -> None:
    sealer = SecretSealer(KeyRing(key))
    await put(store, sealer, A="1", B="2")
    await store.put_secret(SealedSecret(project="p", name="A", sealed=b"\x02x", updated_at=NOW))
    done = await rotate_key(store, sealer)
    assert done.encrypted == 1
    ((project, name, reason),) = done.unreadable
    assert (project, name) == ("p", "A")
    assert "cavvy secret set A" in reason


async def test_secrets_move_from_the_folder_to_kms_and_to_another_key(
    store: Store, key: Path, kms: Any
) -> None:
    await put(store, SecretSealer(KeyRing(key)), A="1")
    one, two = make_kms_place(kms), make_kms_place(kms)
    sealer = SecretSealer(KeyRing(key, one))
    assert await read(store, sealer) == {"A": "1"}  # with the folder's key
    assert (await rotate_key(store, sealer)).key.place == one
    key.unlink()
    assert await read(store, SecretSealer(KeyRing(key, one))) == {"A": "1"}
    moved = SecretSealer(KeyRing(key, two, [one]))
    assert [use.secrets for use in await list_keys(store, moved)] == [0, 1]
    await rotate_key(store, moved)
    assert await read(store, SecretSealer(KeyRing(key, two))) == {"A": "1"}
    assert not key.exists()


async def test_a_refusal_of_kms_is_told(store: Store, key: Path, kms: Any) -> None:
    sealer = SecretSealer(KeyRing(key, make_kms_place(kms)))
    await put(store, sealer, A="1")
    client = sealer.keys.current()._client  # type: ignore[attr-defined]
    with Stubber(client) as refusing:
        refusing.add_client_error("decrypt", "DisabledException", "the key is disabled")
        refusing.add_client_error("encrypt", "AccessDeniedException", "not allowed")
        with pytest.raises(StoreUnusable, match=r"did not decrypt a data key.*key is disabled"):
            await read(store, sealer)
        with pytest.raises(StoreUnusable, match=r"AWS KMS did not encrypt.*not allowed"):
            sealer.seal("p", "A", "1")


def test_kms_refuses_a_data_key_of_another_key(key: Path, kms: Any) -> None:
    one, two = KeyRing(key, make_kms_place(kms)), KeyRing(key, make_kms_place(kms))
    wrapped = one.current().wrap(b"x" * 32)
    assert one.current().unwrap(wrapped) == b"x" * 32
    with pytest.raises(StoreUnusable, match="AWS KMS did not decrypt"):
        two.current().unwrap(wrapped)


def test_a_key_of_another_length_is_refused(tmp_path: Path, key: Path) -> None:
    ring = KeyRing(key, f"file:{write_key(tmp_path / 'master', MATERIAL + b'x')}")
    with pytest.raises(StoreUnusable, match="not a key of 32 bytes"):
        ring.current()
    assert AesKey(MATERIAL, "a").id == AesKey(MATERIAL, "b").id
