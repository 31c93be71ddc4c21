"""The working folder: the snapshot, a Git commit, and setups that are done once."""

import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from tests.system.agent_server import Rig, make_rig
from tests.waits import PATIENCE_S

pytestmark = pytest.mark.system


def again(rig: Rig, attempt: int) -> Path:
    """The next attempt on the same machine: a new home and a control plane that knows nothing of
    it.
    """
    home = rig.folder / f"home{attempt}"
    rig.config["home"] = str(home)
    rig.stub.nonces.clear()
    rig.stub.messages.clear()
    rig.stub.log.clear()
    rig.stub.log_size = 0
    return home


def test_snapshot_is_unpacked_with_modes_and_links_and_never_shared() -> None:
    files = {"train.py": b"print('hi')", "bin/tool": b"#!/bin/sh\necho tool\n"}
    with make_rig(
        run="bin/tool; cat latest; echo changed >train.py; ls -l bin/tool | cut -c1-10"
    ) as rig:
        snapshot = rig.stub.add_folder(files, {"latest": "train.py"}, mode=0o755)
        rig.stub.work["workdir"] = {"snapshot": snapshot}
        assert rig.finish() == 0
        assert rig.output() == "tool\nprint('hi')-rwxr-xr-x\n"
        assert rig.stub.kinds() == ["running", "exited"]
        blobs = rig.folder / "cache" / "blobs"
        again(rig, 2)
        rig.stub.blobs.clear()  # the machine has them all
        assert rig.finish() == 0
        assert rig.output().startswith("tool\nprint('hi')-rwx")
        assert len(list(blobs.iterdir())) == 3


def test_missing_and_wrong_blobs_are_told() -> None:
    with make_rig(run="true") as rig:
        snapshot = rig.stub.add_folder({"a": b"a"})
        del rig.stub.blobs["ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"]
        rig.stub.work["workdir"] = {"snapshot": snapshot}
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "setup"
        assert "refused the part ca978112" in str(rig.exited()["reason"])
    with make_rig(run="true") as rig:
        snapshot = rig.stub.add_folder({"a": b"a"})
        rig.stub.blobs[snapshot] = b"something else"
        rig.stub.work["workdir"] = {"snapshot": snapshot}
        assert rig.finish() == 0
        assert "sent wrong data for" in str(rig.exited()["reason"])


def singles(rig: Rig) -> list[str]:
    """Blobs that were asked for one by one."""
    return [
        path.rpartition("/")[2]
        for path in rig.stub.requests
        if re.search("/blobs/[0-9a-f]{64}$", path)
    ]


@pytest.mark.parametrize("packs", [True, False])
def test_small_files_come_in_packs_where_the_server_knows_them(packs: bool) -> None:
    files = {f"f{number}": b"\n%d\n" % number * number for number in range(8)} | {
        "large": bytes(256 * 1024 + 1)
    }
    with make_rig(run="cat f3; wc -c <large") as rig:
        rig.stub.packs = packs
        snapshot = rig.stub.add_folder(files)
        rig.stub.work["workdir"] = {"snapshot": snapshot}
        assert rig.finish() == 0
        assert rig.output() == "\n3\n" * 3 + f"{256 * 1024 + 1}\n"
        for name, data in files.items():
            assert (rig.home / "work" / name).read_bytes() == data
        alone = sorted([snapshot, sha256(files["large"]).hexdigest()])
        asked = rig.stub.requests.count("/agent/v1/blobs/pack")
        assert (asked, sorted(singles(rig)) == alone) == ((3, True) if packs else (1, False))
        assert len(singles(rig)) == len(set(singles(rig)))
        assert not list((rig.folder / "cache" / "blobs").glob("*.*"))


def test_a_part_that_no_pack_has_is_asked_for_alone_and_told() -> None:
    with make_rig(run="true") as rig:
        rig.stub.work["workdir"] = {"snapshot": rig.stub.add_folder({"a": b"a", "b": b"b"})}
        gone = sha256(b"a").hexdigest()
        del rig.stub.blobs[gone]
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "setup"
        assert f"refused the part {gone}" in str(rig.exited()["reason"])
        assert (rig.folder / "cache" / "blobs" / sha256(b"b").hexdigest()).read_bytes() == b"b"


