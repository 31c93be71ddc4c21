"""What is put before the author's commands sets the variables, in bash and in plain sh; and what
the CLI says.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.system.ports import free_port

from cavvy.agent.work import mpi
from cavvy.capabilities.importers.dstack import TABLES
from cavvy.capabilities.importers.skypilot.rules import NEEDS, TASK
from cavvy.capabilities.importers.translation_header import VARIABLES
from cavvy.cli.plan import command as plan
from cavvy.cli.run import command as run_command
from cavvy.cli.validate import command as validate
from cavvy.cli.view.failure import CommandFailure
from cavvy.sdk.files import find_parts, freeze_parts
from cavvy.task_files import ReadOptions, load_task, parse_task

NODE = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "CAVVY_HOSTS": "10.0.0.1,10.0.0.2",
    "CAVVY_JOB": "train",
    "CAVVY_JOB_ID": "01abc",
    "CAVVY_ATTEMPT": "1",
    "CAVVY_PROJECT": "default",
    "MASTER_ADDR": "10.0.0.1",
    "NODE_RANK": "1",
    "NNODES": "2",
    "NPROC_PER_NODE": "8",
}
SERVICE = {"readiness_probe": "/", "replicas": 1, "ports": 80}
SHELLS = [name for name in ("bash", "sh", "dash") if shutil.which(name)]


def execute(script: str, shell: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As the agent does it: the shell stops at the first failure unless the script says
    otherwise.
    """
    file = folder / "run.sh"
    file.write_text(script)
    command = [shell, "-e", "-c", 'trap : TERM; . "$0"', str(file)]
    env = {**NODE, "TMPDIR": str(folder)}
    return subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("shell", SHELLS)
def test_skypilot_s_variables(shell: str, tmp_path: Path) -> None:
    names = "RANK NUM_NODES NUM_GPUS_PER_NODE TASK_ID".split()  # noqa: SIM905
    echoes = "\n".join(
        f'  echo "${{SKYPILOT_{"NODE_" if name == "RANK" else ""}{name}}}"' for name in names
    )
    text = (
        f"resources: {{accelerators: H100:8}}\nrun: |\n  false\n{echoes}\n  echo "
        '"$SKYPILOT_NODE_IPS" | sed -n 2p\n'
    )
    done = execute(parse_task(text).run, shell, tmp_path)
    assert done.stdout.split() == ["1", "2", "8", "cavvy-01abc", "10.0.0.2"]
    assert done.returncode == 0


@pytest.mark.parametrize("shell", SHELLS)
def test_without_accelerators_there_are_none(shell: str, tmp_path: Path) -> None:
    task = parse_task(
        "num_nodes: 2\nsetup: echo $SKYPILOT_SETUP_NODE_RANK\nrun: echo $SKYPILOT_NUM_GPUS_PER_NODE"
    )
    assert execute(task.run, shell, tmp_path).stdout == "0\n"
    assert execute(task.setup or "", shell, tmp_path).stdout == "1\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_find_what_a_node_of_skypilot_has(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, conda = tmp_path / "home", tmp_path / "home" / "miniconda3" / "bin" / "conda"
    conda.parent.mkdir(parents=True)
    conda.write_text(
        "#!/bin/sh\n[ $1.$2 = shell.posix.hook ] && echo 'conda() { echo hooked $1; }'"
    )
    conda.chmod(0o755)
    monkeypatch.setitem(NODE, "HOME", str(home))
    monkeypatch.setitem(NODE, "CUDA_VISIBLE_DEVICES", "0")
    task = parse_task(
        "setup: echo ${CUDA_VISIBLE_DEVICES-none}\n"
        "run: |\n  conda activate x\n  (cd ~/sky_workdir && pwd -P)\n"
        "  echo $SKYPILOT_JOB_RANK $SKYPILOT_NUM_JOBS $CUDA_VISIBLE_DEVICES\nnum_nodes: 1"
    )
    assert execute(task.setup or "", shell, tmp_path).stdout == "none\n"
    done = execute(task.run, shell, tmp_path)
    assert done.stdout.splitlines() == ["hooked activate", str(tmp_path.resolve()), "0 1 0"]
    (home / "sky_workdir").unlink()
    (tmp_path / "other" / "0" / "work").mkdir(parents=True)
    (home / "sky_workdir").symlink_to(tmp_path / "other" / "0" / "work")
    done = execute(task.run, shell, tmp_path)
    assert (done.returncode, "belongs to another job" in done.stderr) == (1, True)
    (tmp_path / "other" / "0" / "exit.json").touch()  # that job has ended
    assert str(tmp_path.resolve()) in execute(task.run, shell, tmp_path).stdout
    (home / "sky_workdir").unlink()
    (home / "sky_workdir").symlink_to(tmp_path / "gone")  # of a job that has ended
    assert str(tmp_path.resolve()) in execute(task.run, shell, tmp_path).stdout
    (home / "sky_workdir").unlink()
    (home / "sky_workdir").mkdir()  # the user's own
    assert str(home.resolve() / "sky_workdir") in execute(task.run, shell, tmp_path).stdout


