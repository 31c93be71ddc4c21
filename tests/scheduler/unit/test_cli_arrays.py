"""Commands about arrays: the table of their jobs, all logs, removal and export."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.unit.cli_client import T0, UNSTARTED, FakeClient, client, make_job

from cavvy.cli.main import cli
from cavvy.cli.reach.arrays import STREAMS
from cavvy.client import array_wire, wire

__all__ = ["client"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, prog_name="cavvy")


SWEEP = "{name: many, params: {lr: 0.1}, sweep: {lr: [0.3, 0.1]}, run: 'x ${{ params.lr }}'}"


def make_array(phases: Sequence[str], begun: Sequence[bool] = ()) -> array_wire.ArrayDetail:
    """An array of these phases; the jobs that never had a node are False in `begun`."""
    counts = {phase: phases.count(phase) for phase in phases}
    array = wire.JobListing(
        id="0123456789abcdef",
        project="default",
        name="many",
        user="",
        phase=phases[0],
        reason=", ".join(f"{count} {phase}" for phase, count in counts.items()),
        **UNSTARTED,
        spent_micros=0,
        members=counts,
    )
    jobs = [
        array_wire.ArrayMemberView(
            index=index,
            id=f"many-{index}",
            name=f"many.{index}",
            phase=phase,
            reason="",
            attempt=int(begun[index] if begun else phase != "queued"),
            exit_code={"done": 0, "failed": 3}.get(phase),
            placement=None,
            since=T0,
            ended_at=None,
            spent_micros=0,
            params={"phase": f"p{index}"},
            progress={"done": 3, "phase": "x", "loss": (0.0, 0.5, -1)[index % 3], "t": 7},
        )
        for index, phase in enumerate(phases)
    ]
    return array_wire.ArrayDetail(array=array, parallel=None, jobs=jobs)


@pytest.fixture
def arrays(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> list[array_wire.ArrayDetail]:
    """The states of the array, of which each request reads the next; the last one stays."""
    states: list[array_wire.ArrayDetail] = []

    def read(*_: object) -> array_wire.ArrayDetail:
        return states.pop(0) if len(states) > 1 else states[0]

    monkeypatch.setattr(array_wire, "read_array", read)
    monkeypatch.setattr("cavvy.cli.reach.arrays._LOOK_S", 0.01)
    for index in range(3 * STREAMS):
        client.all_jobs[f"many-{index}"] = make_job(f"many-{index}", "done")
    client.log_bytes = b"one\r25%\r50%\ntwo"
    return states


def test_logs_of_an_array_have_the_names_of_its_jobs(
    arrays: list[array_wire.ArrayDetail],
) -> None:
    arrays.append(make_array(["done", "stopped", "running"], [True, False, True]))
    assert run("logs", "many").stdout_bytes == (
        b"many.0: one\r25%\r50%\nmany.0: two\nmany.2: one\r25%\r50%\nmany.2: two\n"
    )
    assert run("logs", "many", "--tail", "1").stdout == "many.0: two\nmany.2: two\n"


def test_following_an_array_prints_all_logs_and_passes_an_exit_code_on(
    arrays: list[array_wire.ArrayDetail],
) -> None:
    count = 2 * STREAMS + 1
    arrays += [
        make_array(["queued"] * count),
        make_array(["running"] * count),
        make_array(["running"] * (count - 1) + ["failed"]),
        make_array(["done"] * (count - 1) + ["failed"]),
    ]
    found = run("logs", "-f", "many")
    assert found.exit_code == 3
    whole = [line for line in found.stdout.split("\n") if line.endswith("two")]
    assert sorted(whole) == sorted(f"many.{index}: two" for index in range(count))
    assert f"many: {count} queued" in found.stderr
    assert f"follows {STREAMS} logs at a time; others come later" in found.stderr


def test_following_an_array_that_never_ran_ends(arrays: list[array_wire.ArrayDetail]) -> None:
    arrays += [make_array(["queued", "queued"]), make_array(["stopped", "stopped"], [False, False])]
    found = run("logs", "-f", "many", "--timestamps")
    assert (found.exit_code, found.stdout) == (1, "")


def test_an_array_is_removed_as_a_whole(
    arrays: list[array_wire.ArrayDetail], monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = []

    def remove(_: object, project: str, name: str) -> wire.JobRemoved:
        removed.append((project, name))
        return wire.JobRemoved(freed_bytes=5_000_000)

    monkeypatch.setattr(array_wire, "remove_array", remove)
    arrays.append(make_array(["done", "running"]))
    refused = run("rm", "many", "-y")
    assert refused.exit_code == 1
    assert "many has jobs that have not ended (1 done, 1 running)" in refused.stderr
    arrays[:] = [make_array(["done", "failed"])]
    found = run("rm", "many", "-y")
    assert removed == [("default", "many")]
    assert "many is removed, with" in found.stdout


def test_jobs_have_their_parameters_and_metrics_whatever_their_names(
    arrays: list[array_wire.ArrayDetail],
) -> None:
    arrays.append(make_array(["done", "running", "failed"]))
    rows = json.loads(run("ps", "many", "-o", "json").stdout)
    keys = ("phase", "params.phase", "metrics.phase", "metrics.loss", "metrics.t")
    assert [tuple(row[key] for key in keys) for row in rows] == [
        ("done", "p0", "x", 0.0, 7),
        ("running", "p1", "x", 0.5, 7),
        ("failed", "p2", "x", -1, 7),
    ]
    assert "metrics.done" not in rows[0]


@pytest.mark.parametrize(
    ("best", "names"),
    [
        ("loss:min", ["many.2", "many.0", "many.1"]),
        ("loss:max", ["many.1", "many.0", "many.2"]),
        ("t:max", ["many.0", "many.1", "many.2"]),
    ],
)
def test_the_best_jobs_come_first(
    arrays: list[array_wire.ArrayDetail], best: str, names: list[str]
) -> None:
    arrays.append(make_array(["done", "running", "failed"]))
    rows = json.loads(run("ps", "many", "--best", best, "-o", "json").stdout)
    assert [row["name"] for row in rows] == names


def test_a_metric_that_no_job_reported(arrays: list[array_wire.ArrayDetail]) -> None:
    arrays.append(make_array(["done"]))
    found = run("ps", "many", "--best", "acc:max")
    assert "no job of the array has reported acc" in found.stderr
    assert "they reported done, loss, t" in found.stderr
    assert "expected METRIC:min or METRIC:max" in run("ps", "many", "--best", "loss").stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "x 0.3"),
        (["--index", "1"], "x 0.1"),
        (["--index", "2"], "error: --index: the array has no job 2"),
    ],
)
def test_one_job_of_a_sweep_is_exported(tmp_path: Path, options: list[str], told: str) -> None:
    file = tmp_path / "many.yaml"
    file.write_text(SWEEP)
    found = run("export", "pbs", str(file), "--blind", *options)
    assert told in found.output
    assert "${{" not in found.output
    assert ("one of 2 jobs" in found.stderr) == (not options)
