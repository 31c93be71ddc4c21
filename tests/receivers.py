"""Stand-ins of the services that receive notices, as strict as the services' documentation: Slack's
incoming webhooks, workflows of Teams, PagerDuty's Events API v2, and a mail server with STARTTLS.
"""

import base64
import json
import re
import socketserver
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SEVERITIES = ("critical", "error", "warning", "info")


def check_slack(told: Any) -> str:
    if set(told) - {"text", "mrkdwn"} or not isinstance(told.get("text"), str) or not told["text"]:
        return "invalid_payload"
    if re.search(r"[<>]|&(?!amp;|lt;|gt;)", told["text"]):
        return "unescaped text"
    return "no_text" if len(told["text"]) > 40_000 else ""


def check_teams(told: Any) -> str:
    (card,) = told["attachments"]
    content = card["content"]
    right = (
        told["type"] == "message"
        and card["contentType"] == "application/vnd.microsoft.card.adaptive"
        and content["type"] == "AdaptiveCard"
        and content["version"] in ("1.0", "1.2", "1.4")
        and all(block["type"] == "RichTextBlock" for block in content["body"])
        and all(
            run["type"] == "TextRun" and isinstance(run["text"], str)
            for block in content["body"]
            for run in block["inlines"]
        )
    )
    return "" if right and len(json.dumps(told)) <= 28 * 1024 else "bad card"


def check_pagerduty(told: Any) -> str:
    payload = told["payload"]
    right = (
        told["routing_key"] == "k" * 32
        and told["event_action"] in ("trigger", "acknowledge", "resolve")
        and len(told["dedup_key"]) <= 255
        and 0 < len(payload["summary"]) <= 1024
        and payload["source"]
        and payload["severity"] in SEVERITIES
    )
    return "" if right else "invalid event"


def check_webhook(told: Any) -> str:
    known = {"id", "event", "project", "job", "job_id", "user", "text", "at"}
    return "" if set(told) == known else "unknown keys"


CHECKS: dict[str, Callable[[Any], str]] = {
    "/slack": check_slack,
    "/teams": check_teams,
    "/v2/enqueue": check_pagerduty,
    "/webhook": check_webhook,
}


class HttpReceiver:
    """Receives at the paths of CHECKS. While `refuses` is positive, requests get the status 503."""

    def __init__(self, refuses: int = 0) -> None:
        self.got: list[tuple[str, Any]] = []
        self.wrong: list[str] = []
        self.refuses, self.tries = refuses, 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.tries += 1
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if receiver.refuses > 0:
                    receiver.refuses -= 1
                    self.answer(503)
                    return
                problem = "not JSON"
                if self.headers["Content-Type"] == "application/json":
                    told = json.loads(body)
                    try:
                        problem = CHECKS[self.path.partition("?")[0]](told)
                    except (KeyError, TypeError, ValueError) as error:
                        problem = repr(error)
                if problem:
                    receiver.wrong.append(problem)
                    self.answer(400)
                    return
                receiver.got.append((self.path, told))
                self.answer(202 if self.path == "/v2/enqueue" else 200)

            def answer(self, status: int) -> None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class MailReceiver:
    """A mail server (RFC 5321) that accepts mail, after STARTTLS and a login if it has a context
    and a password. It refuses commands that are out of order.
    """

    def __init__(
        self, tls: ssl.SSLContext | None = None, password: str = "", *, implicit: bool = False
    ) -> None:
        self.tls, self.password, self.implicit = tls, password, implicit
        self.mails: list[tuple[str, list[str], str]] = []
        self.wrong: list[str] = []
        self.secured: list[bool] = []
        self.server = _MailServer(("127.0.0.1", 0), _MailHandler)
        self.server.receiver = self
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _MailServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    receiver: MailReceiver

    def handle_error(self, *words: object) -> None:
        pass  # a client that refuses the certificate


class _MailHandler(socketserver.StreamRequestHandler):
    timeout = 20
    server: _MailServer

    def handle(self) -> None:
        self.receiver = self.server.receiver
        self.secure = self.login = False
        self.sender, self.recipients = "", list[str]()
        if self.receiver.implicit:
            self.start_tls()
        self.say("220 mail.test ESMTP")
        while line := self.rfile.readline():
            text = line.decode().rstrip("\r\n")
            act = getattr(self, f"on_{text.partition(' ')[0].lower()}", None)
            if act is None or not act(text):
                self.receiver.wrong.append(text)
                self.say("503 out of order")
            if text.upper() == "QUIT":
                return

    def finish(self) -> None:
        super().finish()
        self.request.close()

    def say(self, *lines: str) -> bool:
        self.wfile.write("".join(f"{line}\r\n" for line in lines).encode())
        return True

    def start_tls(self) -> None:
        assert self.receiver.tls is not None
        self.request = self.receiver.tls.wrap_socket(self.request, server_side=True)
        self.secure = True
        self.setup()

    def on_ehlo(self, text: str) -> bool:
        offers = ["mail.test", "8BITMIME"]
        offers += ["STARTTLS"] if self.receiver.tls is not None and not self.secure else []
        offers += ["AUTH PLAIN"] if self.secure and self.receiver.password else []
        return self.say(*(f"250-{each}" for each in offers[:-1]), f"250 {offers[-1]}")

    def on_starttls(self, text: str) -> bool:
        if self.receiver.tls is None or self.secure:
            return False
        self.say("220 go")
        self.start_tls()
        return True

    def on_auth(self, text: str) -> bool:
        given = base64.b64decode(text.split(" ")[2]).decode().split("\0")[2]
        self.login = self.secure and given == self.receiver.password
        return self.say("235 ok" if self.login else f"535 wrong: {given}")

    def on_mail(self, text: str) -> bool:
        self.sender = text.partition("<")[2].partition(">")[0]
        return (self.login or not self.receiver.password) and self.say("250 ok")

    def on_rcpt(self, text: str) -> bool:
        self.recipients.append(text.partition("<")[2].partition(">")[0])
        return bool(self.sender) and self.say("250 ok")

    def on_data(self, text: str) -> bool:
        if not self.recipients:
            return False
        self.say("354 go")
        data = b""
        while not data.endswith(b"\r\n.\r\n"):
            data += self.rfile.readline()
        self.receiver.mails.append((self.sender, self.recipients, data.decode()))
        self.receiver.secured.append(self.secure)
        self.sender, self.recipients = "", []
        return self.say("250 queued")

    def on_quit(self, text: str) -> bool:
        return self.say("221 bye")
