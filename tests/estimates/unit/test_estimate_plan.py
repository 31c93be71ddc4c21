"""Estimates from a work profile: what must grow grows, nothing is said to fit that does not,
rates reach the plan.
"""

import json
import re
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from cavvy.capabilities.estimates import bench, kernel_bench
from cavvy.capabilities.estimates.bench import MachineRun, draw_bars, keep, make_text
from cavvy.cli.main import cli
from cavvy.cli.task import profiles
from cavvy.cli.task.place_runs import read_rate
from cavvy.cli.task.profiles import (
    find_model,
    list_device_profiles,
    list_models,
    measured_devices,
    text_with_rates,
)
from cavvy.cli.view.failure import CommandFailure
from cavvy.domain.values import replace
from cavvy.planner.device_rates import MeasuredRate, carry, device_of
from cavvy.planner.estimate.kernels import KernelSetting
from cavvy.planner.estimate.measured import FARTHEST
from cavvy.planner.estimate.profile import (
    ProfileError,
    ReservedMemory,
    StepSettings,
    WorkProfile,
    read_profile,
)
from cavvy.planner.estimate.roofline import estimate_step
from cavvy.planner.estimate.table import (
    ELSEWHERE,
    FURTHER,
    NEAR,
    device_key,
    estimate_memory,
    estimate_on,
    list_devices,
    make_rates,
    merge_rates,
)
from cavvy.spec.tree import read_table
from cavvy.task_files import load_task

H200 = device_of("H200")
A100 = device_of("A100-80GB")
assert H200 is not None
assert A100 is not None


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own server, if one runs, answers nothing here."""
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))


def gpt2(precision: str = "bf16", checkpointing: bool = False) -> WorkProfile:
    return find_model("gpt2", precision, checkpointing)


def small(**changes: object) -> dict[str, object]:
    data: dict[str, object] = {
        "format": "cavvy-work-profile/1",
        "name": "small",
        "batch": 4,
        "precision": "bf16",
        "optimizer": "adamw",
        "parameters": 1000,
        "tensors": 2,
        "memory": {
            "parameters": 4000,
            "gradients": 4000,
            "buffers": 0,
            "activations": [[8000, 0, 0]],
            "activations_compiled": [[4000, 0, 0]],
        },
        "ops": [
            {
                "kind": "matmul",
                "dtype": "bfloat16",
                "backward": False,
                "flops": 1e12,
                "bytes": 1e9,
                "fixed_bytes": 1e8,
                "fused_bytes": 1e9,
                "size": [1, 100_000, 5000, 1000],
                "count": 2,
            }
        ],
    }
    return {**data, **changes}


def test_flops_of_gpt2_are_six_a_parameter_and_token_and_attention() -> None:
    profile = gpt2()
    tokens = 1024 * profile.batch
    dense = 6 * profile.parameters * tokens
    assert 1.0 < profile.flops / dense < 1.2
    assert profile.parameters == 124_439_808


def test_every_shipped_profile_can_be_read_and_estimated() -> None:
    assert {"resnet50", "gpt2", "bert-base", "vit_b_16", "llama-8b"} <= set(list_models())
    for name in list_models():
        for precision in ("fp32", "bf16"):
            profile = find_model(name, precision, False)
            found = estimate_on(profile, H200, StepSettings())
            assert 0 < found.step.mfu < 1
            assert found.memory.peak < found.memory.needed


@given(
    batch=st.integers(1, 256),
    compiled=st.booleans(),
    accumulate=st.integers(1, 8),
    precision=st.sampled_from(["tf32", "bf16", "fp8"]),
)
@settings(max_examples=60, deadline=None)
def test_more_work_never_takes_less(
    batch: int, compiled: bool, accumulate: int, precision: str
) -> None:
    profile = PROFILE
    run = StepSettings(batch=batch, compile=compiled, accumulate=accumulate, precision=precision)
    more = replace(run, batch=batch + 1)
    assert estimate_step(profile, H200, more).total >= estimate_step(profile, H200, run).total
    assert estimate_memory(profile, more).peak >= estimate_memory(profile, run).peak
    deeper = replace(run, accumulate=accumulate + 1)
    assert estimate_step(profile, H200, deeper).total > estimate_step(profile, H200, run).total
    assert estimate_memory(profile, deeper).peak >= estimate_memory(profile, run).peak
    assert estimate_memory(profile, run).needed > estimate_memory(profile, run).peak
    assert estimate_step(profile, A100, run).total > 0.9 * estimate_step(profile, H200, run).total


PROFILE = gpt2()


def test_the_host_waits_for_the_sizes_of_groups_and_launches_nothing() -> None:
    profile = gpt2()
    groups = replace(
        profile.kernels[0],
        **{"name": "_grouped_mm", "kind": "matmul", "wide": True, "size": (8, 2048, 2048, 1024)},
        **{"flops": 2.0 * 8 * 2048 * 2048 * 1024, "count": 4},
    )
    more = replace(profile, kernels=(*profile.kernels, groups))
    run = StepSettings(batch=1, accumulate=2)  # The host limits this step.
    before, found = (estimate_step(each, H200, run) for each in (profile, more))
    assert found.host > found.device
    assert found.alone > 0
    assert found.alone == pytest.approx(found.device - before.device)
    assert found.total > found.host + found.alone


def test_winograd_speeds_up_small_windows_in_fp32_where_nothing_is_faster() -> None:
    """Volta has no TF32, and Hopper's measured kernels decide."""
    profile = find_model("resnet50", "fp32", False)
    wide = tuple(
        replace(each, window=(*each.window, 2)) if each.window else each for each in profile.kernels
    )
    gain = {}
    for name in ("V100", "H200"):
        device = device_of(name)
        assert device is not None
        run = StepSettings(batch=256, precision="fp32")
        dense, dilated = (
            estimate_step(replace(profile, kernels=each), device, run).total
            for each in (profile.kernels, wide)
        )
        gain[name] = dilated / dense
    assert gain["V100"] > 1.1
    assert gain["H200"] == 1.0


