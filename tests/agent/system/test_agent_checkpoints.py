"""Checkpoints of nodes that cannot reach the job's folder: handed over whole, fetched again, and
told when safe.
"""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.agent.system.test_agent_folder import again
from tests.system.agent_server import Rig, make_rig
from tests.waits import PATIENCE_S

from cavvy.agent.work.checkpoint_files import born_ns

pytestmark = pytest.mark.system
SYNC = {"path": "ckpt", "sync": True, "every_s": 0.2}


def events(rig: Rig) -> list[str]:
    with rig.stub.lock:
        return [str(each["text"]) for each in rig.stub.messages if each["kind"] == "event"]


def test_what_was_written_is_there_in_the_next_attempt_as_it_was() -> None:
    run = """mkdir -p ckpt/deep; echo one >ckpt/deep/model; chmod 750 ckpt/deep/model; ln -s deep/model ckpt/latest
    touch -d 2020-01-01T00:00Z ckpt/old; cp ckpt/deep/model ckpt/twin"""
    with make_rig(run=run, checkpoint=SYNC) as rig:
        assert rig.finish() == 0
        assert rig.stub.folder() == {
            "deep/model": b"one\n",
            "latest": b"deep/model",
            "old": b"",
            "twin": b"one\n",
        }
        told = rig.stub.last("checkpoint")
        assert (told["number"], told["files"], told["bytes"], told["sent"]) == (1, 4, 8, 4)
        assert float(str(told["seconds"])) > 0
        assert rig.stub.kinds()[-2:] == ["checkpoint", "exited"]
        again(rig, 2)
        rig.stub.work["run"] = (
            "cat ckpt/latest; stat -c '%a %Y' ckpt/deep/model ckpt/old; ls ckpt; echo two >ckpt/new"
        )
        assert rig.finish() == 0
        lines = rig.output().splitlines()
        assert (lines[0], lines[1].split()[0], lines[2]) == ("one", "750", "644 1577836800")
        assert lines[3:] == ["deep", "latest", "old", "twin"]
        assert events(rig) == ["resuming from checkpoint 1 of attempt 1: 4 files, 0.0 MiB"]
        assert rig.stub.last("checkpoint")["sent"] == 4  # what was there already was not sent again
        assert rig.stub.folder()["new"] == b"two\n"


def test_what_came_with_the_folder_gives_way_to_the_newest_checkpoint() -> None:
    with make_rig(run="ls ckpt; cat ckpt/a", checkpoint=SYNC, attempt=3) as rig:
        came = {"ckpt/a": b"old\n", "ckpt/stale": b"of another moment\n"}
        rig.stub.work["workdir"] = {"snapshot": rig.stub.add_folder(came)}
        name = rig.stub.add_blob(b"newest\n")
        files = [{"path": "a", "sha256": name, "size": 7, "mode": 0o644, "mtime_ns": 1}]
        rig.stub.commits.append({"files": files})
        assert rig.finish() == 0
        assert rig.output() == "a\nnewest\n"


def test_a_checkpoint_folder_that_is_a_volume_is_handed_over(tmp_path: Path) -> None:
    volume = {"kind": "host", "source": str(tmp_path), "path": "ckpt", "read_only": False}
    with make_rig(run="echo one >ckpt/model", checkpoint=SYNC, volumes=[volume]) as rig:
        assert rig.finish() == 0
        assert rig.stub.folder() == {"model": b"one\n"}


def test_nothing_new_is_not_handed_over() -> None:
    with make_rig(run="cat ckpt/first; sleep 1", checkpoint=SYNC) as rig:
        rig.stub.work["workdir"] = {
            "snapshot": rig.stub.add_folder({"ckpt/first": b"from the folder\n"})
        }
        assert rig.finish() == 0
        assert rig.output() == "from the folder\n"
        assert rig.stub.commits == []


