"""Decides what is sent to the receivers of notices, and when a failed notice is sent again.

An address is a URL; for PagerDuty, an integration key, or https://KEY@HOST/v2/enqueue for another
host than the default; for e-mail, smtp://USER:PASSWORD@HOST:PORT/TO,TO?from=ADDRESS, or smtps://.
"""

import json
import re
from collections.abc import Sequence
from datetime import timedelta
from email.message import EmailMessage
from email.utils import format_datetime
from typing import assert_never
from urllib.parse import parse_qsl, unquote, urlsplit

from cavvy.capabilities.notices.notice import Notice, NoticeChannel, find_severity
from cavvy.domain.targets import is_web_address
from cavvy.domain.values import Struct

AT_ONCE = 100  # maximum notices in one message
MOST_TRIES = 24  # within about 15 hours
PAUSE = timedelta(seconds=1)  # between two messages to one receiver; Slack accepts one a second
_FIRST_PAUSE, _LONGEST_PAUSE = timedelta(seconds=5), timedelta(hours=1)
_MOST_LINES = 20
# The Events API v2 (PagerDuty's developer documentation, "Send an Alert Event"): the address for
# the US region, the length of integration keys, and the maximum length of a summary
_PAGERDUTY = "https://events.pagerduty.com/v2/enqueue"
_KEY = re.compile(r"[A-Za-z0-9]{32}")
_MOST_SUMMARY = 1024
_PORTS = {"smtp": 587, "smtps": 465}  # RFC 6409 and RFC 8314
_MAIL = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9.-]{1,255}")


class WrongAddress(ValueError):
    """Raised if a channel cannot use an address. The message does not repeat the address."""


class HttpNotice(Struct, frozen=True, kw_only=True):
    """A JSON body to post to a URL."""

    url: str
    body: bytes


class MailServer(Struct, frozen=True, kw_only=True):
    """A server that accepts mail. With `tls`, the connection begins with TLS; otherwise, STARTTLS
    is used if the server offers it, and always before a login.
    """

    host: str
    port: int
    tls: bool
    user: str = ""
    password: str = ""


class MailNotice(Struct, frozen=True, kw_only=True):
    """A mail to send through a server."""

    server: MailServer
    sender: str
    recipients: tuple[str, ...]
    message: bytes


def find_pause(tries: int) -> timedelta | None:
    """Return the time until a notice is sent again after `tries` failed tries, or None if it is
    given up.
    """
    if tries >= MOST_TRIES:
        return None
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * (1 << min(tries - 1, 20)))


def count_in_message(channel: NoticeChannel) -> int:
    """Return how many notices one message can contain. People get one message about many events,
    programs a message for each.
    """
    return 1 if channel in (NoticeChannel.PAGERDUTY, NoticeChannel.WEBHOOK) else AT_ONCE


def make_message(
    channel: NoticeChannel, address: str, notices: Sequence[Notice]
) -> HttpNotice | MailNotice:
    """Return the message about these notices. Raises WrongAddress."""
    match channel:
        case NoticeChannel.SLACK:
            # https://docs.slack.dev/messaging/formatting-message-text/#escaping
            text = _join(notices).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            return _post(address, {"text": text, "mrkdwn": False})
        case NoticeChannel.TEAMS:
            return _post(address, _make_card(_join(notices)))
        case NoticeChannel.PAGERDUTY:
            return _make_alert(address, notices[0])
        case NoticeChannel.WEBHOOK:
            return _post(address, _make_document(notices[0]))
        case NoticeChannel.EMAIL:
            return _make_mail(address, notices)
        case _:
            assert_never(channel)


def describe(notice: Notice) -> str:
    """Return one line about a notice."""
    who = f" by {notice.user}" if notice.user else ""
    what = f"{notice.job} ({notice.project}{who})" if notice.job else f"project {notice.project}"
    return _clean(f"[{notice.event}] {what}: {notice.text}")


def _join(notices: Sequence[Notice]) -> str:
    lines = [describe(each) for each in notices[:_MOST_LINES]]
    more = len(notices) - len(lines)
    return "\n".join([*lines, *([f"and {more} more"] if more else [])])


