"""Profiles and tuning: the statistics, what is said, and a real script with planted faults."""

import getpass
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.waits import PATIENCE_S, wait_until

from cavvy.capabilities.tuning.diagnose import Diagnoser
from cavvy.capabilities.tuning.findings import CostFinding, Diagnosis, judge_plain
from cavvy.capabilities.tuning.paired import StepHistory, compare
from cavvy.capabilities.tuning.probe.look import (
    BusyLines,
    StackSample,
    UserLoop,
    _is_work,
    code_at_work,
    find_between,
    find_loop,
    find_own_line,
    sum_up,
)
from cavvy.capabilities.tuning.probe.modes import WindowModes
from cavvy.capabilities.tuning.probe.plain import LEAST_STEPS, MOST_STEPS
from cavvy.capabilities.tuning.session import ScriptError, TimeLimitReached, TuningSession
from cavvy.capabilities.tuning.text import describe
from cavvy.capabilities.tuning.tune import PlanTrial, PlanTuner, list_changes
from cavvy.cli.main import cli
from cavvy.train.data.staging import count_staged
from cavvy.train.micro import MicroBatch
from cavvy.train.plan import Plan

pytestmark = pytest.mark.usefixtures("warm")
SCRIPT = str(Path(__file__).parents[2].joinpath("train", "tuned.py"))
PLAIN_SCRIPT = str(Path(__file__).parents[2].joinpath("train", "plain.py"))
FACTS: dict[str, Any] = {
    "name": "cpu",
    "device": "cpu",
    "ranks": 1,
    "samples": 1000,
    "global_batch": 10,
    "micro_batch": 10,
    "cores": 4,
    "staged": 0,
    "in_memory": False,
    "tensor_cores": False,
    "split": False,
    "loop": False,
    "plan": {
        "threads": 2,
        "workers": 0,
        "prefetch": 2,
        "pin": True,
        "recompute": False,
        "precision": "fp32",
        "micro_batch": 0,
    },
}


def test_a_gain_is_beyond_noise_by_students_t() -> None:
    sure = compare([1.0, 1.1, 0.9], [0.5, 0.6, 0.4])
    assert sure.mean == pytest.approx(0.5)
    assert sure.is_gain
    wide = compare([1.0, 1.0, 1.0], [0.9, 0.5, 1.0])
    assert wide.mean == pytest.approx(0.2)
    assert wide.half == pytest.approx(4.303 * 0.0700**0.5 / 3**0.5, rel=1e-3)
    assert not wide.is_gain
    assert compare([2.0], [1.0]).half == inf
    assert not compare([2.0], [1.0]).is_gain
    worse = compare([1.0, 1.0, 1.0], [2.0, 2.1, 2.0])
    assert worse.mean < -worse.half
    assert not worse.is_gain


def test_pairs_that_all_agree_are_sure_from_five_on_and_told_as_such() -> None:
    """Four of one mind come by chance once in 16 times, five once in 32; the interval may reach
    zero by one outlier.
    """
    assert not compare([1.0, 1.0, 9.0, 1.0], [0.9] * 4).agree
    found = compare([1.0, 1.0, 9.0, 1.0, 1.0], [0.9] * 5)
    assert found.agree
    assert not found.is_gain
    assert not compare([1.0, 1.0, 9.0, 0.8, 1.0], [0.9] * 5).agree

    class Jolted(Played):
        """One of its windows with the last batch again took far longer than the others."""

        count = 0

        def measure(
            self, mode: str = "", *, steps: int, skip: int, **more: Any
        ) -> list[dict[str, Any]]:
            self.count += mode == "cached" and not more
            late = 90.0 if mode == "cached" and not more and self.count == 2 else 0.0
            told = super().measure(mode, steps=steps, skip=skip, **more)
            for each in told:
                each["steps"] = [seconds + late / 1e3 for seconds in each["steps"]]
                each["parts"]["compute"] = [
                    seconds + late / 1e3 for seconds in each["parts"]["compute"]
                ]
            return told

    def diagnose(rounds: int) -> str:
        played: Any = Jolted(2, alone={"step": 4.0}, double={"step": 100.0})
        return describe(Diagnoser(played, steps=4, rounds=rounds).diagnose(), None)

    assert "1. slow collective: 6.0 (6.0 to 96.0 in all pairs) of 10.0 ms" in diagnose(5)
    assert "slow collective" not in diagnose(4)


def test_dollars_are_seconds_of_all_steps_at_the_price() -> None:
    finding = CostFinding("slow storage", 0.014, 0.001, True, "reads", "go near")
    found = Diagnosis(FACTS, 0.034, {"": [0.034]}, [finding])
    text = describe(found, 36.0)
    assert "1. slow storage: 14.0 (+- 1.0) of 34.0 ms = $0.014 an epoch" in text
    assert "$0.034 an epoch" in text
    assert "$" not in describe(found, None)
    assert "no single cause costs more than" in describe(Diagnosis(FACTS, 0.034, {}, []), None)


