"""Where the gateway listens, and the URLs and names of services."""

from pathlib import Path

import pytest

from cavvy.capabilities.serving.server.listener import ServiceListener, read_listener
from cavvy.server.state_dir import StateDirError
from cavvy.settings import load


def read(**values: str) -> ServiceListener:
    environ = {f"CAVVY_{name.upper()}": value for name, value in values.items()}
    return read_listener(load({"CAVVY_HOME": "/nonexistent", **environ}))


def test_without_settings_it_listens_for_this_machine_only() -> None:
    assert read() == ServiceListener()
    assert read().locate((), "/p/chat", 8123) == "http://127.0.0.1:8123/p/chat"


def test_a_service_has_one_url(tmp_path: Path) -> None:
    listener = read(
        services_listen="0.0.0.0:443",
        services_tls_cert=str(tmp_path / "tls.crt"),
        services_tls_key=str(tmp_path / "tls.key"),
        services_name="models.example.com",
        services_domains="models.example.com, .ai.example.com",
    )
    assert (listener.host, listener.port) == ("0.0.0.0", 443)
    assert listener.locate((), "/p/chat", 443) == "https://models.example.com/p/chat"
    assert (
        listener.locate(("a.ai.example.com",), "/p/chat", 8443) == "https://a.ai.example.com:8443"
    )
    assert listener.public
    assert not read(services_listen="[::1]:80").public
    assert listener.permits("A.ai.example.com")
    assert not listener.permits("ai.example.com"), "others may use the domain itself"
    assert not listener.permits("evilai.example.com")
    assert not ServiceListener().permits("localhost")


def test_the_servers_certificate_is_used_if_there_is_no_other() -> None:
    listener = read(server_tls_cert="/tls.crt", server_tls_key="/tls.key")
    assert (listener.certificate, listener.key) == ("/tls.crt", "/tls.key")


@pytest.mark.parametrize(
    "address", ["0.0.0.0:80", "here:http", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:²"]
)
def test_addresses_that_cannot_be_used_are_told(address: str) -> None:
    with pytest.raises(StateDirError, match=r"services\.listen"):
        read(services_listen=address)


def test_the_hint_fits_the_mistake() -> None:
    for address, hint in (("127.0.0.1:99999", "a port up to 65535"), ("0.0.0.0:80", "tls_cert")):
        with pytest.raises(StateDirError) as caught:
            read(services_listen=address)
        assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("services.tls_cert", "services.tls_key"),
        ("services.tls_key", "services.tls_cert"),
        ("server.tls_cert", "services.tls_key"),
    ],
)
def test_a_certificate_and_its_key_are_set_together(given: str, missing: str) -> None:
    with pytest.raises(StateDirError, match=f"{given} is set, but {missing} is not"):
        read(**{given.replace(".", "_"): "/tls.pem"})


def test_an_unknown_plane_is_refused() -> None:
    with pytest.raises(StateDirError, match="'nginx', which is not a gateway") as caught:
        read(services_plane="nginx")
    assert caught.value.hint == "expected one of embedded, haproxy"