def test_choices_act_as_they_should() -> None:
    plain = StepSettings(batch=16)
    assert (
        estimate_step(PROFILE, H200, replace(plain, compile=True)).total
        < estimate_step(PROFILE, H200, plain).total
    )
    math = replace(plain, math_attention=True)
    assert estimate_memory(PROFILE, math).peak > estimate_memory(PROFILE, plain).peak
    assert estimate_step(PROFILE, H200, math).total > estimate_step(PROFILE, H200, plain).total
    sgd, adam = (
        estimate_memory(PROFILE, replace(plain, optimizer=name)) for name in ("sgd", "adamw")
    )
    assert adam.optimizer - sgd.optimizer == pytest.approx(8 * PROFILE.parameters / 2**20)
    less = estimate_memory(gpt2(checkpointing=True), plain)
    assert less.peak < estimate_memory(PROFILE, plain).peak
    again = estimate_step(gpt2(checkpointing=True), H200, plain)
    assert again.total > estimate_step(PROFILE, H200, plain).total
    vision = find_model("resnet50", "bf16", False)
    last = estimate_step(vision, H200, StepSettings(batch=256, channels_last=True)).total
    assert last < estimate_step(vision, H200, StepSettings(batch=256)).total


def test_frozen_parameters_need_no_temporary_memory_in_the_optimizer_step() -> None:
    frozen = replace(PROFILE, parameter_bytes=PROFILE.parameter_bytes + 2**33)
    before, after = (estimate_memory(each, StepSettings()) for each in (PROFILE, frozen))
    assert after.peak - before.peak == pytest.approx(2**33 / 2**20)


def test_sharding_divides_state_and_costs_communication() -> None:
    llama = find_model("llama-8b", "bf16", True)
    one, eight = StepSettings(batch=1), StepSettings(batch=1, accelerators=8, shard=True)
    whole, part = estimate_memory(llama, one), estimate_memory(llama, eight)
    assert part.parameters == pytest.approx(whole.parameters / 8)
    assert part.optimizer == pytest.approx(whole.optimizer / 8)
    h100 = device_of("H100")
    assert h100 is not None
    assert not estimate_on(llama, h100, one).fits
    assert estimate_on(llama, h100, eight).fits
    assert estimate_step(llama, h100, eight).communication > 0
    assert estimate_step(llama, h100, one).communication == 0


def test_state_is_shared_by_the_accelerators_of_all_nodes() -> None:
    llama = find_model("llama-70b", "bf16", True)
    h100 = device_of("H100")
    assert h100 is not None
    one_node = StepSettings(batch=1, accelerators=8, shard=True)
    four = replace(one_node, nodes=4)
    assert estimate_memory(llama, four) == estimate_memory(
        llama, StepSettings(batch=1, accelerators=32, shard=True)
    )
    assert not estimate_on(llama, h100, one_node).fits
    assert estimate_on(llama, h100, four).fits
    copies = replace(one_node, shard=False)
    assert estimate_memory(llama, copies) == estimate_memory(llama, replace(copies, nodes=4))


