"""`cavvy validate` and `cavvy init` as a person and a program use them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cavvy.cli.init import command as init
from cavvy.cli.run import command as run_task
from cavvy.cli.server import command as server
from cavvy.cli.validate import command as validate
from cavvy.task_files import load_task

TEN_HOURS = "resources: {gpu: A100:8}\nwork: {duration: 10h, measured_on: A100:8}"


def run(command: object, *arguments: str, answers: str | None = None) -> Result:
    return CliRunner().invoke(command, list(arguments), input=answers)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "My Project"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))  # nobody's own server is asked
    return home


def test_a_right_file_is_told_in_words(folder: Path) -> None:
    (folder / "a.yaml").write_text(
        "name: a\nparams: {n: 1}\nrun: x\nnodes: ${{ params.n }}\nresources: {gpu: H100:8}"
    )
    result = run(validate, "a.yaml", "--param", "n=2")
    assert result.exit_code == 0
    assert result.stdout.startswith("a.yaml is valid.\n")
    assert "2 nodes, each with 8 H100" in result.stdout


def test_wrong_files_are_all_told_with_exit_code_2(folder: Path) -> None:
    (folder / "a.yaml").write_text("run: x\nnodes: 0\nresorces: {}")
    (folder / "b.yaml").write_text("run: x")
    result = run(validate, "a.yaml", "b.yaml", "c.yaml")
    assert result.exit_code == 2
    assert "a.yaml:2:8: 0 is too small" in result.stderr
    assert "did you mean `resources`?" in result.stderr
    assert "c.yaml: the file does not exist" in result.stderr
    assert "b.yaml is valid." in result.stdout


def test_json_for_programs(folder: Path) -> None:
    (folder / "a.yaml").write_text("run: x\nnodes: 0\nlimits: {deadline: 2020-01-01T00:00Z}")
    (folder / "b.yaml").write_text("run: x\nlimits: {budget: 3}")
    result = run(validate, "-o", "json", "a.yaml", "b.yaml")
    assert result.exit_code == 2
    wrong, right = json.loads(result.stdout)
    assert [(each["line"], each["column"]) for each in wrong["problems"]] == [(2, 8), (3, 10)]
    assert "ago" in wrong["problems"][1]["message"]
    assert (wrong["valid"], wrong["task"]) == (False, None)
    assert right["valid"] is True
    assert right["task"]["limits"]["budget"] == {"micros": 3_000_000}


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff\xfe", "not valid UTF-8"), (b"x" * (5 << 20), "larger than 4 MiB")],
)
def test_files_that_are_no_text(folder: Path, content: bytes, words: str) -> None:
    (folder / "a.yaml").write_bytes(content)
    result = run(validate, "a.yaml")
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_folder_instead_of_a_file(folder: Path) -> None:
    assert "use a file in this folder" in run(validate, ".").stderr


def test_the_schema_is_printed() -> None:
    assert json.loads(run(validate, "--schema").stdout)["title"] == "Cavvy task file"


def test_no_file_is_a_usage_error() -> None:
    result = run(validate)
    assert result.exit_code == 2
    assert "cavvy validate task.yaml" in result.stderr


def test_init_without_questions(folder: Path) -> None:
    result = run(init, "--defaults")
    assert result.exit_code == 0, result.output
    assert load_task("task.yaml").task.name == "my-project"
    assert "cavvy run task.yaml" in result.stdout


def test_init_never_overwrites_unasked(folder: Path) -> None:
    (folder / "task.yaml").write_text("mine")
    result = run(init, "--defaults")
    assert result.exit_code == 2
    assert (folder / "task.yaml").read_text() == "mine"


def test_init_without_a_terminal_says_what_to_do(folder: Path) -> None:
    result = run(init, answers="")
    assert result.exit_code == 2
    assert "--defaults" in result.stderr
    assert not (folder / "task.yaml").exists()


def test_init_asks_again_where_an_answer_is_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cavvy.cli.init._has_terminal", lambda: True)
    answers = [
        "My Job",
        "my-job",
        "python train.py",
        "H1O0:8",
        "H100:8",
        "only",
        "/data",
        "ckpt",
        "much",
        "12.50",
    ]
    result = run(init, "job.yaml", answers="\n".join(answers) + "\n")
    assert result.exit_code == 0, result.output
    assert "write my-job" in result.output
    task = load_task("job.yaml").task
    assert (task.name, task.run.strip(), task.resources.spot) == (
        "my-job",
        "python train.py",
        "only",
    )
    assert task.resources.accelerators[0].count_min == 8
    assert task.checkpoint is not None
    assert task.limits.budget is not None
    assert task.limits.budget.usd == 12.5


def test_init_asks_before_it_overwrites(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cavvy.cli.init._has_terminal", lambda: True)
    (folder / "task.yaml").write_text("mine")
    result = run(init, answers="n\n")
    assert result.exit_code == 1
    assert (folder / "task.yaml").read_text() == "mine"
    assert run(init, answers="y\n\n\n\n\n\n\n").exit_code == 0
    assert load_task("task.yaml").task.name == "my-project"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("run: 5", "5 is a number"),
        ("run: x\nworkdir: ./absent", "absent does not exist; change `workdir`"),
        ("run: x\nresources: {providers: azzure}", "no provider 'azzure'; did you mean azure?"),
        ("run: x\nresources: {regions: mars}", "no region 'mars'"),
        ("run: x\nresources: {instance: p5.48xlrge}", "did you mean p5.48xlarge?"),
        ("run: x\nresources: {gpu: 100}", "No offer: "),
        ("run: x\nresources: {gpu: tpu:3}", "accept TPU-"),
        ("run: x\nresources: {providers: local, cpu: 5000}", "you asked for at least 5000"),
        (f"run: x\n{TEN_HOURS}\nlimits: {{budget: $1}}", "your budget leaves $1.00"),
        (f"run: x\n{TEN_HOURS}\nlimits: {{deadline: 1h}}", "your deadline leaves 1h"),
        ("run: x\nsecrets: [PATH]", "PATH cannot be set, because each node sets it"),
    ],
)
def test_validate_finds_what_run_would_refuse(folder: Path, text: str, told: str) -> None:
    (folder / "a.yaml").write_text(text)
    result = run(validate, "a.yaml")
    assert result.exit_code == 2
    assert told in result.stderr


@pytest.mark.parametrize(
    "resources",
    [
        "{providers: local, cpu: 1}",
        "{providers: kubernetes, gpu: H100:8}",  # it is not configured here, so nothing is known
        "{providers: aws, regions: use2-az1, gpu: H100:8, spot: auto}",
        "{gpu: H100:8, regions: [de, eu]}",
    ],
)
def test_validate_accepts_what_may_run_elsewhere(folder: Path, resources: str) -> None:
    (folder / "a.yaml").write_text(f"run: x\nresources: {resources}\n")
    result = run(validate, "a.yaml")
    assert result.exit_code == 0, result.output


def test_run_and_validate_find_the_same_problems(folder: Path) -> None:
    (folder / "a.yaml").write_text(
        "run: x\nworkdir: ./absent\nresources: {providers: azzure, regions: mars}\n"
    )
    assert run(run_task, "a.yaml").stderr == run(validate, "a.yaml").stderr
    assert run(validate, "a.yaml").stderr.endswith("3 problems.\n")


def test_a_batch_without_local_rows_is_refused_before_it_is_submitted(folder: Path) -> None:
    def check(text: str) -> str:
        (folder / "b.yaml").write_text(f"{{name: b, batch: {{output: /out, {text}}}")
        return run(validate, "b.yaml").stderr

    rows = "input: rows.jsonl, function: 'm:f'}"
    assert "there is no rows.jsonl in the working folder" in check(rows)
    assert "there is no rows.jsonl" in check(f"{rows}, setup: pip install pyarrow")
    assert not check(f"{rows}, setup: 'curl -O https://example.com/rows.jsonl'")
    (folder / "rows.jsonl").touch()
    assert "rows.jsonl is empty, so the batch has no rows" in check(rows)
    (folder / "rows.jsonl").write_text("1\n")
    assert not check(rows)
    (folder / ".cavvyignore").write_text("*.jsonl\n")
    assert "an ignore file excludes it" in check(rows)
    images = folder / "images"
    (images / ".hidden").mkdir(parents=True)
    (images / ".hidden" / "a.png").write_bytes(b"x")
    assert "there is no images in the working folder" in check("input: images, function: 'm:f'}")
    other = run(run_task, "b.yaml", "--dry-run", "--", "echo", "it's")
    assert other.exit_code == 0, other.output
    assert run(server, "stop").exit_code == 0
    for elsewhere in ("input: /rows.jsonl", "input: 's3://b/rows.jsonl'"):
        assert not check(f"{elsewhere}, function: 'm:f'}}")
    brought = "inputs: [{source: 's3://b/in/', target: data}]"
    assert not check(f"input: data/rows.jsonl, function: 'm:f'}}, {brought}")
