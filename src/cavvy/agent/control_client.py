"""The agent's connections to the control plane: it claims the work, sends messages and the log,
receives orders, and renews the lease.

Messages (with the claim), the log, and orders each have their own connection and retry delays, so
that a slow log does not delay messages. An unreachable control plane never delays the work.
"""

from __future__ import annotations

import json
import os
import sys
import time
from random import random

from .config import BadConfig, ConfigFields
from .disk import write_whole
from .documents import PROTOCOL
from .log import CHUNK
from .outbox import now_text
from .tunnel import TunnelOffer
from .wire import BackOff, LoopConnection, ServerAddress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from .config import AgentConfig
    from .documents import ExecConfig, OrderConfig
    from .log import LogSpool
    from .loop import EventLoop, LoopTimer
    from .outbox import MessageOutbox
    from .wire import RequestConnection

    class OrderListener(Protocol):
        """Callbacks for events that the client reports to the agent."""

        def ordered(self, kind: str, seconds: float, reason: str) -> None: ...
        def asked(self, asked: ExecConfig) -> None: ...
        def dismissed(self, reason: str) -> None: ...
        def delivered(self) -> None: ...
        def paced(self, every_s: float) -> None: ...
        def kept(self, seconds: float) -> None: ...


TIMEOUT_S = 30.0
ORDERS_WAIT_S = 30
CLAIM_WAIT_S = 5  # while agents of other ranks are missing
FIRST_DELAY_S = 0.1
LAST_DELAY_S = 5.0
LOG_PAUSE_S = 0.1  # seconds to wait for more output before a short piece of the log is sent
# seconds from the claim to the first request for orders; work that ends earlier sends none
ORDERS_DELAY_S = 0.25
# seconds for which the message that the work runs waits for another, such as that it has ended
RUNNING_PAUSE_S = 0.15


REFUSALS = (
    401,
    403,
    409,
    410,
    426,
)  # statuses that refuse a claim for good
LOST = (409, 410)  # after the claim, these statuses mean that another agent has claimed the work


def make_connection(loop: EventLoop, address: ServerAddress, headers: str) -> RequestConnection:
    """Create a connection to an address; the scheme of the address selects the transport."""
    if address.by_mail:
        from .mailbox import MailboxConnection  # only agents without a network need this module

        return MailboxConnection(loop, address, headers)
    return LoopConnection(loop, address, headers)