def test_a_profile_of_sharded_work_counts_the_nodes_of_the_task(tmp_path: Path) -> None:
    llama = next(
        each
        for each in profiles._zoo()
        if (each["name"], each["precision"], each["checkpointing"]) == ("llama-70b", "bf16", True)
    )
    data = {**llama, "run": {"batch": 1, "shard": True}}
    (tmp_path / "work.json").write_text(json.dumps(data))

    def rates(nodes: int) -> dict[str, float]:
        text = (
            f"name: t\nrun: python train.py\nnodes: {nodes}\nresources: {{gpu: 'H100:8'}}\n"
            "work: {samples: 1e7, profile: work.json}\n"
        )
        (tmp_path / "task.yaml").write_text(text)
        made = profiles.with_rates(load_task(tmp_path / "task.yaml").task, tmp_path)
        assert made.work is not None
        return dict(made.work.rates)

    assert "H100-80GB:8" not in rates(1)
    assert "H100-80GB:8" in rates(4)


def test_a_step_with_convolutions_needs_room_for_their_working_memory() -> None:
    """It is the library's choice and in no trace: resnet18 with 256 images reserved 5.19 GiB, where
    5.12 GiB were said to be enough."""
    traced = replace(PROFILE, reserved=(ReservedMemory(multiple=1, gaps=0, largest=2 << 30),))
    assert not any(each.kind == "conv" for each in traced.kernels)
    conv = replace(traced, kernels=(*traced.kernels[1:], replace(traced.kernels[0], kind="conv")))
    plain, more = (estimate_memory(each, StepSettings()).needed for each in (traced, conv))
    assert more - plain == pytest.approx(1.2 * 2048)


def test_no_fit_is_said_where_the_need_is_more_than_there_is() -> None:
    for device in list_devices():
        found = estimate_on(PROFILE, device, StepSettings(batch=8))
        if found.fits:
            assert found.memory.needed < device.memory_mib


