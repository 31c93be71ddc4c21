"""What a receiver that speaks no HTTP, or breaks off, is to the one who tells it."""

import asyncio
import socket
import threading

import pytest

from cavvy.control.webhooks import post_json


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


@pytest.mark.parametrize(
    "url", ["http://ann:s3cret@host.test/hook", "http://127.0.0.1:9/hook\x7fs3cret"]
)
def test_an_address_that_cannot_be_called_is_a_problem_that_repeats_nothing_of_it(url: str) -> None:
    assert asyncio.run(post_json(url, b"{}")) == "the address cannot be called"


def test_what_a_receiver_says_is_quoted_in_part() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            line, _ = server.accept()
            with line:
                line.settimeout(10)
                while b"{}" not in line.recv(65536):
                    pass
                line.sendall(b"x" * 5000 + b"\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        found = asyncio.run(post_json(f"http://127.0.0.1:{server.getsockname()[1]}/hook", b"{}"))
        thread.join(10)
    assert found == "x" * 200


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]", "[fd00:ec2::254]"]
)
def test_the_metadata_services_of_clouds_are_not_called(host: str) -> None:
    assert "which the server does not call" in asyncio.run(post_json(f"http://{host}/", b"{}"))
