"""Task files that are as long as a file may be, which the server must read without a long pause. With
reading that takes quadratic time, each of these tests would exceed the time of a test.
"""

import json

import pytest
from tests.own_parts import reads_other_tools

from cavvy.spec import SpecError
from cavvy.spec.problems import MOST_PROBLEMS
from cavvy.task_files import parse_task

LONG = 500_000  # characters
GPUS = [f"H100:{number + 1}" for number in range(101)]


def read_problems(**fields: object) -> SpecError:
    with pytest.raises(SpecError) as found:
        parse_task(json.dumps({"name": "t", "run": "true", **fields}), file="f.yaml")
    return found.value


@pytest.mark.parametrize(
    "value", ["1" * LONG, f"1.{'1' * LONG}", "1." * LONG, f"1{' ' * LONG}x", f"{'1' * LONG}s"]
)
def test_a_long_length_of_time(value: str) -> None:
    assert len(read_problems(limits={"duration": value}).problems) == 1


@pytest.mark.parametrize("value", [f"1{' ' * LONG}x", f"1{'/' * LONG}", "1" * LONG])
def test_a_long_price(value: str) -> None:
    assert len(read_problems(resources={"max_price": value}).problems) == 1


@pytest.mark.parametrize(
    "value", [f"a{' ' * LONG})", "1" * LONG, "." * LONG, f"H100:{'1.' * LONG}", ":" * LONG]
)
def test_a_long_accelerator(value: str) -> None:
    assert len(read_problems(resources={"gpu": value}).problems) == 1


def test_a_long_time_zone() -> None:
    schedule = {"cron": "0 3 * * 1", "time_zone": "a/" * 5000 + "a"}
    assert "no time zone is called" in str(read_problems(schedule=schedule))


def test_a_long_list_of_values() -> None:
    names = [f"NAME_{number}" for number in range(25_000)]
    task = parse_task(json.dumps({"name": "t", "run": "true", "secrets": names}), file="f.yaml")
    assert len(task.secrets) == len(names)


def test_reading_ends_after_many_problems() -> None:
    """For each unknown parameter, the message names the most similar of all parameters."""
    inserted = "".join(f"${{{{ params.q{number} }}}}" for number in range(12_000))
    found = read_problems(run=inserted, params={f"p{number}": 1 for number in range(12_000)})
    assert len(found.problems) == MOST_PROBLEMS + 1
    assert found.problems[-1].message == "the file has more problems, which are not listed"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"resources": {"any_of": [{"cpu": number + 1} for number in range(101)]}}, "any_of"),
        ({"resources": {"gpu": GPUS}}, "gpu"),
        ({"resources": {"ordered": [{"gpu": GPUS[:51]}, {"gpu": GPUS[50:]}]}}, "ordered"),
        ({"webhooks": [{"url": f"https://a{number}.example/"} for number in range(101)]}, "webh"),
        ({"volumes": [f"/s{number}:/s{number}" for number in range(101)]}, "volumes"),
        ({"inputs": [{"source": f"s3://b/{n}", "target": f"t{n}"} for n in range(1001)]}, "inputs"),
    ],
)
def test_lists_that_the_server_checks_again_and_again_are_short(
    fields: dict[str, object], place: str
) -> None:
    (found,) = read_problems(**fields).problems
    assert "are too many" in found.message
    assert found.expected.startswith(("at most 100", "at most 1,000"))
    assert place in found.excerpt


def test_a_service_has_at_most_100_sources_of_calls() -> None:
    events = [{"cron": "0 3 * * 1", "path": f"/{number}"} for number in range(101)]
    (found,) = read_problems(service={"port": 80, "events": events}).problems
    assert found.expected == "at most 100 entries"


@reads_other_tools
@pytest.mark.parametrize(
    "file",
    [
        {"num_nodes": 1, "resources": {"accelerators": GPUS}},
        {
            "num_nodes": 1,
            "file_mounts": {f"/d{number}": f"s3://b/{number}" for number in range(1001)},
        },
    ],
)
def test_files_of_other_tools_have_the_same_limits(file: dict[str, object]) -> None:
    assert "entries are too many" in str(read_problems(**file))


@reads_other_tools
@pytest.mark.parametrize(
    "text",
    [
        "type: task\ncommands:\n" + "- x\n" * 10_000,
        "type: task\ncommands:\n- x\n" + "# comment\n" * 30_000,
    ],
)
def test_a_file_that_is_read_without_libyaml_is_shorter(text: str) -> None:
    with pytest.raises(SpecError, match="the file has") as found:
        parse_task(text, file="f.yaml")
    assert len(found.value.problems) == 1
