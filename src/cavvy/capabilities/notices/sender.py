"""Sends the notices of the outbox (`rows.py`) to their targets: by HTTP or SMTP, at least
once, with growing pauses after failures.
"""

import asyncio
import smtplib
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

from cavvy.capabilities.notices.messages import (
    PAUSE,
    HttpNotice,
    MailNotice,
    WrongAddress,
    count_in_message,
    find_pause,
    make_message,
)
from cavvy.capabilities.notices.notice import Notice, NoticeEvent, NoticeTarget
from cavvy.capabilities.notices.rows import SqlNotices
from cavvy.control.clock import ControlClock
from cavvy.control.parts import ControlParts, ReadTargets
from cavvy.control.webhooks import post_json
from cavvy.domain.targets import EVERY
from cavvy.http_client import TargetDenied, connect_allowed
from cavvy.store.base import KeyUnusable, RowNotFound
from cavvy.store.sql import Store

NOTICES = "notices"  # the worklist's key that looks for targets with due notices
_PREFIX = "notices:"
_LOOK = timedelta(seconds=3)
_LOOK_FOR_TARGETS = timedelta(minutes=1)  # another server may have stored the first target
_MAIL_S = 20.0  # maximum seconds without an answer of a mail server
_LONGEST_S = 60.0  # maximum seconds for one mail

OpenAddress = Callable[[NoticeTarget], Awaitable[str]]  # decrypts an address; raises KeyUnusable
# sends a message, and returns "" or the problem; may raise TargetDenied
SendNotice = Callable[[HttpNotice | MailNotice, str], Awaitable[str]]


def notice_key(project: str, name: str) -> str:
    """Return the worklist's key of a target."""
    return f"{_PREFIX}{project}/{name}"


async def send_message(message: HttpNotice | MailNotice, targets: str = EVERY) -> str:
    """Send a message; return "" on success, otherwise the problem, which repeats no part of the
    address. `targets` are the private targets that may be called. Raises TargetDenied.
    """
    if isinstance(message, HttpNotice):
        return await post_json(message.url, message.body, targets)
    line = _Smtp(local_hostname=socket.gethostname(), timeout=_MAIL_S)
    sent = asyncio.get_running_loop().run_in_executor(_THREADS, _send_mail, line, message, targets)
    try:
        async with asyncio.timeout(_LONGEST_S):
            return await sent
    except TimeoutError:
        line.cut()
        return f"the mail server did not accept the mail within {_LONGEST_S:.0f} s"


def make_sender(parts: ControlParts) -> "NoticeSender | None":
    """Return the sender of a server, or None where no secrets are opened, as in simulations."""
    open_sealed = parts.open_sealed
    if open_sealed is None:
        return None

    async def open_address(target: NoticeTarget) -> str:
        return await open_sealed(target.project, target.bound_name, target.sealed)

    return NoticeSender(parts.store, parts.clock, parts.hint, open_address, parts.read_targets)


