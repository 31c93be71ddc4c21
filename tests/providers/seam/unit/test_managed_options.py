"""Array jobs, tuning jobs and schedules of managed services are refused with what to write instead."""

import pytest

from cavvy.providers.managed.provider import object_to_options
from cavvy.spec import SpecError
from cavvy.task_files import parse_task


@pytest.mark.parametrize(
    ("provider", "option", "advice"),
    [
        ("aws-batch", "array: 10", "cavvy run -d --param"),
        ("sagemaker", "tuning: {max_jobs: 20}", "hpo-sweep"),
        ("vertex", "study: {trials: 20}", "own log, checkpoints and bill"),
        ("aws-batch", "schedule: tomorrow", "schedule: {at: TIME}"),
        ("sagemaker", "retry: 3", "write `retry` in the task"),
    ],
)
def test_what_a_service_would_do_itself_is_refused(provider: str, option: str, advice: str) -> None:
    task = parse_task(f"run: x\nresources:\n  options:\n    {provider}: {{{option}}}\n")
    (found,) = object_to_options(provider, task)
    assert found.field == f"resources.options.{provider}.{option.partition(':')[0]}"
    assert advice in found.reason
    assert object_to_options("other", task) == []


def test_other_options_are_the_services_own() -> None:
    task = parse_task("run: x\nresources: {options: {aws-batch: {share: research}}}")
    assert object_to_options("aws-batch", task) == []


@pytest.mark.parametrize("key", ["matrix", "tuning", "tuner"])
def test_a_sweep_of_another_tool_is_refused_with_what_to_do(key: str) -> None:
    with pytest.raises(SpecError, match="write `sweep: "):
        parse_task(f"run: x\n{key}: {{lr: [0.1, 0.2]}}")
