"""Records on disk, written by several at once, in folders that jobs can change."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.domain.values import Struct
from cavvy.providers.hosts.records import AgentExit, HostGangEnd, read, write
from cavvy.providers.hosts.supervisor.files import open_own, read_json, read_own
from cavvy.providers.local import processes
from cavvy.providers.local.gang_store import LocalGangStore
from cavvy.providers.local.records import LocalIntent


def make_store(home: Path) -> LocalGangStore:
    return LocalGangStore(
        home=home,
        installation="i",
        command=[],
        environ={},
        engine=lambda: None,
        now=lambda: datetime.now(UTC),
    )


def test_records_are_read_and_written_through_no_link(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"reason": "secret"}')
    (tmp_path / "exit.json").symlink_to(secret)
    assert read(tmp_path / "exit.json", AgentExit) is None
    assert read(secret, AgentExit) == AgentExit(reason="secret")
    fresh = tmp_path / f".exit.json.{os.getpid()}-{threading.get_ident()}"
    fresh.symlink_to(secret)
    write(tmp_path / "exit.json", AgentExit())
    assert secret.read_text() == '{"reason": "secret"}'
    assert not (tmp_path / "exit.json").is_symlink()


def test_the_log_of_an_agent_is_no_link_to_another_file(tmp_path: Path) -> None:
    """The last line of the log is part of the reason that the job's user sees."""
    rank, secret = tmp_path / "agents/g/0", tmp_path / "token"
    rank.mkdir(parents=True)
    secret.write_text("secret")
    (rank / "agent.log").symlink_to(secret)
    store = make_store(tmp_path)
    assert store._complaint("g", 0) == ""
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND):
        with pytest.raises(OSError):
            open_own(str(rank / "agent.log"), flags)
    with pytest.raises(OSError):
        processes.start(["true"], {}, rank / "agent.log")
    assert read_own(str(rank / "agent.log")) == ""
    assert read_json(str(rank / "agent.log")) is None
    assert secret.read_text() == "secret"
    (rank / "agent.log").unlink()
    (rank / "agent.log").write_text("first\nlast\n")
    assert store._complaint("g", 0) == ": last"
    assert read_own(str(rank / "agent.log")) == "first\nlast"


def test_two_that_write_one_record_at_once_do_not_take_each_others_file(tmp_path: Path) -> None:
    path = tmp_path / "exit.json"

    def write_often(code: int) -> None:
        for _ in range(300):
            write(path, AgentExit(exit_code=code))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write_often, range(4)))
    found = read(path, AgentExit)
    assert found is not None
    assert found.exit_code in range(4)
    assert [each.name for each in tmp_path.iterdir()] == ["exit.json"]


def test_work_that_was_started_without_separation_counts_until_it_has_ended(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    intents = {
        name: LocalIntent(
            name=name,
            installation="i",
            nodes=1,
            launched_at=now,
            grace_s=1.0,
            devices=[],
            separates=name == "new",
        )
        for name in ("new", "old")
    }
    assert make_store(tmp_path).is_separated()
    for name, intent in intents.items():
        (tmp_path / "gangs" / name).mkdir(parents=True)
        write(tmp_path / "gangs" / name / "gang.json", intent)
        assert make_store(tmp_path).is_separated() is (name == "new")
    (tmp_path / "ended").mkdir()
    end = HostGangEnd(
        name="old", installation="i", reason="done", exit_code=0, ranks=[], seen_at=now
    )
    write(tmp_path / "ended/old.json", end)
    assert make_store(tmp_path).is_separated()


class RankConfig(Struct, frozen=True):
    """The part of an agent's configuration that the store itself reads."""

    rank: int
    separates: bool
    devices: tuple[str, ...] = ()
    device_part: float = 1


@pytest.mark.parametrize("modes", [(True, True), (True, False), (False, False)])
def test_a_gang_is_separated_if_all_its_ranks_are(tmp_path: Path, modes: tuple[bool, ...]) -> None:
    store = make_store(tmp_path)
    (tmp_path / "gangs").mkdir()
    spec: Any = SimpleNamespace(
        name="g", installation="i", nodes=len(modes), grace=timedelta(seconds=1)
    )
    configs: Any = [RankConfig(rank, separates) for rank, separates in enumerate(modes)]
    store._prepare(spec, configs)
    assert store.is_separated() is all(modes)