@pytest.mark.parametrize(
    ("tamper", "told"),
    [
        (lambda pack: pack[:-1], "is incomplete at byte 0"),
        (lambda pack: pack[:40], "is incomplete at byte 0"),
        (lambda pack: pack + b"x", "is incomplete at byte 70"),
        (lambda pack: b"../" + pack[3:], "its hash is"),
        (lambda pack: pack[:-1] + b"!", "its hash is"),
    ],
)
def test_a_pack_that_is_not_what_it_says_is_told_and_not_kept(
    tamper: Callable[[bytes], bytes], told: str
) -> None:
    with make_rig(run="true") as rig:
        snapshot = rig.stub.add_folder({"a": b"abcd"})
        rig.stub.work["workdir"] = {"snapshot": snapshot}
        rig.stub.tamper = tamper
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "setup"
        assert told in str(rig.exited()["reason"])
        kept = {path.name for path in (rig.folder / "cache" / "blobs").iterdir()}
        assert kept <= {snapshot, sha256(b"abcd").hexdigest()}
        assert all(
            sha256(path.read_bytes()).hexdigest() == path.name
            for path in (rig.folder / "cache/blobs").iterdir()
        )


@pytest.mark.parametrize("path", ["../out", "/ABOVE/out", "link/out", "."])
def test_snapshots_that_reach_out_of_the_folder_are_refused(path: str) -> None:
    with make_rig(run="true") as rig:
        path = path.replace("/ABOVE", str(rig.folder))
        digest = rig.stub.add_blob(b"evil")
        entries = (
            f'[{{"path": "link", "link": ".."}}, {{"path": "{path}", "sha256": "{digest}", '
            f'"mode": 420, "size": 4}}]'
        )
        rig.stub.work["workdir"] = {
            "snapshot": rig.stub.add_blob(b'{"files": %s}' % entries.encode())
        }
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "setup"
        assert not (rig.home / "out").exists()
        assert not (rig.folder / "out").exists()


def test_snapshot_waits_for_a_control_plane_that_is_away() -> None:
    with make_rig(run="cat a", setup="sleep 0.3", setup_key="k") as rig:
        rig.stub.work["workdir"] = {"snapshot": rig.stub.add_folder({"a": b"content"})}
        agent = rig.launch()
        rig.until(lambda: "/agent/v1/claim" in rig.stub.requests)
        rig.stub.stop()
        rig.until(lambda: "trying again" in rig.said() or (rig.home / "work" / "a").exists())
        rig.stub.start()
        assert agent.wait(PATIENCE_S) == 0
        assert rig.output() == "content"


def test_finished_setup_is_reused_with_all_that_it_made() -> None:
    setup = (
        "echo setting up; python3 -m venv --without-pip .venv; echo dir "
        ">$CAVVY_SETUP_DIR/file; mkdir made"
    )
    run = "ls -d made; cat $CAVVY_SETUP_DIR/file; grep -c $PWD .venv/bin/activate"
    with make_rig(run=run, setup=setup, setup_key="sha256-1") as rig:
        assert rig.finish() == 0
        assert rig.output() == "setting up\nmade\ndir\n1\n"
        assert rig.stub.kinds() == ["setup", "running", "exited"]
        assert rig.stub.last("running")["setup_reused"] is False
        again(rig, 2)
        assert rig.finish() == 0
        assert rig.output() == "made\ndir\n1\n"  # paths in scripts name the new folder
        assert rig.stub.kinds() == ["running", "exited"]
        assert rig.stub.last("running")["setup_reused"] is True
        again(rig, 3)
        rig.stub.work["setup_key"] = "sha256-2"
        assert rig.finish() == 0
        assert rig.stub.kinds()[0] == "setup"


def test_failed_setup_ends_the_attempt_and_is_tried_anew() -> None:
    setup = """cd "$CAVVY_SETUP_DIR"; if test -e half; then echo leftover; fi; touch half
    test -e "$HOME/good" || exit 4"""
    with make_rig(run="echo ran", setup=setup, setup_key="k") as rig:
        assert rig.finish() == 0
        exited = rig.exited()
        assert (exited["outcome"], exited["exit_code"]) == ("setup", 4)
        assert exited["reason"] == "the setup ended with exit code 4"
        again(rig, 2)
        (rig.folder / "good").touch()
        assert rig.finish() == 0
        assert rig.output() == "ran\n"


