"""Two-command files of each dialect lose their node: preempted work resumes, complete work does
not run again.
"""

import pytest
from scripts.drills.two_commands import main

pytestmark = pytest.mark.system


def test_preempted_work_resumes_and_complete_work_does_not_run_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("CAVVY_HOME", "CAVVY_CONFIG"):  # it sets both
        monkeypatch.setenv(name, "")
    assert main(1) == 0, capsys.readouterr().out
