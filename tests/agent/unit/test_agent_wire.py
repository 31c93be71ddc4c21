"""The HTTP client and the outbox of the agent."""

import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cavvy.agent.config import AgentConfig, BadConfig, ConfigFields, read_work
from cavvy.agent.control_client import ControlPlaneClient
from cavvy.agent.ends import judge
from cavvy.agent.loop import EventLoop
from cavvy.agent.outbox import MOST_HELD, MessageOutbox, file_time_text
from cavvy.agent.wire import BackOff, LoopConnection, ServerAddress, parse_reply

TIME = time.time


@pytest.mark.parametrize(
    ("data", "ended", "found"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", False, (200, b"hi", True)),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhi", False, None),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, (204, b"", True)),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 C\r\nContent-Length: 0\r\n\r\n",
            False,
            (201, b"", True),
        ),
        (
            b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
            False,
            (204, b"", True),
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n3;x=y\r\n ho\r\n0\r\n\r\n",
            False,
            (200, b"hi ho", True),
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n3\r\n h", False, None),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nTrailer: x\r\n\r\n",
            False,
            (200, b"", True),
        ),
        (
            b"HTTP/1.1 500 Oh\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx",
            False,
            (500, b"x", False),
        ),
        (b"HTTP/1.0 200 OK\r\n\r\nall", True, (200, b"all", False)),
        (b"HTTP/1.0 200 OK\r\n\r\nall", False, None),
        (b"HTTP/1.1 200", False, None),
    ],
)
def test_replies(data: bytes, ended: bool, found: tuple[int, bytes, bool] | None) -> None:
    assert parse_reply(bytearray(data), ended) == found
    for cut in range(len(data)):
        early = parse_reply(bytearray(data[:cut]), False)
        assert early is None or early == found


