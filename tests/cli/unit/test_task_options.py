"""`run` and `plan` take options that replace what the file says, a command, and standard input."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.own_parts import reads_other_tools
from tests.unit.cli_client import FakeClient

import cavvy.cli.run
from cavvy.cli.main import cli
from cavvy.client import wire


@pytest.fixture
def uploaded() -> dict[str, bytes | Path]:
    """What is uploaded, by hash."""
    return {}


@pytest.fixture
def sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uploaded: dict[str, bytes | Path]
) -> list[dict[str, object]]:
    """What is submitted."""
    found: list[dict[str, object]] = []
    client = FakeClient()

    def submit(text: str, **how: object) -> wire.Submitted:
        found.append({"text": text, **how})
        return wire.Submitted(id="1", project="default", name="a", phase="queued")

    def upload(client: object, project: str, blobs: Mapping[str, bytes | Path]) -> int:
        uploaded.update(blobs)
        return 1

    monkeypatch.setattr(client, "submit", submit, raising=False)
    monkeypatch.setattr("cavvy.cli.task.submission.upload", upload)
    monkeypatch.setattr(cavvy.cli.run, "session", lambda: client)
    monkeypatch.chdir(tmp_path)
    return found


def run(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["run", "-d", *arguments], input=given, prog_name="cavvy")


def overrides(sent: list[dict[str, object]]) -> object:
    return json.loads(sent[-1]["origin"].overrides)  # type: ignore[attr-defined]  # a RunOrigin


@reads_other_tools
def test_options_are_sent_beside_the_file(
    sent: list[dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cavvy.capabilities.importers", reason="reads files of other tools")
    monkeypatch.setenv("TOKEN", "t")
    (tmp_path / "a.yaml").write_text("run: x\nnum_nodes: 2")
    options = "--gpu H100:8 --gpu A100:8 --spot --region eu --provider aws --nodes 3 --env A=b=c"
    options += " --env TOKEN --secret S --budget 25 --deadline 8h --max-price 3.5 --image python:3"
    done = run("a.yaml", *options.split())
    assert done.exit_code == 0, done.output
    assert overrides(sent) == {
        "resources": {
            "gpu": ["H100:8", "A100:8"],
            "spot": "only",
            "providers": ["aws"],
            "regions": ["eu"],
            "max_price": "3.5",
        },
        "nodes": "3",
        "image": "python:3",
        "env": {"A": "b=c", "TOKEN": "t"},
        "secrets": ["S"],
        "limits": {"budget": "25", "deadline": "8h"},
    }
    assert sent[0]["text"] == "run: x\nnum_nodes: 2"
    assert sent[0]["origin"].dialect == "SkyPilot"  # type: ignore[attr-defined]  # a RunOrigin


def test_a_command_needs_no_file(sent: list[dict[str, object]]) -> None:
    assert run("--no-spot", "--", "python", "-c", "print('a b')", "--", "x").exit_code == 0
    assert json.loads(str(sent[0]["text"])) == {"run": """python -c 'print('"'"'a b'"'"')' -- x"""}
    assert (sent[0]["path"], overrides(sent)) == ("python", {"resources": {"spot": "never"}})


def test_one_word_is_a_line_of_shell(sent: list[dict[str, object]]) -> None:
    assert run("--", "cd /tmp && ls").exit_code == 0
    assert json.loads(str(sent[0]["text"])) == {"run": "cd /tmp && ls"}


def test_a_command_replaces_that_of_the_file(sent: list[dict[str, object]], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("run: x\nnodes: 2")
    assert run("a.yaml", "--", "nvidia-smi").exit_code == 0
    assert (sent[0]["text"], overrides(sent)) == ("run: x\nnodes: 2", {"run": "nvidia-smi"})


def test_a_task_from_standard_input(sent: list[dict[str, object]]) -> None:
    assert run("-", given="name: b\nrun: x").exit_code == 0
    assert sent[0]["text"] == "name: b\nrun: x"


@reads_other_tools
def test_the_tool_can_be_named(sent: list[dict[str, object]], tmp_path: Path) -> None:
    pytest.importorskip("cavvy.capabilities.importers", reason="reads files of other tools")
    (tmp_path / "a.yaml").write_text("name: My_Task\nrun: x")
    refused = run("a.yaml")
    assert refused.exit_code == 2
    assert "use `--as skypilot` to read the file as a SkyPilot file" in refused.stderr
    assert run("a.yaml", "--as", "skypilot").exit_code == 0
    assert sent[0]["origin"].dialect == "SkyPilot"  # type: ignore[attr-defined]  # a RunOrigin


def test_an_unknown_parameter_is_no_sign_of_skypilot(
    sent: list[dict[str, object]], tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text("run: echo ${{ params.x }}")
    refused = run("a.yaml")
    assert "unknown parameter 'x'" in refused.stderr
    assert "SkyPilot" not in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "H100:x"], "--gpu H100:x: "),
        (["--nodes", "0"], "--nodes 0: "),
        (["--deadline", "2001-01-01T00:00Z"], "the deadline was "),
        (["--env", "CAVVY_X=1"], "is reserved for Cavvy"),
        (["--env", "NOT_SET_HERE"], "the local environment has no such variable"),
        (["--secret", "A=b"], "`cavvy secret set A` stores the value encrypted"),
        (["--env-file", "none"], "--env-file none: No such file or directory"),
        (["--env-file", "/dev/zero"], "--env-file /dev/zero: the file is larger than 1 MiB"),
        (["--budget", "much"], "--budget much: "),
        (["--machine", "dev", "--keep", "30"], "write 30s, 30m or 30h"),
    ],
)
def test_a_wrong_option_is_named(
    sent: list[dict[str, object]], tmp_path: Path, options: list[str], message: str
) -> None:
    (tmp_path / "a.yaml").write_text("run: x")
    done = run("a.yaml", *options)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not sent


ENV_FILE = """\
\ufeff# comment
A=1
export B = two words  # comment