def test_a_checkpoint_is_safe_while_the_work_goes_on_and_neither_log_nor_orders_wait() -> None:
    run = (
        "echo 1 >ckpt/a; echo written; while test ! -e ../go; do sleep 0.05; done; echo on; "
        "sleep 60"
    )
    with make_rig(run=run, checkpoint=SYNC, job="slow") as rig:
        rig.stub.put_delay_s = 3
        agent = rig.launch()
        rig.until(lambda: "/agent/v1/blobs/missing" in rig.stub.requests)
        (rig.home / "go").touch()
        rig.until(lambda: rig.output() == "written\non\n")
        assert rig.stub.commits == []  # the log came while the file was still on its way
        rig.until(lambda: "checkpoint" in rig.stub.kinds())
        assert rig.stub.folder() == {"a": b"1\n"}
        rig.stub.give("stop", 1)
        assert agent.wait(PATIENCE_S) == 0
        assert rig.exited()["outcome"] == "stopped"


def test_a_file_that_changes_before_it_is_sent_makes_the_checkpoint_void() -> None:
    run = "echo first >ckpt/a; echo second >ckpt/b; while test ! -e ../go; do sleep 0.05; done"
    with make_rig(run=run, checkpoint=SYNC) as rig:
        commits = []

        def change() -> None:
            commits.append(len(rig.stub.commits))
            if len(commits) in (1, 2):  # while `a` is sent, `b` still waits
                for name in ("a", "b"):
                    (rig.home / "work" / "ckpt" / name).write_text(f"{name}{len(commits)}")

        rig.stub.on_put = change
        agent = rig.launch()
        rig.until(lambda: rig.stub.commits)
        assert len(commits) > 2
        assert rig.stub.folder() in ({"a": b"a1", "b": b"b1"}, {"a": b"a2", "b": b"b2"})
        (rig.home / "go").touch()
        assert agent.wait(PATIENCE_S) == 0


def test_a_file_that_is_replaced_while_it_is_sent_stays_what_it_was() -> None:
    run = "echo first >ckpt/a; while test ! -e ../go; do sleep 0.05; done"
    with make_rig(run=run, checkpoint=SYNC) as rig:
        folder = rig.home / "work" / "ckpt"

        def change() -> None:
            if not rig.stub.commits:
                (folder / "fresh").write_text("second\n")
                (folder / "fresh").rename(folder / "a")

        rig.stub.on_put = change
        agent = rig.launch()
        rig.until(lambda: len(rig.stub.commits) >= 2)
        assert rig.stub.folder(0) == {"a": b"first\n"}
        assert rig.stub.folder(1) == {"a": b"second\n"}
        (rig.home / "go").touch()
        assert agent.wait(PATIENCE_S) == 0


def test_files_that_are_written_anew_faster_than_they_are_sent_get_safe_all_the_same() -> None:
    run = "i=0; while test ! -e ../go; do i=$((i+1)); seq -s ' ' $i 20000 >ckpt/a; sleep 0.6; done"
    with make_rig(run=run, checkpoint=SYNC) as rig:
        rig.stub.put_delay_s = 1.0
        agent = rig.launch()
        rig.until(lambda: rig.stub.commits)
        assert rig.stub.folder()["a"].endswith(b" 20000\n")
        (rig.home / "go").touch()
        assert agent.wait(PATIENCE_S) == 0


def test_a_notice_leaves_time_for_the_last_checkpoint() -> None:
    run = """trap 'sleep 0.3; echo last >ckpt/a; cat $CAVVY_NOTICE_FILE; exit 1' TERM
    echo begun; while :; do sleep 0.05; done"""
    with make_rig(run=run, checkpoint=SYNC) as rig:
        agent = rig.launch()
        rig.until(lambda: rig.output().startswith("begun"))
        rig.stub.give("notice", 8)
        assert agent.wait(PATIENCE_S) == 0
        assert '"seconds": 6' in rig.output()  # of 8, a quarter is kept for handing over
        assert rig.stub.folder() == {"a": b"last\n"}
        assert rig.stub.kinds()[-2:] == ["checkpoint", "exited"]
        assert rig.exited()["outcome"] == "preempted"