class RetryingConnection:
    """One connection with its retry delay. After a request has failed, the callback `retry` is
    called when the delay has passed."""

    def __init__(self, link: ControlPlaneClient, retry: Callable[[], None]) -> None:
        self._link = link
        self._retry = retry
        self._delay = BackOff(FIRST_DELAY_S, LAST_DELAY_S, chance=random)
        self._timer: LoopTimer | None = None
        self.connection = make_connection(link.loop, link.address, link.headers)

    @property
    def idle(self) -> bool:
        return self._timer is None and not self.connection.busy

    def ask(
        self,
        method: str,
        path: str,
        body: bytes,
        reply: Callable[[ConfigFields], None],
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Send a request and pass a successful answer to `reply`. This method handles failures and
        refusals itself.
        """
        route = path.partition("?")[0]

        def replied(status: int, data: bytes) -> None:
            self._link.answered = True
            if status in self._link.refusals:
                self._link.dismiss(f"the control plane answered {status}: {said(data)}")
                return
            if status != 200:
                failed(f"status {status}: {said(data)}")
                return
            try:
                fields = ConfigFields(json.loads(data), route)
            except ValueError:
                failed("the answer is not JSON")
                return
            try:
                self._link.heard(fields)
                self._delay.reset()
                reply(fields)
            except BadConfig as error:
                failed(f"the answer does not follow the protocol: {error}")

        def failed(reason: str) -> None:
            if self._delay.fresh:
                complain(f"{route}: {reason}; trying again")
            self._timer = self._link.loop.after(self._delay.next(), self._again)

        self.connection.request(
            method, path, body, timeout_s=timeout_s, replied=replied, failed=failed
        )

    def _again(self) -> None:
        self._timer = None
        self._retry()

    def close(self) -> None:
        self._link.loop.cancel(self._timer)
        self.connection.close()


class ControlPlaneClient:
    """Delivers the queued messages and the log to the control plane, and passes orders to the
    listener."""

    def __init__(
        self,
        loop: EventLoop,
        config: AgentConfig,
        nonce: str,
        outbox: MessageOutbox,
        log: LogSpool,
        listener: OrderListener,
    ) -> None:
        self.loop = loop
        self.address = ServerAddress(config.address, config.pin)
        self.headers = make_headers(config)
        self._config = config
        self._nonce = nonce
        self._outbox = outbox
        self._log = log
        self._listener = listener
        self._order = 0
        self._execs: set[str] = set()
        self._asked_at = 0.0
        self._lease_s = config.lease_s
        self.refusals: tuple[int, ...] = REFUSALS
        self.closed = False
        self.answered = False  # whether the server has ever answered, even with an error
        # whether the log is complete; if so, the rest of the log is sent at once
        self.hurry = False
        self._log_at = 0.0
        self._log_timer: LoopTimer | None = None
        self._hold_timer: LoopTimer | None = None
        self.lease_until = time.monotonic() + config.lease_s
        self.heard_at = time.monotonic()
        self._messages = RetryingConnection(self, self._next)
        self._bytes = RetryingConnection(self, self.pump)
        self._orders = RetryingConnection(self, self.listen)
        self._go: Callable[[ConfigFields], None] | None = None
        self._tunnel = TunnelOffer(config.private)
        self.query = f"?gang={config.gang}&rank={config.rank}"

    def claim(self, go: Callable[[ConfigFields], None]) -> None:
        """Request the work until the server grants it, then pass the work to `go`."""
        self._go = go
        self._claim()

    def _claim(self) -> None:
        host = {
            "hostname": os.uname().nodename,
            "python": sys.version.split()[0],
            "platform": f"{sys.platform}-{os.uname().machine}",
            **self._tunnel.facts(),
        }
        body = {
            "gang": self._config.gang,
            "rank": self._config.rank,
            "nonce": self._nonce,
            "address": self._config.node_address,
            "host": host,
            # a mailbox answers one request after the other
            "wait_s": 0 if self.address.by_mail else CLAIM_WAIT_S,
        }
        self._messages.ask("POST", "/agent/v1/claim", json.dumps(body).encode(), self._claimed)

    def _claimed(self, fields: ConfigFields) -> None:
        go = self._go
        work = fields.inner("work")
        if fields.read("state", "str") == "wait" or work is None:
            keep_s = fields.read("keep_s", "float | None")
            if keep_s is not None:
                self._listener.kept(keep_s)
            self.loop.after(fields.read("after_s", "float", 0.2), self._claim)
        elif go is not None:
            self._go = None
            self._take_token(fields.read("token", "str | None"))
            self.refusals = LOST
            go(work)

    def _take_token(self, token: str | None) -> None:
        """Store and use the token that was sent with the claim, because the configured token can be
        used only once. Later agents of this rank read the stored token.
        """
        if token is None:
            return
        write_whole(self._config.private + "/token", token)
        self._config.token = token
        self.headers = make_headers(self._config)
        for channel in (self._messages, self._bytes, self._orders):
            channel.connection.headers = self.headers

    def listen_soon(self) -> None:
        """Begin to request orders."""
        self.loop.after(ORDERS_DELAY_S, self.listen)

    def listen(self) -> None:
        """Long-poll the control plane for orders while the agent runs."""
        wait_s = max(
            1.0, min(ORDERS_WAIT_S, self._lease_s / 3)
        )  # each answer renews the lease, so an answer must arrive before the lease expires
        path = f"/agent/v1/orders{self.query}&after={self._order}&wait_s={wait_s:.1f}"
        if self._orders.idle and not self.closed:
            self._asked_at = time.monotonic()
            self._orders.ask("GET", path, b"", self._ordered, wait_s + TIMEOUT_S)

    def _next(self) -> None:
        if self._go is None:
            self.pump()
        else:
            self._claim()

    def pump(self) -> None:
        """Send pending messages and log output. Every caller that adds messages or output must call
        this method."""
        if self.closed or self._go is not None or self._hold_timer is not None:
            return  # output waits with the message: who reads a line finds the work running
        if self._messages.idle:
            batch = self._outbox.batch()
            if batch:
                who = {
                    "gang": self._config.gang,
                    "rank": self._config.rank,
                    "nonce": self._nonce,
                    "at": now_text(),  # shows how far this node's clock is from the server's
                    # whether the outbox keeps what the server has taken, but not stored
                    "keeps": self._outbox.keeps,
                }
                body = json.dumps(who)[:-1].encode() + b', "messages": ' + batch + b"}"
                self._messages.ask("POST", "/agent/v1/messages", body, self._applied)
        if self._bytes.idle and self._log.pending and not self._pause():
            self._log_at = time.monotonic()
            offset, lost, data = self._log.chunk()
            path = f"/agent/v1/log{self.query}&offset={offset}"
            self._bytes.ask("POST", path + (f"&lost={lost}" if lost else ""), data, self._stored)

    def hold(self) -> None:
        """Wait a moment before messages and output are sent, unless `release` is called earlier."""
        self._hold_timer = self.loop.after(RUNNING_PAUSE_S, self.release)

    def release(self) -> None:
        """Send messages and output at once."""
        self.loop.cancel(self._hold_timer)
        self._hold_timer = None
        self.pump()

    def _pause(self) -> bool:
        """Return whether to wait for more log output before the next request; a separate request
        for each line would cost too much. If the result is true, start the timer that ends the
        wait.
        """
        wait = self._log_at + LOG_PAUSE_S - time.monotonic()
        if wait <= 0 or self.hurry or self._log.backlog >= CHUNK:
            return False
        if self._log_timer is None:
            self._log_timer = self.loop.after(wait, self._pause_over)
        return True

    def _pause_over(self) -> None:
        self._log_timer = None
        self.pump()

    def stream(self, exec_id: str) -> ExecStream:
        """Return the stream that delivers the output of a user's command."""
        return ExecStream(self, f"/agent/v1/execs/{exec_id}{self.query}")

    def heard(self, fields: ConfigFields) -> None:
        """Renew the lease after a successful answer, and adopt the checkpoint interval in the
        answer, if any.
        """
        self._lease_s = fields.read("lease_s", "float | None") or self._lease_s
        self.heard_at = time.monotonic()
        self.lease_until = self.heard_at + self._lease_s
        every_s = fields.read("every_s", "float | None")
        if every_s is not None:
            self._listener.paced(every_s)

    def dismiss(self, reason: str) -> None:
        self.close()
        self._listener.dismissed(reason)

    def close(self) -> None:
        self.closed = True
        for channel in (self._messages, self._bytes, self._orders):
            channel.close()

    def _applied(self, fields: ConfigFields) -> None:
        taken = fields.read("taken", "int | None")
        self._outbox.pause_s = fields.read("pause_s", "float | None") or 0.0
        self._outbox.acknowledge(fields.read("ack", "int"), taken or 0)
        self._went_on()

    def _stored(self, fields: ConfigFields) -> None:
        self._log.acknowledge(fields.read("offset", "int"))
        self._went_on()

    def _went_on(self) -> None:
        self.pump()
        self._listener.delivered()

    def _ordered(self, fields: ConfigFields) -> None:
        order: OrderConfig | None = fields.read("order", "OrderConfig | None")
        news = order is not None and order.seq > self._order
        if order is not None and news:
            self._order = order.seq
            self._listener.ordered(order.kind, order.seconds, order.reason)
        asked: ExecConfig
        for asked in fields.read("execs", "list[ExecConfig]"):
            if asked.id not in self._execs:
                self._execs.add(asked.id)
                news = True
                self._listener.asked(asked)
        pause_s = fields.read("pause_s", "float | None")
        if pause_s is not None:
            self._outbox.pause_s = pause_s
            self.pump()
        if news or time.monotonic() - self._asked_at > 1:
            self.listen()
        else:  # An immediate answer without news must not cause a storm of requests.
            self.loop.after(ORDERS_DELAY_S, self.listen)


class ExecStream:
    """Delivers the output of one command in order. Undelivered output is kept in memory. When the
    undelivered output exceeds LIMIT bytes, the command is paused.
    """

    LIMIT = 8 * 1024 * 1024

    def __init__(self, link: ControlPlaneClient, path: str) -> None:
        self._path = path
        self._data = bytearray()
        self._code: int | None = None
        # offset of the first undelivered byte, so that a retry duplicates no output
        self._offset = 0
        self._begun = True
        self._done: Callable[[], None] = nothing
        self.drained: Callable[[], None] = nothing
        self._channel = RetryingConnection(link, self._pump)

    @property
    def full(self) -> bool:
        """Whether the command should wait until `drained` is called."""
        return len(self._data) >= self.LIMIT

    def begin(self) -> None:
        """Report that the command runs, before its first output."""
        self._begun = False
        self._pump()

    def write(self, data: bytes) -> None:
        self._data += data
        self._pump()

    def end(self, code: int, done: Callable[[], None]) -> None:
        """Report that the command has ended; `done` is called when the report is delivered."""
        self._code, self._done = code, done
        self._pump()

    def _pump(self) -> None:
        if not self._channel.idle:
            return
        path = f"{self._path}&stream=stdout&offset={self._offset}"
        if self._data or not self._begun:
            size = min(len(self._data), 262144)

            def sent(fields: ConfigFields) -> None:
                was_full, self._begun = self.full, True
                del self._data[:size]
                self._offset += size
                if was_full and not self.full:
                    self.drained()
                self._pump()

            self._channel.ask("POST", path, bytes(self._data[:size]), sent)
        elif self._code is not None:
            self._channel.ask("POST", f"{path}&exit_code={self._code}", b"", self._ended)

    def _ended(self, fields: ConfigFields) -> None:
        self._code = None
        self._channel.close()
        self._done()


def nothing() -> None:
    """Do nothing; this is the default callback."""


def make_headers(config: AgentConfig) -> str:
    return (
        f"Authorization: Bearer {config.token}\r\nCavvy-Agent-Protocol: {PROTOCOL}\r\n"
        "Content-Type: application/json\r\nUser-Agent: cavvy-agent\r\n"
    )


def said(data: bytes) -> str:
    """Return an answer's error message as one short line."""
    return data[:200].decode("utf-8", "replace").replace("\n", " ")


def complain(text: str) -> None:
    """Write to the agent's own log, which the node's provider stores. The task's log contains only
    the task's output."""
    try:
        os.write(
            2, f"cavvy-agent: {text}\n".encode()
        )  # an unbuffered write, so that nothing is left to write at exit
    except OSError:
        return  # The disk is full; the work must go on without this line.
