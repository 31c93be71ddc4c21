"""Runs of two ranks: what differs between ranks is repaired or refused, never silent. Cases run in
ranks that are forked; what torchrun itself does is tested under torchrun, whose ranks are forked, too.
"""

import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train import ranks
from tests.train.cases import play
from tests.train.programs import by_hand
from torch import nn

from cavvy import train
from cavvy.train.checkpoint.notice import leave
from cavvy.train.loss import find_weight

ROOT = Path(__file__).resolve().parents[3]
Found = Callable[[str], list[Any]]


def torchrun(
    script: Path, *args: str, cwd: Path, notice: str = "", restarts: int = 0
) -> tuple[int, str]:
    """Returns the exit code and stderr. `notice` is the path of the agent's socket."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("CAVVY_")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    env |= {"CAVVY_NOTICE": notice} if notice else {}
    env["GLOO_SOCKET_IFNAME"] = "lo"
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    words += [f"--max-restarts={restarts}", str(script), *args]
    code, _, said = ranks.Script(words, env, cwd).result()
    return code, said


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank returned in a case. All cases run in the same two ranks."""
    return run_cases("cases", tmp_path_factory.mktemp("cases"))


def run_cases(module: str, folder: Path) -> Found:
    ranks.run(2, play, f"tests.train.{module}", folder, folder=folder)

    def read(case: str) -> list[Any]:
        files = [folder / f"{case}.{rank}.json" for rank in range(2)]
        return [json.loads(file.read_text()) for file in files]

    return read


def test_all_ranks_begin_with_the_values_of_the_first_rank(found: Found) -> None:
    assert found("other values") == [{"replicas": True, "shards": True}] * 2


def test_ranks_that_take_different_branches_of_a_model_stay_equal(found: Found) -> None:
    first, second = found("branch by rank")
    assert first == second
    assert first[1] == 5


@pytest.mark.parametrize(
    ("case", "text", "steps"),
    [
        (
            "skipped batch",
            "rank 1 skipped batch 3 after 2 steps, but rank 0 is at batch 3 after 2 steps",
            2,
        ),
        (
            "skipped step",
            "rank 1 is at batch 4 after 2 steps, but rank 0 is at batch 4 after 3 steps",
            None,
        ),
        ("learning rate", "rank 1: the copy of parameter 'one.weight' differs", 5),
        ("changed parameter", "rank 1: the copy of parameter 'two.bias' differs", 5),
        ("changed parameter, compared", "rank 1: the copy of parameter 'two.bias' differs", 4),
    ],
)
def test_ranks_that_diverge_end_with_an_error(
    case: str, text: str, steps: int | None, found: Found
) -> None:
    for said, done in found(case):
        assert text in said
        assert steps in (None, done)


@pytest.mark.parametrize("plan", ["replicas", "shards", "other plan"])
def test_a_kept_average_and_schedule_go_on_where_they_were(plan: str, found: Found) -> None:
    for each in found("kept tensors"):
        (begun, *whole), (resumed, *parts) = each[plan]
        assert (begun, resumed) == (0, 3)
        assert parts == whole
        assert whole[2:] == [True, 5, [pytest.approx(1e-4)]]


def test_an_object_that_cannot_be_saved_is_refused_at_the_start(found: Found) -> None:
    for said in found("kept function"):
        assert (
            "run.keep('odd'): the object's state_dict contains a builtin_function_or_method" in said
        )


def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(found: Found) -> None:
    for each in found("damaged"):
        refused = [each.pop("all"), each.pop("all, again")]
        assert list(each.values()) == [[2, True]] * 4
        for said in refused:
            assert "the checkpoint of step 5 is damaged (__0_0.distcp has changed)" in said
            assert "the checkpoint of step 4 is damaged" in said


