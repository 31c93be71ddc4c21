"""The attacks of `abuse.py`: what connections without a token send to a listener, in processes of
their own. Each attack repeats itself until its process ends.
"""

import contextlib
import itertools
import os
import resource
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Process

HEAD = b"GET /v1/health HTTP/1.1\r\nHost: x\r\n"
REFUSED = b"GET /v1/projects/default/jobs HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /agent/v1/messages?gang=x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
OPEN = 200  # connections of an attack that holds many


@dataclass(frozen=True, kw_only=True)
class Target:
    host: str
    port: int
    tls: bool

    def dial(self) -> socket.socket:
        return self.secure(self.connect()) if self.tls else self.connect()

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=30)

    def secure(self, connection: socket.socket) -> socket.socket:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context.wrap_socket(connection)

    def hello(self) -> bytes:
        """The first message of a TLS handshake."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        sent = ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
        return sent.read()


def flood(target: Target, first: bytes, rest: Iterator[bytes]) -> None:
    """Send on one connection until it is cut."""
    with target.dial() as connection:
        connection.sendall(first)
        for part in rest:
            connection.sendall(part)


def send_heads(target: Target) -> None:
    flood(target, HEAD + b"A: ", itertools.repeat(b"a" * 65536, 1024))


def send_fragments(target: Target) -> None:
    """A head in pieces of one byte, each of which is a packet and a record of TLS."""
    flood(target, HEAD + b"A: ", itertools.repeat(b"a", 60_000))


def send_chunks(target: Target) -> None:
    """A body in chunks of one byte."""
    flood(target, POST, itertools.repeat(b"1\r\na\r\n" * 10_000, 1024))


def send_pipelined(target: Target) -> None:
    """Requests that are refused, sent without waiting for the answers, which nobody reads."""
    flood(target, b"", itertools.repeat(REFUSED * 1000, 1024))


def send_after_an_answer(target: Target) -> None:
    """A request that is answered, followed by more bytes than anyone reads."""
    flood(target, HEAD + b"Connection: close\r\n\r\n", itertools.repeat(b"a" * 65536, 1024))


def ask_refused(target: Target) -> None:
    """One refused request after the other, each on its own connection if the server closes it."""
    with target.dial() as connection:
        while True:
            connection.sendall(REFUSED)
            if not connection.recv(65536):
                return


def send_http2(target: Target) -> None:
    with target.dial() as connection:
        connection.sendall(HTTP2)
        connection.recv(65536)


def shake_hands(target: Target) -> None:
    """A connection with its handshake, and nothing else."""
    with target.dial():
        pass


def shake_half(target: Target) -> None:
    """The first message of a handshake on many connections, which then stay silent."""
    hello = target.hello() if target.tls else HEAD
    with contextlib.ExitStack() as held:
        for _ in range(OPEN):
            connection = held.enter_context(target.connect())
            connection.sendall(hello)


def hold(target: Target, first: bytes, *, shake: bool = True) -> None:
    """Hold many connections, each of which has sent `first`."""
    with contextlib.ExitStack() as held:
        for _ in range(OPEN):
            with contextlib.suppress(OSError):
                connection = held.enter_context(target.dial() if shake else target.connect())
                connection.sendall(first)
        time.sleep(3600)


ATTACKS: dict[str, Callable[[Target], None]] = {
    "heads of 64 MiB": send_heads,
    "half heads": lambda target: hold(target, HEAD),
    "idle": lambda target: hold(target, b""),
    "no handshake": lambda target: hold(target, b"", shake=False),
    "heads in single bytes": send_fragments,
    "bodies in single bytes": send_chunks,
    "pipelined refusals": send_pipelined,
    "bytes after the answer": send_after_an_answer,
    "refused requests": ask_refused,
    "HTTP/2": send_http2,
    "handshakes": shake_hands,
    "half handshakes": shake_half,
}


def _repeat(attack: Callable[[Target], None], target: Target) -> None:
    os.nice(19)  # an attacker would use the CPU of another machine
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    while True:
        with contextlib.suppress(OSError):
            attack(target)


@contextlib.contextmanager
def attacked(target: Target, name: str, processes: int = 2) -> Iterator[None]:
    """While this attack goes on."""
    attackers = [
        Process(target=_repeat, args=(ATTACKS[name], target), daemon=True) for _ in range(processes)
    ]
    for each in attackers:
        each.start()
    try:
        time.sleep(0.5)
        yield
    finally:
        for each in attackers:
            each.kill()
            each.join()
