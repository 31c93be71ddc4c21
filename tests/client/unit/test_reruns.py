"""A job of an array is run again alone."""

from datetime import UTC, datetime

import pytest
from msgspec import Raw
from msgspec.json import encode
from tests.console_rig import detail

from cavvy.client.reruns import NotRepeatable, read_run
from cavvy.domain.arrays import count_members, make_member
from cavvy.domain.jobs import RunOrigin
from cavvy.domain.tasks import TaskSpec
from cavvy.task_files import ReadOptions, parse_tasks

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SWEEP = "name: fit\nsweep: {lr: [0.3, 0.1], kind: [a, b]}\nrun: fit ${{ params.lr }} ${{ params.kind }}\n"


def parse(text: str, overrides: str) -> TaskSpec:
    options = ReadOptions(overrides=overrides)
    [found] = parse_tasks(text, file="fit.yaml", params={}, now=NOW, options=options)
    return found.task


@pytest.mark.parametrize(
    ("text", "overrides", "index", "only"),
    [
        (SWEEP, "", 2, "lr 0.1, kind a"),
        (SWEEP, '{"priority": 7}', 1, "lr 0.3, kind b"),
        ("name: fit\nrun: fit $CAVVY_PARAM_LR\n", '{"sweep": {"lr": [0.3, 0.1]}}', 1, "lr 0.1"),
        ("name: fit\narray: 0-9\nrun: fit $CAVVY_ARRAY_INDEX\n", "", 7, "index 7"),
        ("name: fit\narray: 0-9\nrun: fit $MY_ARRAY_COUNT $CAVVY_ARRAY_COUNTS", "", 7, "index 7"),
    ],
)
def test_one_job_of_an_array_becomes_an_array_of_its_own(
    text: str, overrides: str, index: int, only: str
) -> None:
    whole = parse(text, overrides)
    member = make_member(whole, index)
    origin = RunOrigin(task_text=text, overrides=overrides)
    job = detail(f"fit.{index}", task=Raw(encode(member)), origin=Raw(encode(origin)))
    run = read_run(job, "id-of-it")
    assert (run.only, run.name, run.origin.rerun_of) == (only, "fit", "id-of-it")
    again = parse(run.text, run.origin.overrides)
    assert count_members(again) == 1
    made = make_member(again, again.array[0].first if again.array else 0)
    assert (made.run, made.params, made.priority) == (member.run, member.params, member.priority)
    assert read_run(job, "", is_whole_array=True).origin.overrides == overrides


@pytest.mark.parametrize(
    ("text", "overrides", "named"),
    [
        ("run: fit --shard $CAVVY_ARRAY_INDEX --of $CAVVY_ARRAY_COUNT", "", "CAVVY_ARRAY_COUNT"),
        ("env: {LAST: '1'}\nrun: fit ${CAVVY_ARRAY_MAX}", "", "CAVVY_ARRAY_MAX"),
        ("run: fit $SLURM_ARRAY_TASK_MIN", "", "SLURM_ARRAY_TASK_MIN"),
        ("run: fit", '{"env": {"OF": "$CAVVY_ARRAY_COUNT"}}', "CAVVY_ARRAY_COUNT"),
        ("run: fit > $CAVVY_ARRAY_INDEX", '{"sweep": {"lr": [0.1, 0.2]}}', "CAVVY_ARRAY_INDEX"),
    ],
)
def test_a_job_that_would_do_other_work_alone_is_not_run_again_alone(
    text: str, overrides: str, named: str
) -> None:
    text = f"name: fit\n{'' if 'sweep' in overrides else 'array: 0-9'}\n{text}\n"
    member = make_member(parse(text, overrides), 1)
    origin = RunOrigin(task_text=text, overrides=overrides)
    job = detail("fit.1", task=Raw(encode(member)), origin=Raw(encode(origin)))
    with pytest.raises(NotRepeatable, match=rf"the task of fit\.1 names {named},") as caught:
        read_run(job, "")
    assert "`cavvy rerun fit` runs the whole array again" in caught.value.hint
    assert read_run(job, "", is_whole_array=True).origin.overrides == overrides


def test_a_part_of_a_batch_is_not_run_again_alone_unless_jobs_share_all_shards() -> None:
    for output, is_part in (("s3://bucket/results", True), ("/data/results", False)):
        batch = f"{{input: s3://bucket/rows, output: '{output}', function: 'a:b', rows: 5}}"
        text = f"name: fit\nimage: python:3.12\nbatch: {batch}\n"
        member = make_member(parse(text, ""), 1)
        origin = RunOrigin(task_text=text)
        job = detail("fit.1", task=Raw(encode(member)), origin=Raw(encode(origin)))
        if is_part:
            with pytest.raises(NotRepeatable, match=r"fit\.1 does a part of a batch"):
                read_run(job, "")
        else:
            assert read_run(job, "").only == "index 1"


def test_values_that_a_search_chose_are_not_run_again_alone() -> None:
    text = "name: fit\ntrials: 3\nbest: loss:min\nsweep: {lr: [0.1, 0.2, 0.3, 0.4]}\nrun: fit\n"
    member = make_member(parse(text, ""), 0)
    job = detail("fit.0", task=Raw(encode(member)), origin=Raw(encode(RunOrigin(task_text=text))))
    with pytest.raises(NotRepeatable, match=r"fit\.0 were chosen by a search"):
        read_run(job, "")
