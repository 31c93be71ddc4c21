"""What an agent does whose node is kept: it waits, and does other work as the agent of a new
node would.
"""

import os
import signal
import time

import pytest
from tests.system.agent_server import Rig, make_rig
from tests.waits import PATIENCE_S

pytestmark = pytest.mark.system
SECRET = "hunter2hunter2"
FIRST = "echo first; echo $TOKEN > in-folder; echo $TOKEN > ../beside; sleep 300 & disown"
NEXT = 'echo "next ${TOKEN-none} $CAVVY_ATTEMPT"; ls -A; grep -rl "h[u]nter2" .. || exit 3'


class Keeper:
    """Lets the rig's server give a second work to the agent that asks again, after it made it
    wait.
    """

    def __init__(self, rig: Rig, waits: int, **work: object) -> None:
        self.asked: list[str] = []  # words by which it claimed while it waited
        self.before: list[tuple[list[str], str, str]] = []  # of the work before: kinds, log, claim
        self._waits = waits
        self._work = work
        self._rig = rig
        self._claim = rig.stub.claim
        rig.stub.claim = self.claim  # type: ignore[method-assign]

    def claim(self, ask: dict[str, object]) -> tuple[int, object]:
        stub, nonce = self._rig.stub, str(ask["nonce"])
        if stub.messages and stub.messages[-1]["kind"] == "exited" and nonce != stub.nonces[0]:
            self.asked.append(nonce)
            if len(self.asked) <= self._waits:
                return 200, {"state": "wait", "after_s": 0.05}
            if not self._work:
                return 409, {"code": "claimed"}
            self.before.append(
                ([str(each["kind"]) for each in stub.messages], stub.log.decode(), stub.nonces[0])
            )
            stub.messages, stub.log, stub.log_size, stub.nonces = [], bytearray(), 0, {}
            stub.work = {"job_id": stub.work["job_id"], "project": "default", **self._work}
        return self._claim(ask)


def test_a_kept_node_does_other_work_and_knows_nothing_of_the_first() -> None:
    with make_rig(run=FIRST, secrets={"TOKEN": SECRET}, keep_s=60) as rig:
        keeper = Keeper(rig, 3, job="next", attempt=7, run=NEXT)
        assert rig.finish() == 0
        [(kinds, log, claim)] = keeper.before
        assert kinds == ["running", "exited"]
        assert log == "first\n"
        assert len(set(keeper.asked)) == 1, "one word for as long as it waits"
        assert keeper.asked[0] != claim
        assert rig.stub.nonces == {0: keeper.asked[0]}
        assert rig.stub.kinds() == ["running", "exited"]
        assert rig.output() == "next none 7\n"
        assert rig.exited()["exit_code"] == 3


def test_work_that_failed_by_its_exit_code_is_followed_by_other_work_too() -> None:
    with make_rig(run="exit 4", keep_s=60) as rig:
        keeper = Keeper(rig, 0, job="next", attempt=1, run="echo next")
        assert rig.finish() == 0
        assert keeper.before
        assert rig.output() == "next\n"


def test_an_agent_that_is_not_wanted_any_more_leaves() -> None:
    with make_rig(run="true", keep_s=60) as rig:
        keeper = Keeper(rig, 2)
        assert rig.finish() == 0
        assert len(keeper.asked) == 3
        assert rig.stub.kinds() == ["running", "exited"]


def test_it_waits_no_longer_than_it_was_told_to() -> None:
    with make_rig(run="true", keep_s=1) as rig:
        keeper = Keeper(rig, 100_000)
        assert rig.finish() == 0
        assert keeper.asked


def test_a_signal_ends_the_waiting() -> None:
    with make_rig(run="true", keep_s=3600) as rig:
        keeper = Keeper(rig, 100_000)
        agent = rig.launch()
        rig.until(lambda: keeper.asked)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(PATIENCE_S) == 0


def test_a_signal_between_two_works_is_not_lost() -> None:
    """It comes while the first work is cleared away."""
    with make_rig(run="for i in $(seq 3000); do : > f$i; done", keep_s=3600) as rig:
        keeper = Keeper(rig, 100_000)
        agent = rig.launch()
        rig.until(lambda: rig.stub.kinds()[-1:] == ["exited"])
        for _ in range(20):
            if agent.poll() is None:
                os.kill(agent.pid, signal.SIGTERM)
            time.sleep(0.002)
        assert agent.wait(PATIENCE_S) == 0
        assert len(keeper.asked) < 100


def test_a_machine_does_other_work_after_work_that_was_stopped() -> None:
    with make_rig(run="sleep 300", keep_s=60, machine=True) as rig:
        keeper = Keeper(rig, 1, job="next", attempt=1, run="echo next")
        agent = rig.launch()
        rig.until(lambda: "running" in rig.stub.kinds())
        rig.stub.give("stop", 2)
        assert agent.wait(PATIENCE_S) == 0
        assert keeper.before
        assert rig.output() == "next\n"


def test_work_that_was_stopped_is_followed_by_none() -> None:
    with make_rig(run="sleep 300", keep_s=3600) as rig:
        keeper = Keeper(rig, 100_000)
        agent = rig.launch()
        rig.until(lambda: "running" in rig.stub.kinds())
        rig.stub.give("stop", 2)
        assert agent.wait(PATIENCE_S) == 0
        assert keeper.asked == []
