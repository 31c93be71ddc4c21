"""Answers of HAProxy and of the gateway that are incomplete or of another version."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop

from cavvy.capabilities.serving.gateway.control_socket import ControlReply, ReadStatistics
from cavvy.capabilities.serving.gateway.haproxy.runtime import HaproxyRuntime
from cavvy.capabilities.serving.server.gateway_child import GatewayLink, GatewayLost

TIME = "\nproc.cavvy: type=sint value=<1795747270093287>\n\n"
HEAD = "# pxname,svname,qcur,scur,stot,rate,qtime,ttime,\n"
ROWS = "svc-chat,r1.a1,0,1,7,2,0,5,\nsvc-chat,hold,0,0,1,0,0,1,\nsvc-chat,BACKEND,0,1,8,2,0,5,\n"


@contextmanager
def answer(path: Path, text: str) -> Iterator[None]:
    """A socket that answers each line with this text, and closes the connection."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    line, _ = listener.accept()
                except OSError:
                    return
                with line:
                    line.recv(65536)
                    line.sendall(text.encode())

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No such proxy.\n" + TIME,
        HEAD + TIME,
        HEAD + ROWS,
        HEAD + ROWS[:40] + TIME,
        HEAD + ROWS[: ROWS.index("svc-chat,BACK")] + TIME,
    ],
)
def test_incomplete_statistics_of_haproxy_are_an_error_of_the_connection(
    tmp_path: Path, text: str
) -> None:
    with answer(tmp_path / "haproxy", text), pytest.raises(OSError, match="statistics"):
        HaproxyRuntime(tmp_path / "haproxy").read_load("chat")


def test_counts_that_were_taken_do_not_change_when_others_are_read(tmp_path: Path) -> None:
    with answer(tmp_path / "haproxy", HEAD + ROWS + ROWS.replace("r1.", "r2.") + TIME):
        runtime = HaproxyRuntime(tmp_path / "haproxy")
        assert runtime.read_load("chat").replicas == {"r1": 1, "r2": 1}
        taken = runtime.take_served()
        assert set(taken["chat"]) == {"r1.a1", "r2.a1"}
        assert runtime.take_served() == {}
        runtime.read_served()
        assert runtime.take_served() == taken


async def _ask(path: Path) -> ControlReply:
    link = await GatewayLink.open(str(path))
    return await link.ask(ReadStatistics())


def test_an_answer_of_an_unknown_gateway_counts_as_a_lost_gateway(tmp_path: Path) -> None:
    told = json.dumps({"services": [{"name": 7}]}) + "\n"
    with (
        answer(tmp_path / "control", told),
        pytest.raises(GatewayLost, match="cannot be read"),
    ):
        asyncio.run(_ask(tmp_path / "control"))


async def _ask_together(path: Path) -> list[ControlReply | BaseException]:
    link = await GatewayLink.open(str(path))
    asked = [link.ask(ReadStatistics()) for _ in range(3)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    await asyncio.sleep(0)  # the loop closes the connection
    return [*found, *await asyncio.gather(link.ask(ReadStatistics()), return_exceptions=True)]


def test_everyone_who_asks_is_told_that_the_gateway_has_ended(tmp_path: Path) -> None:
    with answer(tmp_path / "control", ""), asyncio.Runner(loop_factory=uvloop.new_event_loop) as it:
        found = it.run(_ask_together(tmp_path / "control"))
    assert [type(each) for each in found] == [GatewayLost] * 4
