"""Notices that a node finds by itself: each cloud's metadata service, signals, and what the task
is told over them.
"""

import json
import signal
from collections.abc import Iterator
from datetime import timedelta

import pytest
from tests.proofs import ALONE
from tests.system.agent_server import Rig, make_rig
from tests.system.metadata_servers import Metadata, serve_metadata
from tests.waits import PATIENCE_S

from cavvy.providers.notices import (
    NoticeHold,
    NoticeNode,
    NoticeReply,
    NoticeSource,
    NoticeTokenSource,
    make_notice_fields,
)

pytestmark = pytest.mark.system
OFTEN = timedelta(seconds=0.05)
WAITS = "trap 'cat $CAVVY_NOTICE_FILE; exit 75' TERM; echo ready; while :; do sleep 0.05; done"
LISTENS = """python3 -uS - <<'END'
import json, os, signal, socket
signal.signal(signal.SIGTERM, signal.SIG_IGN)
line = socket.socket(socket.AF_UNIX)
line.connect(os.environ["CAVVY_NOTICE"])
line.sendall(b'{"saved": {"seconds": 1.5}}\\n')
print("ready")
for told in line.makefile():
    print(told, end="")
    if "notice" in json.loads(told):
        break
END"""


@pytest.fixture
def cloud() -> Iterator[Metadata]:
    with serve_metadata() as metadata:
        yield metadata
        assert metadata.faults == []


def aws(port: int, *, advice: bool = False, life: timedelta = timedelta(hours=6)) -> NoticeSource:
    base = f"http://127.0.0.1:{port}/latest"
    path = "events/recommendations/rebalance" if advice else "spot/instance-action"
    return NoticeSource(
        source="AWS",
        url=f"{base}/meta-data/{path}",
        token=NoticeTokenSource(
            url=f"{base}/api/token",
            header="X-aws-ec2-metadata-token",
            headers={"X-aws-ec2-metadata-token-ttl-seconds": "21600"},
            life=life,
        ),
        every=OFTEN,
        match={} if advice else {"action": ["terminate", "stop", "hibernate"]},
        time_field=None if advice else "time",
        within=timedelta(minutes=2),
        advice=advice,
    )


def google(port: int) -> NoticeSource:
    return NoticeSource(
        source="Google Cloud",
        url=f"http://127.0.0.1:{port}/computeMetadata/v1/instance/preempted",
        headers={"Metadata-Flavor": "Google"},
        hold=NoticeHold(
            query="wait_for_change=true&timeout_sec=20&last_etag={tag}",
            first_tag="NONE",
            longest=timedelta(seconds=20),
        ),
        match={"": ["TRUE"]},
        within=timedelta(seconds=25),
    )


def azure(port: int) -> NoticeSource:
    base = f"http://127.0.0.1:{port}/metadata"
    return NoticeSource(
        source="Azure",
        url=f"{base}/scheduledevents?api-version=2020-07-01",
        headers={"Metadata": "true"},
        every=OFTEN,
        list_field="Events",
        match={"EventType": ["Preempt", "Terminate"]},
        node=NoticeNode(
            url=f"{base}/instance/compute/name?api-version=2021-02-01&format=text",
            field_name="Resources",
        ),
        time_field="NotBefore",
        within=timedelta(seconds=30),
        reply=NoticeReply(
            url=f"{base}/scheduledevents?api-version=2020-07-01",
            body='{"StartRequests": [{"EventId": "{id}"}]}',
            id_field="EventId",
        ),
    )


def begin(rig: Rig, *sources: NoticeSource) -> None:
    rig.config["notices"] = make_notice_fields(sources)
    rig.launch()
    rig.until(lambda: "ready" in rig.output())


def end(rig: Rig) -> tuple[float, str]:
    """Seconds and source of the notice, after the agent has left; the task had less time than
    the node.
    """
    assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
    assert rig.exited()["outcome"] == "preempted"
    told = rig.stub.last("notice")
    return float(str(told["seconds"])), str(told["source"])