def test_nodes_wait_for_each_other_if_their_commands_start_processes(tmp_path: Path) -> None:
    task = parse_task(
        "num_nodes: 2\nrun: |\n  if [ $SKYPILOT_NODE_RANK = 0 ]; then\n"
        "    while [ ! -e go ]; do sleep 0.02; done\n  else\n"
        "    sleep 600 & echo $! > started\n  fi\n"
    )
    port = free_port()
    ranks = [
        subprocess.Popen(
            ["bash", "-c", task.run],
            cwd=tmp_path,
            env={
                **NODE,
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1)},
                **{"NODE_RANK": str(rank), "NNODES": "2"},
            },
        )
        for rank in range(2)
    ]
    started = tmp_path / "started"
    while not (started.exists() and started.read_text()):
        time.sleep(0.01)
    with pytest.raises(subprocess.TimeoutExpired):
        ranks[1].wait(0.3)  # its process serves the other node
    (tmp_path / "go").touch()
    assert [each.wait(60) for each in ranks] == [0, 0]
    os.kill(int(started.read_text()), signal.SIGKILL)


def run_led_nodes(text: str, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run a file of two nodes. Each node has its own copy of the program that connects them."""
    run = parse_task(text).run
    port = free_port()
    ranks = []
    for rank in range(2):
        home = folder / str(rank)
        home.mkdir()
        program = shutil.copy(mpi.__file__, home)
        env = {
            **NODE,
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1), "CAVVY_MPI_KEY": "key"},
            **{"NODE_RANK": str(rank), "CAVVY_MPI": f"{sys.executable} {program}"},
        }
        with (home / "out").open("w") as out:  # processes that a node leaves behind keep it open
            command = ["bash", "-e", "-c", run]
            ranks.append(subprocess.Popen(command, cwd=folder, env=env, stdout=out))
    return [
        subprocess.CompletedProcess("", each.wait(60), (folder / str(rank) / "out").read_text())
        for rank, each in enumerate(ranks)
    ]


NODES = "type: task\nnodes: 2\n"
LED = "commands:\n  - if [ $DSTACK_NODE_RANK = 0 ]; then {}; else {}; fi\n"


@pytest.mark.parametrize("code", [0, 3])
def test_a_job_ends_with_its_master(code: int, tmp_path: Path) -> None:
    (tmp_path / "live").touch()
    endless = "while [ -e live ]; do sleep 0.1; done >/dev/null 2>&1"
    lines = LED.format(f"echo $OMPI_MCA_plm_rsh_agent; exit {code}", endless)
    found = run_led_nodes(NODES + "stop_criteria: master-done\n" + lines, tmp_path)
    (tmp_path / "live").unlink()
    assert [each.returncode for each in found] == [code, code]
    assert found[0].stdout == "cavvy-rsh\n"  # `mpirun` reaches the other node


def test_a_node_that_fails_ends_before_its_master(tmp_path: Path) -> None:
    master = "touch begun; while [ ! -e gone ]; do sleep 0.02; done"
    other = "while [ ! -e begun ]; do sleep 0.02; done; touch gone; exit 4"
    lines = LED.format(master, other)
    lines = "stop_criteria: master-done\nstartup_order: workers-first\n" + lines
    found = run_led_nodes(NODES + lines, tmp_path)
    assert found[1].returncode == 4


def test_the_master_starts_last_and_all_nodes_finish(tmp_path: Path) -> None:
    lines = LED.format("touch done", "while [ ! -e done ]; do sleep 0.02; done; echo late")
    found = run_led_nodes(NODES + "startup_order: workers-first\n" + lines, tmp_path)
    assert [each.returncode for each in found] == [0, 0]
    assert found[1].stdout == "late\n"


MPI = "if [ $NODE_RANK = 0 ]; then which mpirun; echo $OMPI_MCA_plm_rsh_agent; fi"


@pytest.mark.parametrize(
    "text", [f"num_nodes: 2\nrun: |\n  {MPI}", f"{NODES}commands:\n  - {MPI}\n"]
)
def test_mpi_reaches_the_other_nodes_without_ssh(text: str, tmp_path: Path) -> None:
    found = run_led_nodes(text, tmp_path)
    assert [each.returncode for each in found] == [0, 0]
    assert found[0].stdout.splitlines()[-1] == "cavvy-rsh"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("text", "code"),
    [(f"{NODES}commands: ['true mpirun']", 0), (f"{NODES}stop_criteria: master-done\n{LED}", 1)],
)
def test_nodes_without_python_are_not_connected(
    text: str, code: int, shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NODE, "CAVVY_MPI", "no-python mpi.py")
    done = execute(parse_task(text.replace("{}", "true")).run, shell, tmp_path)
    assert done.returncode == code
    assert "this node has no Python" in done.stderr


@pytest.mark.parametrize("lines", ["nodes: 1\nstop_criteria: master-done", "startup_order: any"])
def test_nodes_without_an_order_are_not_connected(lines: str) -> None:
    task = parse_task(f"type: task\n{lines}\ncommands: [x]")
    assert "CAVVY_MPI" not in task.run


def test_an_ampersand_in_an_address_starts_no_process() -> None:
    task = parse_task("num_nodes: 1\nsetup: wget 'https://h/x?a=1&b=2'\nrun: echo a")
    assert "wget" in (task.setup or "")
    assert "wget" not in task.run


@pytest.mark.parametrize("shell", SHELLS)
def test_a_setup_that_starts_processes_runs_with_the_commands(shell: str, tmp_path: Path) -> None:
    setup = "cat > a <<EOF\nx\nEOF\nsleep 600 & echo $! > b"
    text = json.dumps({"num_nodes": 1, "setup": setup, "run": "kill $(cat b) && cat a"})
    assert execute(parse_task(text).setup or "", shell, tmp_path).stdout == ""
    assert execute(parse_task(text).run, shell, tmp_path).stdout == "x\n"
    stops = json.dumps({"num_nodes": 1, "setup": "set -e\nfalse\ntrue &", "run": "echo never"})
    assert execute(parse_task(stops).run, shell, tmp_path).stdout == ""
    failing = json.dumps({"num_nodes": 1, "setup": "true & exit 3", "run": "echo never"})
    done = execute(parse_task(failing).run, shell, tmp_path)
    assert (done.returncode, done.stdout) == (3, "")


@pytest.mark.parametrize(
    ("more", "moves"),
    [
        ({"file_mounts": {"/data": "s3://b/c"}}, True),
        ({"file_mounts": {"~/.app": "./app"}}, True),
        ({"volumes": {"/disk": "v"}}, True),
        ({"file_mounts": {"~/sky_workdir/app": "./app"}}, False),
        ({"file_mounts": {"/data": "s3://b/c"}, "resources": {"image_id": "docker:a/b"}}, False),
        ({"file_mounts": {"/data": "s3://b/c"}, "service": SERVICE}, False),
        ({"file_mounts": {"~/pips": "s3://b/c"}, "service": SERVICE}, True),
    ],
)
def test_a_setup_that_may_need_mounts_runs_with_the_commands(
    more: dict[str, object], moves: bool
) -> None:
    text = json.dumps({"num_nodes": 1, "setup": "pip install $HOME/pips/a", "run": "x", **more})
    task = parse_task(text, options=ReadOptions(serves="service" in more))
    assert ("pip install" in task.run) is moves
    assert ("pip install" in (task.setup or "")) is not moves


@pytest.mark.parametrize(
    ("run", "waits"),
    [
        ("ray start --head", True),
        ("python a.py > log 2>&1 &", True),
        ("setsid daemon", True),
        ("a && b 2>&1 >&2", False),
        ("torchrun a.py &> log", False),
    ],
)
def test_other_nodes_end_with_their_commands(run: str, waits: bool) -> None:
    task = parse_task(json.dumps({"num_nodes": 2, "run": run}))
    assert ("_helper" in task.run) is waits
    assert "_helper" not in parse_task(json.dumps({"num_nodes": 1, "run": run})).run


def test_exports_of_bashrc_reach_commands_that_mention_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".bashrc").write_text("case $- in *i*) ;; *) return ;; esac\nexport FROM_IT=yes\n")
    monkeypatch.setitem(NODE, "HOME", str(tmp_path))
    task = parse_task("num_nodes: 1\nsetup: echo a >> ~/.bashrc\nrun: echo $FROM_IT $PATH")
    said = execute(task.run, "bash", tmp_path).stdout
    assert said.startswith("yes ")
    assert said.rstrip().endswith(f"{tmp_path}/.local/bin:{tmp_path}/.cargo/bin")


def test_nothing_is_put_before_commands_that_do_not_need_it() -> None:
    task = parse_task("num_nodes: 1\nrun: echo a")
    assert "sky_workdir" not in task.run
    assert "conda" not in task.run


@pytest.mark.parametrize("shell", SHELLS)
def test_dstack_s_variables(shell: str, tmp_path: Path) -> None:
    text = """\
type: task
resources: {gpu: H100:8}
working_dir: sub
commands:
  - echo "$DSTACK_NODE_RANK $DSTACK_NODES_NUM $DSTACK_GPUS_PER_NODE $DSTACK_GPUS_NUM $DSTACK_MASTER_NODE_IP"
  - echo "$DSTACK_NODES_IPS"
  - cat $DSTACK_MPI_HOSTFILE; basename "$PWD"
  - "false"
  - echo never
"""
    done = execute(parse_task(text).run, shell, tmp_path)
    assert done.stdout.splitlines() == [
        "1 2 8 16 10.0.0.1",
        "10.0.0.1",
        "10.0.0.2",
        "10.0.0.1 slots=8",
        "10.0.0.2 slots=8",
        "sub",
    ]
    assert done.returncode == 1
    assert not list(tmp_path.glob("dstack-hosts-*"))


@pytest.mark.parametrize("shell", SHELLS)
def test_a_working_dir_may_be_in_the_home_folder(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NODE, "HOME", str(tmp_path / "home"))
    task = parse_task(
        "type: task\nworking_dir: ~/my app\ncommands: [pwd, printenv DSTACK_WORKING_DIR]\n"
    )
    assert execute(task.run, shell, tmp_path).stdout == f"{tmp_path}/home/my app\n" * 2


@pytest.mark.parametrize("shell", SHELLS)
def test_secrets_are_written_into_files(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "run: cat ~/.netrc {0}/it\\'s; echo ${{NETRC_FILE-none}}\nfile_mounts:\n"
    text += '  ~/.netrc: ~/.netrc\n  "{0}/it\'s": ~/.ssh/id_rsa\nnum_nodes: 1\n'
    run = parse_task(text.format(tmp_path)).run
    monkeypatch.setitem(NODE, "HOME", str(tmp_path / "home"))
    monkeypatch.setitem(NODE, "NETRC_FILE", "machine a\n  login b")
    monkeypatch.setitem(NODE, "SSH_ID_RSA_FILE", "k e y")
    done = execute(run, shell, tmp_path)
    assert done.stdout.splitlines() == ["machine a", "  login b", "k e y", "none"]
    file = tmp_path / "home" / ".netrc"
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("mine\n")
    assert execute(run, shell, tmp_path).stdout.splitlines()[0] == "mine", "it stays as it was"
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("in the way")
    assert execute(run, shell, tmp_path).returncode == 1


def test_a_python_that_is_not_there_ends_the_work(tmp_path: Path) -> None:
    if shutil.which("python3.15") is not None:
        pytest.skip("this machine has a Python 3.15")
    task = parse_task("type: task\npython: 3.15\ncommands: [echo never]")
    script = task.run.replace("command -v uv", "false")
    done = execute(script, SHELLS[0], tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "this needs Python 3.15" in done.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_validate_tells_what_is_kept(folder: Path) -> None:
    (folder / "a.yaml").write_text(
        "run: x\nresources: {cpus: 1, local_disk: nvme, disk_tier: best}"
    )
    result = CliRunner().invoke(validate, ["a.yaml"])
    assert result.exit_code == 1
    assert result.stdout.startswith("a.yaml is a valid SkyPilot task.\n")
    assert "not supported: line 2: `resources.local_disk`: " in result.stdout
    assert "note: line 2: `resources.disk_tier`: " in result.stdout
    assert "`cavvy run` would refuse this file" in result.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: x\nresources: {cpus: x}", "of SkyPilot, because of the key `resources.cpus`"),
        ("type: task\ncommands: 1", "of dstack, because of the key `type`"),
        ("type: service\ncommands: [x]\nport: 1", "a service of dstack"),
        ("run: x\nnum_nodes: 1\nresources: {local_disk: nvme}", "the key `num_nodes`"),
    ],
)
def test_errors_end_with_a_note_of_the_tool_that_the_file_was_read_for(
    text: str, said: str, folder: Path
) -> None:
    (folder / "a.yaml").write_text(text)
    done = CliRunner().invoke(run_command, ["a.yaml"], standalone_mode=False)
    *_, last = str(done.exception).splitlines()
    assert last.startswith("note: a.yaml was read as a ")
    assert said in last
    assert "--as cavvy" in last


def test_a_cavvy_file_is_not_a_guess(folder: Path) -> None:
    (folder / "a.yaml").write_text("run: 1\nnodes: x")
    done = CliRunner().invoke(run_command, ["a.yaml"], standalone_mode=False)
    assert "was read as" not in str(done.exception)


SERVED = "type: service\nname: chat\nimage: x\ncommands: [serve]\nport: 1\n"


def test_run_names_the_command_for_a_service(folder: Path) -> None:
    (folder / "a.yaml").write_text(SERVED)
    done = CliRunner().invoke(run_command, ["a.yaml"], standalone_mode=False)
    assert isinstance(done.exception, CommandFailure)
    assert done.exception.exit_code == 2
    assert "`cavvy serve a.yaml` starts the service" in str(done.exception)


@pytest.mark.parametrize("answer", ["y", "n"])
def test_run_offers_to_start_a_service(
    answer: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cavvy.capabilities.serving")
    (folder / "a.yaml").write_text(SERVED)
    served: list[object] = []
    monkeypatch.setattr("cavvy.cli.task.submission.may_ask", lambda: True)
    monkeypatch.setattr(
        "cavvy.capabilities.serving.serve_command.serve_file",
        lambda file, *_, name, **__: served.append((file, name)),
    )
    words = ["a.yaml", "--name", "b"]
    done = CliRunner().invoke(run_command, words, input=answer, standalone_mode=False)
    assert "a.yaml describes a service, not a job. Start the service?" in done.output
    assert served == ([("a.yaml", "b")] if answer == "y" else [])
    assert (done.exception is None) is (answer == "y")


def test_validate_for_programs(folder: Path) -> None:
    (folder / "a.dstack.yml").write_text("type: fleet\nnodes: 2")
    (folder / "b.yaml").write_text("name: g\n---\nrun: x\nnum_nodes: 1\n---\nrun: y")
    result = CliRunner().invoke(validate, ["-o", "json", "a.dstack.yml", "b.yaml"])
    fleet, pipeline = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (fleet["valid"], fleet["runs"], fleet["kind"], fleet["what"], fleet["task"]) == (
        True,
        False,
        "dstack",
        "fleet",
        None,
    )
    assert fleet["kept"][0]["line"] == 1
    assert [task["run"] for task in pipeline["tasks"]] == ["x", "y"]


def test_a_plan_needs_one_task(folder: Path) -> None:
    (folder / "a.dstack.yml").write_text("type: fleet\nnodes: 2")
    result = CliRunner().invoke(plan, ["a.dstack.yml"])
    assert result.exit_code != 0
    assert "a dstack fleet with nothing that runs" in str(result.exception) + result.output


def test_the_reference_names_every_key_and_variable() -> None:
    page = (
        Path(__file__).resolve().parents[3] / "docs" / "reference" / "other-tools.md"
    ).read_text()
    internal = ("file_mounts_mapping", "volume_mounts", "ephemeral_storage")
    keys = {*TASK.fields, *NEEDS.fields, *TABLES.table("run").fields} | {
        name for table in VARIABLES.values() for name in table
    }
    words = set(re.findall(r"\w+", page))
    assert (
        sorted(key for key in keys if key not in words and key[0] != "_" and key not in internal)
        == []
    )


@pytest.mark.parametrize("target", ["/out", "~/out", "~/sky_workdir/out"])
def test_an_empty_folder_is_not_submitted(folder: Path, target: str) -> None:
    (folder / "empty").mkdir()
    file = folder / "t.sky.yaml"
    file.write_text(f"run: x\nnum_nodes: 1\nfile_mounts: {{{target}: ./empty}}\n")
    done = CliRunner().invoke(validate, [str(file)])
    assert done.exit_code == 2
    assert f"the folder {folder}/empty has no files to submit" in done.output
    assert "put a file such as .keep into the folder" in done.output
    (folder / "empty" / ".keep").touch()
    assert CliRunner().invoke(validate, [str(file)]).exit_code == 0


def test_mounted_files_are_submitted_though_the_folder_ignores_them(folder: Path) -> None:
    (folder / ".gitignore").write_text("outputs/\nkey.txt\n")
    (folder / "outputs").mkdir()
    file = folder / "t.sky.yaml"
    file.write_text(
        "run: x\nworkdir: .\nnum_nodes: 1\nfile_mounts: {/out: ./outputs, /key.txt: key.txt}\n"
    )
    done = CliRunner().invoke(validate, [str(file)])
    assert done.exit_code == 2
    assert f"the folder {folder}/outputs has no files to submit" in done.output
    (folder / "outputs" / "old.txt").write_text("1")
    (folder / "key.txt").write_text("2")
    assert CliRunner().invoke(validate, [str(file)]).exit_code == 0
    loaded = load_task(file)
    parts = find_parts(loaded.task, loaded.source, loaded.folder)
    snapshot = freeze_parts(loaded.task, parts, folder / "state", 100)
    assert [each.path for each in snapshot.entries] == [
        ".gitignore",
        "key.txt",
        "outputs/old.txt",
        "t.sky.yaml",
    ]
