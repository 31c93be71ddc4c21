"""The requests that a killed HAProxy has listed."""

import os
import resource
from pathlib import Path

import pytest

from cavvy.capabilities.serving.gateway.haproxy.configuration import (
    EndedRequests,
    make_ring,
    read_ring,
)
from cavvy.capabilities.serving.gateway.haproxy.runtime import HaproxyRuntime

SECOND = 10**15  # in microseconds: some second since 1970


def write_line(server: str, at_us: int, active_ms: int = 5, service: str = "chat") -> bytes:
    text = f"svc-{service}/{server} {SECOND + at_us} {active_ms}".encode()
    return b"\0" + bytes([len(text)]) + text


def test_lines_are_read_from_a_ring_that_has_begun_again() -> None:
    lines = [write_line("r1.a1", number, 10) for number in range(6)]
    other = write_line("hold", 6, -1) + write_line("r2.a1", 7, -1, "images")
    data = b"head\0" + b"".join(lines[4:]) + other + b"r1.a1 1000" + b"".join(lines[:4])
    found = read_ring(data + lines[0][:-8], lambda service: SECOND + 2 if service == "chat" else 0)
    assert found == {
        ("chat", "r1.a1"): EndedRequests(requests=3, active_s=0.03),
        ("chat", "hold"): EndedRequests(requests=1),
        ("images", "r2.a1"): EndedRequests(requests=1),
    }


def test_requests_after_the_last_statistics_are_counted_once(tmp_path: Path) -> None:
    runtime = HaproxyRuntime(tmp_path / "haproxy")
    row = {"svname": "r1.a1", "stot": "7", "scur": "3", "ttime": "5"}
    runtime._note("svc-chat", [row], SECOND + 50)  # three of the seven have not ended
    ring = tmp_path / "requests.ring"
    ended = [write_line("r1.a1", at_us) for at_us in (10, 20, 51, 60)]
    ring.write_bytes(b"".join([*ended, write_line("r2.a1", 60)]))
    runtime.read_ended(ring)
    assert not ring.exists()
    taken = runtime.take_served()["chat"]
    assert {name: each.requests for name, each in taken.items()} == {"r1.a1": 7, "r2.a1": 1}
    ring.write_bytes(b"".join(write_line("r1.a1", at_us) for at_us in range(40, 60)))
    runtime._note("svc-chat", [row], SECOND + 50)
    runtime.read_ended(ring)
    assert runtime.take_served()["chat"]["r1.a1"].requests == 4 + 9


@pytest.mark.parametrize(
    "damage",
    [
        b"svc-chat/r\xff.a1 1000000000000001 5",
        b"svc-chat/r1.a1 1000000000000001 " + b"9" * 5000,
        b"svc-chat/r1.a1 1000000000000001 -" + b"9" * 400,
        b"\x1f\x8b\xff" * 1000,
    ],
)
def test_lines_that_haproxy_did_not_write_are_left_out(damage: bytes) -> None:
    """HAProxy could otherwise not start any more."""
    data = write_line("r1.a1", 1) + damage + b"\0" + write_line("r1.a1", 2)
    assert read_ring(data, lambda service: 0)["chat", "r1.a1"].requests == 2


def test_a_file_that_is_no_ring_is_not_read(tmp_path: Path) -> None:
    runtime = HaproxyRuntime(tmp_path / "haproxy")
    pipe, link, huge = (tmp_path / f"{name}.ring" for name in ("pipe", "link", "huge"))
    os.mkfifo(pipe)
    runtime.read_ended(pipe)
    link.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="symbolic links"):
        runtime.read_ended(link)
    huge.touch()
    os.truncate(huge, 1 << 40)
    runtime.read_ended(huge)
    assert runtime.take_served() == {}
    assert not pipe.exists()
    assert not huge.exists()


def test_a_full_disk_leaves_no_part_of_the_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="large"):
            make_ring(tmp_path / "requests.ring")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "requests.ring").exists()
