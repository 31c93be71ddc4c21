"""The same losses as a loop written by hand, for each way to spread a model and each precision."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.programs import (
    by_hand,
    by_hand_on_ranks,
    compare_by_hand,
    count_threads,
    learn_on_gpu,
    parity,
    refused,
)
from tests.train.ranks import run
from tests.train.ways import both, not_filled

from cavvy.train import Plan

STEPS = 6
# in the rank itself, by no process that would outlive it; headers are not compiled for one small
# network
COMPILING = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    "TORCHINDUCTOR_CACHE_DIR": str(Path.home() / ".cache/cavvy-tests/inductor"),
}
PLANS = [
    (1, Plan()),
    (2, Plan()),
    (3, Plan(micro_batch=3)),
    (2, Plan(shards=0)),
    (4, Plan(replicas=2, shards=2)),
    (2, Plan(tensor=2)),
    (4, Plan(tensor=2)),
    (4, Plan(shards=2, tensor=2)),
    (2, Plan(pipeline=2, micro_batch=6)),
    (4, Plan(pipeline=2, micro_batch=3)),
    (4, Plan(pipeline=2, shards=2, micro_batch=3)),
    (1, Plan(micro_batch=5)),
    (1, Plan(recompute=True)),
    (2, Plan(shards=2, recompute=True, micro_batch=4)),
]


PLANS += [(4, Plan(tensor=2, pipeline=2, micro_batch=6))]


def name(case: tuple[int, Plan]) -> str:
    size, plan = case
    plain = Plan()
    said = [
        f"{n}{getattr(plan, n)}"
        for n in Plan.__dataclass_fields__
        if getattr(plan, n) != getattr(plain, n)
    ]
    return "-".join([f"ranks{size}", *said])


@pytest.mark.parametrize("case", PLANS, ids=name)
def test_every_plan_learns_as_a_plain_loop_does(case: tuple[int, Plan], tmp_path: Path) -> None:
    size, plan = case
    losses, norms = by_hand("fp32", steps=STEPS)
    for found in run(size, parity, plan, STEPS, folder=tmp_path):
        assert found["losses"] == pytest.approx(losses, rel=1e-6)
        assert found["norms"] == pytest.approx(norms, rel=1e-5)
        assert found["steps"] == STEPS


def test_ranks_compute_on_one_thread(tmp_path: Path) -> None:
    """As torchrun has it by default; sums of floats depend on it."""
    assert run(2, count_threads, folder=tmp_path) == [1, 1]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_is_bitwise_that_of_a_plain_loop(precision: str, tmp_path: Path) -> None:
    (expected,) = run(1, compare_by_hand, precision, STEPS, False, folder=tmp_path)
    (found,) = run(1, parity, Plan(precision=precision), STEPS, folder=tmp_path)  # type: ignore[arg-type]
    assert (found["losses"], found["norms"]) == expected


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_ranks_learn_as_with_torchs_own_classes(
    precision: str, sharded: bool, tmp_path: Path
) -> None:
    expected, _ = run(2, by_hand_on_ranks, precision, sharded, STEPS, folder=tmp_path)
    plan = Plan(precision=precision, shards=2 if sharded else 1)  # type: ignore[arg-type]
    for found in run(2, parity, plan, STEPS, folder=tmp_path):
        assert found["losses"] == pytest.approx(expected, rel=1e-6)


WAYS = [
    (Plan(), False, {"forwards": 2 * STEPS, "channels_last": False, "meta": False}),
    (Plan(recompute=True), False, {"forwards": 4 * STEPS}),
    (Plan(channels_last=True), False, {"channels_last": True}),
    (Plan(), True, {"meta": True}),
    (
        Plan(channels_last=True, recompute=True),
        True,
        {"forwards": 4 * STEPS, "channels_last": True, "meta": True},
    ),
    (Plan(compile=True), False, {"interpreted": 0}),
]


@pytest.mark.parametrize(
    ("plan", "meta", "seen"), WAYS, ids=["plain", "recompute", "layout", "meta", "three", "compile"]
)
def test_every_way_to_run_a_network_is_bitwise_that_by_hand(
    plan: Plan, meta: bool, seen: dict[str, Any], tmp_path: Path
) -> None:
    if plan.compile and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip(
            "torch.compile on a CPU needs a C++ compiler, and there is neither g++ nor clang++"
        )
    (found,) = run(1, both, plan, meta, STEPS, folder=tmp_path, env=COMPILING)
    assert found["losses"] == found["expected"]
    assert {name: found[name] for name in seen} == seen


def test_a_layer_that_nothing_would_fill_is_not_built_empty(tmp_path: Path) -> None:
    (reason,) = run(1, not_filled, folder=tmp_path)
    assert "1 (MultiheadAttention) has no reset_parameters() to fill in_proj_weight" in reason


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "since"), [("tf32", (8, 0)), ("fp8", (8, 9))])
def test_modes_of_gpus_stay_near_fp32(
    precision: str, since: tuple[int, int], tmp_path: Path
) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < since:
        pytest.skip(f"{precision} is a mode of GPUs, and none is here that has it")
    if precision == "fp8":
        pytest.importorskip("torchao", reason="fp8 needs torchao")
    losses = [
        run(1, learn_on_gpu, kind, STEPS, folder=tmp_path / kind)[0] for kind in ("fp32", precision)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2 if precision == "tf32" else 5e-2)


@pytest.mark.parametrize(
    ("plan", "device", "reason"),
    [
        (Plan(precision="tf32"), "cpu", "Ampere"),
        (Plan(precision="fp8"), "cpu", "Hopper"),
        (Plan(), "tpu", "TorchTPU"),
        (Plan(), "abacus", "not one of auto"),
        (Plan(replicas=2), "cpu", "cannot be spread over 1 ranks"),
        (Plan(tensor=2), "cpu", "cannot be spread over 1 ranks"),
    ],
)
def test_what_this_machine_cannot_do_is_said(
    plan: Plan, device: str, reason: str, tmp_path: Path
) -> None:
    assert reason in run(1, refused, plan, device, folder=tmp_path)[0]
