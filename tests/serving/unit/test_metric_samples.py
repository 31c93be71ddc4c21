"""Numbers that a replica reports in Prometheus's text format."""

import asyncio

import pytest

from cavvy.capabilities.serving.server.probes import read_metric, sum_samples

TEXT = """# HELP vllm:num_requests_waiting Requests that wait.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model="a b",engine="0"} 3.0
vllm:num_requests_waiting{model="}",engine="1"} 1.5e+1 1700000000000
vllm:num_requests_waiting_total 99
up 1
bad NaN
"""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm:num_requests_waiting", 18.0),
        ("up", 1.0),
        ("bad", None),
        ("missing", None),
        ("num_requests_waiting", None),
    ],
)
def test_samples_are_added_over_their_labels(name: str, value: float | None) -> None:
    assert sum_samples(TEXT, name) == value


@pytest.mark.parametrize(("status", "value"), [("200 OK", 18.0), ("404 Not Found", None)])
def test_a_metric_is_read_from_a_program(status: str, value: float | None) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        assert asked.startswith(b"GET /metrics HTTP/1.0\r\n")
        writer.write(f"HTTP/1.1 {status}\r\n\r\n".encode())
        for line in TEXT.splitlines(keepends=True):
            writer.write(line.encode())
            await writer.drain()
        writer.close()

    async def read() -> float | None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await read_metric(port, "vllm:num_requests_waiting", 20)

    assert asyncio.run(read()) == value


@pytest.mark.parametrize("value", ["1.2.3", "..", ".", "1e999", "1 2 3", "-", "1e", "0x1"])
def test_what_is_no_number_is_no_sample(value: str) -> None:
    assert sum_samples(f"load {value}\n", "load") is None


@pytest.mark.parametrize(("value", "number"), [("1.", 1.0), (".5", 0.5), ("-2e-1", -0.2)])
def test_numbers_have_several_forms(value: str, number: float) -> None:
    assert sum_samples(f"load {value}\n", "load") == number


def test_a_long_number_is_read_once() -> None:
    """A search that tried all ways to divide these digits would take longer than any test may."""
    assert sum_samples(f"load {'1' * 1_000_000}x\nload 2\n", "load") == 2.0
