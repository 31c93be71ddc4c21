"""What a trace restores, because the command goes on in the process that ran the script."""

import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")

from cavvy.capabilities.estimates.tracer.script import trace_script


def test_signals_end_the_command_after_it_has_traced_a_script_that_handles_them(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import signal
import torch
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: None)
model = torch.nn.Linear(32, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model(torch.randn(8, 32)).sum().backward()
optimizer.step()
"""
    )
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(each) for each in numbers]
    trace_script(str(script), [])
    assert [signal.getsignal(each) for each in numbers] == before
