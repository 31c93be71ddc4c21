"""`after` of the task file: what each form means, and what each mistake is told."""

import re

import pytest

from cavvy.domain.tasks import JobDependency, StartCondition
from cavvy.spec import SpecError
from cavvy.task_files import ReadOptions, parse_task

SUCCESS, FAILURE, ANY = StartCondition


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prepare", [("prepare", SUCCESS)]),
        (
            "[prepare, 'load:any', clean:failure]",
            [("prepare", SUCCESS), ("load", ANY), ("clean", FAILURE)],
        ),
        ("[prepare: failure, load]", [("prepare", FAILURE), ("load", SUCCESS)]),
        ("{prepare: failure, load: Success}", [("prepare", FAILURE), ("load", SUCCESS)]),
        ("array.7:any", [("array.7", ANY)]),
        ("[]", []),
    ],
)
def test_forms(text: str, expected: list[tuple[str, StartCondition]]) -> None:
    found = parse_task(f"{{name: a, run: x, after: {text}}}").after
    assert found == tuple(JobDependency(*each) for each in expected)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prepare:ok", "did you mean `success`"),
        ("prepare:allways", "expected: success, failure or any"),
        ("{prepare: failed}", "did you mean `failure`"),
        ("'afternotok:prepare'", "write prepare:failure"),
        ("[a b]", "cannot be the name or ID of a job"),
        ("''", "cannot be the name or ID of a job"),
        ("{prepare: }", "a value is missing"),
        ("[prepare, prepare:any]", "prepare is in the list twice"),
        ("train", "a job cannot wait for itself"),
        ("[[prepare]]", "not allowed here"),
        ("prepare, schedule: '0 3 * * *'", "a job that repeats cannot wait for other jobs"),
        ("prepare, service: {port: 80}", "`after` has no meaning with `service`"),
        (str([f"j{number}" for number in range(101)]), "at most 100"),
    ],
)
def test_mistakes(text: str, told: str) -> None:
    with pytest.raises(SpecError, match=re.escape(told)):
        parse_task(f"{{name: train, run: x, after: {text}}}")


def test_keys_of_other_tools_name_it() -> None:
    for key in ("needs", "depends_on", "dependencies"):
        with pytest.raises(SpecError, match=r"write `after: \[JOB\]`"):
            parse_task(f"{{run: x, env: {{A: b}}, {key}: prepare}}")


def test_the_command_line_replaces_it() -> None:
    options = ReadOptions(overrides='{"after": ["b:any"]}')
    assert parse_task("{run: x, after: a}", options=options).after == (JobDependency("b", ANY),)