@pytest.mark.parametrize(
    "data", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"x" * 70000]
)
def test_what_is_not_http_is_told(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_reply(bytearray(data), False)


def test_addresses() -> None:
    assert ServerAddress("unix:/run/s").targets == [(socket.AF_UNIX, "/run/s")]
    assert (
        ServerAddress("https://h:8443/base/").name,
        ServerAddress("https://h:8443/base/").port,
    ) == (
        "h",
        8443,
    )
    assert ServerAddress("https://h/base/").prefix == "/base"
    assert (ServerAddress("http://[::1]:80").name, ServerAddress("https://h").port) == ("::1", 443)
    with pytest.raises(ValueError, match="unix:/path"):
        ServerAddress("/run/s")


def serve(path: Path, *scripts: Callable[[socket.socket], None]) -> threading.Thread:
    """Answer each connection in turn by one script."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def run() -> None:
        with listener:
            for script in scripts:
                connection, _ = listener.accept()
                with connection:
                    script(connection)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def ask(path: Path, times: int = 1, timeout_s: float = 5) -> list[tuple[int, bytes] | str]:
    """Ask so many times over one connection object, and return each answer or reason of failure."""
    loop, answers = EventLoop(), list[tuple[int, bytes] | str]()
    connection = LoopConnection(loop, ServerAddress(f"unix:{path}"), "")

    def done(answer: tuple[int, bytes] | str) -> None:
        answers.append(answer)
        if len(answers) < times:
            again()
        else:
            loop.stop()

    def again() -> None:
        connection.request(
            "GET",
            "/x",
            b"",
            timeout_s=timeout_s,
            replied=lambda status, body: done((status, body)),
            failed=done,
        )

    again()
    loop.run()
    connection.close()
    return answers


GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


def answer_once(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(GOOD)


def test_closed_kept_connections_are_made_again_in_silence(tmp_path: Path) -> None:
    thread = serve(tmp_path / "s", answer_once, answer_once)
    assert ask(tmp_path / "s", 2) == [(200, b"hi"), (200, b"hi")]
    thread.join()


def test_failures_are_told_once_each(tmp_path: Path) -> None:
    assert ask(tmp_path / "nobody")[0] == "ENOENT"
    thread = serve(tmp_path / "s", lambda connection: connection.recv(65536))  # type: ignore[arg-type, return-value]
    assert ask(tmp_path / "s") == ["the connection was closed"]
    thread.join()
    release = threading.Event()
    thread = serve(tmp_path / "t", lambda connection: release.wait(10))  # type: ignore[arg-type, return-value]
    assert ask(tmp_path / "t", timeout_s=0.05) == ["no answer within 0.05 s"]
    release.set()
    thread.join()


def test_outbox_numbers_without_gaps_and_keeps_what_is_not_acknowledged(tmp_path: Path) -> None:
    outbox = MessageOutbox(str(tmp_path / "outbox"))
    outbox.put("running", setup_reused=False)
    outbox.put("progress", values={"step": 1})
    outbox.put("progress", values={"step": 2})
    outbox.put("exited", outcome="exit")
    again = MessageOutbox(str(tmp_path / "outbox"))
    for box in (outbox, again):
        sent = json.loads(box.batch())
        assert [(message["seq"], message["kind"]) for message in sent] == [
            (1, "running"),
            (2, "progress"),
            (3, "exited"),
        ]
        assert sent[1]["values"] == {"step": 2}
        box.acknowledge(2)
        assert [message["seq"] for message in json.loads(box.batch())] == [3]
        assert box.has("exited")
        assert not box.has("running")


def test_a_clock_that_is_set_changes_no_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = MessageOutbox(str(tmp_path / "outbox"))
    for shift in (0.0, 7200.0, -7200.0):
        monkeypatch.setattr(time, "time", lambda shift=shift: TIME() + shift)
        outbox.put("event", name="note", text="x")
    first, *others = (datetime.fromisoformat(each["at"]) for each in json.loads(outbox.batch()))
    assert all(timedelta(0) <= each - first < timedelta(minutes=1) for each in others)
    # the clock is two hours behind now, and so are the times of the files that are written
    written = datetime.fromisoformat(file_time_text(time.time()))
    assert timedelta(0) <= written - first < timedelta(minutes=1)


def test_outbox_goes_on_counting_after_a_rewrite_and_passes_over_a_torn_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "outbox"
    outbox = MessageOutbox(str(path))
    outbox.put("event", name="big", text="x" * 300_000)
    outbox.acknowledge(1)
    assert path.stat().st_size < 1000
    with path.open("a") as file:
        file.write('{"seq": 2, "ki')
    again = MessageOutbox(str(path))
    assert again.empty
    again.put("event", name="next", text="")
    assert json.loads(again.batch())[0]["seq"] == 2
    third = MessageOutbox(str(path))
    assert [message["seq"] for message in json.loads(third.batch())] == [2]


@pytest.mark.parametrize(
    ("code", "ending", "outcome"),
    [
        (0, None, "succeeded"),
        (0, ("stopped", ""), "stopped"),
        (1, None, "exit"),
        (1, ("stopped", ""), "stopped"),
        (143, ("preempted", ""), "preempted"),
        (75, None, "preempted"),
        (75, ("limit", ""), "limit"),
        (139, None, "exit"),
    ],
)
def test_outcomes(code: int, ending: tuple[str, str] | None, outcome: str) -> None:
    assert judge(code, ending)[:2] == (outcome, code)


@pytest.mark.parametrize(
    ("code", "named"), [(129, "1 (SIGHUP;"), (137, "9 (SIGKILL;"), (139, "11 (SIGSEGV;")]
)
def test_a_signal_that_ends_programs_is_named(code: int, named: str) -> None:
    assert judge(code, None)[2].startswith(f"the task was killed by signal {named}")


@pytest.mark.parametrize("code", [128, 145, 146, 147, 151, 156, 160, 161, 192, 193, 250, 255])
def test_other_codes_above_128_are_the_programs_own(code: int) -> None:
    """Of signals 17 to 19, 23 and 28 none ends a program on Linux; 32 and 33 are the C
    library's; 64 is the last.
    """
    assert judge(code, None)[2] == f"the task ended with exit code {code}"


def test_fields_that_are_wrong_are_named() -> None:
    with pytest.raises(BadConfig, match="`token` must be text, not None"):
        AgentConfig(ConfigFields({"gang": "g", "rank": 0, "address": "unix:/s"}, "configuration"))
    with pytest.raises(BadConfig, match=r"work\.checkpoint: `path`"):
        read_work(
            ConfigFields(
                {
                    "job": "j",
                    "job_id": "i",
                    "project": "p",
                    "attempt": 1,
                    "run": "x",
                    "checkpoint": {},
                },
                "work",
            )
        )
    with pytest.raises(BadConfig, match="expected an object"):
        ConfigFields([], "work")


def test_nodes_that_failed_together_do_not_retry_together() -> None:
    chances = iter([0.0, 0.5, 0.999, 0.0])
    delay = BackOff(0.1, 0.4, chance=lambda: next(chances))
    assert [delay.next() for _ in range(4)] == pytest.approx([0.1, 0.15, 0.2002, 0.4])
    delay.reset()
    assert delay.fresh
    plain = BackOff(0.1, 0.4)
    assert [plain.next() for _ in range(4)] == [0.1, 0.2, 0.4, 0.4]


def test_outbox_keeps_what_the_server_has_only_taken_and_sends_it_again_after_a_crash(
    tmp_path: Path,
) -> None:
    outbox = MessageOutbox(str(tmp_path / "outbox"))
    for number in (1, 2, 3):
        outbox.put("event", name=f"n{number}", text="")
    outbox.acknowledge(1, taken=3)
    assert outbox.batch() == b""
    assert not outbox.empty
    outbox.put("event", name="n4", text="")
    assert [each["seq"] for each in json.loads(outbox.batch())] == [4]
    # the server was killed, so the next message does not follow what it has stored
    outbox.acknowledge(1)
    assert [each["seq"] for each in json.loads(outbox.batch())] == [2, 3, 4]
    again = MessageOutbox(str(tmp_path / "outbox"))
    assert [each["seq"] for each in json.loads(again.batch())] == [1, 2, 3, 4]


def test_outbox_asks_for_a_write_before_its_file_grows_without_end(tmp_path: Path) -> None:
    path = tmp_path / "outbox"
    outbox = MessageOutbox(str(path))
    assert outbox.keeps
    outbox.put("event", name="big", text="x" * 300_000)
    outbox.acknowledge(0, taken=1)
    assert not outbox.keeps
    outbox.put("event", name="next", text="")
    outbox.acknowledge(2)
    assert outbox.keeps
    assert path.stat().st_size < 1000


def test_figures_wait_as_long_as_the_server_said_and_all_else_takes_them_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = [1000.0]
    monkeypatch.setattr("cavvy.agent.outbox.time.monotonic", lambda: at[0])
    outbox = MessageOutbox(str(tmp_path / "outbox"))

    def send() -> list[str]:
        """What is sent now, and answered by the server, which lets figures wait for 30 s."""
        sent = [each["kind"] for each in json.loads(outbox.batch() or b"[]")]
        if sent:
            outbox.pause_s = 30.0
            outbox.acknowledge(outbox._last)
        return sent

    outbox.put("running")
    assert send() == ["running"]
    at[0] += 10
    outbox.put("telemetry", values={"gpu_percent": 1})
    outbox.put("minute", figures={})
    assert send() == []
    assert outbox.holds
    at[0] += 5
    outbox.put("notice", seconds=30.0)  # never waits, and nothing overtakes figures before it
    assert send() == ["telemetry", "minute", "notice"]
    outbox.put("telemetry", values={"gpu_percent": 2})
    at[0] += 29
    outbox.put("telemetry", values={"gpu_percent": 3})
    assert send() == []
    at[0] += 1
    assert json.loads(outbox.batch())[0]["values"] == {"gpu_percent": 3}
    assert send() == ["telemetry"]
    at[0] += 40
    outbox.put("telemetry", values={"gpu_percent": 4})
    assert outbox.batch()
    outbox.acknowledge(outbox._last - 1)  # the server has not taken it
    assert [each["kind"] for each in json.loads(outbox.batch())] == ["telemetry"]
    outbox.acknowledge(outbox._last)
    for _ in range(MOST_HELD):
        assert send() == []
        outbox.put("points", series=[])
    assert send() == ["points"] * MOST_HELD
    outbox.put("points", series=[])
    again = MessageOutbox(str(tmp_path / "outbox"))  # it does not know what the server said
    assert [each["kind"] for each in json.loads(again.batch())][-1] == "points"


def test_the_newest_figures_go_with_those_that_waited_but_not_with_those_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = [1000.0]
    monkeypatch.setattr("cavvy.agent.outbox.time.monotonic", lambda: at[0])
    outbox = MessageOutbox(str(tmp_path / "outbox"))
    outbox.pause_s = 60.0
    outbox.acknowledge(0)

    def kinds() -> list[str]:
        return [each["kind"] for each in json.loads(outbox.batch() or b"[]")]

    outbox.put("minute", figures={})
    at[0] += 59
    outbox.put("telemetry", values={"gpu_percent": 1})
    assert kinds() == []
    at[0] += 1
    assert kinds() == ["minute", "telemetry"]
    outbox.put("telemetry", values={"gpu_percent": 2})
    at[0] += 5
    assert kinds() == ["minute", "telemetry"]
    outbox.acknowledge(outbox._last)
    at[0] += 60
    assert kinds() == ["telemetry"]


def test_what_the_server_has_lost_is_sent_at_once_also_soon_after_the_machine_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cavvy.agent.outbox.time.monotonic", lambda: 5.0)
    outbox = MessageOutbox(str(tmp_path / "outbox"))
    outbox.put("telemetry", values={"gpu_percent": 1})
    sent = outbox.batch()
    outbox.pause_s = 60.0
    outbox.acknowledge(0)
    assert sent
    assert outbox.batch() == sent


def test_figures_do_not_wait_after_a_poll_for_orders_that_says_so(tmp_path: Path) -> None:
    """As somebody looks at them now."""
    place = {"address": f"unix:{tmp_path / 's'}", "gang": "g", "rank": 0, "lease_s": 60.0}
    config = cast(Any, SimpleNamespace(**place, pin="", token="", private=""))
    outbox = MessageOutbox(str(tmp_path / "outbox"))
    outbox.pause_s = 60.0
    outbox.acknowledge(0)
    listener = cast(Any, SimpleNamespace(delivered=lambda: None))
    log = cast(Any, SimpleNamespace(pending=False))
    client = ControlPlaneClient(EventLoop(), config, "n", outbox, log, listener)
    outbox.put("telemetry", values={"gpu_percent": 1})

    def poll(**fields: object) -> bool:
        """Whether figures are sent when this answer to a poll has come."""
        client._ordered(ConfigFields({"order": None, "execs": [], "lease_s": 60, **fields}, ""))
        return not client._messages.idle

    assert not poll()
    assert not poll(pause_s=None)
    assert poll(pause_s=0.0)
