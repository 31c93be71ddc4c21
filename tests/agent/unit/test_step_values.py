"""Values of steps are sent once each, and bounded."""

import json
from typing import Any

import pytest

from cavvy.agent.work import step_values
from cavvy.agent.work.meters import UsageMeter
from cavvy.agent.work.monitor import WorkMonitor
from cavvy.agent.work.step_values import BYTES_PER_S, LINES_PER_S, MOST_NAMES, StepValueReader


class Sent:
    """Takes what would be sent; its clock stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0
        self.messages: list[tuple[str, dict[str, Any]]] = []

    def say(self, kind: str, **fields: Any) -> None:
        self.messages.append((kind, fields))

    def clock(self) -> float:
        return self.now

    def rows(self, name: str) -> list[tuple[float | None, int, float]]:
        return [
            (row[0], row[1], row[2 + series["names"].index(name)])
            for kind, fields in self.messages
            if kind == "points"
            for series in fields["series"]
            if name in series["names"]
            for row in series["rows"]
        ]


def test_values_are_sent_each_second_with_their_age() -> None:
    sent = Sent()
    values = StepValueReader(sent.say, sent.clock)
    assert values.feed(b"step 1 loss=0.5\n") == {"loss": 0.5}
    sent.now += 0.5
    assert values.feed(b"step 2 loss=0.25 acc=0.5\nstep 3 loss=0.125") == {"loss": 0.25, "acc": 0.5}
    values.tick()
    assert sent.messages == [], "a second is not over"
    sent.now += 0.5
    values.tick()
    assert sent.rows("loss") == [(1, 1000, 0.5), (2, 500, 0.25)]
    assert values.end() == {"loss": 0.125}, "the last line has no end"
    assert sent.rows("loss")[2:] == [(3, 0, 0.125)]


def test_reported_values_have_the_step_that_is_reported_with_them() -> None:
    sent = Sent()
    values = StepValueReader(sent.say, sent.clock)
    values.report({"step": 7, "loss": 0.5, "total": 100, "note": "text", "left_s": 3})
    values.report({"done": 8, "loss": 0.25})
    values.report({"complete": 1})
    values.end()
    assert sent.rows("loss") == [(7, 0, 0.5), (8, 0, 0.25)]
    assert {name for _, each in sent.messages for s in each["series"] for name in s["names"]} == {
        "loss"
    }


def test_reports_in_lines_need_no_name_that_people_plot() -> None:
    sent = Sent()
    values = StepValueReader(sent.say, sent.clock)
    values.feed(b'CAVVY_PROGRESS {"step": 3, "budget_used": 0.5, "total": 9, "note": "x"}\n')
    values.feed(b'CAVVY_PROGRESS {"budget_used": 1e999}\nCAVVY_PROGRESS {"a": [1}\n')
    values.feed(b"CAVVY_PROGRESS {" + b"[" * 3000 + b"\n")
    values.end()
    assert sent.rows("budget_used") == [(3, 0, 0.5)]
    assert {name for _, each in sent.messages for s in each["series"] for name in s["names"]} == {
        "budget_used"
    }


def test_what_a_program_reports_is_not_read_from_its_lines_again() -> None:
    """`cavvy.train` writes a file, and a line such as `128/1000 samples  loss 0.5`."""
    sent = Sent()
    values = StepValueReader(sent.say, sent.clock)
    values.report({"done": 128, "total": 1000, "loss": 0.5})
    values.feed(b"128/1000 samples  loss 0.5  acc 0.25\n")
    values.end()
    assert sent.rows("loss") == [(128, 0, 0.5)]
    assert [each[2] for each in sent.rows("acc")] == [0.25]


def test_a_program_that_prints_without_end_is_bounded(monkeypatch: Any) -> None:
    sent = Sent()
    values = StepValueReader(sent.say, sent.clock)
    for number in range(3 * LINES_PER_S):
        values.feed(b"step %d loss=1\n" % number)
    assert len(sent.rows("loss")) <= LINES_PER_S
    sent.now += 1
    values.tick()
    assert len(sent.rows("loss")) == LINES_PER_S
    values.feed(b"step 1 loss=2\n")
    sent.now += 1
    values.tick()
    values.feed(b"x" * BYTES_PER_S)
    for _ in range(3):
        values.feed(b"step 1 bad_loss=3\n" * 1000)
    sent.now += 1
    values.tick()
    values.feed(b"=4 loss=4\nstep 2 good_loss=3\n")
    assert sent.rows("bad_loss") == [], "gigabytes of output are not read"
    for number in range(3 * MOST_NAMES):
        values.report({f"n{number}": number})
    values.end()
    names = {name for _, each in sent.messages for s in each["series"] for name in s["names"]}
    assert len(names) == MOST_NAMES
    assert sent.rows("good_loss") == [(2, 0, 3)]
    assert 4 not in [each[2] for each in sent.rows("loss")], "half a line"
    monkeypatch.setattr(step_values, "THINNED_AFTER", 100)
    sent = Sent()
    values = StepValueReader(sent.say, sent.clock)
    for number in range(1000):
        values.report({"a": number})
    values.end()
    # 100 of 100, 100 of the next 200, 100 of the next 400, and a part of the rest
    assert 300 <= len(sent.rows("a")) <= 400
    assert sent.rows("a")[:100] == [(None, 0, float(each)) for each in range(100)]


def monitor(say: Any, path: str) -> WorkMonitor:
    usage = UsageMeter(None, b"")  # type: ignore[arg-type]
    return WorkMonitor(say, usage, progress=path, checkpoints=None, idle_s=None)


def test_printed_values_are_shown_but_conclude_nothing(tmp_path: Any) -> None:
    """`done` or `fraction` in a line would otherwise say that the work is complete."""
    sent = Sent()
    watch = monitor(sent.say, str(tmp_path / "progress"))
    watch.wrote(b"step 1 loss=0.5 fraction=1 done=3 step_ms=4\n" * 2)
    watch.wrote(b"step 2 loss=0.4 fraction=2 done=4 step_ms=5\n")
    shown: dict[str, object] = {}
    for kind, fields in sent.messages:
        if kind == "progress":
            shown.update(fields["values"])
    assert shown == {"loss": 0.4}
    assert not watch.is_complete()


def test_what_a_program_reports_itself_comes_before_what_it_prints(tmp_path: Any) -> None:
    sent = Sent()
    watch = monitor(sent.say, str(tmp_path / "progress"))
    watch.wrote(b'CAVVY_PROGRESS {"loss": 0.1, "step": 5}\n')
    watch.wrote(b"a different loss: 9\n")
    told = [fields["values"] for kind, fields in sent.messages if kind == "progress"]
    assert told == [{"loss": 0.1, "step": 5}]


def test_the_watch_of_the_work_sends_what_is_printed_and_reported(
    tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(step_values, "SEND_S", 0.0)
    sent, path = Sent(), tmp_path / "progress"
    watch = monitor(sent.say, str(path))
    watch.wrote(b"step 1 loss=0.5\n")
    watch.tick()
    assert [(step, value) for step, _, value in sent.rows("loss")] == [(1, 0.5)], "while it runs"
    path.write_text('{"step": 2, "reward": 7}\n')
    watch.tick()
    assert [(step, value) for step, _, value in sent.rows("reward")] == [(2, 7)]
    watch.wrote(b"step 3 loss=0.25")
    watch.end()
    assert sent.rows("loss")[-1][2] == 0.25, "the last line has no end"


def gaps(sent: Sent, name: str) -> list[tuple[float | None, float]]:
    return [
        (row[0], row[2 + series["names"].index(name)])
        for _, fields in sent.messages
        for series in fields.get("series", ())
        if series.get("odd") and name in series["names"]
        for row in series["rows"]
    ]


def test_values_that_are_no_finite_numbers_are_sent_apart() -> None:
    """JSON has no such numbers."""
    sent = Sent()
    values = StepValueReader(sent.say, sent.clock)
    logged = {"loss": float("nan"), "acc": 0.5, "up": float("inf"), "down": -float("inf")}
    assert values.log(logged, 3) == {"acc": 0.5}
    values.end()
    assert json.loads(json.dumps(sent.messages, allow_nan=False))
    assert gaps(sent, "loss") == [(3, 1.0)]
    assert (gaps(sent, "up"), gaps(sent, "down")) == ([(3, 2.0)], [(3, 3.0)])
    assert sent.rows("acc") == [(3, 0, 0.5)]


def test_a_number_that_is_too_large_for_a_curve_is_a_gap() -> None:
    """So what was reported beside it is kept."""
    sent = Sent()
    values = StepValueReader(sent.say, sent.clock)
    assert values.log({"loss": 1e200, "low": -1e200, "acc": 0.5}, 3) == {"acc": 0.5}
    values.end()
    assert (gaps(sent, "loss"), gaps(sent, "low")) == ([(3, 2.0)], [(3, 3.0)])
    assert sent.rows("acc") == [(3, 0, 0.5)]


def test_a_loss_that_is_printed_as_no_number_is_a_gap() -> None:
    sent = Sent()
    values = StepValueReader(sent.say, sent.clock)
    lines = b"step 1 loss=0.5\nstep 2 loss=nan\n{'loss': nan, 'epoch': 2.0}\nstep 4 loss: inf acc: 0.5\n"
    assert values.feed(lines) == {"loss": 0.5, "acc": 0.5}
    values.end()
    assert gaps(sent, "loss") == [(2, 1.0), (2, 1.0), (4, 2.0)]
    assert sent.rows("acc") == [(4, 0, 0.5)]


@pytest.mark.parametrize(
    "line",
    [
        b"lossy nan\n",
        b"the loss inf order to learn\n",
        b"loss: nan-safe mode\n",
        b"loss=info\n",
        b"val_loss improved from inf to 0.5\n",
        b"epoch=nan loss=1e999\n",
    ],
)
def test_words_that_only_begin_like_no_number_are_none(line: bytes) -> None:
    sent = Sent()
    values = StepValueReader(sent.say, sent.clock)
    values.feed(line)
    values.end()
    assert not any(each.get("odd") for _, fields in sent.messages for each in fields["series"])


def test_processes_of_a_node_have_rows_of_their_own() -> None:
    sent = Sent()
    values = StepValueReader(sent.say, sent.clock)
    assert values.log({"loss": 0.5}, 1) == {"loss": 0.5}
    assert values.log({"loss": 0.75}, 1, process=1) == {}, "the first process tells how far it is"
    values.end()
    [(_, fields)] = sent.messages
    assert [(each.get("process", 0), each["rows"][0][2]) for each in fields["series"]] == [
        (0, 0.5),
        (1, 0.75),
    ]


def test_settings_are_sent_once() -> None:
    sent = Sent()
    values = StepValueReader(sent.say, sent.clock)
    values.describe({"lr": "0.1", "": "x", "long": "y" * 999})
    values.end()
    values.describe({"lr": "0.1"})
    values.end()
    values.describe({"lr": "0.2"})
    values.end()
    assert [fields["params"] for _, fields in sent.messages] == [
        {"lr": "0.1", "long": "y" * 500},
        {"lr": "0.2"},
    ]