def test_unknown_accelerators_are_not_guessed() -> None:
    assert device_of("no such thing") is None
    assert device_of("K520") is None  # the table has no rates for it


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "format"),
        ({"format": "other"}, "format"),
        (small(batch=0), "at least 1, not 0"),
        (small(memory={}), "incomplete"),
        (small(ops=[{"kind": "matmul"}]), "incomplete"),
        (small(ops="none"), "incomplete"),
        (small(assumed=[3]), "only strings, not 3"),
        (
            small(
                memory={
                    "parameters": 1,
                    "gradients": 1,
                    "buffers": 0,
                    "activations": [],
                    "activations_compiled": [],
                }
            ),
            "has no entries",
        ),
    ],
)
def test_what_is_no_profile_is_refused(data: object, says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        read_profile(data)


# rates


def test_rates_are_carried_by_arithmetic_and_bandwidth() -> None:
    h100, v100 = device_of("H100"), device_of("V100-16GB")
    assert h100 is not None
    assert v100 is not None
    measured = [MeasuredRate(device=A100, count=1, rate=100.0)]
    assert carry(measured, A100, 1, "bf16") == pytest.approx(100)
    assert 130 < carry(measured, h100, 1, "bf16") < 260
    assert carry(measured, v100, 1, "bf16") < 100
    assert 600 < carry(measured, A100, 8, "bf16") < 800
    with pytest.raises(ValueError, match="nothing"):
        carry([], A100, 1, "bf16")


@pytest.mark.parametrize(
    ("name", "half", "tf32"),
    [
        ("RTX4080", 2, 1),  # GeForce: half of the rate of its chip
        ("RTX5070Ti", 2, 1),
        ("RTX4000", 8, 1),  # a Quadro of Turing, whose data sheet states half precision
        ("RTX5000-Ada", 4, 2),
        ("A5000", 4, 2),
        ("RTX2080Ti", 4, 1),
        ("V100", 8, 1),
    ],
)
def test_cards_have_the_tensor_peaks_of_their_architecture(
    name: str, half: float, tf32: float
) -> None:
    device = device_of(name)
    assert device is not None
    assert device.half / device.fp32 == pytest.approx(half, rel=0.01)
    assert device.tf32 / device.fp32 == pytest.approx(tf32, rel=0.01)


def test_tf32_without_tensor_units_is_fp32() -> None:
    """A GeForce card has the same peak in both, but only products in TF32 reach it."""
    v100, geforce = device_of("V100"), device_of("RTX4090")
    assert v100 is not None
    assert geforce is not None
    assert v100.achieved_tf32 == v100.achieved_fp32 > v100.achieved
    assert geforce.tf32 == geforce.fp32
    assert geforce.achieved_tf32 > geforce.achieved_fp32
    wide = gpt2("fp32")
    for device, faster in ((v100, 1.0), (geforce, 1.2)):
        fp32, tf32 = (
            estimate_step(wide, device, StepSettings(batch=8, precision=each)).total
            for each in ("fp32", "tf32")
        )
        assert fp32 >= tf32 * faster * 0.95


def test_fp32_products_measured_on_other_processors_correct_nothing() -> None:
    """An H100 has 128 fp32 results per processor and clock, a V100 half of them."""
    v100, run = device_of("V100"), StepSettings(batch=8, precision="fp32")
    assert v100 is not None
    (h100,) = (each for each in measured_devices(own=False) if each.device.name == "H100")
    product = next(each for each in gpt2("fp32").kernels if each.kind == "matmul")
    setting = KernelSetting(device=v100, run=run, precision="fp32", scale=1.0)
    assert h100.correct(product, setting) == (1.0, FARTHEST)
    near = h100.correct(product, replace(setting, device=h100.device))
    assert near[1] < FARTHEST


def test_many_measurements_outweigh_the_prior() -> None:
    """Rates that follow arithmetic alone are recognised as that."""
    names = ("A100-80GB", "H100", "H200", "B200", "L4", "A10", "L40S", "T4", "V100-16GB", "RTX4090")
    devices = [device for name in names if (device := device_of(name)) is not None]
    rows = [
        MeasuredRate(device=each, count=1, rate=each.half * each.achieved / 1e12)
        for each in devices
    ] * 300
    target = device_of("H100-PCIe")
    assert target is not None
    assert carry(rows, target, 1, "bf16") == pytest.approx(
        target.half * target.achieved / 1e12, rel=0.03
    )


def test_measured_rates_replace_estimates_and_correct_the_others() -> None:
    run, key, other = StepSettings(batch=16), device_key(A100, 1), device_key(H200, 1)
    rates = make_rates(PROFILE, run, counts=(1,))
    known = {key: rates[key] / 2, "cpu": 3.0}
    corrected = merge_rates(make_rates(PROFILE, run, (1,), (), known), known)
    assert corrected[key] == rates[key] / 2
    assert corrected[other] == pytest.approx(rates[other] / 2, rel=0.01)
    assert corrected["cpu"] == 3.0
    alone = merge_rates({}, {key: 100.0})
    assert alone[key] == 100.0
    assert alone[other] > 100.0


@pytest.mark.parametrize(("slower", "others"), [(1.3, 1.0), (0.8, 1.0), (6.0, 4.0)])
def test_a_slow_host_does_not_slow_down_other_machines(slower: float, others: float) -> None:
    """A step that waits for the host says nothing of the kernels, unless no host is that slow."""
    run, key, other = StepSettings(batch=1), device_key(A100, 1), device_key(H200, 1)
    rates = make_rates(PROFILE, run, counts=(1,))
    corrected = make_rates(PROFILE, run, (1,), (), {key: rates[key] / slower})
    assert corrected[other] == pytest.approx(rates[other] / others)


# commands


def task(folder: Path, work: str) -> str:
    (folder / "task.yaml").write_text(
        f"name: t\nrun: python train.py\nresources: {{gpu: 1}}\nwork: {work}\n"
    )
    return str(folder / "task.yaml")


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, list(arguments))
    return done.exit_code, done.output


def test_estimate_lists_every_accelerator_as_json() -> None:
    code, out = run(
        "estimate", "--model", "gpt2", "--batch", "8", "--compile", "--samples", "1e6", "-o", "json"
    )
    assert code == 0
    rows = {(row["accelerator"], row["memory_mib"]): row for row in json.loads(out)["estimates"]}
    assert len(rows) > 50
    h200 = rows["H200", 141 * 1024]
    assert h200["fits"]
    assert h200["usd"] == pytest.approx(h200["time_s"] / 3600 * h200["usd_hr"])
    assert not rows["T4", 16 * 1024]["fits"] or rows["T4", 16 * 1024]["needed_mib"] < 16 * 1024


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "gpt3"], "gpt2"),
        (["--model", "resnet50", "--checkpointing"], "no profile"),
        ([], "one of"),
        (["--model", "gpt2", "--optimizer", "adamm"], "adamw"),
        (["--model", "gpt2", "--gpu", "H9000"], "H9000"),
        (["--model", "gpt2", "--gpu", "H1OO:8"], "did you mean H100"),
        (["--model", "gpt2", "--gpu", "H100:many"], "H100:8"),
        (["--model", "gpt2", "--gpu", "H100:0"], "H100:8"),
        (["--model", "gpt2", "--gpu", "H100:80", "--gpus", "8"], "different numbers"),
        (["--model", "gpt2", "--gpu", "H100:8", "--gpus", "1"], "different numbers"),
        ([str(Path(__file__)), "--epochs", "3"], "-- --epochs"),
    ],
)
def test_estimate_says_what_is_wrong(arguments: list[str], says: str) -> None:
    code, out = run("estimate", *arguments)
    assert code != 0
    assert says in out