def test_work_that_does_not_heed_a_notice_is_killed_in_time_to_save_what_it_wrote() -> None:
    run = "trap '' TERM; echo begun; while :; do echo x >>ckpt/a; sleep 0.05 || true; done"
    with make_rig(run=run, checkpoint=SYNC) as rig:
        agent = rig.launch()
        rig.until(lambda: rig.output().startswith("begun"))
        rig.stub.give("notice", 8)
        assert agent.wait(PATIENCE_S) == 0
        assert rig.stub.folder()["a"] == (rig.home / "work" / "ckpt" / "a").read_bytes()
        assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == ("preempted", 137)


def test_a_checkpoint_that_does_not_fit_into_a_notice_is_told() -> None:
    run = "trap 'echo last >ckpt/a; exit 1' TERM; echo begun; while :; do sleep 0.05; done"
    with make_rig(run=run, checkpoint=SYNC) as rig:
        rig.stub.put_delay_s = 30
        agent = rig.launch()
        rig.until(lambda: rig.output().startswith("begun"))
        rig.stub.give("notice", 2)
        assert agent.wait(PATIENCE_S) == 0
        assert rig.stub.commits == []
        assert events(rig) == [
            "the last changes to the checkpoint folder could not be uploaded in time; no "
            "checkpoint of this attempt was saved"
        ]
        assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == ("preempted", 1)


def test_a_large_file_goes_on_where_the_line_broke() -> None:
    run = "head -c 40000000 /dev/urandom >ckpt/a; sha256sum <ckpt/a"
    with make_rig(run=run, checkpoint=SYNC) as rig:
        calls = []

        def fail() -> None:
            calls.append(sum(map(len, rig.stub.parts.values())))
            rig.stub.put_status = 503 if len(calls) == 2 else 200

        rig.stub.on_put = fail
        assert rig.finish() == 0
        assert calls[:4] == [0, 16 << 20, 16 << 20, 32 << 20]
        assert rig.output().split()[0] in rig.stub.held
        assert rig.stub.last("checkpoint")["sent"] == 40_000_000


def test_a_full_disk_of_the_control_plane_is_told_and_waited_for() -> None:
    with make_rig(run="echo 1 >ckpt/a", checkpoint=SYNC) as rig:
        rig.stub.put_status = 507
        agent = rig.launch()
        rig.until(lambda: events(rig))
        assert events(rig)[0].startswith("the control plane's disk is full")
        assert rig.stub.commits == []
        rig.stub.put_status = 200
        assert agent.wait(PATIENCE_S) == 0
        assert rig.stub.folder() == {"a": b"1\n"}


def test_other_ranks_are_told_that_their_files_are_not_kept() -> None:
    with make_rig(run="echo 1 >ckpt/a; sleep 1.5", checkpoint=SYNC, nodes=2) as rig:
        rig.config["rank"] = 1
        assert rig.finish() == 0
        assert rig.stub.commits == []
        assert [text.partition(",")[0] for text in events(rig)] == [
            "rank 1 writes to its own checkpoint folder"
        ]


def test_what_the_control_plane_has_lost_meanwhile_is_sent_again() -> None:
    run = "echo 1 >ckpt/a; while test ! -e ../go; do sleep 0.05; done; echo 2 >ckpt/b"
    with make_rig(run=run, checkpoint=SYNC) as rig:
        agent = rig.launch()
        rig.until(lambda: rig.stub.commits)
        first = True

        def lose() -> None:
            nonlocal first
            if first:
                first = False
                rig.stub.held.clear()

        rig.stub.on_put = lose
        (rig.home / "go").touch()
        assert agent.wait(PATIENCE_S) == 0
        assert rig.stub.folder() == {"a": b"1\n", "b": b"2\n"}


def test_a_killed_agent_leaves_no_process_that_hands_over() -> None:
    with make_rig(run="echo 1 >ckpt/a; sleep 60", checkpoint=SYNC) as rig:
        rig.stub.put_delay_s = 1
        agent = rig.launch()
        rig.until(lambda: "/agent/v1/blobs/missing" in rig.stub.requests)
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        rig.until(lambda: not _agents(rig))
        time.sleep(1.2)  # the request that was on its way is answered
        assert rig.stub.commits == []


def _agents(rig: Rig) -> list[str]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if str(rig.folder).encode() + b"/config" in command:
            found.append(name)
    return found