def test_failed_saves_leave_nothing_behind_and_a_failed_final_save_is_an_error(
    found: Found,
) -> None:
    for saved, left, said in found("full disk"):
        assert saved == [True, False, False, True, True]
        assert left[3:] == [["1", "4"], ["4", "5"]]
        assert said.startswith("the final checkpoint, of step 10, could not be saved to FOLDER")


def test_a_final_upload_that_fails_is_an_error_and_the_next_attempt_completes_it(
    found: Found,
) -> None:
    failed = ["the final checkpoint, of step 5,", []]
    assert found("failed upload") == [[*failed, 5, ["step-000000000005"]]] * 2


@pytest.mark.parametrize(
    "spread",
    ["one pass", "micro-batches of 5", "micro-batches of 1", "shards", "pipeline", "fp16"],
)
@pytest.mark.parametrize(
    "loss",
    ["mean_by_torch", "smooth_mean", "mean_by_mask", "mean_of_even_classes", "mean_and_number"],
)
def test_means_over_tokens_do_not_depend_on_how_a_batch_is_split(
    loss: str, spread: str, found: Found
) -> None:
    """The reported loss is that of the global batch, on each rank."""
    first, second = (each[f"{loss}, {spread}"] for each in found("token means"))
    rel = 1e-4 if spread == "fp16" else 1e-6
    for losses, expected, error in (first, second):
        assert losses == pytest.approx(expected, rel=rel)
        assert error <= rel
    assert first[0] == second[0]


@pytest.mark.parametrize("plan", ["replicas", "shards"])
def test_an_evaluation_counts_each_sample_once(plan: str, found: Found) -> None:
    for mean, expected, training in (each[plan] for each in found("evaluated")):
        assert mean == pytest.approx(expected, rel=1e-6)
        assert training


def test_two_models_with_a_loss_each_learn_as_in_a_plain_loop(found: Found) -> None:
    for difference, steps in found("two models"):
        assert difference < 1e-6
        assert steps == 5


def test_a_checkpoint_of_other_data_is_refused_unless_that_is_accepted(found: Found) -> None:
    for begun, fewer, reseeded, accepted in found("other data"):
        assert (begun, accepted) == ("3", "8")
        assert (
            "changed since the checkpoint: samples was 120 and is now 96. From sample 72 on"
            in fewer
        )
        assert "the checkpoint: seed was 3 and is now 4" in reseeded


def test_a_mean_that_is_divided_keeps_the_weight_of_its_tokens() -> None:
    logits = torch.zeros(6, 3, requires_grad=True)
    targets = torch.tensor([0, 1, 2, 0, -100, -100])
    loss = nn.functional.cross_entropy(logits, targets)
    assert [float(find_weight(each)) for each in (loss, loss / math.log(2), loss / 2)] == [4.0] * 3


def test_fp8_with_tensor_parallel_is_refused() -> None:
    with pytest.raises(ValueError, match="fp8 is not supported with tensor parallel"):
        train.Plan(precision="fp8", tensor=2)


def test_ranks_that_save_after_a_lack_of_memory_go_on_under_the_same_torchrun(
    tmp_path: Path,
) -> None:
    code, said = torchrun(ROOT / "tests/train/short.py", str(tmp_path), cwd=tmp_path)
    assert code == 0, said[-3000:]
    expected, _ = by_hand("fp32", steps=5)
    for rank in range(2):
        first, second = (tmp_path / f"starts-{rank}").read_text().split()
        assert first == second, "the process stays the same"
        steps, count, losses, micro = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (steps, count, micro) == (5, 2, 6)
        assert losses == pytest.approx(expected[3:], rel=1e-6)


def test_a_rank_that_leaves_reports_it_to_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "notice")
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(path)
        agent.listen()
        monkeypatch.setenv("CAVVY_NOTICE", path)
        with pytest.raises(SystemExit) as left:
            leave()
        with agent.accept()[0] as line:
            assert line.recv(100) == b'{"again": {}}\n'
    assert left.value.code == train.AGAIN
