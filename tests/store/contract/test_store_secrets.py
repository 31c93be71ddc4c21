"""Sealed values open with their own key, project and name, and with nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.waits import PATIENCE_S

from cavvy.store.base import StoreUnusable
from cavvy.store.keys import KeyRing
from cavvy.store.secrets import SecretSealer


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return tmp_path / "key"


def make_sealer(key: Path) -> SecretSealer:
    return SecretSealer(KeyRing(key))


def test_a_secret_opens_again(key: Path) -> None:
    sealed = make_sealer(key).seal("p", "TOKEN", "s3cret é\n")
    assert b"s3cret" not in sealed
    assert make_sealer(key).unseal("p", "TOKEN", sealed) == "s3cret é\n"
    assert make_sealer(key).seal("p", "TOKEN", "s3cret é\n") != sealed
    assert make_sealer(key).unseal("p", "EMPTY", make_sealer(key).seal("p", "EMPTY", "")) == ""


def test_the_key_is_private_and_alone(key: Path) -> None:
    make_sealer(key).seal("p", "n", "x")
    assert key.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in key.parent.iterdir()] == ["key"]
    key.chmod(0o640)
    with pytest.raises(StoreUnusable, match="chmod 600"):
        make_sealer(key).seal("p", "n", "x")


@pytest.mark.parametrize(
    ("project", "name"), [("q", "TOKEN"), ("p", "OTHER"), ("", "p/TOKEN"), ("p/T", "OKEN")]
)
def test_sealed_values_cannot_be_swapped(key: Path, project: str, name: str) -> None:
    sealed = make_sealer(key).seal("p", "TOKEN", "x")
    with pytest.raises(StoreUnusable, match="cavvy secret set"):
        make_sealer(key).unseal(project, name, sealed)


@given(st.data())
def test_a_changed_byte_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    key = tmp_path_factory.mktemp("sealer") / "key"
    sealed = bytearray(make_sealer(key).seal("p", "TOKEN", "value"))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(StoreUnusable):
        make_sealer(key).unseal("p", "TOKEN", bytes(sealed))


@pytest.mark.parametrize("sealed", [b"", b"\x01", b"\x01" + b"0" * 20])
def test_what_was_never_sealed_does_not_open(key: Path, sealed: bytes) -> None:
    with pytest.raises(StoreUnusable):
        make_sealer(key).unseal("p", "TOKEN", sealed)


def test_another_key_does_not_open(tmp_path: Path) -> None:
    sealed = make_sealer(tmp_path / "one").seal("p", "TOKEN", "x")
    with pytest.raises(StoreUnusable, match="restore the key"):
        make_sealer(tmp_path / "two").unseal("p", "TOKEN", sealed)


def test_a_wrong_key_file_is_told(key: Path) -> None:
    key.touch(0o600)
    key.write_bytes(b"short")
    with pytest.raises(StoreUnusable, match="not a key"):
        make_sealer(key).seal("p", "TOKEN", "x")
    with pytest.raises(StoreUnusable, match="cannot read the key"):
        make_sealer(key / "below").seal("p", "TOKEN", "x")


_SEAL = """
import sys
from pathlib import Path
from cavvy.store.keys import KeyRing
from cavvy.store.secrets import SecretSealer
assert "cryptography" not in sys.modules
print("ready", flush=True)
sys.stdin.readline()
print(SecretSealer(KeyRing(Path(sys.argv[1]))).seal("p", "n", "x").hex())
"""


def test_processes_that_make_the_key_at_once_use_one(key: Path) -> None:
    makers = [
        subprocess.Popen([sys.executable, "-c", _SEAL, key], stdin=-1, stdout=-1, text=True)
        for _ in range(4)
    ]
    for maker in makers:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "ready\n"
    for maker in makers:
        assert maker.stdin is not None
        maker.stdin.write("\n")
        maker.stdin.flush()
    for maker in makers:
        sealed = bytes.fromhex(maker.communicate(timeout=PATIENCE_S)[0])
        assert make_sealer(key).unseal("p", "n", sealed) == "x"