def test_a_shared_folder_of_the_place_is_brought_up_to_date_once_for_all_ranks() -> None:
    with make_rig(
        run="cp ckpt/a ../../seen-$CAVVY_RANK", checkpoint=SYNC, project="p", attempt=3, nodes=2
    ) as rig:
        rig.config["storage"] = str(rig.folder / "shared")
        name = rig.stub.add_blob(b"from elsewhere\n")
        files = [{"path": "a", "sha256": name, "size": 15, "mode": 0o644, "mtime_ns": 1}]
        rig.stub.commits.append({"files": files})  # attempt 1 handed it over
        folder = rig.folder / "shared" / "p" / str(rig.stub.work["job_id"])
        agents = []
        for rank in (1, 0):
            rig.config["rank"], rig.config["home"] = rank, str(rig.folder / f"home{rank}")
            agents.append(rig.launch())
            rig.until(lambda rank=rank: (rig.folder / f"home{rank}" / "started").exists())
        for rank in (0, 1):
            rig.until(lambda rank=rank: (rig.folder / f"home{rank}" / "exit.json").exists())
            assert (rig.folder / f"seen-{rank}").read_text() == "from elsewhere\n"
        assert (folder / "checkpoint" / "a").read_text() == "from elsewhere\n"
        assert (folder / "attempt").read_text() == "3"
        for agent in agents:
            agent.kill()
        rig.stub.faults.clear()  # two ranks reported to a server that counts for one


def test_a_shared_folder_that_is_newer_stays_as_it_is() -> None:
    with make_rig(
        run="cat ckpt/a; echo more >>ckpt/a", checkpoint=SYNC, project="p", attempt=3
    ) as rig:
        rig.config["storage"] = str(rig.folder / "shared")
        folder = rig.folder / "shared" / "p" / str(rig.stub.work["job_id"])
        (folder / "checkpoint").mkdir(parents=True)
        (folder / "checkpoint" / "a").write_text("from here\n")
        (folder / "attempt").write_text("2")
        rig.stub.commits.append({"files": []})  # of attempt 1
        assert rig.finish() == 0
        assert rig.output() == "from here\n"
        assert len(rig.stub.commits) == 1  # it stays with its place
        assert (folder / "checkpoint" / "a").read_text() == "from here\nmore\n"


@pytest.mark.parametrize("shared", [False, True])
def test_how_long_the_writing_of_a_single_file_took_is_told_where_its_making_is_known(
    shared: bool,
) -> None:
    run = "echo one >ckpt/fresh; sleep 0.3; echo two >>ckpt/fresh; mv ckpt/fresh ckpt/model"
    with make_rig(run=run, checkpoint={"path": "ckpt", "sync": True}) as rig:
        if born_ns(str(rig.folder)) is None:
            pytest.skip("this file system does not remember when a file was made")
        if shared:
            rig.stub.work["checkpoint"] = {"path": "ckpt", "storage": str(rig.folder / "kept")}
        assert rig.finish() == 0
        told = rig.stub.last("checkpoint")
        assert (told["files"], told["sent"]) == (1, 8)
        assert "cost_s" in told


@pytest.mark.parametrize("shared", [False, True])
def test_how_long_the_writing_took_is_told_where_the_files_show_it(shared: bool) -> None:
    run = """mkdir new; echo 1 >new/a; echo 22 >new/b
    touch -d 2020-01-01T00:00:00Z new/a; touch -d 2020-01-01T00:00:02Z new/b; mv new ckpt/new"""
    with make_rig(run=run, checkpoint={"path": "ckpt", "sync": True}) as rig:
        if shared:
            rig.stub.work["checkpoint"] = {"path": "ckpt", "storage": str(rig.folder / "kept")}
        assert rig.finish() == 0
        told = rig.stub.last("checkpoint")
        assert told["cost_s"] == 2
        assert told["sent"] == 5
        if shared:
            return
        again(rig, 2)
        rig.stub.work["run"] = (
            "echo 3 >ckpt/new/a"  # a file that was brought back and is written over
        )
        assert rig.finish() == 0
        assert "cost_s" not in rig.stub.last("checkpoint")
