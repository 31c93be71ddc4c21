"""What a receiver that speaks no HTTP, or breaks off, is to the one who tells it."""

import asyncio
import socket
import threading

import pytest

from remuda.control.webhooks import post_json


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", ""),
        (b"220 mail.test ESMTP\r\n", "220 mail.test ESMTP"),
        (b"HTTP/1.1 500 no\r\nContent-Length: 0\r\n\r\n", "no"),
        (b"", "Remote end closed connection without response"),
    ],
)
def test_a_receiver_that_speaks_no_http_is_a_problem_to_tell_and_no_error(said: bytes, told: str) -> None:
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
    assert found.strip() == told
