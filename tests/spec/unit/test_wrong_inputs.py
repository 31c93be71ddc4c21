"""Wrong inputs that need no server get an error, a hint and the documented exit code; the drill
`scripts/drills/wrong_inputs.py` also runs those that need a server or a terminal.
"""

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from scripts.drills.wrong_inputs import FILES, USAGE, Case, judge, make_cases
from tests.unit.cli_client import FakeClient, client

from cavvy.cli.main import cli

__all__ = ["client"]
SERVER = ("Bad", "bogus", "''", "cp a b", "secret set", "simulate")  # the server finds these
ASKS = (  # and what begins like these
    "budget set team 5 -",
    "credential set",
    "policy",
    "project create",
    "quota",
    "role list",
    "token create --expires 9",
    "trust add",
    "user add",
)
SLOW = ("offers", "estimate", "plan", "run -d", "run good.yaml --g", "catalog", "check", "export")
QUICK = [
    case
    for case in make_cases()
    if USAGE in case.codes
    and not any(word in case.line for word in SERVER)
    and not case.line.startswith(SLOW + ASKS)
]


@pytest.mark.parametrize("case", QUICK, ids=[case.line for case in QUICK])
def test_a_wrong_input_gets_an_error_and_a_hint(
    case: Case, client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for word in shlex.split(case.line):
        if word in FILES:
            (tmp_path / word).write_bytes(FILES[word])
    answer = CliRunner().invoke(cli, shlex.split(case.line), input=case.given, prog_name="cavvy")
    assert judge(case, answer.exit_code, answer.output, 0) == []


def test_texts_of_libraries_are_noticed() -> None:
    case = Case(line="ps")
    assert judge(case, 2, "error: query.phase.0: Input should be 'queued'\nhint: x", 0) != []
    assert judge(case, 2, "Usage: cavvy ps\nError: no\n", 0) != []
    assert judge(case, 1, "error: x\nhint: y", 0) == ["exit code 1, expected 2"]
    assert judge(case, 2, "error: x\nhint: y", 0) == []
