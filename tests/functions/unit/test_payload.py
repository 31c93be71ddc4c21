"""What is sent to other processes, and what is not."""

import sys
from pathlib import Path

import pytest

from cavvy.capabilities.functions import payload
from cavvy.capabilities.functions.errors import NotSendable


def test_an_open_file_is_not_sent_with_what_is_in_it(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    (tmp_path / "token").write_text("secret")
    with open(tmp_path / "token") as file:

        def read() -> str:
            return file.read()

        with pytest.raises(NotSendable, match="token' is an open file"):
            payload.dump_code(read, "read")
        with pytest.raises(NotSendable, match=r"argument 2 of f \(TextIOWrapper\).*an open file"):
            payload.dump_arguments("f", (1, file), {}, None)


def test_standard_output_is_that_of_the_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cloudpickle")
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        sent = payload.dump_code([lambda: 1, out], "x")
        assert payload.load(sent)[1] is out