def _clean(text: str) -> str:
    """Return one line without control characters, because the text may quote a node."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _post(address: str, document: object) -> HttpNotice:
    if not is_web_address(address):
        raise WrongAddress("expected a web address without a login, such as https://HOST/PATH")
    return HttpNotice(url=address, body=json.dumps(document).encode())


def _make_card(text: str) -> object:
    """Return an Adaptive Card, in the form that a Teams workflow "When a webhook request is
    received" expects. Text runs contain no Markdown, so that a text cannot contain links.
    """
    blocks = [
        {"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": line}]}
        for line in text.splitlines()
    ]
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": blocks,
    }
    kind = "application/vnd.microsoft.card.adaptive"
    return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}


def _make_alert(address: str, notice: Notice) -> HttpNotice:
    """Return an alert. A repeated event of one job updates its alert: it has the same key."""
    url, key = _PAGERDUTY, address
    if "://" in address:
        parts = urlsplit(address)
        key = parts.username or ""
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    if not _KEY.fullmatch(key) or not is_web_address(url):
        raise WrongAddress(
            "expected the integration key of an Events API v2 integration, which has 32 letters "
            "and digits"
        )
    document = {
        "routing_key": key,
        "event_action": "trigger",
        "dedup_key": f"cavvy/{notice.project}/{notice.job_id}/{notice.event}"[:255],
        "payload": {
            "summary": describe(notice)[:_MOST_SUMMARY],
            "source": "cavvy",
            "severity": find_severity(notice.event),
            "timestamp": notice.at.isoformat(),
            "component": notice.job,
            "group": notice.project,
            "class": notice.event,
        },
    }
    return HttpNotice(url=url, body=json.dumps(document).encode())


def _make_document(notice: Notice) -> object:
    return {
        "id": notice.id,
        "event": notice.event,
        "project": notice.project,
        "job": notice.job,
        "job_id": notice.job_id,
        "user": notice.user,
        "text": _clean(notice.text),
        "at": notice.at.isoformat(),
    }


def _make_mail(address: str, notices: Sequence[Notice]) -> MailNotice:
    server, sender, recipients = _read_mail_address(address)
    mail = EmailMessage()
    mail["From"], mail["To"] = sender, ", ".join(recipients)
    more = f" and {len(notices) - 1} more" if len(notices) > 1 else ""
    mail["Subject"] = f"Cavvy: {describe(notices[0])[:150]}{more}"
    mail["Date"] = format_datetime(notices[0].at)
    # the same message is sent again after a lost answer, so that mail programs can recognise it
    mail["Message-ID"] = f"<notice-{notices[0].id}-{len(notices)}@{sender.partition('@')[2]}>"
    mail["Auto-Submitted"] = "auto-generated"  # RFC 3834
    mail.set_content(_join(notices))
    return MailNotice(server=server, sender=sender, recipients=recipients, message=mail.as_bytes())


def _read_mail_address(address: str) -> tuple[MailServer, str, tuple[str, ...]]:
    try:
        parts = urlsplit(address)
        port, query = parts.port, dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError:
        raise WrongAddress(_EXPECTED) from None
    recipients = tuple(unquote(parts.path.removeprefix("/")).split(","))
    sender = query.pop("from", "") or f"cavvy@{parts.hostname or ''}"
    mails = (sender, *recipients)
    known = parts.scheme in _PORTS and parts.hostname and port != 0 and not query
    if not known or not all(map(_MAIL.fullmatch, mails)):
        raise WrongAddress(_EXPECTED)
    server = MailServer(
        host=parts.hostname or "",
        port=port or _PORTS[parts.scheme],
        tls=parts.scheme == "smtps",
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
    )
    return server, sender, recipients


_EXPECTED = (
    "expected smtps://USER:PASSWORD@HOST:PORT/TO?from=FROM with percent-encoded parts, such as "
    "smtps://cavvy:s3cret@mail.example.com/ops@example.com?from=cavvy@example.com"
)
