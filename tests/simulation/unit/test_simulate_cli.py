"""`cavvy simulate` from the command line, on small made-up records."""

import csv
import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cavvy.cli.main import cli


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", *arguments], catch_exceptions=False)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    source = random.Random(5)
    for zone in ("a-1a_gpu_1", "b-1a_gpu_1"):
        counts: list[int] = []
        while len(counts) < 900:
            counts += [len(counts) % 2] * source.randrange(1, 30)
        folder = tmp_path / "traces"
        folder.mkdir(exist_ok=True)
        (folder / f"{zone}.json").write_text(
            json.dumps({"metadata": {"gap_seconds": 600}, "data": counts[:900]})
        )
    return tmp_path / "traces"


def spot(traces: Path, *more: str) -> Result:
    lengths = (
        "--work",
        "10h",
        "--deadline",
        "12h,20h",
        "--overhead",
        "0.1h,0.5h",
        "--windows",
        "3",
        "--processes",
        "1",
    )
    return run("spot", "--trace", str(traces), *lengths, *more)


def test_json_has_each_policys_score_and_each_cells(traces: Path) -> None:
    document = json.loads(spot(traces, "--policy", "auto,greedy", "-o", "json").stdout)
    assert list(document["policies"]) == ["auto", "greedy"]
    for score in document["policies"].values():
        assert score["cost_over_optimum"]["worst"] >= score["cost_over_optimum"]["mean"] >= 1
        assert (score["missed_deadlines"], score["runs"]) == (0, 2 * 3 * 4)
    assert len(document["cells"]) == 2 * 4
    assert "runs" not in document


def test_segments_let_anyone_work_out_the_cost_again(traces: Path) -> None:
    document = json.loads(
        spot(traces, "--policy", "auto", "--spot-ratio", "0.4", "--segments", "-o", "json").stdout
    )
    assert len(document["runs"]) == 2 * 3 * 4
    for one in document["runs"]:
        hours = {"spot": 0.0, "on-demand": 0.0, "idle": 0.0}
        for segment in one["segments"]:
            hours[segment["mode"]] += (segment["end_s"] - segment["start_s"]) / 3600
        assert one["usd"] == pytest.approx(0.4 * hours["spot"] + hours["on-demand"])
        assert sum(segment["work_s"] for segment in one["segments"]) == pytest.approx(one["work_s"])
        assert one["segments"][-1]["end_s"] == pytest.approx(one["end_s"])
        assert one["end_s"] <= one["deadline_s"] + 0.01


def test_without_the_optimum_costs_are_told_alone(traces: Path) -> None:
    score = json.loads(spot(traces, "--policy", "auto", "--no-optimum", "-o", "json").stdout)[
        "policies"
    ]["auto"]
    assert score["cost_over_optimum"] == {"mean": None, "worst": None}
    assert score["mean_usd"] > 0
    assert "auto" in spot(traces, "--no-optimum").stdout


def test_markets_together_cost_no_more_than_the_better_one(traces: Path) -> None:
    apart = json.loads(spot(traces, "--policy", "auto", "-o", "json").stdout)["policies"]["auto"]
    together = json.loads(spot(traces, "--policy", "auto", "--together", "-o", "json").stdout)[
        "policies"
    ]["auto"]
    assert together["runs"] == apart["runs"] / 2
    assert together["mean_optimum_usd"] < apart["mean_optimum_usd"]