def test_the_range_is_that_of_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "measured" / "estimate.md").read_text()
    found = re.search(r"nine of ten errors are at most (\S+) times", " ".join(page.split()))
    assert found is not None
    assert 0.85 <= float(found[1]) <= 1.0
    assert f"the range: {NEAR} and {FURTHER} x distance; {ELSEWHERE} elsewhere" in page


def test_the_range_grows_where_less_was_measured() -> None:
    def ratio(*given: str) -> float:
        code, out = run("estimate", "-o", "json", *given)
        assert code == 0, out
        row = json.loads(out)["estimates"][0]
        low, high = row["step_ms"] / row["step_ms_low"], row["step_ms_high"] / row["step_ms"]
        assert low == pytest.approx(high, rel=1e-3)
        return float(high)

    known = ratio("--model", "gpt2", "--gpu", "H200")
    assert 1.05 < known < 1.3
    assert ratio("--model", "gpt2", "--gpu", "L4") > known + 0.05
    assert ratio("--model", "gpt2", "--gpu", "H200:8") > known + 0.05


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gpt2", "--gpu", "H200"], "Nine of ten measured steps took at most"),
        (["gpt2"], "depending on the accelerator and on the step's kernels"),
        (["gpt2", "--gpu", "H200:8"], "of more than one accelerator were not measured"),
        (["gpt2", "--precision", "fp8"], "Step times of fp8 were not measured"),
        (["gpt2", "--attention", "math"], "attention that stores its scores were not measured"),
    ],
)
def test_the_line_below_the_table_is_for_this_kind_of_step(arguments: list[str], says: str) -> None:
    code, out = run("estimate", "--model", *arguments)
    assert code == 0
    assert says in " ".join(out.split())


def test_a_number_of_accelerators_is_read_as_in_a_task() -> None:
    options = ("estimate", "--model", "gpt2", "-o", "json")
    assert run(*options, "--gpu", "H100:8") == run(*options, "--gpu", "H100", "--gpus", "8")


def test_several_nodes_are_priced_together() -> None:
    options = (
        "estimate",
        "--model",
        "gpt2",
        "--gpu",
        "A100:80GB:8",
        "--samples",
        "1e6",
        "-o",
        "json",
    )
    (one,), (four,) = (
        json.loads(run(*options, "--nodes", nodes)[1])["estimates"] for nodes in ("1", "4")
    )
    assert four["usd_hr"] == pytest.approx(4 * one["usd_hr"])
    assert four["samples_per_s"] == pytest.approx(4 * one["samples_per_s"], rel=0.1)
    assert four["time_s"] == pytest.approx(one["time_s"] / 4, rel=0.1)
    assert four["usd"] == pytest.approx(four["time_s"] / 3600 * four["usd_hr"])