def test_one_of_several_sets_up_and_the_others_wait() -> None:
    with make_rig(
        run="cat made", setup="echo x >>../../setups; sleep 1; echo made >made", setup_key="k"
    ) as rig:
        agents = []
        for rank in range(3):
            rig.config.update(rank=rank, home=str(rig.folder / f"home{rank}"))
            rig.stub.messages.clear()
            agents.append(rig.launch())
        rig.stub.faults.clear()
        rig.until(
            lambda: all((rig.folder / f"home{rank}" / "exit.json").exists() for rank in range(3))
        )
        assert (rig.folder / "setups").read_text() == "x\n"
        for rank in range(3):
            assert '"succeeded"' in (rig.folder / f"home{rank}" / "exit.json").read_text()
        for agent in agents:
            agent.kill()
        rig.stub.faults.clear()  # three ranks reported to a server that counts for one


def test_git_commit_is_checked_out() -> None:
    with make_rig(run="cat file; git rev-parse HEAD") as rig:
        repository = rig.folder / "repo"
        env = {"PATH": os.environ["PATH"], "HOME": str(rig.folder), "GIT_CONFIG_NOSYSTEM": "1"}

        def git(*arguments: str) -> str:
            who = ["-c", "user.name=a", "-c", "user.email=a@b"]
            command = ["git", *who, "-C", str(repository), *arguments]
            return (
                subprocess.run(command, env=env, capture_output=True, check=True)
                .stdout.decode()
                .strip()
            )

        repository.mkdir()
        git("init", "-q")
        for text in ("one\n", "two\n"):
            (repository / "file").write_text(text)
            git("add", "file")
            git("commit", "-qm", text)
        first = git("rev-parse", "HEAD~1")
        rig.stub.work["git"] = {"url": f"file://{repository}", "commit": first}
        assert rig.finish() == 0
        assert rig.output() == f"one\n{first}\n"
        again(rig, 2)
        rig.stub.work["git"] = {"url": f"file://{repository}", "commit": "0" * 40}
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "setup"
        again(rig, 3)
        rig.stub.work["git"] = {"url": f"file://{repository}", "commit": "HEAD"}
        assert rig.finish() == 0
        assert rig.output().startswith("two\n")


def test_checkpoints_that_came_with_the_folder_are_the_first_ones() -> None:
    with make_rig(run="cat c/start; echo later >c/start") as rig:
        storage = rig.folder / "storage"
        rig.stub.work["workdir"] = {"snapshot": rig.stub.add_folder({"c/start": b"first\n"})}
        rig.stub.work["checkpoint"] = {"path": "c", "storage": str(storage)}
        assert rig.finish() == 0
        home = again(rig, 2)
        assert rig.finish() == 0
        assert rig.output() == "later\n"
        assert stat.S_ISLNK((home / "work" / "c").lstat().st_mode)


def test_unusable_checkpoint_path_is_refused() -> None:
    with make_rig(run="true", checkpoint={"path": "../../x", "storage": "/tmp/x"}) as rig:
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "setup"
        assert "is not in the working folder" in str(rig.exited()["reason"])


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system that is soon full, where we may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if (
        not sys.platform.startswith("linux")
        or subprocess.run(command, check=False, capture_output=True).returncode
    ):
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_is_the_nodes_fault() -> None:
    with make_rig(run="true") as rig, small_disk(rig.folder / "cache", "64k"):
        rig.stub.work["workdir"] = {"snapshot": rig.stub.add_folder({"big": b"x" * 200_000})}
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "node"
        assert "No space left" in str(rig.exited()["reason"])


def test_work_that_fills_the_disk_is_reported_all_the_same() -> None:
    run = """head -c 4000000 /dev/zero >fill || echo full
    sleep 0.3; head -c 700000 /dev/zero; echo; exit 3"""
    with make_rig(run=run, log_limit_mib=2) as rig, small_disk(rig.home, "1m"):
        assert rig.finish() == 0
        assert (rig.exited()["outcome"], rig.exited()["exit_code"]) == ("exit", 3)
        assert rig.stub.log_size > 700_000