def test_every_run_is_written_and_the_plots_are_drawn(traces: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    parquet = pytest.importorskip("pyarrow.parquet")
    files = {
        name: tmp_path / name for name in ("runs.csv", "runs.parquet", "plot.svg", "gantt.svg")
    }
    options = zip(
        ("--csv", "--parquet", "--plot", "--gantt"), map(str, files.values()), strict=True
    )
    assert spot(traces, *(part for pair in options for part in pair)).exit_code == 0
    with files["runs.csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * 4 * 3
    assert parquet.read_table(files["runs.parquet"]).num_rows == len(rows)
    assert "</svg>" in files["plot.svg"].read_text()
    assert "</svg>" in files["gantt.svg"].read_text()


def test_a_drawing_may_end_as_matplotlib_knows_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    jobs, pools = tmp_path / "jobs.csv", tmp_path / "pools.csv"
    jobs.write_text("arrival_s,duration_s,gpus,vc\n0,100,3,a\n")
    pools.write_text("vc,node num\na,1\n")
    names = (
        "queue.PNG",
        "queue.jpg",
        "queue.Jpeg",
        "queue.eps",
        "queue.svgz",
        "queue.tif",
        "queue",
    )
    for name in names:
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        done = run(
            "fleet", "--jobs", str(jobs), "--pools", str(pools), "--plot", str(folder / name)
        )
        assert done.exit_code == 0, done.stderr
        assert [file.name for file in folder.iterdir()] == [name if "." in name else f"{name}.png"]


def test_the_same_seed_draws_the_same_windows_on_any_number_of_processes(traces: Path) -> None:
    one = spot(traces, "--policy", "greedy", "-o", "json").stdout
    assert spot(traces, "--policy", "greedy", "-o", "json", "--processes", "2").stdout == one
    assert spot(traces, "--policy", "greedy", "-o", "json", "--seed", "1").stdout != one


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--policy", "best"), "expected one of auto"),
        (("--deadline", "soon"), "--deadline: expected a length of time"),
        (("--work", "30h"), "do not fit into a deadline"),
        (("--deadline", "300h"), "does not fit into the record"),
        (("--plot", "cost.xyz"), "cost.xyz: expected a name that ends in .svg, .png or .pdf"),
        (("--csv", "nowhere/runs.csv"), "nowhere: no such folder"),
        (("--on-demand", "-1"), "expected a number above 0, not -1"),
        (("--checkpoint-gb", "-3"), "expected a number of 0 or more, not -3"),
    ],
)
def test_what_cannot_be_is_said(traces: Path, more: tuple[str, ...], words: str) -> None:
    result = spot(traces, *more)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_queue_is_served_in_order_and_large_jobs_do_not_starve(tmp_path: Path) -> None:
    jobs, pools = tmp_path / "jobs.csv", tmp_path / "pools.csv"
    jobs.write_text(
        "arrival_s,duration_s,gpus,vc\n0,100,3,a\n10,100,4,a\n20,100,1,a\n30,100,9,a\n40,50,1,b\n"
    )
    pools.write_text("vc,node num\na,1\nb,1\n")
    options = ("--jobs", str(jobs), "--pools", str(pools), "--gpus-per-node", "4")
    found = json.loads(run("fleet", *options, "-o", "json").stdout)
    assert (found["jobs"], found["left_out"]) == (4, 1)
    # the second waits for the first until 100, and the third, which would fit beside the first,
    # until 200
    assert found["makespan_s"] == 300
    assert found["mean_wait_s"] == (0 + 90 + 180 + 0) / 4


FIELDS = "JobID|Submit|ElapsedRaw|AllocTRES|Partition\n"


def test_jobs_that_slurm_has_run_are_read(tmp_path: Path) -> None:
    jobs, pools = tmp_path / "jobs.txt", tmp_path / "pools.csv"
    jobs.write_text(
        f"{FIELDS}8|2026-03-01T09:00:00|100|billing=9,cpu=9,gres/gpu:a100=3,gres/gpu=3,node=1|a\n"
        "8.0|2026-03-01T09:00:00|100|cpu=9,gres/gpu=3|\n"  # a step
        "9|2026-03-01T09:00:10|100|cpu=1,gres/gpu:a100=3,gres/gpu:h100=1,mem=1G|a\n"
        "10|2026-03-01T09:00:20|100|cpu=4,mem=8G,node=1|a\n"  # without a GPU
        "11|2026-03-01T09:00:30|0||a\n"  # cancelled before it had started
        "12|2026-03-01T09:00:40|50|gres/gpu=1|b\n"
    )
    pools.write_text("vc,node num\na,1\nb,1\n")
    options = ("--jobs", str(jobs), "--pools", str(pools), "--gpus-per-node", "4")
    found = json.loads(run("fleet", *options, "-o", "json").stdout)
    assert (found["jobs"], found["left_out"], found["makespan_s"]) == (3, 0, 200)
    assert found["mean_wait_s"] == 90 / 3


def test_a_record_as_long_as_the_deadline_has_one_window(tmp_path: Path) -> None:
    (tmp_path / "short.json").write_text(
        json.dumps({"metadata": {"gap_seconds": 300}, "data": [1] * 144})
    )
    lengths = ("--work", "10h", "--deadline", "12h", "--windows", "2", "--processes", "1")
    document = json.loads(
        run("spot", "--trace", str(tmp_path), *lengths, "--segments", "-o", "json").stdout
    )
    assert {one["start_s"] for one in document["runs"]} == {0.0}
    assert run("spot", "--trace", str(tmp_path), *lengths, "--deadline", "13h").exit_code == 2


HEAD = "arrival_s,duration_s,gpus,vc\n"


