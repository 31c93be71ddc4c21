"""Runs the whole check of one rank's node in a separate process, because a faulty GPU driver can
hang forever. The check includes the network speed between the nodes of a gang.

For the network speed, the ranks form a ring. All ranks simultaneously send data to the next rank
for two seconds. Each rank uses several TCP streams, because one stream does not fill a fast link. A
peer must prove that it knows the gang's key; connections without this proof are dropped. The
receiving rank decides whether its link is fast enough.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import threading
import time
from contextlib import suppress

from ..config import AgentConfig
from ..documents import CheckConfig, WorkConfig
from ..notices.faults import GPU, LINK, read_kernel
from ..work.environment import device_variables
from ..work.reaper import report
from .gpus import GpuFault, check_gpus

LIMIT_S = 180.0  # seconds for the whole check
LATELY_S = 600.0  # age in seconds of the oldest kernel messages that are read
# the port is the master's port + this offset + the rank, because several ranks may run on one
# machine
PORT_AFTER_MASTER = 2
STREAMS = 4
SECONDS = 2.0
MEET_S = 60.0  # seconds that a rank waits for its neighbours
STALL_S = 10.0
CHUNK = 1 << 18
MARK = 32  # bytes of a nonce, and of the HMAC that proves knowledge of the key


def check_node(config: AgentConfig, work: WorkConfig, channel: int) -> int:
    """Write each measurement to `channel` as a line `check TEXT`, then the result as JSON. The
    task's own variables are left out, because they could make the driver load any library.
    """
    os.environ.update(device_variables(config))  # the indices of the GPUs assigned to the work
    outcome = reason = ""
    try:
        # Check the links first. If the GPU check failed first, the other ranks would wait for this
        # one in vain.
        if work.nodes > 1:
            _tell(channel, check_links(_wanted(work), work, config.rank))
        _check_gpus(config, work, channel)
    except GpuFault as error:
        outcome, reason = GPU, str(error)
    except SlowLink as error:
        outcome, reason = LINK, str(error)
    except OSError as error:
        outcome, reason = "node", f"the node check failed to run: {error}"
    return report(channel, outcome, reason)


def _check_gpus(config: AgentConfig, work: WorkConfig, channel: int) -> None:
    if not work.accelerators_per_node:
        return
    if config.vendor not in ("", "nvidia"):
        _tell(channel, f"only NVIDIA GPUs can be checked, not {config.vendor} GPUs")
        return
    fault = read_kernel(time.monotonic() - LATELY_S)
    if fault:
        raise GpuFault(f"the kernel log reports {fault}")
    for line in check_gpus(_wanted(work), work.accelerators_per_node):
        _tell(channel, line)


def _wanted(work: WorkConfig) -> CheckConfig:
    assert work.check is not None
    return work.check


def _tell(channel: int, text: str) -> None:
    os.write(channel, f"check {text}\n".encode())


class SlowLink(Exception):
    """Raised if a link is missing or slower than required. The message contains the measured
    speeds."""


def check_links(wanted: CheckConfig, work: WorkConfig, rank: int) -> str:
    """Measure the links to the two neighbours in the ring. Returns the measured speeds as text.
    Raises SlowLink if a link is missing or too slow."""
    before, after = (rank - 1) % work.nodes, (rank + 1) % work.nodes
    end = time.monotonic() + MEET_S
    key = work.gang_key.encode()
    failures: list[str] = []
    with socket.socket(_family(work.addresses[rank])) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", _port(work, rank)))
        server.listen(4 * STREAMS)
        sender = threading.Thread(
            target=_send_all, args=(work, after, key, end, failures), daemon=True
        )
        sender.start()
        received, seconds = _receive_all(server, key, before, end)
        sender.join(max(0.0, end - time.monotonic()) + SECONDS + STALL_S)
    if failures:
        raise SlowLink(failures[0])
    mbps = received * 8 / 1e6 / seconds
    told = f"{say_speed(mbps)} from rank {before} ({work.addresses[before]})"
    if mbps < wanted.link_mbps:
        raise SlowLink(f"{told}, required: at least {say_speed(wanted.link_mbps)}")
    return told


def say_speed(mbps: float) -> str:
    return f"{mbps / 1000:.1f} Gbit/s" if mbps >= 1000 else f"{mbps:.0f} Mbit/s"


def _port(work: WorkConfig, rank: int) -> int:
    return work.master_port + PORT_AFTER_MASTER + rank


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _show(key: bytes, nonce: bytes) -> bytes:
    return hmac.new(key, b"check" + nonce, hashlib.sha256).digest()


def _send_all(work: WorkConfig, rank: int, key: bytes, end: float, failures: list[str]) -> None:
    where = (work.addresses[rank], _port(work, rank))
    lines = []
    try:
        for _ in range(STREAMS):
            lines.append(_call(where, key, end))
    except (OSError, ValueError) as error:
        failures.append(f"cannot reach rank {rank} at {where[0]}:{where[1]}: {error}")
    senders = [threading.Thread(target=_send, args=(line,), daemon=True) for line in lines]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()


def _call(where: tuple[str, int], key: bytes, end: float) -> socket.socket:
    """Connect to a rank and verify that it knows the gang's key. Raises OSError, ValueError."""
    while True:
        try:
            line = socket.create_connection(where, max(0.1, min(5.0, end - time.monotonic())))
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
    line.settimeout(max(0.1, end - time.monotonic()))
    line.sendall(_show(key, _read(line)))
    if _read(line) != _show(key, b"rank"):
        raise ValueError("the peer at this address is not a rank of this gang")
    line.settimeout(STALL_S)
    return line


def _send(line: socket.socket) -> None:
    data = bytes(CHUNK)
    until = time.monotonic() + SECONDS
    with line, suppress(OSError):  # the receiver reports a broken connection
        while time.monotonic() < until:
            line.sendall(data)


def _receive_all(server: socket.socket, key: bytes, rank: int, end: float) -> tuple[int, float]:
    """Return the number of bytes received over all connections, and the duration of the transfer in
    seconds. Raises SlowLink."""
    lines: list[socket.socket] = []
    while len(lines) < STREAMS:
        server.settimeout(max(0.01, end - time.monotonic()))
        try:
            line, _ = server.accept()
        except OSError:
            raise SlowLink(f"rank {rank} did not connect within {MEET_S:.0f} s") from None
        with suppress(OSError, ValueError):
            if _greet(line, key):
                lines.append(line)
                continue
        line.close()
    counts = [0] * STREAMS
    began = time.monotonic()
    readers = [
        threading.Thread(target=_count, args=(line, counts, at), daemon=True)
        for at, line in enumerate(lines)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return sum(counts), max(0.001, time.monotonic() - began)


def _greet(line: socket.socket, key: bytes) -> bool:
    line.settimeout(STALL_S)
    nonce = os.urandom(MARK)
    line.sendall(nonce)
    if not hmac.compare_digest(_read(line), _show(key, nonce)):
        return False
    line.sendall(_show(key, b"rank"))
    return True


def _read(line: socket.socket) -> bytes:
    found = b""
    while len(found) < MARK:
        more = line.recv(MARK - len(found))
        if not more:
            raise ValueError("the connection was closed")
        found += more
    return found


def _count(line: socket.socket, counts: list[int], at: int) -> None:
    buffer = bytearray(CHUNK)
    with line, suppress(OSError):
        while True:
            size = line.recv_into(buffer)
            if not size:
                return
            counts[at] += size