class NoticeSender:
    """Reconciles NOTICES and the keys of targets."""

    waits_outside = True

    def __init__(
        self,
        store: Store,
        clock: ControlClock,
        hint: Callable[[str], None],
        open_address: OpenAddress,
        read_targets: ReadTargets,
        send: SendNotice = send_message,
    ) -> None:
        self._rows, self._clock, self._hint = SqlNotices(*store.database), clock, hint
        self._open, self._read_targets, self._send = open_address, read_targets, send

    def owns(self, key: str) -> bool:
        return key == NOTICES or key.startswith(_PREFIX)

    async def unfinished(self) -> Sequence[str]:
        return [NOTICES]

    async def look(self) -> timedelta:
        """Hint each target with due notices."""
        for project, name in await self._rows.due_targets(self._clock.now()):
            self._hint(notice_key(project, name))
        return _LOOK if await self._rows.any_target() else _LOOK_FOR_TARGETS

    async def reconcile(self, key: str) -> timedelta | None:
        """Send the oldest notices of a target. Return the time until the next message."""
        if key == NOTICES:
            return await self.look()
        project, _, name = key.removeprefix(_PREFIX).partition("/")
        try:
            target = await self._rows.target(project, name)
        except RowNotFound:
            return None
        notices = await self._rows.waiting(target, count_in_message(target.channel))
        if not notices:
            return None
        now = self._clock.now()
        if notices[0].due_at > now:  # later notices wait behind a failed one, in their order
            return notices[0].due_at - now
        problem, final = await self._try(target, notices)
        if not problem:
            await self._rows.remove(target, notices, "")
            return PAUSE
        pauses = [(each, None if final else find_pause(each.tries + 1)) for each in notices]
        left = [each for each, pause in pauses if pause is not None]
        if given_up := [each for each, pause in pauses if pause is None]:
            await self._rows.remove(target, given_up, f"not sent: {problem}")
        if not left:
            return PAUSE
        pause = next(pause for _, pause in pauses if pause is not None)
        await self._rows.postpone(target, left, self._clock.now() + pause, problem)
        return pause

    async def test(self, target: NoticeTarget, user: str) -> str:
        """Send one message now that says that it is a test. Return "" or the problem."""
        now = self._clock.now()
        notice = Notice(
            project=target.project,
            target=target.name,
            event=NoticeEvent.DONE,
            user=user,
            text="this is a test of `cavvy notify`",
            at=now,
            due_at=now,
        )
        problem, _ = await self._try(target, [notice])
        return problem

    async def _try(self, target: NoticeTarget, notices: Sequence[Notice]) -> tuple[str, bool]:
        """Return why the notices were not sent, or "", and whether another try is useless."""
        try:
            address = await self._open(target)
            message = make_message(target.channel, address, notices)
            return await self._send(message, await self._read_targets()), False
        except KeyUnusable:
            return "its address cannot be decrypted; set it again", True
        except (WrongAddress, TargetDenied) as error:
            return str(error), True


# Separate threads, because mail servers can be slow: other work must not wait for them.
_THREADS = ThreadPoolExecutor(4, "notices")


class _Smtp(smtplib.SMTP):
    """A connection that is opened only to addresses that `targets` allow."""

    targets = EVERY
    tls: ssl.SSLContext | None = None
    over = False
    copy: socket.socket | None = None  # of the socket, which stays valid when TLS begins

    def cut(self) -> None:
        """End the connection from another thread. A server that sends lines without end would keep
        the thread and fill the memory, because each line restarts the time limit of the socket.
        """
        self.over = True
        if self.copy is not None:
            with suppress(OSError):
                self.copy.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        super().close()
        if self.copy is not None:
            self.copy.close()

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
        plain = connect_allowed((host, port), timeout, targets=self.targets)
        self.copy = plain.dup()
        if self.over:
            plain.close()
            raise TimeoutError("the time is over")
        return plain if self.tls is None else self.tls.wrap_socket(plain, server_hostname=host)


def _send_mail(line: _Smtp, mail: MailNotice, targets: str) -> str:
    """Raises TargetDenied."""
    server, tls = mail.server, ssl.create_default_context()
    line.targets, line.tls = targets, tls if server.tls else None
    line._host = server.host  # type: ignore[attr-defined]  # STARTTLS checks this name
    try:
        code, _ = line.connect(server.host, server.port)
        if code != 220:
            return f"the mail server refused the connection ({code})"
        line.ehlo()
        if not server.tls and line.has_extn("starttls"):
            line.starttls(context=tls)
            line.ehlo()
        elif not server.tls and server.user:
            return "the mail server offers no TLS, so the password was not sent"
        if server.user:
            line.login(server.user, server.password)
        line.sendmail(mail.sender, mail.recipients, mail.message)
        return ""
    except smtplib.SMTPAuthenticationError as error:  # the server's text may quote the login
        return f"the mail server refused the login ({error.smtp_code})"
    except smtplib.SMTPRecipientsRefused as error:
        codes = sorted({str(code) for code, _ in error.recipients.values()})
        return f"the mail server refused the recipients ({', '.join(codes)})"
    except smtplib.SMTPResponseException as error:
        return f"the mail server refused the mail ({error.smtp_code})"
    except smtplib.SMTPException as error:
        return f"the mail server broke the protocol ({type(error).__name__})"
    except (OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or str(error)
        return told[:200] or type(error).__name__
    finally:
        with suppress(OSError):
            line.close()
