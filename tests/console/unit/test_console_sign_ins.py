"""Who may sign in at the console at a time."""

from collections.abc import Iterator
from threading import Event

import pytest
from starlette.requests import Request
from tests.console_rig import CannedClient

from cavvy.client.account_wire import SignInWay
from cavvy.console import access as module
from cavvy.console.access import DeviceSignIns, SignInFull
from cavvy.console.app import find_browser


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """A provider whose users never confirm their code, until this is set."""
    over = Event()

    def wait_for_user(issuer: str, client_id: str, show: object, wait: object) -> str:
        over.wait(60)
        raise module._Left

    monkeypatch.setattr(module, "sign_in_by_device", wait_for_user)
    yield over
    over.set()


def make() -> DeviceSignIns:
    signs = DeviceSignIns(lambda: CannedClient({}))
    way = SignInWay(name="idp", issuer="https://idp", client_id="c")
    signs._ways = (float("inf"), (way,))
    return signs


def test_one_address_cannot_keep_others_from_signing_in(ended: Event) -> None:
    signs = make()
    flood = [signs.begin("idp", "203.0.113.9") for _ in range(50)]
    with pytest.raises(SignInFull):
        signs.begin("idp", "203.0.113.9")
    others = [signs.begin("idp", f"198.51.100.{n}") for n in range(20)]
    assert all(signs.find(key) for key in others), "they are not displaced"
    gone = [key for key in flood if signs.find(key) is None]
    assert gone == flood[:20], "the oldest of the address with the most make room"


def test_addresses_of_one_ipv6_network_count_as_one_place(ended: Event) -> None:
    signs = make()
    for n in range(50):
        signs.begin("idp", f"2001:db8::{n:x}")
    with pytest.raises(SignInFull):
        signs.begin("idp", "2001:db8::ffff")
    assert signs.find(signs.begin("idp", "2001:db8:0:1::1"))
    assert signs.find(signs.begin("idp", "fe80::1%eth0"))
    assert signs.find(signs.begin("idp", "testclient"))


@pytest.mark.parametrize(
    ("peer", "headers", "found"),
    [
        ("127.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("::1", ["198.51.100.1, 203.0.113.9"], "203.0.113.9"),
        ("127.0.0.1", [], "127.0.0.1"),
        ("192.0.2.1", ["203.0.113.9"], "192.0.2.1"),
    ],
)
def test_behind_a_proxy_of_this_machine_the_browser_counts(
    peer: str, headers: list[str], found: str
) -> None:
    """Others could state any address."""
    sent = [(b"x-forwarded-for", each.encode()) for each in headers]
    request = Request({"type": "http", "client": (peer, 1), "headers": sent})
    assert find_browser(request) == found


def test_sign_ins_that_made_room_hold_a_bounded_number_of_threads(ended: Event) -> None:
    signs = make()
    places = [f"10.0.{n // 250}.{n % 250}" for n in range(1000)]

    def flood() -> None:
        for place in places:
            signs.begin("idp", place)
            signs.begin("idp", place)

    with pytest.raises(SignInFull):
        flood()
    assert signs._threads <= module._MOST_THREADS
    with pytest.raises(KeyError):
        signs.begin("other", "10.0.0.1")