def test_aws_terminates_when_its_instance_action_says_by_its_own_clock(cloud: Metadata) -> None:
    cloud.skew_s = -3600  # the node's clock is an hour wrong
    with make_rig(run=WAITS) as rig:
        begin(rig, aws(cloud.port))
        rig.until(lambda: cloud.requests.count("GET /latest/meta-data/spot/instance-action") > 2)
        assert rig.stub.kinds().count("notice") == 0
        cloud.set(action={"action": "terminate", "time": cloud.iso_date(40)})
        seconds, source = end(rig)
        assert 0 < seconds <= 40
        assert source == "AWS"
        seen = json.loads(rig.output().splitlines()[-1])
        assert seen["reason"] == "AWS is reclaiming the node"
        assert seen["seconds"] == seconds  # nothing is handed over, so the task has all of it
        assert len(cloud.tokens) == 1


def test_a_token_is_renewed_and_a_lost_one_asked_for_again(cloud: Metadata) -> None:
    with make_rig(run=WAITS) as rig:
        begin(rig, aws(cloud.port, life=timedelta(seconds=0.2)))
        rig.until(lambda: len(cloud.tokens) > 2)
        cloud.tokens.clear()
        cloud.set(action={"action": "stop", "time": cloud.iso_date(5)})
        assert end(rig)[0] <= 5


def test_a_rebalance_recommendation_is_advice_that_the_task_hears_while_it_works_on(
    cloud: Metadata,
) -> None:
    with make_rig(run=LISTENS) as rig:
        begin(rig, aws(cloud.port), aws(cloud.port, advice=True))
        cloud.set(rebalance={"noticeTime": cloud.iso_date(0)})
        rig.until(lambda: "advice" in rig.output())
        rig.until(lambda: "event" in rig.stub.kinds())  # the task hears of it first
        assert rig.stub.last("event")["name"] == "advice"
        with open(f"{rig.home}/advice.json", encoding="utf-8") as file:
            assert json.load(file)["source"] == "AWS"
        cloud.set(action={"action": "terminate", "time": cloud.iso_date(30)})
        assert rig.agents[-1].wait(PATIENCE_S) == 0
        lines = [json.loads(line) for line in rig.output().splitlines()[1:]]
        assert [list(line) for line in lines] == [["advice"], ["notice"]]  # each once
        assert lines[1]["notice"]["reason"] == "AWS is reclaiming the node"
        # It left at the notice with 0, and did not say that its work is complete.
        assert rig.exited()["outcome"] == "preempted"


def test_google_cloud_answers_when_preempted_changes_and_not_before(cloud: Metadata) -> None:
    with make_rig(run=WAITS) as rig:
        begin(rig, google(cloud.port))
        rig.until(lambda: cloud.holding)
        asked = len(cloud.requests)
        assert asked == 2  # one answered at once, which gave the tag, and one that is held
        cloud.set(preempted="TRUE")
        assert end(rig) == (25, "Google Cloud")


def test_azure_names_the_node_and_hears_when_it_may_go_on(cloud: Metadata) -> None:
    def event(name: str, kind: str, *nodes: str) -> dict[str, object]:
        return {
            "EventId": name,
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": list(nodes),
            "EventStatus": "Scheduled",
            "NotBefore": cloud.http_date(30),
            "EventSource": "Platform",
        }

    with make_rig(run=WAITS) as rig:
        begin(rig, azure(cloud.port))
        cloud.set(events=[event("a", "Preempt", "vm_6"), event("b", "Freeze", "vm_7")])
        rig.until(lambda: cloud.requests.count("GET /metadata/scheduledevents") > 3)
        assert cloud.started == []
        assert "notice" not in rig.stub.kinds()
        cloud.set(events=[event("a", "Preempt", "vm_6"), event("c", "Preempt", "vm_7", "vm_8")])
        seconds, source = end(rig)
        assert 0 < seconds <= 30
        assert source == "Azure"
        assert cloud.started == ["c"]  # after the work: the agent has left