def test_a_size_of_memory_is_read_as_in_a_task() -> None:
    def sizes(*given: str) -> set[int]:
        code, out = run("estimate", "--model", "gpt2", "-o", "json", *given)
        assert code == 0, out
        return {row["memory_mib"] // 1024 for row in json.loads(out)["estimates"]}

    assert sizes("--gpu", "A100") == {40, 80}
    assert sizes("--gpu", "A100:80GB") == sizes("--gpu", "A100:80GB:8") == {80}
    assert min(sizes("--gpu", "nvidia:80GB")) == 80 < max(sizes("--gpu", "nvidia:80GB"))


def test_plan_ranks_by_cost_to_finish_with_a_profile(tmp_path: Path) -> None:
    (tmp_path / "work.json").write_text(json.dumps(small(run={"batch": 8})))
    file = task(tmp_path, "{samples: 1e7, profile: work.json}")
    code, out = run("plan", file, "-o", "json", "--limit", "200")
    assert code == 0
    costs = [
        each["cost_micros"]
        for each in json.loads(out)["placements"]
        if each["cost_micros"] is not None
    ]
    assert len(costs) > 20
    assert costs == sorted(costs)
    hourly = [each["rate_micros_per_hour"] for each in json.loads(out)["placements"]][: len(costs)]
    assert hourly != sorted(hourly)


def test_plan_uses_measured_rates_before_estimates(tmp_path: Path) -> None:
    (tmp_path / "work.json").write_text(json.dumps(small()))
    file = task(tmp_path, "{samples: 1e7, profile: work.json}")

    def time_on(name: str) -> float:
        _, out = run("plan", file, "-o", "json", "--limit", "500")
        rows = json.loads(out)["placements"]
        return next(
            float(row["run_time_s"])
            for row in rows
            if row["accelerators"] == name and row["run_time_s"]
        )

    before = time_on("1 x L4")
    keep(tmp_path / "work.json", [run_of("nowhere/l4", 2 * 1e7 / before)])
    assert time_on("1 x L4") == pytest.approx(before / 2)
    assert "ops" in json.loads((tmp_path / "work.json").read_text())


def run_of(machine: str, rate: float | None, usd_hr: float | None = 3.6) -> MachineRun:
    return MachineRun(key="L4-24GB:1", machine=machine, rate=rate, usd_hr=usd_hr, job="bench-1")


def test_bench_keeps_the_rate_of_each_machine_and_the_lowest_of_the_accelerator(
    tmp_path: Path,
) -> None:
    path = tmp_path / "work.json"
    keep(path, [run_of("a/l4:1", 10.0), run_of("b/l4:1", 8.0), run_of("c/l4:1", None)])
    keep(path, [run_of("b/l4:1", 9.0)])
    kept = json.loads(path.read_text())
    assert kept["machines"] == {"a/l4:1": 10.0, "b/l4:1": 9.0}
    assert kept["measured"] == {"L4-24GB:1": 9.0}
    file = task(tmp_path, "{samples: 1e7, profile: work.json}")
    code, out = run("validate", file)
    assert code == 0, out


def test_bench_keeps_what_it_measured_before_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run_of("a/l4:1", 10.0)]

    def measure(*given: object) -> MachineRun:
        if not runs:
            raise CommandFailure("the server refuses the task")
        return runs.pop()

    monkeypatch.setattr(bench, "session", nullcontext)
    monkeypatch.setattr(bench, "_measure", measure)
    file = task(tmp_path, "{samples: 1e7, profile: work.json}")
    code, out = run("bench", file, "--provider", "aws", "--provider", "gcp")
    assert code == 1
    assert "refuses" in out
    assert json.loads((tmp_path / "work.json").read_text())["machines"] == {"a/l4:1": 10.0}


def test_bench_plots_the_price_of_1000_samples() -> None:
    runs = [run_of("a/l4", 1.0), run_of("b/l4", 4.0), run_of("c/l4", None)]
    assert [run.usd_per_1000 for run in runs] == [pytest.approx(1.0), pytest.approx(0.25), None]
    lines = draw_bars([(run.machine, run.usd_per_1000) for run in runs], width=8)
    assert lines == [
        "USD per 1,000 samples",
        "b/l4  0.25      ##",
        "a/l4  1         ########",
        "c/l4  unknown",
    ]


def test_rates_of_machines_are_accepted(tmp_path: Path) -> None:
    code, out = run("validate", task(tmp_path, "{samples: 1e7, rates: {aws/p5.48xlarge: 5}}"))
    assert code == 0, out
    code, out = run("validate", task(tmp_path, "{samples: 1e7, rates: {aws/p5/48: 5}}"))
    assert code != 0


def test_plan_says_where_a_profile_is_missing_or_no_profile(tmp_path: Path) -> None:
    file = task(tmp_path, "{samples: 1e7, profile: work.json}")
    code, out = run("plan", file)
    assert code == 2
    assert "work.json" in out
    (tmp_path / "work.json").write_text("{}")
    code, out = run("plan", file)
    assert code == 2
    assert "neither" in out


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        ('{"measured": 5}', "`measured` states"),
        ('{"measured": {"L4:1": "x"}}', "`measured` states 'x' for 'L4:1'"),
        ('{"measured": {"L4:1": 0}}', "`measured` states 0"),
        ('{"measured": {"L4:1": 1e999}}', "`measured` states inf"),
        ('{"measured": {"L4:1": NaN}}', "`measured` states nan"),
        ('{"measured": {"L4:0": 5}}', "`measured` states 5 for 'L4:0'"),
        ('{"measured": {"L4:x": 5}}', "`measured` states 5 for 'L4:x'"),
        ('{"measured": {"L4:1": 5}, "machines": [5]}', "`machines` states"),
        ('{"machines": {"aws/g6.xlarge:1": -1}}', "`machines` states -1"),
        ('{"measured": {"L4:1": 5}, "run": 5}', "`run` is no table of settings"),
        ('{"measured": {"L4:1": 5}, "run": {"x": 1}}', "`run` is no table of settings"),
    ],
)
def test_odd_rates_of_a_profile_are_said(tmp_path: Path, profile: str, says: str) -> None:
    (tmp_path / "work.json").write_text(profile)
    code, out = run("plan", task(tmp_path, "{samples: 1e7, profile: work.json}"))
    assert code == 2
    assert f"work.json: {says}" in " ".join(out.split())


