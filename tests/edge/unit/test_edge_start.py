"""How a device starts: what its script installs, and which options it refuses."""

import hashlib
import os
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from cavvy.capabilities.edge.command import _CLOUD_INIT, command
from cavvy.capabilities.edge.on_device.bundle import make_script
from cavvy.capabilities.edge.on_device.device import (
    DeviceOptionInvalid,
    make_defaults,
    read_options,
    run,
)
from cavvy.capabilities.edge.on_device.slots import write_json

# a `python3` whose virtual environments have a pip that notes its calls, and fails in the first
PYTHON = """#!/bin/sh
mkdir -p "$3/bin"
printf '#!/bin/sh\nexit 0\n' >"$3/bin/python"
printf '#!/bin/sh\nenv; echo >>"%s"; [ "$(wc -l <"%s")" -gt 1 ]\n' "$CALLS" "$CALLS" >"$3/bin/pip"
chmod +x "$3/bin/python" "$3/bin/pip"
"""


def start(
    folder: Path, curl: str = "#!/bin/sh\nexit 22\n", *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the script, for a program with the bytes `packed`."""
    bundle = hashlib.sha256(b"packed").hexdigest()
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (("python3", PYTHON), ("curl", curl)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return subprocess.run(
        ["sh", "-s", *arguments],
        input=make_script("https://server", ("pin", "pin"), bundle),
        env={
            "CAVVY_EDGE_TOKEN": "" if arguments else "a token",
            "PATH": f"{tools}:{os.environ['PATH']}",
            "CAVVY_EDGE_FOLDER": str(folder / "device"),
            "CALLS": str(folder / "calls"),
            **variables,
        },
        capture_output=True,
        text=True,
    )


def test_an_interrupted_installation_is_repeated_and_a_complete_one_is_kept(
    tmp_path: Path,
) -> None:
    for _ in range(3):
        start(tmp_path)
    assert (tmp_path / "calls").read_text() == "\n\n"


# writes the bytes `packed` to the file after `-o`
CURL = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
printf packed >"$2"
"""


@pytest.mark.parametrize("arguments", [(), ("a token",)], ids=["variable", "as older lines"])
def test_only_the_program_of_a_device_gets_the_token(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    for _ in range(2):
        ended = start(tmp_path, CURL, *arguments)
    assert "a token" not in ended.stdout, "of `pip`, which prints its variables"
    assert "PATH=" in ended.stdout
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$CAVVY_EDGE_TOKEN, not $*"\n')
    program.chmod(0o755)
    told = start(tmp_path, CURL, *arguments, CAVVY_EDGE_PYTHON=str(program)).stdout
    assert told.startswith("a token, not -m cavvy.edge "), told


def test_a_named_python_that_is_missing_is_refused_before_anything_is_installed(
    tmp_path: Path,
) -> None:
    ended = start(tmp_path, CAVVY_EDGE_PYTHON="/no/python")
    assert ended.returncode == 1
    assert "CAVVY_EDGE_PYTHON: no program /no/python" in ended.stderr
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must be a table"),
        ('{"every": 5}', "there is no option 'every'; known: listen"),
    ],
)
def test_wrong_options_are_refused_instead_of_ignored(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "edge.json").write_text(text)
    with pytest.raises(DeviceOptionInvalid, match=said):
        read_options(str(tmp_path))


def test_options_of_the_file_replace_the_defaults(tmp_path: Path) -> None:
    assert read_options(str(tmp_path)) == make_defaults()
    (tmp_path / "edge.json").write_text('{"every_s": 5}')
    assert read_options(str(tmp_path)) == {**make_defaults(), "every_s": 5}


@pytest.mark.parametrize("listen", ["127.0.0.1:http", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], listen: str
) -> None:
    write_json(f"{tmp_path}/card.json", {"address": "https://server:1", "device": "d"})
    write_json(f"{tmp_path}/edge.json", {"listen": listen})
    assert run(str(tmp_path)) == 1
    assert "expected HOST:PORT" in "".join(capsys.readouterr())


def test_a_port_in_use_is_named_with_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(f"{tmp_path}/card.json", {"address": "https://server:1", "device": "d"})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        write_json(f"{tmp_path}/edge.json", {"listen": f"127.0.0.1:{taken.getsockname()[1]}"})
        assert run(str(tmp_path)) == 1
    said = "".join(capsys.readouterr())
    assert "Address already in use" in said
    assert f"`listen` in {tmp_path}/edge.json" in said
    assert f"{tmp_path}/start" in said


def test_a_file_for_cloud_init_enrols_at_the_first_start_and_then_runs_the_program(
    tmp_path: Path,
) -> None:
    line = "echo enrols | cat"
    told = yaml.safe_load(_CLOUD_INIT.format(command=line))
    files = {each["path"]: each for each in told["write_files"]}
    [script, unit] = files.values()
    assert script["permissions"] == "0700", "it has the token"
    assert unit["content"].index("ExecStart=/usr/local/sbin/cavvy-edge\n")
    content = script["content"].replace("/var/lib/cavvy-edge", str(tmp_path))

    def start() -> str:
        done = subprocess.run(["sh", "-c", content], capture_output=True, text=True, check=True)
        return done.stdout

    begun = tmp_path / "start"
    begun.write_text("#!/bin/sh\necho runs\n")
    begun.chmod(0o700)
    assert start() == "enrols\n", "also if it was interrupted before it enrolled"
    (tmp_path / "card.json").write_text("{}")
    assert start() == "runs\n"
    odd = CliRunner().invoke(command, ["token", "--site", "lyon", "--cloud-init", "-o", "json"])
    assert (odd.exit_code, "prints no JSON" in odd.output) == (2, True), "it makes no token"
