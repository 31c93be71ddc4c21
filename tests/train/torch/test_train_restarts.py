"""Under `torchrun --max-restarts`, a run continues after a rank has failed."""

import json
from pathlib import Path

import torch
from tests.train.restarted import SAVED, STEPS, make_model, make_samples
from tests.train.torch.test_train_ends import PLANTED, Agent
from tests.train.torch.test_train_torchrun import ROOT, torchrun

from cavvy import train


def train_alone(folder: Path) -> list[torch.Tensor]:
    """The parameters after the same steps without failures, in one process."""
    run = train.Run(folder, plan=train.Plan(), device="cpu")
    model = run.model(make_model)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    data = run.data(train.Tensors(make_samples()), global_batch=4)
    for batch in run.batches(data, epochs=STEPS * 4 / 40):
        run.accumulate(lambda part: model(part[0]).square().mean(), batch)
        run.step(optimizer)
    return [each.detach() for each in model.parameters()]


def test_a_run_continues_after_a_failure_under_torchrun(tmp_path: Path) -> None:
    agent = Agent(str(tmp_path / "notice"))
    code, said = torchrun(
        ROOT / "tests/train/restarted.py",
        str(tmp_path),
        cwd=tmp_path,
        notice=str(tmp_path / "notice"),
        restarts=1,
    )
    heard = agent.heard()
    assert code == 0, said[-3000:]
    assert agent.started == [0, 0, 1, 1], "the second attempt withdraws earlier failures"
    assert {(each["rank"], each["error"]) for each in heard} == {(1, PLANTED)}
    alone = train_alone(tmp_path / "alone")
    for rank in range(2):
        is_resumed, first, steps, weights = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (is_resumed, steps) == (True, STEPS)
        assert first == SAVED, "the second attempt resumes from the newest checkpoint"
        for found, expected in zip(weights, alone, strict=True):
            torch.testing.assert_close(torch.tensor(found), expected)