def test_what_is_submitted_carries_the_rates(tmp_path: Path) -> None:
    import yaml

    (tmp_path / "work.json").write_text(json.dumps(small()))
    file = Path(task(tmp_path, "{samples: 1e7, profile: work.json, rates: {L4: 77}}"))
    loaded = load_task(str(file), {}, now=datetime(2026, 1, 1, tzinfo=UTC))
    made = yaml.safe_load(text_with_rates(loaded.text, loaded.task, tmp_path))
    assert "profile" not in made["work"]
    assert made["work"]["rates"]["L4"] == 77
    assert made["work"]["rates"]["H200-141GB:1"] > made["work"]["rates"]["A100-80GB:1"]
    assert {key.partition(":")[2] for key in made["work"]["rates"]} == {"1", ""}
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(made))
    again = load_task(str(tmp_path / "again.yaml"), {}, now=datetime(2026, 1, 1, tzinfo=UTC))
    assert again.task.work is not None
    assert again.task.work.rates == made["work"]["rates"]


def test_rates_that_a_measurement_corrected_have_a_smaller_margin(tmp_path: Path) -> None:
    file = Path(task(tmp_path, "{samples: 1e7, profile: work.json}"))

    def margin(**more: object) -> float:
        (tmp_path / "work.json").write_text(json.dumps({**small(), **more}))
        loaded = load_task(str(file), {}, now=datetime(2026, 1, 1, tzinfo=UTC))
        text = text_with_rates(loaded.text, loaded.task, tmp_path)
        found = re.search(r"margin: ([\d.]+)", text)
        return float(found[1]) if found else 1.0

    assert 1 < margin(measured={"A100-80GB:1": 2.0}) < margin()


# bench


def test_bench_changes_only_what_it_must() -> None:
    text = (
        "name: t\nrun: python train.py\nresources: {cpu: 4, gpu: 8}\noutputs: []\nlimits: "
        "{budget: 5}\n"
    )
    import yaml

    made = yaml.safe_load(make_text(text, "H100:1", ("local",), 60))
    assert made["resources"] == {"cpu": 4, "gpu": "H100:1", "providers": ["local"]}
    assert made["run"] == "python train.py"
    assert made["limits"]["budget"] == 5
    assert "outputs" not in made
    with pytest.raises(CommandFailure):
        make_text("resources: {accelerators: H100}\n", None, (), 60)


def test_a_rate_leaves_the_warm_up_out() -> None:
    slow = [(float(second), 10.0 * second) for second in range(10)]
    steady = [(10.0 + second, 90.0 + 100.0 * second) for second in range(51)]
    assert read_rate(slow + steady, 60) == pytest.approx(100)
    assert read_rate([], 60) is None
    assert read_rate([(0.0, 5.0)], 60) is None
    assert read_rate([(0.0, 0.0), (1.0, 50.0)], 60) == 50


# bench --kernels

ABOUT = {"format": "cavvy-device-profile/1", "device": "NVIDIA L4", "memory_mib": 22491}
ROW = {
    "kind": "matmul",
    "name": "mm",
    "precision": "bf16",
    "wide": False,
    "backward": False,
    "size": [1, 4096, 4096, 4096],
    "shape": [1, 4096, 4096, 4096],
    "flops": 1e11,
    "bytes": 1e8,
    "us": 1000.0,
}


def print_profile(*parts: dict[str, object]) -> list[str]:
    """The output of the program that measures kernels, between other lines."""
    return ["warning: something", *(f"CAVVY_KERNEL {json.dumps(each)}\n" for each in parts)]


def test_a_measured_profile_replaces_the_built_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path))
    shipped = list_device_profiles()
    assert set(shipped) >= {"H100", "H200"}
    for each in shipped.values():
        assert each["source"]
        assert each["date"]
        assert device_of(each["accelerator"]) is not None
        assert all(row["us"] > 0 for row in each["kernels"])
    lines = print_profile(
        {"about": {**ABOUT, "device": "NVIDIA H200"}},
        {"total": 1},
        {"host": {"launch_us": 5.0}},
        {"row": ROW},
        {"end": {"seconds": 50.0, "skipped": []}},
    )
    kernel_bench.keep(kernel_bench.collect(lines), None)
    own = list_device_profiles()["H200"]
    assert own["kernels"] == [ROW]
    assert own["host"] == {"launch_us": 5.0}


