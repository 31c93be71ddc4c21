"""The check of a node at its boot: GPUs by a compiled stand-in of NVIDIA's libraries, links over
real namespaces.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.drivers import make_driver
from tests.system.agent_server import Rig, make_rig
from tests.system.hosts import require_hosts
from tests.waits import PATIENCE_S

pytestmark = pytest.mark.system
WANTED = {"share": 0.6, "kind": "A100", "memory_mib": 4096, "bandwidth_gbs": 2039.0}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_driver(tmp_path_factory.mktemp("driver"))


def use(rig: Rig, driver: Path, **fakes: object) -> None:
    rig.config["devices"], rig.config["device_indices"], rig.config["vendor"] = (
        ["a", "b"],
        [0, 1],
        "nvidia",
    )
    rig.environ["LD_LIBRARY_PATH"] = str(driver)
    rig.environ.update(
        {f"FAKE_{name.upper()}": str(value) for name, value in {"mib": 4096, **fakes}.items()}
    )


def told(rig: Rig) -> list[str]:
    return [str(each["text"]) for each in rig.stub.messages if each.get("name") == "check"]


def test_good_gpus_are_measured_and_the_work_runs(driver: Path) -> None:
    with make_rig(run="echo ran", check=WANTED, accelerators_per_node=2) as rig:
        use(rig, driver)
        assert rig.finish() == 0
        assert rig.output() == "ran\n"
        lines = told(rig)
        assert [line.partition(",")[0] for line in lines] == ["GPU 0", "GPU 1"]
        assert (
            "of 4096 MiB of memory tested, no memory errors, 1700 GB/s of a A100's 2039" in lines[1]
        )


@pytest.mark.parametrize(
    ("fakes", "said"),
    [
        ({"gbs": 900}, "the memory speed is 900 GB/s; a A100 must reach 1223"),
        (
            {"flip": 7},
            "GPU memory does not keep written data: 1 wrong bits in the first damaged block of 4 MiB",
        ),
        ({"mib": 3072}, "the GPU has 3072 MiB of memory; a A100 has at least 3686"),
        ({"free": 50}, "2047 of 4096 MiB of GPU memory are free; other programs use the rest"),
        ({"ecc": 3}, "3 uncorrected memory errors since the node booted"),
        ({"rows": 1}, "the GPU could not repair its memory"),
    ],
)
def test_a_gpu_that_falls_short_fails_its_node_with_the_figures(
    driver: Path, fakes: dict[str, object], said: str
) -> None:
    with make_rig(run="echo ran", check=WANTED, accelerators_per_node=2) as rig:
        use(rig, driver, **fakes)
        assert rig.finish() == 0
        assert rig.output() == ""
        exited = rig.exited()
        assert (exited["outcome"], exited["failure"]) == ("node", "gpu-fault")
        assert str(exited["reason"]).startswith("GPU fault: GPU 0: "), exited
        assert said in str(exited["reason"])


def test_gpus_that_are_missing_or_have_no_driver_are_told(driver: Path) -> None:
    with make_rig(run="echo ran", check=WANTED, accelerators_per_node=4) as rig:
        use(rig, driver)
        assert rig.finish() == 0
        assert rig.exited()["reason"] == "GPU fault: found 2 of 4 GPUs"
    with make_rig(run="echo ran", check=WANTED, accelerators_per_node=1) as rig:
        assert rig.finish() == 0
        assert str(rig.exited()["reason"]).startswith(
            "GPU fault: the driver library cannot be loaded"
        )


def test_a_driver_that_hangs_stops_no_stop(driver: Path) -> None:
    with make_rig(run="echo ran", check=WANTED, accelerators_per_node=1, grace_s=1) as rig:
        use(rig, driver, hang=1)
        agent = rig.launch()
        rig.until(lambda: rig.stub.nonces)
        rig.stub.give("stop", 0.5, "enough")
        assert agent.wait(PATIENCE_S) == 0
        assert (rig.exited()["outcome"], rig.exited()["reason"]) == ("stopped", "enough")


LINK = """
import sys, types
from cavvy.agent.node_check import SlowLink, check_links
rank, key, mbps = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
work = types.SimpleNamespace(nodes=2, addresses=["10.98.0.1", "10.98.0.2"], master_port=21000, gang_key=key)
try:
    print("fine:", check_links(types.SimpleNamespace(link_mbps=mbps), work, rank))
except SlowLink as error:
    print("slow:", error)
"""


class Pair:
    """Two network namespaces with one wire between them; what the second sends can be slowed
    down.
    """

    def __init__(self) -> None:
        self.spaces = [f"rmcheck{os.getpid()}{letter}" for letter in "ab"]

    def lay(self, slow: str) -> None:
        for space in self.spaces:
            self.ip("netns", "add", space)
        first, second = self.spaces
        self.ip(
            "-n",
            first,
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            second,
        )
        for number, space in enumerate(self.spaces, 1):
            self.ip("-n", space, "addr", "add", f"10.98.0.{number}/24", "dev", "eth0")
            self.ip("-n", space, "link", "set", "eth0", "up")
        if slow:
            shape = [
                "tc",
                "-n",
                second,
                "qdisc",
                "add",
                "dev",
                "eth0",
                "root",
                "tbf",
                "rate",
                slow,
                "burst",
                "64kb",
            ]
            done = subprocess.run([*shape, "latency", "50ms"], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"this kernel cannot slow a link down (tc tbf): {done.stderr}")

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def say(self, mbps: float, keys: tuple[str, str] = ("k", "k")) -> list[str]:
        """What each rank's check says."""
        processes = [
            subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    space,
                    sys.executable,
                    "-c",
                    LINK,
                    str(rank),
                    keys[rank],
                    str(mbps),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, space in enumerate(self.spaces)
        ]
        return [process.communicate(timeout=PATIENCE_S)[0] for process in processes]


@pytest.fixture
def pair() -> Iterator[Pair]:
    require_hosts()
    pair = Pair()
    try:
        yield pair
    finally:
        for space in pair.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def test_a_slow_link_is_found_by_the_rank_that_receives_over_it(pair: Pair) -> None:
    pair.lay("4mbit")
    first, second = pair.say(6)  # little, because a busy machine slows the other link, too
    assert re.fullmatch(
        r"slow: \d Mbit/s from rank 1 \(10.98.0.2\), required: at least 6 Mbit/s\n", first
    ), first
    assert second.startswith("fine: "), second
    assert second.endswith(" from rank 0 (10.98.0.1)\n")


def test_who_does_not_know_the_gangs_key_is_no_rank(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.lay("")
    soon = "import cavvy.agent.node_check\ncavvy.agent.node_check.MEET_S = 2"
    monkeypatch.setitem(globals(), "LINK", soon + LINK)
    said = pair.say(1, ("k", "another"))
    assert all(text.startswith("slow: rank ") for text in said), said


def test_work_that_uses_more_gpu_memory_than_its_share_is_killed(
    driver: Path, tmp_path: Path
) -> None:
    """The reason says so, and not only that a signal ended the work."""
    processes = tmp_path / "processes"
    with make_rig(run=f'echo "1 $$ 20001" > {processes}; sleep 60') as rig:
        use(rig, driver, processes=processes)
        rig.config.update(
            devices=["GPU-00000000-0000-0000-0000-000000000001"],
            device_indices=[1],
            device_part=0.25,
            device_memory_mib=20000,
        )
        assert rig.finish() == 0
        exited = rig.exited()
        assert (exited["outcome"], exited["exit_code"]) == ("exit", 137)
        assert str(exited["reason"]).startswith("out of GPU memory: the work used 20001 MiB")
