"""TLS of the listener for users: which files are refused, and how a renewed certificate is used."""

import socket
import ssl
from pathlib import Path
from threading import Thread

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from tests.certificates import Authority

from cavvy import settings
from cavvy.server import user_listener
from cavvy.server.state_dir import StateDirError
from cavvy.server.user_listener import UserTls, listen_for_users


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def listen(**chosen: object) -> object:
    names = {f"CAVVY_SERVER_{name.upper()}": str(value) for name, value in chosen.items()}
    return listen_for_users(settings.load({"CAVVY_CONFIG": "/dev/null", **names}))


def test_other_machines_need_a_certificate(authority: Authority) -> None:
    certificate, key = authority.issue()
    with pytest.raises(StateDirError, match="other machines can reach"):
        listen(listen="0.0.0.0:0")
    made = listen_for_users(
        settings.load(
            {
                "CAVVY_CONFIG": "/dev/null",
                "CAVVY_SERVER_LISTEN": "0.0.0.0:0",
                "CAVVY_SERVER_TLS_CERT": str(certificate),
                "CAVVY_SERVER_TLS_KEY": str(key),
            }
        )
    )
    assert made is not None
    assert made.address.startswith("https://0.0.0.0:")
    made.sock.close()


def test_half_of_the_settings_is_refused(authority: Authority) -> None:
    certificate, key = authority.issue()
    for chosen, said in (
        ({"tls_cert": certificate}, "tls_key is not"),
        ({"tls_key": key}, "tls_cert is not"),
        ({"tls_cert": certificate, "tls_key": key}, "server.listen is empty"),
    ):
        with pytest.raises(StateDirError, match=said):
            listen(**chosen)
    for where in ("localhost", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "::1"):
        with pytest.raises(StateDirError, match="is not an address with a port"):
            listen(listen=where)


def test_files_that_cannot_be_used_are_explained(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue()
    _, other = authority.issue("other")
    locked = tmp_path / "locked.key"
    loaded = load_pem_private_key(key.read_bytes(), None)
    locked.write_bytes(
        loaded.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x"))
    )
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("hello")
    for files, said in (
        ((tmp_path / "none", key), "No such file"),
        ((certificate, other), "the key does not belong to the certificate"),
        ((certificate, locked), "the key is encrypted"),
        ((no_pem, key), "cannot be used"),
        ((tmp_path, key), "cannot be used"),
    ):
        with pytest.raises(StateDirError, match=said):
            UserTls(*map(str, files))


def shown(tls: UserTls, authority: Authority, *, name: str | None = "localhost") -> str:
    """The common name of the certificate that a client sees."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        tls.strict.wrap_socket(theirs, server_side=True).close()

    thread = Thread(target=serve)
    thread.start()
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.check_hostname = name is not None
    with context.wrap_socket(ours, server_hostname=name) as client:
        subject = client.getpeercert()
    thread.join()
    assert subject is not None
    return dict(pair for parts in subject["subject"] for pair in parts)["commonName"]


def test_a_renewed_certificate_is_used_and_a_broken_one_is_not(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_listener, "_LOOK_S", 0.0)
    certificate, key = authority.issue()
    tls = UserTls(str(certificate), str(key))
    assert shown(tls, authority) == "server"
    assert shown(tls, authority, name=None) == "server"
    newer, newer_key = authority.issue("newer")
    newer.replace(certificate)
    assert shown(tls, authority) == "server"  # the key of the new certificate is not there yet
    newer_key.replace(key)
    assert shown(tls, authority) == "newer"
    certificate.unlink()
    assert shown(tls, authority) == "newer"
    assert shown(tls, authority, name=None) == "newer"


def test_old_versions_of_tls_are_refused(authority: Authority) -> None:
    certificate, key = authority.issue()
    assert UserTls(str(certificate), str(key)).strict.minimum_version == ssl.TLSVersion.TLSv1_2
