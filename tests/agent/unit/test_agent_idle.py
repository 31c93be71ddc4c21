"""Work is idle without output and CPU use, or if its GPUs are used less than the limit."""

from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.agent.config import ConfigFields
from cavvy.agent.notification_socket import TaskReports
from cavvy.agent.work import monitor
from cavvy.agent.work.monitor import WorkMonitor


class Watched:
    """A monitor on a clock that the test moves, with the messages that it sends."""

    def __init__(self, patch: pytest.MonkeyPatch, **limits: Any) -> None:
        self.now = 1000.0
        patch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.usage: Any = SimpleNamespace(
            look=lambda: None,
            known=True,
            cpu_percent=0.0,
            memory_mib=1.0,
            memory_peak_mib=2.0,
            rates={},
        )
        self.monitor = WorkMonitor(
            lambda kind, **fields: self.said.append((kind, fields)),
            self.usage,
            progress="/nowhere",
            checkpoints=None,
            **limits,
        )

    def run(self, minutes: float, cpu: float = 0, gpu: float | None = None) -> tuple[float, str]:
        """Let time pass. Returns how many minutes passed until the work was ended, and why."""
        self.usage.cpu_percent = cpu
        if gpu is not None:
            self.monitor.take_gpus({"gpu_percent": gpu, "gpu_memory_mib": 100})
        for second in range(int(minutes * 60)):
            self.now += 1
            if reason := self.monitor.tick():
                return round(second / 60, 1), reason
        return minutes, ""

    @property
    def warnings(self) -> list[str]:
        return [fields["text"] for kind, fields in self.said if kind == "event"]


def test_a_busy_cpu_beside_an_idle_gpu_is_warned_and_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, idle_s=1800, idle_gpu_percent=5)
    assert watched.run(14.8, cpu=400, gpu=4.9) == (14.8, "")
    assert watched.warnings == []
    assert watched.run(1, cpu=400) == (1, "")
    assert len(watched.warnings) == 1
    assert watched.warnings[0].startswith("GPU use below 5 % for 9")
    ended, reason = watched.run(60, cpu=400)
    assert 13.9 < ended < 15
    assert reason == "GPU use below 5 % for 1800 s"


def test_a_gpu_that_is_used_again_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, idle_s=1800, idle_gpu_percent=5)
    for _ in range(4):
        assert watched.run(29, cpu=100, gpu=0) == (29, "")
        assert watched.run(1, gpu=5) == (1, "")
    assert len(watched.warnings) == 4


def test_a_gpu_that_cannot_be_measured_leaves_the_plain_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, idle_s=1800, idle_gpu_percent=5)
    assert watched.run(120, cpu=100) == (120, "")
    assert watched.run(60)[1] == "no output, no CPU use and no connection in use for 1800 s"


def test_without_a_gpu_limit_a_busy_cpu_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, idle_s=1800)
    assert watched.run(120, cpu=100, gpu=0) == (120, "")


def test_a_node_reports_how_long_its_gpus_have_been_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, idle_s=None)
    watched.run(20, cpu=100, gpu=4)
    assert watched.said[-1][1]["values"]["gpu_idle_s"] == pytest.approx(1200, abs=10)
    watched.run(1, cpu=100, gpu=40)
    assert "gpu_idle_s" not in watched.said[-1][1]["values"]
    watched.monitor.take_gpus({})
    watched.run(20, cpu=100)
    assert "gpu_idle_s" not in watched.said[-1][1]["values"]


def test_the_first_use_is_reported_after_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, idle_s=None)
    watched.run(3 / 60, cpu=100, gpu=99)
    assert [fields["values"]["gpu_percent"] for _, fields in watched.said] == [99]
    watched.run(9 / 60, cpu=100)
    assert len(watched.said) == 1, "then every ten seconds"
    watched.run(1 / 60, cpu=100)
    assert len(watched.said) == 2


def test_means_are_weighted_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, idle_s=None)
    watched.run(10, cpu=100, gpu=90)
    watched.run(30, cpu=20, gpu=10)
    values = watched.said[-1][1]["values"]
    assert values["measured_s"] == pytest.approx(2400, abs=10)
    assert values["cpu_mean_percent"] == pytest.approx(40, abs=1)
    assert values["gpu_mean_percent"] == pytest.approx(30, abs=1)


def test_checkpoints_are_counted_as_the_task_or_the_agent_reports_them() -> None:
    reports = TaskReports()
    assert reports.totals == {}
    reports.saw(2.5)
    reports.saw(1.5)
    assert reports.totals == {"checkpoints": 2, "checkpoint_pause_s": 4}
    reports.hear(ConfigFields({"saved": {"seconds": 0.5}}, "report"))
    reports.saw(9)  # the upload of the checkpoint that the task reported
    assert reports.totals == {"checkpoints": 3, "checkpoint_pause_s": 4.5}
