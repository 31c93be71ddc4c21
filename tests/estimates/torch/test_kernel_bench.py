"""The program of `cavvy bench --kernels`, with tiny kernels on a CPU."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cavvy.capabilities.estimates.kernel_bench import collect  # noqa: E402
from cavvy.capabilities.estimates.tracer import bench_kernels  # noqa: E402
from cavvy.capabilities.estimates.tracer.bench_kernels import Case, Device, list_cases, measure  # noqa: E402

SMALL = 1 << 23  # bytes of a kernel that a CPU computes at once


def find_cases() -> list[Case]:
    """One small kernel with each name."""
    found: dict[str, Case] = {}
    for case in list_cases(Device("cpu", small=True)):
        if case.bytes < SMALL and case.name not in found:
            found[case.name] = case
    return list(found.values())


def test_each_kernel_runs_and_is_described() -> None:
    device = Device("cpu", small=True)
    rows = [measure(case, device) for case in find_cases()]
    assert [row for row in rows if not row.get("us")] == []
    assert len(rows) > 50
    assert {row["kind"] for row in rows} >= {"matmul", "conv", "attention", "recurrent", "copy"}
    for row in rows:
        json.dumps(row)
        assert row["bytes"] > 0, row
        is_product = row["kind"] in ("matmul", "conv", "attention", "recurrent")
        assert (row["flops"] > 0) is is_product, row


def test_a_kernel_that_does_not_run_is_left_out_with_its_reason() -> None:
    def make() -> bench_kernels.Call:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    row = measure(Case("matmul", "mm", "bf16", make), Device("cpu", small=True))
    assert row["error"] == "out of memory"
    assert "us" not in row


def test_the_program_prints_a_profile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_kernels, "list_cases", lambda device: find_cases()[:2])
    assert bench_kernels.main(["--smoke"]) == 0
    profile = collect(capsys.readouterr().out.splitlines())
    assert profile["format"] == "cavvy-device-profile/1"
    assert len(profile["kernels"]) == 2
    assert profile["host"]["linear_backward_us"] >= 0  # a difference of times, which may be noise
    assert profile["skipped"] == []


def test_the_program_needs_nothing_of_cavvy() -> None:
    text = Path(str(bench_kernels.__file__)).read_text()
    assert "import cavvy" not in text
    assert "from cavvy" not in text
