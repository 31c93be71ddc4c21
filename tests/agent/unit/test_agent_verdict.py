"""Why work failed, and the record of its exit that a later agent reports."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.agent.gpu_faults import GPU, NETWORK
from cavvy.agent.verdict import ExitRecord, FailureCause

SIGN = b"RuntimeError: CUDA error: uncorrectable ECC error encountered\n"


@pytest.mark.parametrize(
    ("output", "excess", "outcome", "reason"),
    [
        (b"", "", "exit", "the task ended with exit code 1"),
        (SIGN, "", GPU, "uncorrectable ECC error (exit code 1)"),
        # a program that takes more than its part of a GPU may cause any message
        (SIGN, "out of memory", "exit", "out of memory"),
    ],
)
def test_a_limit_explains_a_failure_before_a_sign_of_a_broken_gpu(
    output: bytes, excess: str, outcome: str, reason: str
) -> None:
    cause = FailureCause()
    for at in range(0, len(output), 7):  # a sign may come in several pieces
        cause.feed(output[at : at + 7])
    found = cause.explain(1, "the task ended with exit code 1", excess)
    assert found == (outcome, reason)


def test_the_exit_message_states_whose_fault_a_failure_is() -> None:
    def state(cause: FailureCause, outcome: str) -> tuple[object, object]:
        told = cause.describe(outcome, 1, "it failed")
        return told["outcome"], told["failure"]

    assert state(FailureCause(), "exit") == ("exit", None)
    assert state(FailureCause(), GPU) == ("node", GPU)
    known = FailureCause()
    known.explain(1, "", "out of memory")
    assert state(known, "exit") == ("exit", "program")
    assert state(known, "preempted") == ("preempted", None)
    assert known.cut_off("reset") == "the connection to another rank was lost: reset"
    assert state(known, "exit") == ("exit", NETWORK)


def test_a_later_agent_reads_the_exit_that_an_earlier_one_has_written(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(exit_file=str(tmp_path / "exit.json"))
    later = ExitRecord(config)
    assert (later.read(), later.fields, later.stored) == (False, {}, False)
    first = ExitRecord(config)
    first.write({"outcome": "exit", "exit_code": 7})
    assert first.stored
    assert (later.read(), later.fields, later.stored) == (True, first.fields, True)
    (tmp_path / "exit.json").write_text("{")
    assert not ExitRecord(config).read()


def test_an_exit_that_cannot_be_written_is_kept_in_memory(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(exit_file=str(tmp_path / "none" / "exit.json"))
    record = ExitRecord(config)
    record.write({"outcome": "succeeded"})
    assert (record.fields, record.stored) == ({"outcome": "succeeded"}, False)
