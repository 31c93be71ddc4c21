"""What a receiver that speaks no HTTP, or breaks off, is to the one who tells it."""

import asyncio
import os
import socket
import threading
from contextlib import suppress

import pytest

from cavvy.control.webhooks import post_json
from cavvy.domain.targets import EVERY, AddressKind, find_kind, is_allowed, read_targets
from cavvy.http_client import TargetDenied, is_own
from cavvy.store.objects.base import ObjectDenied
from cavvy.store.objects.http import ask


def post_to(said: bytes) -> str:
    """What is told of a receiver that answers so."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            line, _ = server.accept()
            with line:
                line.settimeout(10)
                while b"{}" not in line.recv(65536):
                    pass
                line.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        found = asyncio.run(post_json(f"http://127.0.0.1:{server.getsockname()[1]}/hook", b"{}"))
        thread.join(10)
    return found


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", ""),
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
            "a redirect (302); redirects are not followed",
        ),
        (b"HTTP/1.1 503 \r\nContent-Length: 0\r\n\r\n", "status 503"),
        (b"220 mail.test ESMTP\r\n", "220 mail.test ESMTP"),
        (b"HTTP/1.1 500 no\r\nContent-Length: 0\r\n\r\n", "no"),
        (b"", "Remote end closed connection without response"),
    ],
)
def test_a_receiver_that_speaks_no_http_is_a_problem_to_tell_and_no_error(
    said: bytes, told: str
) -> None:
    assert post_to(said).strip() == told


@pytest.mark.parametrize(
    "url", ["http://ann:s3cret@host.test/hook", "http://127.0.0.1:9/hook\x7fs3cret"]
)
def test_an_address_that_cannot_be_called_is_a_problem_that_repeats_nothing_of_it(url: str) -> None:
    assert asyncio.run(post_json(url, b"{}")) == "the address cannot be called"


def test_what_a_receiver_says_is_quoted_in_part() -> None:
    assert post_to(b"x" * 5000 + b"\r\n") == "x" * 200


@pytest.mark.parametrize(
    "host",
    [
        *("169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]", "[fd00:ec2::254]"),
        *("[fd20:ce::254]", "[fd00:c1::a9fe:a9fe]", "[fd00:42::42]", "[fd00:ec2:0:0::23]"),
    ],
)
def test_the_metadata_services_of_clouds_are_not_called(host: str) -> None:
    with pytest.raises(TargetDenied, match="which the server does not call"):
        asyncio.run(post_json(f"http://{host}/", b"{}"))


def test_receivers_that_do_not_answer_keep_no_thread_of_the_server() -> None:
    async def main(server: socket.socket) -> None:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/hook"
        sent = [asyncio.create_task(post_json(url, b"{}")) for _ in range(100)]
        connected, _ = await asyncio.to_thread(server.accept)
        assert await asyncio.to_thread(os.getpid) == os.getpid()
        assert not any(each.done() for each in sent)
        connected.close()
        for each in sent:
            each.cancel()

    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        asyncio.run(main(server))


PUBLIC, PRIVATE, LOOPBACK, METADATA = AddressKind
ADDRESSES = {
    "8.8.8.8": PUBLIC,
    "2606:4700::1111": PUBLIC,
    "::ffff:8.8.8.8": PUBLIC,
    "64:ff9b::8.8.8.8": PUBLIC,
    "2002:0808:0808::1": PUBLIC,
    "10.1.2.3": PRIVATE,
    "172.31.0.1": PRIVATE,
    "172.32.0.1": PUBLIC,
    "192.168.0.1": PRIVATE,
    "100.64.0.1": PRIVATE,
    "255.255.255.255": PRIVATE,
    "224.0.0.1": PRIVATE,
    "fc00::1": PRIVATE,
    "fec0::1": PRIVATE,
    "ff02::1": PRIVATE,
    "64:ff9b:1::8.8.8.8": PRIVATE,  # a translator of this network
    "::ffff:10.0.0.1": PRIVATE,
    "::10.0.0.1": PRIVATE,
    "::ffff:0:10.0.0.1": PRIVATE,
    "64:ff9b::10.0.0.1": PRIVATE,
    "2002:0a00:0001::": PRIVATE,
    "2001:0:0808:0808:0:0:f5ff:fffe": PRIVATE,  # the client 10.0.0.1 of Teredo
    "2001:0:0a00:0001:0:0:f7f7:f7f7": PRIVATE,  # the server 10.0.0.1
    "2606:4700::5efe:10.0.0.1": PRIVATE,
    "2606:4700::200:5efe:10.0.0.1": PRIVATE,
    "127.0.0.1": LOOPBACK,
    "192.0.2.2": PRIVATE,
    "2001:db8::1": PRIVATE,
    "127.255.255.254": LOOPBACK,
    "0.0.0.0": LOOPBACK,
    "0.1.2.3": LOOPBACK,
    "::": LOOPBACK,
    "::1": LOOPBACK,
    "::1%lo": LOOPBACK,
    "::ffff:127.0.0.1": LOOPBACK,
    "::ffff:0.0.0.0": LOOPBACK,
    "::127.0.0.1": LOOPBACK,
    "64:ff9b::7f00:1": LOOPBACK,
    "64:ff9b:1::127.0.0.1": LOOPBACK,
    "2002:7f00:1::": LOOPBACK,
    "fe80::5efe:10.0.0.1%eth0": METADATA,
    "169.254.169.254": METADATA,
    "fe80::1%eth0": METADATA,
    "::ffff:169.254.169.254": METADATA,
    "::169.254.169.254": METADATA,
    "64:ff9b::a9fe:a9fe": METADATA,
    "64:ff9b:1::a9fe:a9fe": METADATA,
    "2002:a9fe:a9fe::": METADATA,
    "2001:0:0808:0808:0:0:5601:5601": METADATA,
    "2606:4700::5efe:a9fe:a9fe": METADATA,
    "::ffff:168.63.129.16": METADATA,
    "fd00:ec2::254": METADATA,
}


def is_none(address: str) -> bool:
    """No address is one of this machine."""
    return False


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_is_of_the_kind_of_what_it_leads_to(address: str) -> None:
    kind = ADDRESSES[address]
    assert find_kind(address) is kind
    assert is_allowed("", "host.test", address, is_none) == (kind is PUBLIC)
    assert is_allowed(EVERY, "host.test", address, is_none) == (kind is not METADATA)


@pytest.mark.parametrize(
    ("targets", "host", "address", "allowed"),
    [
        ("10.0.0.0/8", "10.0.0.1", "10.0.0.1", True),
        ("10.0.0.0/8", "x.test", "::ffff:10.0.0.1", True),
        ("10.0.0.0/8", "x.test", "64:ff9b::10.0.0.1", True),
        ("10.0.0.0/8", "x.test", "192.168.0.1", False),
        ("10.0.0.0/8", "x.test", "2001:0:0a00:0001:0:0:80ff:fffe", False),  # 127.0.0.1 behind it
        ("hooks.test , 10.0.0.1", "HOOKS.test.", "192.168.0.1", True),
        ("hooks.test", "other.hooks.test", "192.168.0.1", False),
        ("169.254.0.0/16, meta.test", "meta.test", "169.254.169.254", False),
        ("[::1], 127.0.0.1", "x.test", "::1", True),
    ],
)
def test_an_administrator_allows_hosts_and_networks(
    targets: str, host: str, address: str, allowed: bool
) -> None:
    assert is_allowed(targets, host, address, is_none) is allowed


@pytest.mark.parametrize("address", ["8.8.8.8", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"])
def test_a_public_address_of_this_machine_leads_past_its_firewall(address: str) -> None:
    for targets, allowed in (("", False), ("8.8.0.0/16", True), ("x.test", True), (EVERY, True)):
        assert is_allowed(targets, "x.test", address, "8.8.8.8".__eq__) is allowed


def test_the_addresses_of_this_machine_are_known() -> None:
    assert is_own("127.0.0.1")
    # this machine may have no network
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("8.8.8.8", 9))
        assert is_own(probe.getsockname()[0])
    assert not is_own("8.8.8.8")


@pytest.mark.parametrize("text", ["10.0.0.0/33", "http://a.test", "a b", "a.test:80", "*.test"])
def test_targets_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a host, an address or a network"):
        read_targets(text)


def call_inside(url: str) -> str:
    """Return why the server does not call a URL for a user."""
    with pytest.raises(TargetDenied) as caught:
        asyncio.run(post_json(url, b"{}", ""))
    with pytest.raises(ObjectDenied) as again:
        ask("HEAD", url, targets="")
    assert str(caught.value) == str(again.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1"),
        *("0.0.0.0", "0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]"),
        *("[64:ff9b::127.0.0.1]", "10.0.0.1", "user@127.0.0.1", "①②⑦.⓪.⓪.①"),
    ],
)
def test_nothing_inside_is_called_and_no_answer_tells_what_is_there(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        open_, closed = (call_inside(f"http://{host}:{each}/x") for each in (port, 9))
        assert open_ == closed
        assert "server.private_targets does not list it" in open_
        with pytest.raises(BlockingIOError):
            server.accept()