C='${X} # text' # comment
D="one
\\ttwo \\"three\\" \\${X}"
E=
F=a#b=c\r
G= # comment
H=h"""


def test_variables_are_read_from_files(sent: list[dict[str, object]], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("run: x")
    (tmp_path / ".env").write_text(ENV_FILE, newline="")
    (tmp_path / "more").write_text("H=i\nI=j")
    done = run("a.yaml", "--env", "I=mine", "--env-file", ".env", "--env-file", "more")
    assert done.exit_code == 0, done.output
    assert overrides(sent) == {
        "env": {
            "A": "1",
            "B": "two words",
            "C": "${X} # text",
            "D": 'one\n\ttwo "three" ${X}',
            "E": "",
            "F": "a#b=c",
            "G": "",
            "H": "i",
            "I": "mine",
        }
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=1\nB", "line 2: expected NAME=VALUE"),
        ("a-b=1", "line 1: expected NAME=VALUE"),
        ("A=1\n\nB='2", "line 3: expected NAME=VALUE"),
        ('A="1" 2', "line 1: expected NAME=VALUE"),
        ("A=${B}c", "line 1: Cavvy does not replace ${B}"),
        ("CAVVY_X=1", "is reserved for Cavvy"),
    ],
)
def test_a_wrong_line_of_a_file_is_named(
    sent: list[dict[str, object]], tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "a.yaml").write_text("run: x")
    (tmp_path / ".env").write_text(text)
    done = run("a.yaml", "--env-file", ".env")
    assert done.exit_code == 2
    assert message in done.stderr
    assert not sent


@pytest.mark.parametrize("command", ["run", "plan", "validate"])
def test_a_folder_is_no_task_file(command: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, [command, str(tmp_path)])
    assert done.exit_code != 0
    assert f"error: {tmp_path}: this is a folder" in done.stderr


def test_nothing_to_run_is_a_wrong_use(sent: list[dict[str, object]]) -> None:
    assert run().exit_code == 2
    assert run("--").exit_code == 2


def test_a_dry_run_submits_nothing(sent: list[dict[str, object]]) -> None:
    done = run("--dry-run", "--", "echo", "hi")
    assert done.exit_code == 0, done.output
    assert "echo hi" in done.output
    assert "local" in done.output
    assert not sent


def frozen(sent: list[dict[str, object]], uploaded: dict[str, bytes | Path]) -> list[str]:
    """The paths of the submitted folder."""
    manifest = uploaded[sent[-1]["origin"].snapshot]  # type: ignore[attr-defined]  # a RunOrigin
    assert isinstance(manifest, bytes)
    return [each["path"] for each in json.loads(manifest)["files"]]


@reads_other_tools
def test_local_files_of_another_tool_are_submitted_beside_the_folder(
    sent: list[dict[str, object]], uploaded: dict[str, bytes | Path], tmp_path: Path
) -> None:
    pytest.importorskip("cavvy.capabilities.importers", reason="reads files of other tools")
    (tmp_path / "tasks" / "src").mkdir(parents=True)
    (tmp_path / "tasks" / "src" / "a.py").write_text("a")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "b").write_text("b")
    (tmp_path / "c.txt").write_text("c")
    mounts = "file_mounts: {/data: data, conf/c.txt: c.txt, /src: src}"  # data: of this folder
    (tmp_path / "tasks" / "a.yaml").write_text(f"run: x\nworkdir: src\n{mounts}")
    done = run("tasks/a.yaml")
    assert done.exit_code == 0, done.output
    assert frozen(sent, uploaded) == [".mounts/0-data/b", "a.py", "conf/c.txt"]


@reads_other_tools
def test_without_a_working_folder_only_the_named_files_are_submitted(
    sent: list[dict[str, object]], uploaded: dict[str, bytes | Path], tmp_path: Path
) -> None:
    pytest.importorskip("cavvy.capabilities.importers", reason="reads files of other tools")
    (tmp_path / "other").write_text("o")
    (tmp_path / "c.txt").write_text("c")
    (tmp_path / "a.yaml").write_text("run: x\nfile_mounts: {/c: ./c.txt}")
    assert run("a.yaml").exit_code == 0
    assert frozen(sent, uploaded) == [".mounts/0-c.txt"]


@reads_other_tools
@pytest.mark.parametrize(
    ("mounts", "message"),
    [
        ("{/data: ../nothing}", "nothing does not exist; relative paths are searched for in "),
        (
            "{/data: ./nothing}",
            "there is no nothing in the working folder, but the volume at /data needs it",
        ),
    ],
)
def test_missing_local_files_are_found_before_the_submission(
    sent: list[dict[str, object]], tmp_path: Path, mounts: str, message: str
) -> None:
    pytest.importorskip("cavvy.capabilities.importers", reason="reads files of other tools")
    (tmp_path / "a.yaml").write_text(f"run: x\nworkdir: .\nfile_mounts: {mounts}")
    done = run("a.yaml")
    assert done.exit_code == 2
    assert message in done.stderr
    assert not sent


@reads_other_tools
@pytest.mark.parametrize(
    ("text", "variable", "message"),
    [
        ("workdir: .", "SERVER_BLOB_MIB", "big has 2.0 MiB; the server accepts files of at most 1"),
        ("workdir: .\nfile_mounts: {/data: ./gone}", "", "there is no gone in the working folder"),
        (
            f"# {'x' * 600_000}",
            "SERVER_REQUEST_MIB",
            "the server refuses requests of more than 1 MiB",
        ),
    ],
    ids=["file", "volume", "request"],
)
def test_validate_and_run_refuse_the_same_files(
    sent: list[dict[str, object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    variable: str,
    message: str,
) -> None:
    if "file_mounts" in text:
        pytest.importorskip("cavvy.capabilities.importers", reason="reads files of other tools")
    monkeypatch.setenv(f"CAVVY_{variable or 'SERVER_LOG_MIB'}", "1")
    (tmp_path / "big").write_bytes(bytes(2 << 20))
    (tmp_path / "a.yaml").write_text(f"run: x\n{text}\n")
    checked = CliRunner().invoke(cli, ["validate", "a.yaml"], prog_name="cavvy")
    for done in (run("a.yaml"), checked):
        assert done.exit_code == 2
        assert message in done.stderr
    assert not sent


@reads_other_tools
def test_a_branch_is_submitted_as_the_commit_that_it_is_at(
    sent: list[dict[str, object]], tmp_path: Path
) -> None:
    pytest.importorskip("cavvy.capabilities.importers", reason="reads files of other tools")

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path / "repo"), "-c", "user.name=a", "-c", "user.email=b"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    (tmp_path / "repo").mkdir()
    git("init", "-b", "main")
    git("commit", "--allow-empty", "-m", "one")
    git("tag", "-a", "v1", "-m", "one")
    first = git("rev-parse", "HEAD")
    git("commit", "--allow-empty", "-m", "two")
    url = f"file://{tmp_path / 'repo'}"
    for ref, commit in (
        ("ref: v1", first),
        ("ref: main", git("rev-parse", "HEAD")),
        ("", git("rev-parse", "HEAD")),
    ):
        (tmp_path / "a.yaml").write_text(f"run: x\nworkdir: {{url: '{url}', {ref}}}")
        done = run("a.yaml", "--nodes", "2")
        assert done.exit_code == 0, done.output
        assert overrides(sent) == {"nodes": "2", "workdir": {"git": url, "commit": commit}}
    (tmp_path / "a.yaml").write_text(f"run: x\nworkdir: {{url: '{url}', ref: none}}")
    done = run("a.yaml")
    assert (done.exit_code, "the repository does not have this branch or tag" in done.stderr) == (
        2,
        True,
    )


@reads_other_tools
def test_a_path_with_an_unset_variable_is_refused_until_env_sets_it(
    sent: list[dict[str, object]], tmp_path: Path
) -> None:
    pytest.importorskip("cavvy.capabilities.importers", reason="reads files of other tools")
    (tmp_path / "a.yaml").write_text("run: x\nenvs: {B: }\nfile_mounts: {/b: {name: '${B}'}}")
    done = run("a.yaml")
    assert (done.exit_code, "with --env" in done.stderr, sent) == (2, True, [])
    assert run("a.yaml", "--env", "B=mine").exit_code == 0
    validated = CliRunner().invoke(cli, ["validate", "a.yaml"], prog_name="cavvy")
    assert (
        "note: line 3: `file_mounts./b`: the bucket name ${B} contains a variable"
        in validated.output
    )


@pytest.mark.parametrize(
    ("arguments", "problem", "line"),
    [
        (["sleep", "5"], "expected one task file, but 2 words were given", "sleep 5"),
        (["python train.py"], "python train.py: the file does not exist", "python train.py"),
        (["nvidia-smi", "-L"], "nvidia-smi: the file does not exist", "nvidia-smi -L"),
        (["--spot", "ls", "-Z"], "ls: the file does not exist", "ls -Z"),
        (["ls", "-Z", "-d"], "ls: the file does not exist", "ls -Z -d"),
        (["ls"], "ls: the file does not exist", "ls"),
        (["a; b"], "a; b: the file does not exist", "'a; b'"),
        (["echo $HOME > it"], "echo $HOME > it: the file does not exist", "'echo $HOME > it'"),
        (["a.yaml", "it's"], "expected one task file", "a.yaml 'it'\"'\"'s'"),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_who_gives_a_command_as_the_file_is_told_how_to(
    sent: list[dict[str, object]], command: str, arguments: list[str], problem: str, line: str
) -> None:
    done = CliRunner().invoke(cli, [command, *arguments])
    assert (done.exit_code, sent) == (2, [])
    assert problem in done.stderr
    assert f"write it after --: `cli {command} -- {line}`" in done.stderr


def test_who_gives_a_parameter_as_a_word_or_option_is_told_how_to(
    sent: list[dict[str, object]], tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text("run: x\nparams: {who: world, n: 1}\n")
    done = run("a.yaml", "who=Ada Lee", "n=2")
    assert "cavvy run a.yaml --param 'who=Ada Lee' --param n=2`" in done.stderr
    for option in ("--who", "--who=Bob", "-n"):
        done = run("a.yaml", option, "x")
        assert done.exit_code == 2
        name = option.strip("-").partition("=")[0]
        assert f"--param {name}=VALUE sets the parameter {name} of a.yaml" in done.stderr
    assert "--param" not in run("a.yaml", "--whom", "x").stderr
    (tmp_path / "b.yaml").write_text("run: [\n")
    assert "there is no option --who" in run("b.yaml", "--who", "x").stderr
    assert sent == []


@pytest.mark.parametrize(
    ("name", "meant"), [("train.yml", "train.yaml"), ("trian.yaml", "train.yaml"), ("./train", "")]
)
def test_a_missing_file_names_the_one_that_was_meant(
    sent: list[dict[str, object]], tmp_path: Path, name: str, meant: str
) -> None:
    (tmp_path / "train.yaml").write_text("run: x\n")
    assert f"did you mean {meant or 'train.yaml'}?" in run(name).stderr


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["a.yaml", "-d"], "`cavvy run a.yaml -d` runs the task"),
        (["python3", "a b.py"], "`cavvy run -- python3 'a b.py'` runs the program as a job"),
        (["version"], "`cavvy --version`"),
        (["help", "run"], "`cavvy COMMAND --help`"),
        (["none.yaml"], "`cavvy --help` lists"),
    ],
)
def test_a_word_that_is_no_command_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], advice: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("run: x\n")
    done = CliRunner().invoke(cli, words, prog_name="cavvy")
    assert (done.exit_code, advice in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("words", [[""], [" "]])
def test_an_empty_name_is_no_file_and_no_command(words: list[str]) -> None:
    done = CliRunner().invoke(cli, ["run", *words])
    assert done.exit_code == 2
    assert "expected a task file" in done.stderr


def test_two_files_before_a_command_get_no_advice_to_write_one() -> None:
    done = CliRunner().invoke(cli, ["run", "a.yaml", "b.yaml", "--", "ls"])
    assert "expected one task file, but 2 words were given" in done.stderr
    assert "hint" not in done.stderr


def test_a_name_that_is_no_command_is_a_file_that_is_missing() -> None:
    done = CliRunner().invoke(cli, ["run", "nowhere.yaml"])
    assert "`cavvy init` writes a starter file" in done.stderr