def test_only_exact_changes_unless_told_otherwise() -> None:
    assert all(exact for _, exact in list_changes(FACTS, numerics=False))
    gpu = {**FACTS, "device": "cuda", "tensor_cores": True}
    every = list_changes(gpu, numerics=True)
    exact = [is_exact for _, is_exact in every]
    assert exact == sorted(exact, reverse=True)
    assert ({"precision": "bf16"}, False) in every
    assert ({"channels_last": True}, False) in every
    assert list_changes({**FACTS, "in_memory": True}, numerics=False) == []


@pytest.mark.parametrize(
    ("fault", "ranks", "cause"),
    [("data", 1, "too few workers"), ("python", 2, "python-bound loop")],
)
def test_the_planted_fault_is_first(fault: str, ranks: int, cause: str, tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    with TuningSession(SCRIPT, [fault], ranks=ranks) as session:
        assert session.facts["ranks"] == ranks
        found = Diagnoser(session, steps=5, rounds=4, trace=str(trace)).diagnose()
        told = session.measure("alone", steps=3, skip=1)
    assert found.findings[0].cause == cause
    assert found.findings[0].lost_s > 0
    assert json.loads(trace.read_text())["traceEvents"]
    if fault == "python":
        assert "tuned.py" in found.findings[0].evidence
    assert [each["rank"] for each in told] == list(range(ranks))
    assert all(len(each["steps"]) == len(each["parts"]["communication"]) == 3 for each in told)


@pytest.mark.parametrize(
    ("fault", "ranks", "cause", "word"),
    [
        ("data", 1, "too few workers", "num_workers=0"),
        ("memory", 2, "batch preparation", "plain.py:"),
        ("save", 1, "work between steps", "plain.py:"),
    ],
)
def test_a_plain_loop_is_measured_and_leaves_no_files(
    fault: str, ranks: int, cause: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with TuningSession(PLAIN_SCRIPT, [fault], ranks=ranks) as session:
        assert session.is_plain
        found = judge_plain(session.reports)
        assert [each["rank"] for each in session.reports] == list(range(ranks))
    assert list(tmp_path.iterdir()) == []
    assert found.findings[0].cause == cause
    assert word in found.findings[0].evidence
    assert 0.02 < found.findings[0].lost_s <= found.step_s
    assert (found.facts["global_batch"], found.facts["samples"]) == (8 * ranks, 800)
    assert "samples/s" in describe(found, 1.0)
    assert all(each["parts"]["checkpoint"] > 0 for each in session.reports) == (fault == "save")


LIMITED_SCRIPT = """
import os, sys, time, torch
assert float(os.environ["CAVVY_TUNE_UNTIL"]) == float(sys.argv[1])
os.environ["CAVVY_TUNE_UNTIL"] = str(time.monotonic() + 4)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""
GRAPHS_SCRIPT = """
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
graphs = [torch.randn(5, 8) for _ in range(200)]
for graph in torch.utils.data.DataLoader(graphs, batch_size=4, collate_fn=torch.cat):
    model(graph).sum().backward()
    optimizer.step()
"""


def test_a_plain_loop_reports_before_the_time_limit(tmp_path: Path) -> None:
    script, until = tmp_path / "train.py", monotonic() + PATIENCE_S
    script.write_text(LIMITED_SCRIPT)
    with TuningSession(str(script), [str(until)], until=until) as session:
        assert LEAST_STEPS <= len(session.facts["steps"]) < MOST_STEPS


def test_the_samples_of_a_plain_loop_are_those_of_its_loader(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(GRAPHS_SCRIPT)
    with TuningSession(str(script)) as session:
        assert session.facts["batch"] == 4


@pytest.mark.parametrize(
    ("device", "parts", "workers", "cause", "lost_ms", "fix"),
    [
        ("cpu", {"transfer": 2.0, "prepare": 3.0}, 0, "batch preparation", 5.0, "DataLoader"),
        ("cuda", {"transfer": 4.0, "prepare": 1.0}, 0, "host-device copies", 4.0, "pin_memory"),
        ("cpu", {"data": 4.0}, 0, "too few workers", 4.0, "DataLoader(num_workers=4)"),
        ("cpu", {"data": 4.0}, 4, "slow data", 4.0, "convert the data once"),
        ("cpu", {"checkpoint": 4.0}, 0, "slow checkpoint", 4.0, "in the background"),
        ("cpu", {"own": 30.0}, 0, "work between steps", 10.0, "vectorize"),
    ],
)
def test_the_parts_of_a_plain_loop_are_its_costs(
    device: str, parts: dict[str, float], workers: int, cause: str, lost_ms: float, fix: str
) -> None:
    names = ("data", "transfer", "compute", "optimizer", "checkpoint", "prepare", "own")
    report = {
        "rank": 0,
        "ranks": 1,
        "name": device,
        "device": device,
        "cores": 4,
        "workers": workers,
        "batch": 8.0,
        "samples": 800,
        "steps": [0.01] * 5,
        "parts": {name: parts.get(name, 0.0) / 1e3 for name in names},
        "lines": [("a.py:1", 0.5)],
    }
    found = judge_plain([report])
    assert found.findings[0].cause == cause
    assert found.findings[0].lost_s == pytest.approx(lost_ms / 1e3)
    assert fix in found.findings[0].fix
    assert found.step_s == pytest.approx(0.01)


def test_a_script_with_a_run_and_a_loop_of_its_own_ends_after_a_few_steps(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import torch\n"
        "from cavvy import train\n"
        "train.Run(device='cpu')\n"
        "weight = torch.nn.Parameter(torch.ones(1))\n"
        "while True:\n"
        "    torch.optim.SGD([weight]).step()\n"
    )
    with pytest.raises(ScriptError, match=r"has no loop over `run\.batches`"):
        TuningSession(str(script)).close()


def test_a_session_ends_at_its_time_limit_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(TimeLimitReached, match="the time limit has passed"):
        TuningSession(SCRIPT, until=monotonic())
    assert list(tmp_path.iterdir()) == []


def test_a_tuning_stops_at_its_time_limit() -> None:
    class Tuner(PlanTuner):
        def _start(self, plan: Any) -> Any:
            return Played(1, facts={"in_memory": False})

        def _try(self, best: Any, change: dict[str, Any], exact: bool) -> Any:
            self._until = 0.0
            return PlanTrial(change, exact, 1.0, 1.0, None, False), best

    tuner = Tuner("train.py", until=monotonic() + 1e6)
    assert len(list(tuner.run())) == 1
    assert tuner.is_over


def test_a_command_that_is_terminated_leaves_nothing(tmp_path: Path) -> None:
    script, temporary = tmp_path / "train.py", tmp_path / "tmp"
    temporary.mkdir()
    script.write_text(
        "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(1e4)\n"
    )
    command = [str(Path(sys.executable).with_name("cavvy")), "tune", str(script)]
    env = {**os.environ, "TMPDIR": str(temporary)}
    # PyTorch makes this when its compiler is imported, which may be before or after the signal
    env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "compiled")
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL) as process:
        wait_until((tmp_path / "pid").exists)
        process.terminate()
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert list(temporary.iterdir()) == []


def test_a_script_ends_when_its_session_is_killed(tmp_path: Path) -> None:
    where = tmp_path / "s"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(where))
    listener.listen()
    code = (
        "import threading\n"
        "from cavvy.capabilities.tuning.probe import child\n"
        "child._CLOSE_S = 0\n"
        f"channel = child.ProbeChannel({str(where)!r})\n"
        "threading.Event().wait()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    listener.accept()[0].close()
    assert process.wait(60) == -signal.SIGKILL
    listener.close()


@pytest.mark.parametrize(("ranks", "passes"), [(1, 4), (2, 3), (1, 1)])
def test_what_a_loop_over_epochs_does_between_two_is_found_and_what_follows_the_loop_is_not_run(
    ranks: int, passes: int, tmp_path: Path
) -> None:
    after = tmp_path / "after"
    with TuningSession(SCRIPT, ["epoch", str(passes), str(after)], ranks=ranks) as session:
        found = Diagnoser(session, steps=5, rounds=4).diagnose()
    causes = [each.cause for each in found.findings]
    assert not after.exists()
    if passes == 1:  # there is no second one to come to
        assert "work between epochs" not in causes
        return
    finding = found.findings[causes.index("work between epochs")]
    assert finding.lost_s > 0
    assert re.search(r"% of it at .*tuned\.py:\d+$", finding.evidence)


def test_a_loop_is_found_from_what_it_calls_and_guarded_where_it_ends() -> None:
    class Left(BaseException):
        pass

    def around() -> UserLoop | None:
        for _ in range(2):
            pass
        return find_loop(sys._getframe(1))

    def learn(done: list[int]) -> None:
        for number in range(3):
            if number == 0:
                loop = (lambda: around())()
                assert loop is not None
                loop.guard(Left)
                continue
            try:
                done.append(number)
            finally:
                done.append(-number)
        done.append(0)

    with ThreadPoolExecutor(1) as thread:  # the tests themselves are run by a loop
        assert thread.submit(around).result() is None, "a loop that is over is none"
    done: list[int] = []
    before = sys.gettrace()
    try:
        with pytest.raises(Left):
            learn(done)
    finally:
        sys.settrace(before)
    assert done == [1, -1, 2, -2]


class Played:
    """A session whose windows are made up: what each mode's steps take on each rank, in
    milliseconds.
    """

    def __init__(self, ranks: int, **modes: Any) -> None:
        self.facts = {
            **FACTS,
            "ranks": ranks,
            "interval": modes.pop("interval", None),
            "in_memory": True,
        }
        if "micro" in modes:
            self.facts |= {
                "micro_batch": modes["micro"],
                "plan": {**FACTS["plan"], "micro_batch": modes.pop("micro")},
            }
        self.facts |= modes.pop("facts", {})
        self._modes = modes

    def close(self) -> None: ...

    def measure(
        self, mode: str = "", *, steps: int, skip: int, **more: Any
    ) -> list[dict[str, Any]]:
        told = []
        for rank in range(self.facts["ranks"]):
            said = {"step": 10.0, "waits": 0.0, "own": 0.0, "sent": 0.0, "saving": 0.0}
            said |= {"python": 0.0, "work": 0.0, "file": 0.0, **self._modes.get("all", {})}
            size = {
                "micro": self.facts["micro_batch"] * (2 if mode == "larger" else 1),
                **self._modes.get(mode, {}),
            }
            said |= {
                name: value for name, value in self._modes.get(mode, {}).items() if name != "micro"
            }
            said = {
                name: (value[rank] if isinstance(value, tuple) else value) / 1e3
                for name, value in said.items()
            }
            parts = {
                "data": 0.0,
                "transfer": said["sent"],
                "communication": said["waits"],
                "checkpoint": said["saving"],
            }
            parts["compute"] = (
                said["step"] - sum(parts.values()) - said["python"] - said["work"] - said["file"]
            )
            seconds, own = said["step"], said["own"] / said["step"]
            between = {
                "python": said["python"],
                "work": said["work"],
                "saving": said["file"],
                "loop": 0.0,
            }
            told.append(
                {
                    "rank": rank,
                    "seconds": seconds,
                    "steps": [seconds] * steps,
                    "idle": seconds / 2,
                    "parts": {name: [value] * steps for name, value in parts.items()},
                    "every": {
                        "checkpoint": [said["saving"]] * steps,
                        "transfer": [said["sent"]] * steps,
                        "between": [sum(between.values())] * steps,
                    },
                    "between": {name: round(value * 1e6) for name, value in between.items()},
                    "own": own,
                    "micro_batch": size["micro"],
                    "lines": {kind: [["train.py:7", own]] for kind in ("python", "saving", "work")},
                }
            )
        return told


def test_rounds_stop_at_the_time_limit() -> None:
    found = Diagnoser(Played(1), steps=4, rounds=50, limit_s=0).diagnose()  # type: ignore[arg-type]
    assert len(found.seconds[""]) == 2


def test_no_part_is_larger_than_the_step() -> None:
    assert first(Played(1, all={"own": 15.0})) == ("python-bound loop", 10.0)


def first(played: Any) -> tuple[str, float]:
    """The first cause and what it costs, in milliseconds."""
    found = Diagnoser(played, steps=4, rounds=4).diagnose().findings
    return (found[0].cause, round(found[0].lost_s * 1e3, 3)) if found else ("", 0.0)


def test_what_does_not_grow_with_the_batch_is_a_tiny_batch_only_where_nothing_else_explains_it() -> (
    None
):
    assert first(Played(1, double={"step": 11.0})) == ("tiny batch", 9.0)
    assert first(Played(1, double={"step": 20.0})) == ("", 0.0)
    assert first(Played(1, all={"own": 8.0}, double={"step": 12.0})) == ("python-bound loop", 8.0)
    late: dict[str, Any] = {"all": {"waits": (7.0, 0.1)}, "double": {"step": 13.0}}
    assert first(Played(2, **late)) == ("straggler rank", 6.9)
    assert first(Played(2, alone={"step": 4.0}, double={"step": 14.0})) == ("slow collective", 6.0)
    assert first(Played(2, all={"waits": 5.0}, double={"step": 15.0})) == ("slow collective", 5.0)
    assert first(Played(1, all={"sent": 4.0}, double={"step": 20.0})) == ("host-device copies", 4.0)
    assert first(Played(1, all={"sent": 9.0}, double={"step": 11.0})) == ("host-device copies", 9.0)


def test_what_lies_between_the_steps_parts_is_told_by_what_was_at_work_there() -> None:
    assert first(Played(1, all={"python": 6.0}, double={"step": 14.0})) == (
        "python-bound loop",
        6.0,
    )
    assert first(Played(1, all={"work": 6.0}, double={"step": 14.0})) == ("work between steps", 6.0)
    assert first(Played(1, all={"file": 6.0}, double={"step": 14.0})) == ("slow checkpoint", 6.0)
    assert first(Played(1, all={"saving": 6.0}, double={"step": 14.0})) == ("slow checkpoint", 6.0)
    assert (
        first(Played(2, all={"python": (0.0, 6.0), "waits": (6.0, 0.0)}, double={"step": 14.0}))[0]
        == "straggler rank"
    )


class Seldom(Played):
    """Its first rank alone does something in one step of ten; where this is not `seen`, in none
    that are looked at.
    """

    def __init__(self, kind: str, *, traced: float = 10.0, is_seen: bool = True) -> None:
        super().__init__(2, double={"step": 20.0})
        self._kind, self._steps, self._traced, self._is_seen = kind, 0, traced, is_seen
        self.looks: list[tuple[int, str]] = []  # steps, and the trace's file

    def measure(
        self, mode: str = "", *, steps: int, skip: int, **more: Any
    ) -> list[dict[str, Any]]:
        told = super().measure(mode, steps=steps, skip=skip, **more)
        self.looks += [(steps, more.get("trace", ""))] if more else []
        if self._is_seen or not more:
            told[0]["every"]["between"] = [
                0.1 * (n % 10 == 0) for n in range(self._steps, self._steps + steps)
            ]
        told[0]["between"][self._kind] = 1
        for each in told if "trace" in more else []:
            each["seconds"] = self._traced / 1e3
        self._steps += steps
        return told


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("python", "python-bound loop"),
        ("work", "work between steps"),
        ("saving", "slow checkpoint"),
    ],
)
def test_what_one_rank_does_in_few_steps_keeps_all_of_them_waiting(kind: str, cause: str) -> None:
    assert first(Seldom(kind)) == (cause, 10.0)


@pytest.mark.parametrize("kind", ["python", "work", "saving"])
def test_what_no_look_saw_is_no_fault_of_what_they_saw(kind: str) -> None:
    assert first(Seldom(kind, is_seen=False)) == ("", 0.0)


@pytest.mark.parametrize(
    ("traced", "most", "steps"), [(10.0, 100, 41), (10.0, 20, 20), (1000.0, 100, 15), (5e3, 9, 4)]
)
def test_a_trace_of_what_comes_seldom_is_short_and_not_kept(
    traced: float, most: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cavvy.capabilities.tuning.diagnose.MOST_TRACED", most)
    played: Any = Seldom("work", traced=traced)
    Diagnoser(played, steps=4, rounds=4, trace="x.json").diagnose()
    assert played.looks == [(4, "x.json"), (4, "")] * 4 + [(steps, "-"), (41, "")]


def test_python_that_comes_once_a_pass_is_the_micro_batchs_fault() -> None:
    passes = {"all": {"own": 8.0}, "larger": {"own": 4.0, "step": 6.0}, "micro": 1}  # of ten
    assert first(Played(1, **passes)) == ("tiny micro-batch", 7.2)
    assert first(Played(1, **{**passes, "larger": {"own": 8.0}})) == ("python-bound loop", 8.0)


@pytest.mark.parametrize(("micro", "lost"), [(5, 3.0), (4, 6.0), (3, 4.5), (1, 5.4)])
def test_a_tiny_micro_batch_costs_all_passes_but_one(micro: int, lost: float) -> None:
    """Of ten samples: 2, 3, 4 and 10 passes, of which the half, rounded up, is 3 ms faster."""
    assert first(Played(1, larger={"step": 7.0}, micro=micro)) == ("tiny micro-batch", lost)


def test_what_does_not_fit_into_memory_tells_nothing_of_sizes() -> None:
    assert first(Played(1, double={"step": 10.0, "micro": 5})) == ("", 0.0)
    assert first(Played(1, larger={"step": 7.0, "micro": 2}, micro=2)) == ("", 0.0)
    found: dict[str, Any] = {
        "facts": {"micro_batch": 4},
        "larger": {"step": 7.0},
        "double": {"step": 10.0},
    }
    assert first(Played(1, **found)) == ("", 0.0), "Cavvy found it: no more fit"


def test_a_mode_that_ran_out_of_memory_leaves_the_size_as_it_was() -> None:
    modes, micro = WindowModes(), MicroBatch("gpu", {"gpu": 8})
    device = SimpleNamespace(kind="cuda")
    modes.run = SimpleNamespace(
        _state=SimpleNamespace(micro=micro), world=SimpleNamespace(device=device)
    )
    sizes = []
    for name in ("cached", "double", "cached", "larger", "larger", "cached"):
        modes.choose(name)
        sizes.append(micro.size)
        if name in ("double", "larger"):
            micro.shrink(micro.size)
    assert sizes == [8, 8, 8, 16, 16, 8]
    micro.shrink(8)  # without any mode's doing: as training itself would go on
    modes.choose("double")
    assert micro.size == 4
    device.kind = "cpu"  # where memory is no limit
    modes.choose("larger")
    assert micro.size == 16


def test_what_a_device_runs_is_work_whatever_its_name() -> None:
    cpu, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    events = [
        ("aten::add", cpu, False),
        ("cudaLaunchKernel", cpu, False),
        ("Memcpy HtoD", cuda, False),
    ]
    events.append(("Optimizer.step", cuda, True))
    told = [
        SimpleNamespace(name=n, device_type=device, is_user_annotation=named)
        for n, device, named in events
    ]
    assert [_is_work(each) for each in told] == [True, False, True, False]


class Reading(Played):
    """Its data comes slowly, also with more workers; `tried` are the commands with other readers.
    `waits`: of a step for data, by rank; every `one_in` steps.
    """

    def __init__(
        self, cores: int, workers: int = 2, waits: tuple[float, ...] = (8.0,), one_in: int = 1
    ) -> None:
        plan = {**FACTS["plan"], "workers": workers}
        cached = 10.0 - (max(waits) if one_in == 1 else 0.0)
        super().__init__(
            len(waits),
            cached={"step": cached},
            alone={"step": cached},
            double={"step": 2 * cached},
            facts={"in_memory": False, "cores": cores, "plan": plan},
        )
        self.tried: list[dict[str, Any]] = []
        self._waits, self._one_in = waits, one_in

    def measure(
        self, mode: str = "", *, steps: int, skip: int, **more: Any
    ) -> list[dict[str, Any]]:
        self.tried += [{"skip": skip, **more["reading"]}] if "reading" in more else []
        told = super().measure(mode, steps=steps, skip=skip, **more)
        for each, wait in zip(told, self._waits, strict=True):
            if mode == "":
                late = [wait / 1e3 if n % self._one_in == 0 else 0.0 for n in range(steps)]
                each["parts"] |= {"data": late, "compute": [0.01 - seconds for seconds in late]}
        return told

    def ask(self, _: Any) -> list[dict[str, Any]]:
        return [
            {"read": [0.001, 0.0], "transform": [0.004, 0.004], "collate": [0.0, 0.0]}
            for _ in self._waits
        ]


def test_data_that_comes_late_on_one_rank_alone_makes_it_a_straggler() -> None:
    assert first(Reading(2, waits=(0.0, 8.0))) == ("straggler rank", 8.0)
    assert first(Reading(2, waits=(7.0, 8.0))) == ("slow decode", 8.0)


def test_data_in_memory_that_comes_late_is_found() -> None:
    assert first(Played(1, double={"step": 100.0}, **{"": {"step": 14.0}})) == (
        "slow data in memory",
        4.0,
    )
    assert first(Played(1, double={"step": 100.0}, **{"": {"step": 10.2}})) == ("", 0.0)


def test_data_that_comes_late_in_few_steps_costs_something_in_each() -> None:
    played: Any = Reading(2, waits=(40.0,), one_in=10)
    found = Diagnoser(played, steps=21, rounds=4).diagnose().findings
    assert found[0].cause == "slow decode"
    assert found[0].lost_s == pytest.approx(0.004)


@pytest.mark.parametrize(("cores", "workers"), [(4, 4), (64, 16)])
def test_a_trial_of_more_workers_skips_no_more_steps_than_can_be_waited_for(
    cores: int, workers: int
) -> None:
    played = Reading(cores)
    found = Diagnoser(played, steps=4, rounds=4).diagnose().findings  # type: ignore[arg-type]
    assert found[0].cause == "slow decode"
    assert played.tried == [{"skip": 6 * workers, "workers": workers, "threads": 2}]


def test_each_window_skips_the_batches_of_the_former_mode_that_are_copied_ahead() -> None:
    skips: list[list[int]] = []
    for device in ("cpu", "cuda"):
        played: Any = Reading(4)
        played.facts["staged"] = count_staged(torch.device(device))
        measure = played.measure
        skips.append([])

        def note(mode: str = "", *, skip: int, measure: Any = measure, **more: Any) -> Any:
            skips[-1].append(skip)
            return measure(mode, skip=skip, **more)

        played.measure = note
        Diagnoser(played, steps=4, rounds=4).diagnose()
    assert skips[0]
    assert skips[1] == [skip + 2 for skip in skips[0]]


def test_a_look_is_sorted_by_where_it_was_and_what_its_line_is_at() -> None:
    lines = BusyLines()
    told = [(10_000, "a.py:1"), (50_000, "a.py:1"), (60_000, "a.py:1"), (200_000, "b.py:2")]
    lines.learn(
        [StackSample(at, 1_000_000, True, line) for at, line in told], [(30_000, 90_000)], steps=1
    )
    assert not lines.is_python("a.py:1"), "one look beside its operation does not make it Python"
    assert lines.is_python("b.py:2")
    assert not lines.is_python("c.py:3")
    looks = [
        StackSample(1, 10, True, "a.py:1"),
        StackSample(2, 10, True, "b.py:2"),
        StackSample(3, 20, False, "a.py:1"),
        StackSample(4, 30, False, "b.py:2"),
        StackSample(5, 40, False, "b.py:2", "saving"),
        StackSample(6, 50, False, ""),
    ]
    found = sum_up(looks, 200, lines)
    assert found["own"] == 10 / 200
    assert found["between"] == {"python": 30, "saving": 40, "work": 20, "loop": 50}
    assert found["lines"] == {
        "python": [("b.py:2", 40 / 200)],
        "work": [("a.py:1", 20 / 200)],
        "saving": [("b.py:2", 40 / 200)],
    }


@pytest.mark.parametrize(("steps", "is_python"), [(1, True), (9, False)])
def test_many_tiny_operations_of_one_line_are_a_loop_in_python(steps: int, is_python: bool) -> None:
    lines = BusyLines()
    lines.learn([StackSample(45_000, 1_000_000, True, "a.py:1")], [(40_000, 51_000)], steps)
    assert lines.is_python("a.py:1") is is_python


def test_what_keeps_the_interpreter_for_itself_counts_as_long_as_it_took() -> None:
    lines = BusyLines()
    seen = [
        StackSample(1_000, 30_000_000, True, "sort.py:1"),
        *(StackSample(1_000, 1_000_000, True, "") for _ in range(10)),
    ]
    lines.learn(seen, [], steps=1)
    assert sum_up(seen, 40_000_000, lines)["own"] == 0.75


def test_what_one_rank_alone_does_in_python_makes_it_a_straggler() -> None:
    played = Played(2, all={"own": (0.0, 6.0), "waits": (6.0, 0.0)}, double={"step": 14.0})
    assert first(played) == ("straggler rank", 6.0)


def test_saves_cost_what_they_keep_waiting_by_the_script_or_by_the_clock() -> None:
    assert first(Played(1, all={"saving": 3.0}, double={"step": 20.0})) == ("slow checkpoint", 3.0)
    # a window of four steps with 400 ms of saving, each two seconds: 200 steps of 10 ms
    assert first(Played(1, interval=2.0, saving={"saving": 100.0}, double={"step": 20.0})) == (
        "slow checkpoint",
        2.0,
    )
    assert first(Played(1, interval=None, saving={"saving": 100.0}, double={"step": 20.0})) == (
        "",
        0.0,
    )


def test_a_line_counts_where_it_or_what_it_calls_works_but_not_in_the_training_loop() -> None:
    here = sys._getframe()
    assert find_own_line(here) == f"{__file__}:{here.f_lineno}"
    asked: list[str] = []
    sorted([2, 1], key=lambda n: asked.append(find_own_line(sys._getframe())) or n)  # type: ignore[func-returns-value]
    json.dumps({"a": Asking(asked)}, default=lambda thing: thing.ask())
    torch.nn.Linear(1, 1).apply(lambda module: asked.append(find_own_line(sys._getframe().f_back)))
    assert all(line.startswith(__file__) for line in asked[:3])
    assert asked[3:] == [""]


def test_a_compiled_models_own_files_are_not_the_users() -> None:
    asked: list[str] = []
    code = compile("asked.append(find(sys._getframe()))", "/tmp/torchinductor_me/ab/cab.py", "exec")
    exec(code, {"asked": asked, "find": find_own_line, "sys": sys})
    assert asked[0].startswith(__file__)


def test_between_the_steps_it_counts_who_was_called_and_by_which_name() -> None:
    loop, told = code_at_work(), []

    def look(*_: Any) -> None:
        told.append(find_between(sys._getframe(1), loop)[1])

    def save_weights() -> None:
        look()

    def evaluate() -> None:
        look()
        torch.save({"state": Asking(told, look)}, io.BytesIO())

    def save_if_best() -> None:
        torch.nn.Linear(1, 1).apply(look)
        evaluate()

    def log() -> None:
        exec(
            compile("look()", f"{Path(torch.__file__).parent}/utils/tensorboard/writer.py", "exec"),
            {"look": written},
        )

    written = torch.no_grad()(look)
    look()
    save_weights()
    evaluate()
    torch.nn.Linear(1, 1).apply(look)
    assert told == ["", "saving", "work", "saving", "work"]
    told.clear()
    save_if_best()
    assert told == ["saving", "work", "saving"], (
        "an evaluation is one also where it is asked whether to save"
    )
    told.clear()
    torch.no_grad()(save_weights)()
    torch.no_grad()(lambda: look())()
    log()
    assert told == ["saving", "", ""], (
        "what only stands between, or writes a log, is Python or not as any other line"
    )
    line, _ = find_between(sys._getframe(), loop)
    assert line.startswith(__file__)


@pytest.mark.parametrize(("period", "first"), [(5, 0), (50, 17)])
def test_what_comes_in_few_steps_has_its_cost_in_each_in_whatever_windows_it_falls(
    period: int, first: int
) -> None:
    every = StepHistory()
    for window in range(20):
        steps = [
            0.5 if (step - first) % period == 0 else 0.001
            for step in range(15 * window, 15 * window + 15)
        ]
        every.add([{"between": steps}], is_clean=window % 3 == 0)
    assert every.period("between", 0) == period
    assert every.mean("between", 0) == pytest.approx(0.001 + 0.499 / period)


def test_what_comes_in_each_step_is_the_middle_one() -> None:
    every = StepHistory()
    every.add([{"between": [0.010] * 20 + [0.050]}], is_clean=True)
    assert every.mean("between", 0) == 0.010
    assert every.period("between", 0) == 1


@pytest.mark.parametrize(
    "far",
    [[10, 11, 12], [*range(9), 440], [100, 101, 300, 301]],
    ids=["hiccups", "more at first", "two at once"],
)
def test_what_comes_irregularly_counts_as_often_as_it_came(far: list[int]) -> None:
    every = StepHistory()
    for window in range(30):
        steps = [0.01 if step in far else 0.00005 for step in range(15 * window, 15 * window + 15)]
        every.add([{"between": steps}], is_clean=window % 3 == 0)
    assert every.period("between", 0) == 450 / len(far)
    assert every.mean("between", 0) == pytest.approx(0.00005 + 0.00995 * len(far) / 450)


def test_what_hiccups_in_clean_windows_alone_is_not_told_of_each_step() -> None:
    every = StepHistory()
    every.add([{"between": [0.001] * 44 + [0.010] * 6}], is_clean=True)
    every.add([{"between": [0.001] * 450}], is_clean=False)
    assert every.mean("between", 0) == pytest.approx(0.001 + 0.009 * 6 / 500)


def test_a_window_that_a_closer_look_slows_down_holds_nothing_that_comes_seldom() -> None:
    every = StepHistory()
    for window in range(21):
        is_traced = window % 7 == 3
        every.add(
            [{"between": [0.001] * 2 + [0.008 if is_traced else 0.001] * 13}],
            is_clean=not is_traced,
        )
    assert every.period("between", 0) == 1
    assert every.mean("between", 0) == 0.001


class Asking:
    def __init__(self, asked: list[str], look: Any = None) -> None:
        self._asked, self._look = asked, look

    def ask(self) -> int:
        self._asked.append(find_own_line(sys._getframe()))
        return 0

    def __reduce__(self) -> Any:
        self._look()
        return int, ()


def test_what_helps_is_kept_and_written_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tempfile.mkdtemp()  # a short path, since a socket will lie there
    monkeypatch.setattr(tempfile, "tempdir", place)
    monkeypatch.setenv("TMPDIR", place)
    monkeypatch.setattr(
        "cavvy.capabilities.tuning.tune.list_changes",
        lambda *_, **__: [({"threads": 8}, True), ({"bad": 1}, True)],
    )
    plan, page = tmp_path / "plan.json", tmp_path / "page.html"
    line = [
        "tune",
        "--pairs",
        "4",
        "--steps",
        "8",
        "--price",
        "3",
        "--plan",
        str(plan),
        "--report",
        str(page),
        SCRIPT,
        "data",
    ]
    result = CliRunner().invoke(cli, line)
    assert result.exit_code == 0, result.output
    assert {path.name for path in Path(place).iterdir()} <= {
        f"torchinductor_{getpass.getuser()}"
    }  # torch's own
    shutil.rmtree(place)
    assert result.stderr.splitlines()[1:] == ["trying    threads=8", "trying    bad=1"]
    assert "kept      threads=8" in result.stdout
    assert (
        "reverted  bad=1: ValueError: unknown keys in a plan: bad" in result.output
    )  # as every script that fails says why
    written = json.loads(plan.read_text())
    assert written["threads"] == 8
    assert Plan(**written).fit(4).replicas == 4  # it was tuned on one rank, and may run on more
    assert "bad" not in written
    assert "threads=8" in page.read_text()
