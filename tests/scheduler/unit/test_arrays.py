"""Arrays and sweeps in task files, and the tasks of their jobs."""

import json
import re
from typing import Any

import pytest
from tests.own_parts import reads_other_tools

from cavvy.domain.arrays import count_members, find_phase, list_indices, make_member
from cavvy.domain.shares import QueueRow
from cavvy.domain.tasks import TaskSpec
from cavvy.scheduler.shares import ShareBook, ShareRule, give_turns
from cavvy.spec import SpecError
from cavvy.task_files import ReadOptions, parse_task

RUN = "run: python train.py\n"
PARAMS = "params: {lr: 0.1, n: 1, opt: adam}\n"


def read(text: str, **options: Any) -> TaskSpec:
    """Read a task file, with options of `cavvy run`."""
    return parse_task(text, options=ReadOptions(overrides=json.dumps(options) if options else ""))


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("0-3", [0, 1, 2, 3]),
        ("0-10:5", [0, 5, 10]),
        ("1,3,7-9", [1, 3, 7, 8, 9]),
        ("5-5", [5]),
        (" 2-3 , 0 ", [2, 3, 0]),
    ],
)
def test_indices_of_an_array(text: str, indices: list[int]) -> None:
    task = read(f"{RUN}array: '{text}'\n")
    assert [*list_indices(task)] == indices
    assert count_members(task) == len(indices)
    assert task == read(RUN, array=text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0", "an array of 0 has no jobs"),
        ("8", "write 0-7 for 8 jobs, or 8-8 for one job of index 8"),
        ("1", "write 1-1 for one job of index 1"),
        ("", "is not a range"),
        ("-3", "is not a range"),
        ("0-", "is not a range"),
        ("1,,2", "is not a range"),
        ("a-b", "is not a range"),
        ("1.5-3", "is not a range"),
        ("5-1", "ends before it begins"),
        ("0-9:0", "a step of 0"),
        ("0-10000", "10,001 jobs are too many"),
        ("0-9999999", "10,000,000 jobs are too many"),
        ("99999999-99999999", "is too large"),
        ("1-5,3", "the index 3 is in '1-5,3' twice"),
        ("0-9%3", "`parallel: 3` or --parallel 3"),
    ],
)
def test_wrong_indices(text: str, told: str) -> None:
    for refused in (lambda: read(f"{RUN}array: '{text}'\n"), lambda: read(RUN, array=text)):
        with pytest.raises(SpecError, match=re.escape(told)):
            refused()


def test_a_sweep_has_a_job_for_each_combination() -> None:
    task = read(f"{PARAMS}sweep: {{lr: [1e-3, 0.1], n: 0..2}}\n{RUN}")
    members = [make_member(task, index).params for index in list_indices(task)]
    assert [(each["lr"], each["n"], each["opt"]) for each in members] == [
        (lr, n, "adam") for lr in (0.001, 0.1) for n in (0, 1, 2)
    ]
    assert task == read(f"{PARAMS}{RUN}", sweep={"lr": "1e-3,0.1", "n": "0..2"})


def test_the_options_replace_the_sweep_of_the_file() -> None:
    task = read(f"{PARAMS}sweep: {{lr: [1, 2]}}\n{RUN}", sweep={"n": "0..10:5"})
    assert [(each.name, each.values) for each in task.sweep] == [("n", (0, 5, 10))]
    assert task.params == {"lr": 0.1, "n": 0, "opt": "adam"}


def test_commands_and_variables_get_the_values_as_they_were_written() -> None:
    text = (
        PARAMS + "env: {RATE: '${{ params.lr }}', MARK: 'a$${{ b }}'}\n"
        "run: 'train ${{ params.lr }} ${{ params.opt }} $${{ params.lr }} ${{params.n}}'\n"
    )
    member = make_member(read(text, sweep={"lr": "1e-3,0.10"}), 1)
    assert member.run == "train 0.10 adam ${{ params.lr }} 1"
    assert member.env == {
        "RATE": "0.10",
        "MARK": "a${{ b }}",
        "CAVVY_ARRAY_INDEX": "1",
        "CAVVY_ARRAY_COUNT": "2",
        "CAVVY_ARRAY_MIN": "0",
        "CAVVY_ARRAY_MAX": "1",
    }


def test_a_value_that_looks_like_an_expression_is_text() -> None:
    text = "params: {a: x, b: y}\nrun: '${{ params.a }} ${{ params.b }}'\n"
    task = parse_task(
        text,
        params={"a": "${{ params.b }}"},
        options=ReadOptions(overrides=json.dumps({"sweep": {"b": "1,2"}})),
    )
    assert make_member(task, 0).run == "${{ params.b }} 1"


def test_the_variables_of_an_array_name_its_indices() -> None:
    env = make_member(read(RUN, array="3,10-20:5"), 15).env
    assert env == {
        "CAVVY_ARRAY_INDEX": "15",
        "CAVVY_ARRAY_COUNT": "4",
        "CAVVY_ARRAY_MIN": "3",
        "CAVVY_ARRAY_MAX": "20",
    }