@pytest.mark.parametrize(
    ("rows", "nodes", "words"),
    [
        ("when,long\n1,2\n", "1", "expected the columns arrival_s"),
        ("", "1", "the file has no column arrival_s and no duration_s"),
        (f"{HEAD}nan,1,1,a\n", "1", "arrival nan s"),
        (f"{HEAD}0,-5,1,a\n", "1", "duration -5 s"),
        (f"{HEAD}0,5,0,a\n", "1", "0 GPUs"),
        (f"{FIELDS}8|noon|60|gres/gpu=1|a\n", "1", "line 2: Invalid isoformat string: 'noon'"),
        (f"{FIELDS}8|2026-03-01T09:00:00\n", "1", "line 2: "),
        ("JobID|Submit|Elapsed\n", "1", "the list has no field ElapsedRaw and no AllocTRES"),
        (f"{HEAD}0,5,1,a\n", "-1", "expected the columns vc and node num: -1 nodes"),
    ],
)
def test_a_queue_that_cannot_be_read_is_said(
    tmp_path: Path, rows: str, nodes: str, words: str
) -> None:
    jobs, pools = tmp_path / "jobs.csv", tmp_path / "pools.csv"
    jobs.write_text(rows)
    pools.write_text(f"vc,node num\na,{nodes}\n")
    result = run("fleet", "--jobs", str(jobs), "--pools", str(pools))
    assert result.exit_code == 2
    assert words in result.stderr


PODS = "cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec"
NODES = "cpu_milli,memory_mib,gpu,model"


def write_packing(tmp_path: Path, pod: str = "1000,1,1,500,", node: str = "9000,9,2,T4") -> Path:
    folder = tmp_path / "lists"
    folder.mkdir()
    (folder / "few.csv").write_text(f"{PODS}\n{pod}\n2000,1,1,1000,T4|A100\n1000,0,0,0,\n")
    (folder / "nodes.csv").write_text(f"{NODES}\n{node}\n9000,9,2,T4\n")
    return folder


def test_a_cluster_is_filled_by_each_policy(tmp_path: Path) -> None:
    folder, page = write_packing(tmp_path), tmp_path / "page.html"
    (tmp_path / "known.csv").write_text("workload,01-Random,06-FGD\nfew,80.5,90\nother,1,2\n")
    options = ("--pods", str(folder), "--nodes", str(folder / "nodes.csv"), "--processes", "1")
    options += ("--published", str(tmp_path / "known.csv"), "--page", str(page))
    found = json.loads(run("fleet", *options, "-o", "json").stdout)
    assert [each["policy"] for each in found] == ["random", "best fit", "FGD", "cavvy"]
    assert {each["jobs"] for each in found} == {"few"}  # nodes.csv in the folder is no list of jobs
    assert all(0 < each["allocated_percent"] <= 100 for each in found)
    assert [each["published_percent"] for each in found] == [80.5, None, 90.0, None]
    assert "<td>80.50</td>" in page.read_text()
    assert page.read_text().count("<svg") == 1


def write_racks(tmp_path: Path, *gangs: str) -> tuple[str, ...]:
    """Two racks with three and five nodes of one GPU, and these gangs of whole GPUs."""
    nodes = [f"9000,9,1,T4,{rack}" for rack in ("r1",) * 3 + ("r2",) * 5]
    (tmp_path / "nodes.csv").write_text("\n".join((f"{NODES},rack", *nodes)))
    rows = [f"1000,1,1,1000,{gang}" for gang in gangs]
    columns = "cpu_milli,memory_mib,num_gpu,gpu_milli,nodes,same,prefer,slice"
    (tmp_path / "gangs.csv").write_text("\n".join((columns, *rows)))
    return ("--pods", str(tmp_path / "gangs.csv"), "--nodes", str(tmp_path / "nodes.csv"))


@pytest.mark.parametrize(
    ("gangs", "percent"),
    [
        (["3,rack,,", "5,rack,,"], 100),  # each takes the smallest rack that holds it
        (["6,rack,,"], 0),  # no rack holds it
        (["6,rack,,2"], 75),  # one slice in the rack of three, and two in the other
        (["8,,rack,"], 100),
    ],
)
def test_gangs_are_packed_by_racks(tmp_path: Path, gangs: list[str], percent: float) -> None:
    options = write_racks(tmp_path, *gangs)
    runs = run("fleet", *options, "--runs", "1", "--processes", "1", "-o", "json").stdout
    assert {each["allocated_percent"] for each in json.loads(runs)} == {percent}