def test_setup_sees_what_it_uses_alone_and_its_work_is_laid_over_the_whole_folder() -> None:
    setup = """find . -type f | sort; echo built >src/pkg/native.so; echo two >generated; mkdir -p out; echo x >out/made
    env | grep -c PARAM_LR || ln -s src link"""
    run = (
        "find . -type f | sort; cat generated out/made link/pkg/native.so train.py; echo "
        "$CAVVY_PARAM_LR"
    )
    files = {
        "a.txt": b"a",
        "src/pkg/x.c": b"c",
        "src/other": b"o",
        "generated": b"one\n",
        "out": b"a file\n",
    }
    with make_rig(
        run=run, setup=setup, setup_key="k", setup_uses=["a.txt", "src/pkg"], params={"lr": 0.1}
    ) as rig:

        def finish(train: bytes) -> str:
            snapshot = rig.stub.add_folder({**files, "train.py": train})
            rig.stub.work["workdir"] = {"snapshot": snapshot}
            assert rig.finish() == 0
            assert rig.exited()["outcome"] == "succeeded", rig.output()
            return rig.output()

        whole = "./a.txt\n./generated\n./out/made\n./src/other\n./src/pkg/native.so\n./src/pkg/x.c\n./train.py\n"
        seen = "./a.txt\n./src/pkg/x.c\n0\n"
        assert finish(b"first\n") == f"{seen}{whole}two\nx\nbuilt\nfirst\n0.1\n"
        again(rig, 2)
        assert finish(b"second\n") == f"{whole}two\nx\nbuilt\nsecond\n0.1\n"
        assert rig.stub.last("running")["setup_reused"] is True


def test_setup_that_uses_what_is_not_there_is_told() -> None:
    with make_rig(run="true", setup="true", setup_key="k", setup_uses=["gone.txt"]) as rig:
        rig.stub.work["workdir"] = {"snapshot": rig.stub.add_folder({"a": b"a"})}
        assert rig.finish() == 0
        assert rig.exited()["outcome"] == "setup"
        assert (
            rig.exited()["reason"] == "the setup uses gone.txt, which is not in the working folder"
        )


def test_setup_uses_parts_of_a_git_commit() -> None:
    run = "find . -path ./.git -prune -o -type f -print | sort"
    with make_rig(
        run=run, setup=f"{run}; echo new >made", setup_key="k", setup_uses=["sub"]
    ) as rig:
        repository = rig.folder / "repo"
        for name in ("a", "sub/b", "sub/deep/c"):
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            (repository / name).write_text(name)
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(repository)]
        for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
            subprocess.run([*git, *arguments], check=True)
        commit = (
            subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True)
            .stdout.decode()
            .strip()
        )
        rig.stub.work["git"] = {"url": str(repository), "commit": commit}
        assert rig.finish() == 0
        assert rig.output() == "./sub/b\n./sub/deep/c\n./a\n./made\n./sub/b\n./sub/deep/c\n"


def test_setup_sees_the_parameters_that_it_names() -> None:
    with make_rig(
        run="true", setup="echo $CAVVY_PARAM_LR", setup_key="k", params={"lr": 0.1}
    ) as rig:
        assert rig.finish() == 0
        assert rig.output() == "0.1\n"


def test_the_cache_of_a_machine_is_swept_while_work_runs_and_what_the_work_uses_stays() -> None:
    """Once a day: here the last time is long ago."""
    run = (
        "while test -e ../../cache/blobs/old -o -e ../../cache/setups/old/finished; do sleep "
        "0.05; done; cat made"
    )
    with make_rig(run=run, setup="echo yes >made", setup_key="used") as rig:
        cache = rig.folder / "cache"
        (cache / "blobs").mkdir(parents=True)
        (cache / "setups" / "old" / "tree").mkdir(parents=True)
        for path in (
            cache / "swept",
            cache / "blobs" / "old",
            cache / "setups" / "old" / "finished",
        ):
            path.write_text("x")
            os.utime(path, (0, 0))
        assert rig.finish() == 0
        assert rig.output() == "yes\n"
        assert (cache / "setups" / f"used@{os.uname().nodename}" / "finished").exists()
        assert (cache / "swept").stat().st_mtime > 0
