"""MIG instances that agents make on the slices that their work holds: where they are placed, and
that they are removed, and no others."""

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.providers.hosts.unit.test_ssh_machines import ENTRY, FACTS, known

from cavvy.agent import mig
from cavvy.agent.main import main
from cavvy.catalog.mig import find_tables
from cavvy.catalog.needs import NeedError, parse_accelerator
from cavvy.domain.allocations import Allocation, Host, SlicedGpu
from cavvy.domain.values import replace
from cavvy.planner.shared_hosts import smallest_shares
from cavvy.providers.hosts.fleet.machines import (
    SmiReading,
    list_offers,
    make_hosts,
    make_machine,
)
from cavvy.providers.hosts.supervisor.facts import ask_smi, read_facts
from cavvy.providers.hosts.supervisor.mig_mode import divide_marked
from cavvy.scheduler.packing import AllocationOwner, allocate_one, choose_slices
from cavvy.task_files import parse_task

PROGRAM = Path(__file__).parents[3] / "nvidia_smi.py"


class Card:
    """The stand-in of nvidia-smi with one A100 of 80 GB whose MIG mode is on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self.records = folder / "gpus.json", folder / "records"
        (folder / "nvidia-smi").symlink_to(PROGRAM)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        monkeypatch.setenv("FAKE_SMI", str(self.file))
        monkeypatch.setenv("CAVVY_MIG_FOLDER", str(self.records))
        monkeypatch.setattr(mig, "PAUSES_S", (0, 0))
        monkeypatch.setattr("os.geteuid", lambda: 0)
        (table,) = (each for each in find_tables("A100") if each.memory_mib == 81920)
        profiles = [
            [each.name, 20 - at, each.size, int(each.name[0]), each.starts]
            for at, each in enumerate(table.profiles)
        ]
        name = "NVIDIA A100-SXM4-80GB"
        gpu = {"uuid": "GPU-a", "name": name, "memory": 81920, "mig": True, "instances": {}}
        self.file.write_text(json.dumps([{**gpu, "profiles": profiles}]))

    def instances(self) -> Mapping[str, Any]:
        found = json.loads(self.file.read_text())[0]["instances"]
        assert isinstance(found, dict)
        return found

    def change(self, number: str, **fields: object) -> None:
        (gpu,) = json.loads(self.file.read_text())
        gpu["instances"][number].update(fields)
        self.file.write_text(json.dumps([gpu]))

    def host(self) -> tuple[Host, list[str]]:
        facts = replace(FACTS, smi=SmiReading(**ask_smi()))
        (host,) = make_hosts([known(facts=facts)])
        return host, [each.instance_type for each in list_offers([known(facts=facts)])]


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(tmp_path, monkeypatch)


class Config:
    """The parts of a configuration that the instance depends on. The agent holds its lock."""

    def __init__(self, home: Path, slice_: str, instance: str) -> None:
        self.devices, self.device_indices, self.instance = [slice_], [0], instance
        home.mkdir(exist_ok=True)
        self.private = str(home)
        self.lock = open(home / "lock", "w")  # noqa: SIM115 - until the agent is killed
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def kill(self) -> None:
        self.lock.close()


@contextmanager
def hold(card: Card, slice_: str, instance: str, *, makes: bool = True) -> Iterator[Config]:
    config: Any = Config(card.file.parent / slice_.replace("/", "-"), slice_, instance)
    try:
        with mig.hold_instance(config, makes=makes):
            yield config
    finally:
        config.kill()


def leave(card: Card, slice_: str, instance: str) -> Config:
    """An agent makes an instance. It is killed, and its work still lives until the test ends it."""
    config: Any = Config(card.file.parent / slice_.replace("/", "-"), slice_, instance)
    holding = mig.hold_instance(config, makes=True)
    holding.__enter__()
    LEFT.append(holding)
    return config


LEFT: list[object] = []  # a generator that is collected would clean up


def test_work_has_its_instance_and_leaves_nothing(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    mig.smi("mig", "-i", "GPU-a", "-cgi", "1g.10gb:0", "-C")  # by a person
    with hold(card, "GPU-a/4", "3g.40gb") as config:
        assert config.devices == ["MIG-a-2-2"]
        assert card.instances()["2"]["start"] == 4
        monkeypatch.setattr("os.geteuid", lambda: 1000)
        assert list(card.host()[0].devices) == ["MIG-a-1-1"], "as a server of another user sees it"
        monkeypatch.setattr("os.geteuid", lambda: 0)
        host, offers = card.host()
        assert offers.count("A100-MIG-1g.10gb") == 1
        assert set(host.devices) == {"MIG-a-1-1", *(f"GPU-a/{n}" for n in range(1, 8))}
    assert set(card.instances()) == {"1"}
    assert [each.name for each in card.records.iterdir()] == ["lock"]


def test_what_a_killed_agent_left_is_removed_by_the_next(card: Card) -> None:
    mig.smi("mig", "-i", "GPU-a", "-cgi", "1g.10gb:6", "-C")
    killed = leave(card, "GPU-a/0", "2g.20gb")
    record = card.records / "GPU-a-0.json"
    # killed after it had made the instance, and before it could record its UUID
    told = json.loads(record.read_text())
    del told["uuid"]
    record.write_text(json.dumps(told))
    assert len(card.host()[0].devices) == 8, "one of a person, seven slices of agents"
    with hold(card, "GPU-a/4", "1g.10gb", makes=False):
        assert set(card.instances()) == {"1", "2"}, "the reaper has not ended its work"
    killed.kill()
    card.change("2", busy=True)
    with hold(card, "GPU-a/4", "1g.10gb", makes=False):
        assert set(card.instances()) == {"1", "2"}, "a process still uses it"
    with pytest.raises(OSError, match="still uses slice 0"), hold(card, "GPU-a/0", "1g.10gb"):
        pass
    card.change("2", busy=False)
    with hold(card, "GPU-a/4", "1g.10gb") as config:
        assert config.devices == ["MIG-a-2-3"]
        assert [each["start"] for each in card.instances().values()] == [6, 4]
    assert set(card.instances()) == {"1"}


def test_a_living_agent_keeps_its_instance(card: Card) -> None:
    with hold(card, "GPU-a/0", "1g.10gb"):
        with hold(card, "GPU-a/1", "1g.10gb"):
            assert len(card.instances()) == 2
        assert len(card.instances()) == 1


def test_an_agent_whose_lock_cannot_be_read_keeps_its_instance(card: Card) -> None:
    killed = leave(card, "GPU-a/0", "1g.10gb")
    home = Path(killed.private)
    killed.kill()
    (home / "lock").unlink()
    (home / "lock").symlink_to("lock")  # stands for a folder that this user may not read
    assert mig.sweep()
    assert len(card.instances()) == 1
    (home / "lock").unlink()
    assert mig.sweep()
    assert not card.instances()


def test_an_agent_that_is_killed_when_it_has_made_an_instance_has_a_record(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object) -> str:
        raise SystemExit

    monkeypatch.setattr(mig, "find_uuid", kill)
    card.records.mkdir()
    entry: dict[str, object] = {"gpu": "GPU-a", "start": 0, "profile": "1g.10gb", "lock": "/no"}
    with pytest.raises(SystemExit):
        mig.make_instance(f"{card.records}/GPU-a-0.json", entry)
    assert card.instances()
    assert mig.sweep()
    assert not card.instances()


def test_an_instance_that_a_person_made_after_a_kill_stays(card: Card) -> None:
    killed = leave(card, "GPU-a/0", "1g.10gb")
    killed.kill()
    mig.destroy("GPU-a", 1)  # by hand
    mig.smi("mig", "-i", "GPU-a", "-cgi", "2g.20gb:0", "-C")
    assert mig.sweep()
    assert [each["name"] for each in card.instances().values()] == ["2g.20gb"]
    assert not list(card.records.glob("*.json"))


@pytest.mark.parametrize(
    ("slice_", "profile"), [("GPU-a/0", "4g.40gb"), ("GPU-a/3", "4g.40gb"), ("GPU-a/0", "1g.10gb")]
)
def test_an_instance_of_others_is_not_touched(card: Card, slice_: str, profile: str) -> None:
    mig.smi("mig", "-i", "GPU-a", "-cgi", f"{profile}:0", "-C")
    with pytest.raises(OSError, match="Insufficient Resources"), hold(card, slice_, "1g.10gb"):
        pass
    assert [each["name"] for each in card.instances().values()] == [profile]
    assert [each.name for each in card.records.iterdir()] == ["lock"]


def make_sliced(family: str = "A100", memory_mib: int = 81920) -> Host:
    (table,) = (each for each in find_tables(family) if each.memory_mib == memory_mib)
    profiles = tuple((each.name, each.size, each.starts) for each in table.profiles)
    slices = tuple(f"{gpu}/{n}" for gpu in "ab" for n in range(table.slices))
    return Host(
        name="local/me",
        cpus=64,
        memory_mib=1,
        devices=slices,
        kinds=("s",) * len(slices),
        sliced=tuple(SlicedGpu(gpu=gpu, profiles=profiles) for gpu in "ab"),
    )


def take(kind: str, host: Host, held: list[Allocation]) -> list[str]:
    found = choose_slices(kind, host, held)
    if found:
        one = Allocation(
            host=host.name, gang=str(len(held)), rank=0, project="p", cpus=1, memory_mib=0
        )
        held.append(replace(one, devices=tuple(found)))
    return found


def test_small_instances_leave_room_for_large_ones() -> None:
    host, held = make_sliced(), list[Allocation]()
    assert take("1g.10gb", host, held) == ["a/6"]
    assert take("3g.40gb", host, held) == ["a/0", "a/1", "a/2", "a/3"]
    assert take("7g.80gb", host, held) == [f"b/{n}" for n in range(8)]
    assert take("2g.20gb", host, held) == ["a/4", "a/5"]
    assert take("1g.10gb", host, held) == []


@settings(max_examples=30)
@given(
    st.sampled_from(
        [
            (each, one.memory_mib)
            for each in ("A100", "A30", "H200", "B200")
            for one in find_tables(each)
        ]
    ),
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30),
)
def test_instances_never_overlap_and_the_driver_would_make_them(
    card: tuple[str, int], steps: list[tuple[int, bool]]
) -> None:
    host, held = make_sliced(*card), list[Allocation]()
    profiles = {name: (size, starts) for name, size, starts in host.sliced[0].profiles}
    for number, ends in steps:
        name = list(profiles)[number % len(profiles)]
        size, starts = profiles[name]
        if found := take(name, host, held):
            assert len(found) == size
            assert int(found[0][2:]) in starts
        used = [device for each in held for device in each.devices]
        assert len(used) == len(set(used))
        if ends and held:
            held.pop(0)


def test_a_task_gets_slices_and_pays_its_part(card: Card) -> None:
    host, offers = card.host()
    assert offers[1:] == [
        f"A100-MIG-{name}"
        for name in ("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
    ]
    facts = replace(FACTS, smi=SmiReading(**ask_smi()))
    assert len(make_machine(ENTRY, facts).devices) == 8
    task = parse_task("run: x\nresources: {gpu: 'A100:3g.40gb', memory: 1GB}")
    (offer,) = (
        each
        for each in smallest_shares(task, list_offers([known(facts=facts)]), ())
        if each.accelerator == "A100-MIG-3g.40gb"
    )
    assert offer.rate.micros_per_hour == 1_000_000
    found = allocate_one(task, offer, host, (), AllocationOwner(gang="g", project="p"), 0)
    assert found is not None
    assert found.devices == tuple(f"GPU-a/{n}" for n in range(4, 8))


def test_a_profile_that_no_such_gpu_has_is_refused() -> None:
    with pytest.raises(NeedError, match=r"no A100 has instances with the profile 1g\.18gb"):
        parse_accelerator("A100:1g.18gb")
    assert parse_accelerator("H100:1g.10gb+me")


def test_a_killed_agent_s_instance_is_swept(card: Card) -> None:
    killed = leave(card, "GPU-a/0", "1g.10gb")
    assert main(["--sweep", "config.json"]) == 0
    host, offers = card.host()
    assert len(host.devices) == 8, "its slices are Cavvy's, and nobody else gets the instance"
    assert len(offers) == 7
    killed.kill()
    card.change("1", busy=True)
    assert main(["--sweep", "config.json"]) == 1
    card.change("1", busy=False)
    assert main(["--sweep", "config.json"]) == 0
    assert not card.instances()


class MarkedGpu:
    """The stand-in's GPU without MIG mode, which the owner's file may mark."""

    def __init__(self, card: Card, marks: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.card, self.shared = card, card.file.parent
        self.root = self.shared / "installations" / "one"
        self.root.mkdir(parents=True)
        (self.shared / "marks").write_text(marks)
        monkeypatch.setenv("CAVVY_MIG_MARKS", str(self.shared / "marks"))
        self.set(mig=False)

    def set(self, **fields: object) -> None:
        (gpu,) = json.loads(self.card.file.read_text())
        self.card.file.write_text(json.dumps([gpu | fields]))

    def modes(self) -> tuple[bool, bool]:
        """The mode, and whether the driver has noted another one."""
        (gpu,) = json.loads(self.card.file.read_text())
        return gpu["mig"], "pending" in gpu

    def divide(self) -> str:
        return divide_marked(str(self.root)).get("GPU-a", "")


@pytest.mark.parametrize("marks", ["0", "GPU-a", "7, 0  # the owner's", "all"])
def test_a_marked_gpu_that_is_idle_is_switched_to_mig(
    card: Card, marks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = MarkedGpu(card, marks, monkeypatch)
    smi = SmiReading(**read_facts(str(gpu.root), divide_marked(str(gpu.root)))["smi"])
    assert gpu.modes() == (True, False)
    machine = make_machine(ENTRY, replace(FACTS, smi=smi))
    assert [each.id for each in machine.devices] == [f"GPU-a/{n}" for n in range(8)]
    with hold(card, "GPU-a/0", "1g.10gb") as config:
        assert config.devices == ["MIG-a-1-1"]
        assert gpu.divide() == ""


@pytest.mark.parametrize("marks", ["", "1", "# 0", "GPU-b", "-1", "al", "00"])
def test_a_gpu_that_is_not_marked_keeps_its_mode(
    card: Card, marks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = MarkedGpu(card, marks, monkeypatch)
    assert gpu.divide() == ""
    assert gpu.modes() == (False, False)


def test_a_gpu_that_something_uses_is_not_switched(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = MarkedGpu(card, "all", monkeypatch)
    rank = gpu.shared / "other" / "two" / "agents" / "their-gang" / "0"
    rank.mkdir(parents=True)
    (rank / "devices").write_text("GPU-a 0.25\n")  # it is about to start
    command = "`sudo nvidia-smi -i GPU-a -mig 1`"
    assert (
        gpu.divide() == f"the gang their-gang is using GPU-a; {command} switches it when it is idle"
    )
    (rank / "dead.json").write_text("{}")
    gpu.set(programs=[4711])
    assert gpu.divide().startswith(f"the process 4711 uses it; {command}")
    gpu.set(programs=[])
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert gpu.divide().startswith(f"only root can switch the mode: {command}")
    assert gpu.modes() == (False, False)


def test_a_mode_that_the_driver_only_notes_is_taken_back(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the next reset, the GPU would be divided under the job that runs then."""
    gpu = MarkedGpu(card, "0", monkeypatch)
    gpu.set(held=True)
    told = divide_marked(str(gpu.root))
    assert "In use by another client" in told["GPU-a"]
    assert gpu.modes() == (False, False)
    smi = SmiReading(**read_facts(str(gpu.root), told)["smi"])
    machine = make_machine(ENTRY, replace(FACTS, smi=smi))
    assert [each.id for each in machine.devices] == ["GPU-a"], "it is offered whole"
    assert machine.notes == [f"NVIDIA: GPU-a is not divided: {told['GPU-a']}"]