def test_azure_is_answered_after_the_checkpoint_is_durable(cloud: Metadata) -> None:
    run = WAITS.replace("cat $CAVVY_NOTICE_FILE", "echo last >ckpt/state")
    with make_rig(run=run, checkpoint={"path": "ckpt", "sync": True}) as rig:
        durable: list[bool] = []
        rig.stub.on_put = lambda: durable.append(bool(cloud.started))
        begin(rig, azure(cloud.port))
        sent = {"EventId": "x", "EventType": "Preempt", "Resources": ["vm_7"], "NotBefore": ""}
        cloud.set(events=[sent])
        assert end(rig)[0] == 30  # it says no time: as long as the place promises
        assert rig.stub.folder() == {"state": b"last\n"}
        assert durable == [False]
        assert cloud.started == ["x"]


def test_a_service_that_is_not_there_hurts_nothing() -> None:
    with make_rig(run="sleep 1.2; echo done") as rig:
        rig.config["notices"] = make_notice_fields(
            [aws(9), google(9)]
        )  # the discard port: nobody listens
        assert rig.finish() == 0
        assert rig.output() == "done\n"
        assert rig.said().count("trying again") == 2  # complained of once each


@pytest.mark.proves(ALONE, "notice")
def test_every_sigterm_is_a_notice_where_orders_come_before_removals() -> None:
    with make_rig(run=WAITS) as rig:
        rig.config["taken"] = {"source": "Kubernetes", "seconds": 20}
        begin(rig)
        rig.agents[-1].send_signal(signal.SIGTERM)
        assert end(rig) == (20, "Kubernetes")


def test_the_signal_that_a_batch_system_was_asked_for_is_a_notice() -> None:
    with make_rig(run=WAITS) as rig:
        rig.config["taken"] = {"source": "Slurm", "seconds": 5, "signal": "USR1", "warning_s": 60}
        begin(rig)
        rig.agents[-1].send_signal(signal.SIGUSR1)
        assert end(rig) == (60, "Slurm")


def test_the_task_hears_how_often_to_save_and_what_is_safe_and_says_what_a_checkpoint_cost() -> (
    None
):
    run = "cat $CAVVY_CHECKPOINT_EVERY_FILE; echo; echo 1 >ckpt/a;" + LISTENS
    with make_rig(run=run, checkpoint={"path": "ckpt", "sync": True, "every_s": 4}) as rig:
        begin(rig)
        rig.until(lambda: "safe" in rig.output())
        rig.stub.every_s = 7.5
        rig.stub.give("notice", 10)
        assert rig.agents[-1].wait(PATIENCE_S) == 0
        first, *rest = rig.output().splitlines()
        told = [json.loads(line) for line in rest if line != "ready"]
        assert json.loads(first) == told[0]["every_s"] == 4
        safe = next(line["safe"] for line in told if "safe" in line)
        assert (safe["number"], safe["files"], safe["bytes"]) == (1, 1, 2)
        assert {"every_s": 7.5} in told
        assert rig.stub.last("checkpoint")["cost_s"] == 1.5
        assert not (rig.home / "notice.sock").exists()


def test_a_home_with_a_long_path_has_a_socket_all_the_same() -> None:
    with make_rig(run=LISTENS) as rig:
        rig.home = rig.folder / ("d" * 60) / ("e" * 60)
        rig.home.mkdir(parents=True)
        rig.config["home"] = str(rig.home)
        begin(rig)
        rig.stub.give("notice", 10, "for a test")
        assert rig.agents[-1].wait(PATIENCE_S) == 0
        assert json.loads(rig.output().splitlines()[-1])["notice"]["reason"] == "for a test"
