"""What a receiver that speaks no HTTP, or breaks off, is to the one who tells it."""

import asyncio
import os
import socket
import threading
from contextlib import suppress

import pytest

from cavvy.control.webhooks import post_json
from cavvy.providers.redirects import NoRedirects
from cavvy.store.objects.http import make_opener


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
    "host",
    [
        *("169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]", "[fd00:ec2::254]"),
        *("[fd20:ce::254]", "[fd00:c1::a9fe:a9fe]", "[fd00:42::42]", "[fd00:ec2:0:0::23]"),
    ],
)
def test_the_metadata_services_of_clouds_are_not_called(host: str) -> None:
    assert "which the server does not call" in asyncio.run(post_json(f"http://{host}/", b"{}"))


def test_receivers_that_do_not_answer_keep_no_thread_of_the_server() -> None:
    async def main(server: socket.socket) -> None:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/hook"
        sent = [asyncio.create_task(post_json(url, b"{}")) for _ in range(100)]
        connected, _ = await asyncio.to_thread(server.accept)
        assert await asyncio.to_thread(os.getpid) == os.getpid()
        assert not any(each.done() for each in sent)
        connected.close()
        for each in sent:
            each.cancel()

    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        asyncio.run(main(server))


@pytest.mark.parametrize("said", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_an_answer_that_arrives_byte_by_byte_has_a_time_limit(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            line, _ = server.accept()
            with line, suppress(OSError):
                line.sendall(said)
                while not ended.wait(0.02):
                    line.sendall(b"x")

        ended = threading.Event()
        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        try:
            with (
                pytest.raises(OSError, match=r"not complete after|timed out"),
                make_opener(NoRedirects, 0.5).open(url, timeout=10) as answer,
            ):
                answer.read()
        finally:
            ended.set()
            thread.join()