@pytest.mark.parametrize(
    ("gang", "words"),
    [
        ("4,rak,,", "gangs: no node has the label rak; the labels are rack"),
        ("4,rack,,3", "gangs.csv:2: 4 nodes cannot be divided into slices of 3"),
        ("1,rack,,", "gangs.csv:2: `topology` has no meaning for a task of one node"),
        ("x,rack,,", "gangs.csv:2: nodes: expected a whole number from 1"),
    ],
)
def test_gangs_that_no_rack_can_hold_are_told(tmp_path: Path, gang: str, words: str) -> None:
    done = run("fleet", *write_racks(tmp_path, gang))
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("pod", "node", "words"),
    [
        ("1000,1,1,1500,", "9,9,2,T4", "few.csv:2: gpu_milli: expected a whole number from 1 to"),
        ("-1,1,1,500,", "9,9,2,T4", "few.csv:2: cpu_milli: expected a whole number"),
        ("1,1,1", "9,9,2,T4", "few.csv:2: gpu_milli: expected a whole number from 1 to 1000"),
        ("1,1,1,500,", "x,9,2,T4", "nodes.csv:2: cpu_milli: expected a whole number"),
    ],
)
def test_a_bad_row_of_a_packing_is_named(tmp_path: Path, pod: str, node: str, words: str) -> None:
    folder = write_packing(tmp_path, pod, node)
    done = run("fleet", "--pods", str(folder), "--nodes", str(folder / "nodes.csv"))
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "expected jobs: pass --jobs and --pools, or --pods and --nodes"),
        (("--jobs", "few.csv"), "--jobs needs --pools"),
        (("--pods", "few.csv"), "--pods needs --nodes"),
        (("--pods", "nodes.csv", "--nodes", "nodes.csv"), "no column num_gpu and no gpu_milli"),
        (("--pods", "few.csv", "--nodes", "few.csv"), "the file has no column gpu and no model"),
    ],
)
def test_options_of_a_fleet_that_do_not_fit_are_refused(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    folder = write_packing(tmp_path)
    done = run(
        "fleet", *(str(folder / each) if each.endswith(".csv") else each for each in options)
    )
    assert done.exit_code == 2
    assert words in done.stderr


def test_projects_share_a_pool_and_keep_their_shares(tmp_path: Path) -> None:
    """Project a has long jobs on all GPUs. Those of b come later, are short, and preempt them."""
    jobs, pools, page = (tmp_path / each for each in ("jobs.csv", "pools.csv", "page.html"))
    rows = [*["0,36000,1,a"] * 8, *["10,600,1,b"] * 4, "0,5,9,a", "0,5,1,unknown"]
    jobs.write_text("arrival_s,duration_s,gpus,vc\n" + "\n".join(rows) + "\n")
    pools.write_text("vc,node num\na,1\nb,1\n")
    options = ("--jobs", str(jobs), "--pools", str(pools), "--shared-gpus", "8")
    found = json.loads(run("fleet", *options, "--page", str(page), "-o", "json").stdout)
    first, shortest, ours = found
    assert {each["jobs"] for each in found} == {12}
    assert {each["left_out"] for each in found} == {2}
    assert (ours["preemptions"], ours["below_share"]) == (4, 0)
    # four long jobs wait for the short ones, and repeat a minute of work
    assert ours["mean_h"] * 3600 == pytest.approx((4 * 36000 + 4 * 36660 + 4 * 600) / 12, abs=1)
    assert first["mean_h"] == shortest["mean_h"] > ours["mean_h"]
    assert page.read_text().count("<svg") == 1
    assert run("fleet", "--shared-gpus", "8").exit_code == 2


def test_a_service_is_compared_with_a_rule(tmp_path: Path) -> None:
    requests = tmp_path / "requests.csv"
    rows = "".join(f"{at},2\n" for at in range(300))
    requests.write_text(f"arrival_s,service_s\n{rows}")
    plot = tmp_path / "late.svg"
    given = ["serve", "--trace", str(requests), "--rule", "cavvy,keda", "--plot", str(plot)]
    document = json.loads(run(*given, "--on-time", "0.9", "-o", "json").stdout)
    assert [each["rule"] for each in document["runs"]] == ["cavvy", "keda"]
    bound = document["bound_replica_hours"]
    assert bound == pytest.approx(300 * 2 / 4 / 3600)
    assert all(each["replica_hours"] >= bound for each in document["runs"])
    assert "<svg" in plot.read_text()
    table = run(*given[:-2], "--cold")
    assert "REPLICA-HOURS" in table.stdout
    wrong = CliRunner().invoke(cli, ["simulate", *given[:-3], "none"])
    assert wrong.exit_code == 2
    assert "expected one of cavvy" in wrong.output


def test_a_service_may_run_on_recorded_spot(tmp_path: Path, traces: Path) -> None:
    requests = tmp_path / "requests.csv"
    requests.write_text("arrival_s,service_s\n" + "".join(f"{at},2\n" for at in range(300)))
    given = ("serve", "--trace", str(requests), "--rule", "cavvy,skyserve", "--spot", str(traces))
    document = json.loads(run(*given, "-o", "json").stdout)
    assert all(each["usd"] > 0 for each in document["runs"])
