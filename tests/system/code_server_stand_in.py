"""Stands in for code-server, with its options, log line, login, and sockets: refuses options that
it does not know, pages without a session, and sockets of another origin. Its page opens a socket,
and shows what the server answers: the folder and the job in which it runs.
"""

import base64
import hashlib
import json
import os
import secrets
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

FLAGS = {"--disable-telemetry", "--disable-update-check"}
LOGIN = "<title>login</title><form method=post action=./login>{}<input name=password><button>"
PAGE = """<title>workbench</title><p id=said></p><script>
  const socket = new WebSocket(`ws://${location.host}/stable?reconnectionToken=x`);
  socket.onopen = () => socket.send("x".repeat(70000));
  socket.onmessage = (event) => { document.querySelector("#said").textContent = event.data; };
  socket.onclose = () => { document.title = "closed"; };
</script>"""
SESSION = secrets.token_hex()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *given: object) -> None:
        pass

    def answer(self, status: int, body: str = "", **fields: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "text/html", **fields}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def is_known(self) -> bool:
        return f"code-server-session={SESSION}" in (self.headers["Cookie"] or "")

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/login":
            self.answer(200, LOGIN.format(""))
        elif self.headers["Upgrade"] == "websocket":
            origin = urlsplit(self.headers["Origin"] or "").netloc
            if origin != self.headers["Host"]:
                self.answer(403, "Forbidden")
            elif not self.is_known():
                self.answer(401, "Unauthorized")
            else:
                self.talk()
        elif not self.is_known():
            self.answer(302, Location="./login")
        else:
            self.answer(200, PAGE)

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        if form.get("password") != [os.environ["PASSWORD"]]:
            self.answer(200, LOGIN.format("<b>Incorrect password</b>"))
            return
        cookie = f"code-server-session={SESSION}; Path=/; HttpOnly; SameSite=Lax"
        self.answer(302, Location="./", Set_Cookie=cookie)

    def talk(self) -> None:
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        accepted = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_header("Sec-WebSocket-Accept", accepted)
        self.end_headers()
        self.close_connection = True
        sent = self.read_message()
        said = {"sent": sent, "folder": sys.argv[-1], "job": os.environ["CAVVY_JOB_ID"]}
        body = json.dumps(said).encode()
        self.wfile.write(b"\x81\x7e" + len(body).to_bytes(2, "big") + body)
        self.rfile.read(1)  # until the browser leaves

    def read_message(self) -> int:
        """The size of the one message that the page sends, perhaps in several frames."""
        size, is_last = 0, False
        while not is_last:
            first, second = self.rfile.read(2)
            is_last, length = bool(first & 128), second & 127
            assert second & 128, "a browser masks its frames"
            if length > 125:
                length = int.from_bytes(self.rfile.read(2 if length == 126 else 8), "big")
            size += len(self.rfile.read(4 + length)) - 4
        return size


def main() -> None:
    _, *options, folder = sys.argv
    assert options[:3] == ["--auth", "password", "--bind-addr"], options
    assert set(options[4:]) <= FLAGS, options
    assert os.path.isdir(folder), folder
    host, _, port = options[3].rpartition(":")
    server = ThreadingHTTPServer((host, int(port)), Handler)
    at = f"http://{host}:{server.server_port}/"
    print(f"[2026-11-28T12:00:00.000Z] info  HTTP server listening on {at}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