def test_kernels_that_were_not_measured_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    failed = {**ROW, "us": None, "error": "out of memory"}
    lines = print_profile(
        {"about": ABOUT},
        {"total": 3},
        {"row": ROW},
        {"row": failed},
        {"end": {"seconds": 110.0, "skipped": ["mm bf16 (1, 2, 2, 2)"]}},
    )
    kernel_bench.show([kernel_bench.collect(lines)], "table")
    shown = capsys.readouterr()
    assert re.search(r"L4 +matmul +bf16 +1 +100 +100 +1,000.0", shown.out)
    assert "not measured: mm bf16 1x4096x4096x4096: out of memory" in shown.err
    assert "the last 1 kernels, for lack of time" in shown.err


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"error": "PyTorch sees no accelerator on this machine"}], "sees no accelerator"),
        ([{"about": ABOUT}, {"total": 9}, {"row": ROW}], "ended after 1 of 9 kernels"),
        ([], "ended after 0 of all kernels"),
    ],
)
def test_a_measurement_that_ends_early_is_an_error(
    parts: list[dict[str, object]], message: str
) -> None:
    with pytest.raises(CommandFailure, match=message) as failure:
        kernel_bench.collect(print_profile(*parts))
    assert failure.value.hint


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "5",
        "[" * 100_000,
        '{"about": 5}',
        '{"about": {"device": null, "kernels": 5}}',
        '{"about": {"format": "other"}}',
        '{"total": 1e999}',
        '{"row": {}}',
        '{"end": {"seconds": 1, "skipped": 7}}',
        '{"host": {"launch_us": NaN}}',
        *(
            json.dumps({"row": {**ROW, key: value}})
            for key, values in {
                "us": (float("nan"), float("inf"), -1, "x", 1e17, 10**400, 1e-12),
                "size": (None, [], [1, 2, -3, 4], [1, 2, 3, 1e999]),
                "bytes": (-1, float("nan"), None),
                "name": (None, 5),
                "kind": ([], None),
            }.items()
            for value in values
        ),
    ],
)
def test_odd_lines_of_a_measurement_are_no_profile(line: str) -> None:
    """A node of others prints what it likes, and two processes print into each other's lines."""
    end = {"end": {"seconds": 50.0, "skipped": []}}
    lines = print_profile({"about": ABOUT}, {"row": ROW}, end)
    odd = [*lines[:-1], f"CAVVY_KERNEL {line}", lines[-1]]
    if "skipped" in line:
        odd.pop()
    assert len(kernel_bench.collect(lines)["kernels"]) == 1
    with pytest.raises(CommandFailure, match="no device profile"):
        kernel_bench.collect(odd)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 100_000,
        '{"accelerator": "L4"}',
        *(
            json.dumps({**ABOUT, "accelerator": "L4", "kernels": kernels})
            for kernels in (5, [5], ["x"], [{**ROW, "us": 1e300}], [{**ROW, "us": float("nan")}])
        ),
    ],
)
def test_a_broken_profile_of_a_device_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path))
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "L4.json").write_text(text)
    measured_devices.cache_clear()
    with pytest.raises(CommandFailure, match=r"devices"):
        measured_devices()
    measured_devices.cache_clear()


def test_kernels_are_measured_in_a_valid_task(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(kernel_bench.make_task("H100:1", "aws"))
    resources = load_task(str(file), {}, now=datetime.now(UTC)).task.resources
    assert resources.accelerators[0].count_min == 1
    assert resources.providers == ("aws",)


def test_bench_needs_a_task_or_kernels(tmp_path: Path) -> None:
    assert run("bench")[0] == 2
    code, out = run("bench", task(tmp_path, "{samples: 1e7}"), "--kernels")
    assert code == 2
    assert "omit TASK.YAML" in out


def test_a_file_holds_the_profile_of_one_accelerator(tmp_path: Path) -> None:
    save = str(tmp_path / "profile.json")
    code, out = run("bench", "--kernels", "--gpu", "H100:1", "--gpu", "L4:1", "--save", save)
    assert code == 2
    assert "name one accelerator" in out


def test_a_benchmark_runs_the_values_of_the_task_file() -> None:
    values = "{flag: no, time: 10:30, mode: 010, day: 2024-01-01, lr: 1e-05, text: '1e-05'}"
    text = make_text(f"name: x\nparams: {values}\nrun: train\n", None, (), 60.0)
    assert (read_table(text) or {})["params"] == (read_table(f"p: {values}") or {})["p"]