@pytest.mark.parametrize(
    ("values", "value"),
    [
        ("[0.1, 1]", 0.1),
        ("[1, 0.1]", 1.0),
        ("3..5", 3),
        ("[true, false]", True),
        ("[adam, 3]", "adam"),
        ("[1e-3, a]", "1e-3"),
    ],
)
def test_a_sweep_declares_its_parameters_if_the_file_declares_none(
    values: str, value: object
) -> None:
    text = f"run: 'train ${{{{ params.x-y }}}}'\nsweep: {{x-y: {values}}}"
    (param,) = read(text).sweep
    assert (param.values[0], type(param.values[0])) == (value, type(value))
    with pytest.raises(SpecError, match="would both be CAVVY_PARAM_A_B"):
        read(f"{RUN}sweep: {{a-b: [1, 2], A_B: [3]}}")
    with pytest.raises(SpecError, match="cannot be a parameter's name"):
        read(f"{RUN}sweep: {{1a: [1, 2]}}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sweep: {rl: [1, 2]}", "the file has no parameter 'rl'"),
        ("sweep: {lr: [a, b]}", "'a' is not a number"),
        ("sweep: {n: [1, 1.5]}", "'1.5' is not a whole number"),
        ("sweep: {lr: [1, 1.0]}", "a value is in the list twice"),
        ("sweep: {lr: []}", "the list has no values"),
        ("sweep: {n: 5..1}", "contains no values"),
        ("sweep: {n: 0..1000000}", "contains 1,000,001 values"),
        ("sweep: {lr: 0..999, n: 0..999}", "1,000,000 jobs are too many"),
        ("sweep: {lr: 0.1..0.9}", "0.1..0.9 cannot be swept"),
        ("sweep: {lr: " + "1" * 100_000 + "..x, s: 1e9..2}", "1e9..2 cannot be swept"),
        ("sweep: {n: 0..1e9}", "0..1e9 cannot be swept"),
        ("sweep: {n: 0..9999999999999999999}", "cannot be swept"),
        ("sweep: {n: 0..10:0.5}", "0..10:0.5 cannot be swept"),
        ("sweep: {n: '0..4,8'}", "0..4 cannot be swept"),
        ("sweep: {lr: a..b}", "a..b is no range of numbers"),
        ("sweep: {lr: '1,,2'}", "an empty value"),
        ("sweep: {lr: {a: 1}}", "is not allowed here"),
        ("sweep: 3", "where a table was expected"),
        ("sweep: {n: [1, 2]}\nnodes: ${{ params.n }}", "differs between the jobs of the sweep"),
        ("sweep: {n: [1, 2]}\narray: 0-3", "either `array` or `sweep`"),
        ("sweep: {n: [1, 2]}\nmachine: box", "`sweep` cannot be used with `machine`"),
        ("array: 0-3\nmachine: box", "`array` cannot be used with `machine`"),
        ("array: 0-3\nschedule: '2031-01-01 00:00 UTC'", "cannot be used with `schedule`"),
        ("array: 0-3\nsession: true", "cannot be used with `session`"),
        ("array: 0-3\nservice: {port: 80}", "cannot be used with `service`"),
        ("array: 0-3\nparallel: 0", "0 is too small"),
        ("parallel: 3", "only an array or a sweep"),
    ],
)
def test_what_cannot_be_an_array(text: str, told: str) -> None:
    with pytest.raises(SpecError, match=re.escape(told)):
        read(f"{PARAMS}{RUN}{text}\n")


def test_a_swept_parameter_cannot_be_set_too() -> None:
    with pytest.raises(SpecError, match="--param sets the parameter, too"):
        parse_task(f"{PARAMS}sweep: {{n: [1, 2]}}\n{RUN}", params={"n": 1})


@reads_other_tools
def test_files_of_other_tools_have_arrays_but_no_sweeps() -> None:
    text = "resources: {accelerators: A100}\nrun: x\n"
    assert count_members(read(text, array="0-3")) == 4
    with pytest.raises(SpecError, match="declares no parameter lr"):
        read(text, sweep={"lr": "1,2"})


@pytest.mark.parametrize(
    ("counts", "phase"),
    [
        ({"done": 3}, "done"),
        ({"done": 3, "failed": 1}, "failed"),
        ({"done": 3, "failed": 1, "queued": 1}, "queued"),
        ({"queued": 1, "running": 1, "failed": 2}, "running"),
        ({"stopped": 1, "done": 1}, "stopped"),
    ],
)
def test_the_phase_of_an_array(counts: dict[str, int], phase: str) -> None:
    assert find_phase(counts) == phase


def test_the_limit_of_an_array_keeps_only_its_own_jobs_waiting() -> None:
    members = [QueueRow(f"a{n}", "p", "u", 1.0, "a", 2) for n in range(4)]
    others = [QueueRow(f"b{n}", "p", "u", 1.0) for n in range(2)]
    book = ShareBook(running={"a": 1}, rules={"p": ShareRule(limit=2)})
    turns = {turn.row.id: turn.limit for turn in give_turns([*members, *others], book)}
    assert [job for job, limit in turns.items() if not limit] == ["a0", "b0"]
    assert turns["a1"] == "waits for its array, of which at most 2 jobs run at once"
    assert turns["b1"].startswith("waits for the limit of project p")
