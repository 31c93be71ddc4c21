"""Batch scripts of Slurm: what their lines of #SBATCH become, and the Slurm that they find."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from base64 import b64decode
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import decompress

import pytest

from cavvy.agent.work.reaper import list_children
from cavvy.capabilities.importers.slurm import node_tools
from cavvy.capabilities.importers.slurm.directives import read_minutes
from cavvy.domain.tasks import AcceleratorNeed, IndexRange, TaskSpec
from cavvy.domain.values import replace
from cavvy.spec import SpecError
from cavvy.task_files import ReadOptions, parse_file, parse_task

HEAD = "#!/bin/bash\n"


def read(*lines: str, commands: str = "srun hostname\n") -> TaskSpec:
    text = HEAD + "".join(f"#SBATCH {line}\n" for line in lines) + commands
    (task,) = parse_file(text, file="job.sbatch").tasks
    return task


@pytest.mark.parametrize(
    ("lines", "nodes", "cpus", "mib"),
    [
        (["-N2", "--ntasks-per-node=4", "-c 2", "--mem=64G"], 2, 8, 65536),
        (["--nodes=2-4", "-n 3", "--mem-per-cpu=500"], 2, 2, 1000),
        (["--ntasks 8 --ntasks-per-node 4", "-c4"], 2, 16, None),
        (["-n 1"], 1, None, None),
        (["--gpus-per-node=h100:2", "--cpus-per-gpu=8", "--mem-per-gpu=10G"], 1, 16, 20480),
        (["--nodes=4", "--ntasks=2"], 2, None, None),  # sbatch takes no more nodes than tasks
        (["-n 2", "-n 4"], 1, 4, None),  # the last line counts
    ],
)
def test_nodes_tasks_and_sizes(
    lines: list[str], nodes: int, cpus: int | None, mib: int | None
) -> None:
    task = read(*lines)
    found = task.resources
    assert (task.nodes, found.cpus_min, found.memory_min_mib) == (nodes, cpus, mib)


def test_a_range_of_nodes_is_one(tmp_path: Path) -> None:
    task = read("--nodes=2-4", "--ntasks-per-node=2")
    assert (task.nodes, str(task.elastic), task.resources.cpus_min) == (2, "2..4", 2)
    assert str(read("-N 2-8", "-n 6").elastic) == "2..6", "no more nodes than tasks"
    assert [read(line).elastic for line in ("-N 2", "-N 2-2", "-n 4")] == [None] * 3
    for given, nodes in (("nodes: 3", 3), ("pool: gpus", 2), ("machine: mine", 2)):
        options = ReadOptions(overrides=given)
        (fixed,) = parse_file(f"{HEAD}#SBATCH -N 2-4\n", file="a.sbatch", options=options).tasks
        assert (fixed.nodes, fixed.elastic) == (nodes, None)
    plan = read_plan("--nodes=2-4 --ntasks-per-node=2")
    assert (plan["ntasks"], plan["tasks_follow"]) == (4, True)
    assert not read_plan("--nodes=2-4 -n 4")["tasks_follow"]


@pytest.mark.parametrize(("follow", "tasks"), [(True, "6"), (False, "4")])
def test_tasks_follow_the_nodes_of_a_range(
    follow: bool, tasks: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CAVVY_HOSTS", "a,b,c")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(node_tools, "make_own_folder", lambda: str(tmp_path))
    plan = {**read_plan("-N 2-4 --ntasks-per-node=2"), "tasks_follow": follow}
    found = node_tools.make_variables(plan, 3)
    assert (found["SLURM_NTASKS"], found["SLURM_NPROCS"]) == (tasks, tasks)


@pytest.mark.parametrize(
    ("lines", "name", "count"),
    [
        (["--gres=gpu:a100:4"], "A100", 4),
        (["--gres=lustre:1,gpu:2"], None, 2),
        (["-N 2", "-G 8"], None, 4),
        (["-n 4", "--gpus-per-task=v100:1"], "V100", 4),
        (["--gpus-per-node=2", "--constraint=h100&ib"], "H100", 2),
        (["--gres=gpu:2", "-N 2", "--gpus=4"], None, 2),
        (["--gpus=v100-32:4"], "V100", 4),
    ],
)
def test_gpus(lines: list[str], name: str | None, count: int) -> None:
    (need,) = read(*lines).resources.accelerators
    assert (need.name, need.count_min) == (name, count)
    assert isinstance(need, AcceleratorNeed)


def test_the_rest_of_a_script() -> None:
    task = read(
        *("-J My_Run", "-t 1-02:30", "--array=1-9:4,20%2", "--no-requeue"),
        *("--export=ALL,A=1", "--signal=B:USR1@300", r"--container-image=nvcr.io\#nvidia/x:1"),
    )
    assert task.name == "my-run"
    assert task.limits.duration == timedelta(days=1, hours=2, minutes=30)
    assert (task.array, task.parallel) == ((IndexRange(1, 9, 4), IndexRange(20, 20)), 2)
    assert (task.retry.preemption, task.retry.node) == (0, 0)
    assert (task.env, task.grace) == ({"A": "1"}, timedelta(seconds=300))
    assert task.image == "nvcr.io/nvidia/x:1"
    assert read("-t 0:0:1").limits.duration == timedelta(minutes=1)  # sbatch rounds up
    again = read("-t 60", commands='scontrol requeue "$SLURM_JOB_ID"\n')
    assert again.limits.duration is None  # each run has its time anew


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("1:30", 1.5), ("2:00:00", 120), ("1-0", 1440), ("1-2:3", 1563), ("0", None)],
)
def test_times(text: str, minutes: float | None) -> None:
    assert read_minutes(text) == minutes


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--ntask=2", "did you mean --ntasks?"),
        ("--nodes=two", "a number such as 2"),
        ("--nodes=0", "a number such as 2"),
        ("--time=1h", "minutes, or H:M:S"),
        ("--mem=64GiB8", "a size such as"),
        ("--mem=1G --mem-per-cpu=1G", "exclude each other"),
        ("--gres=gpu:a100:2 --gpus-per-node=4", "keep one of the two lines"),
        ("--gres=gpu:a100:2 --gpus-per-node=h100:2", "two types of GPUs"),
        ("--array=5-1", "indices such as"),
        ("--array=0-999999999", "the index 999,999,999 is too large"),
        ("--array=0-99999", "100,000 jobs are too many"),
        ("--array=1,1", "is in '1,1' twice"),
        ("--time=999999999999999999", "minutes, or H:M:S"),
        ("--time=99999999999-0", "minutes, or H:M:S"),
        ("--mem=99999999999999999T", "memory such as"),
        ("--cpus-per-task=99999", "CPUs are too many"),
        ("--signal=999@1", "a signal such as"),
        ("--export=1BAD=2", "the name of a variable"),
        ("--signal=NOPE@60", "a signal such as"),
        ("--cpus-per-gpu=4", "asks for none"),
        ("train.py", "is no option of sbatch"),
        ("hetjob", "parts with different nodes"),
        ("packjob", "`group` in Cavvy files"),
        ("--comment='open", "cannot be read"),
        ("--job-name", "has no value"),
    ],
)
def test_mistakes_name_the_line(line: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        read("-n 2", line)
    assert said in str(error.value)
    assert "job.sbatch:3:" in str(error.value)


def test_bounds_are_those_of_the_task_file() -> None:
    with pytest.raises(SpecError, match="from 1 to 10,000") as error:
        read("--nodes=20000")
    assert "job.sbatch:2:" in str(error.value)


def test_what_names_the_cluster_is_left_out_or_refused() -> None:
    text = HEAD + "#SBATCH -p gpu -A lab\n#SBATCH --cpu-bind=cores\nsrun x\n#SBATCH -n 4\n"
    found = parse_file(text, file="a.sh")
    assert [(each.line, each.key) for each in found.kept] == [
        (2, "--account"),
        (2, "--partition"),
        (3, "--cpu-bind"),
        (5, "#SBATCH"),
    ]
    assert found.task is not None
    with pytest.raises(SpecError, match="names jobs of a Slurm cluster"):
        parse_task(HEAD + "#SBATCH -d afterok:123\nsrun x\n", file="a.sh")
    with pytest.raises(SpecError, match="declares no parameter lr"):
        parse_task(HEAD + "#SBATCH -n 1\nx\n", file="a.sh", params={"lr": 1})


def test_the_command_is_the_whole_script_with_its_tools() -> None:
    script = HEAD + "#SBATCH -n 2\necho '$A' \"`date`\" \\\n  x\n"
    ready = parse_task(script, file="a.sh")
    assert script.rstrip() in ready.run
    subprocess.run(["bash", "-n", "-c", ready.run], check=True)
    laid = [line.split() for line in ready.run.splitlines() if re.match(r"\w+\.py \S+$", line)]
    texts = {name: decompress(b64decode(data)).decode() for name, data in laid}
    assert texts == {
        "tools.py": Path(node_tools.__file__).read_text("utf-8"),
        "queries.py": Path(node_tools.__file__).with_name("node_queries.py").read_text("utf-8"),
    }
    assert len(ready.run) < 40_000


def test_a_script_may_contain_what_ends_the_text_of_a_script(tmp_path: Path) -> None:
    lines = "CAVVY_END_() { echo called; }\nCAVVY_END_\n"
    assert run_script(tmp_path, "#SBATCH -n 1", lines) == (0, "called\n")


def test_lists_of_hosts() -> None:
    assert node_tools.split_hosts("a[01-03,7],b") == ["a01", "a02", "a03", "a7", "b"]
    assert node_tools.split_hosts("10.0.0.1,10.0.0.2") == ["10.0.0.1", "10.0.0.2"]
    assert node_tools.shorten([2, 2, 1]) == "2(x2),1"
    assert node_tools.share_out(5, 2, 0) == [3, 2]
    assert node_tools.share_out(4, 2, 2) == [2, 2]
    assert node_tools.write_numbers([0, 1, 2, 5]) == "0-2,5"


@pytest.mark.parametrize(
    ("words", "options", "command"),
    [
        (
            ["-n2", "-lu", "a", "-n", "9"],
            {"ntasks": "2", "label": "1", "unbuffered": "1"},
            "a -n 9",
        ),
        (["-K", "sh"], {"kill-on-bad-exit": "1"}, "sh"),
        (
            ["--exclusive=user", "--mpi=none", "--", "-x"],
            {"exclusive": "user", "mpi": "none"},
            "-x",
        ),
        (["--cpu-bind", "none", "a"], {"cpu-bind": "none"}, "a"),
    ],
)
def test_options_of_srun(words: list[str], options: dict[str, str], command: str) -> None:
    assert node_tools.parse_step(words) == (options, command.split())


@pytest.mark.parametrize("words", [["-Z", "a"], ["--nope", "a"], ["-n"], ["-n", "2"]])
def test_mistakes_of_srun(words: list[str]) -> None:
    with pytest.raises(node_tools.Usage):
        node_tools.parse_step(words)


def run_script(
    folder: Path, lines: str, commands: str, time_s: int = 0, **variables: str
) -> tuple[int, str]:
    """Run a script on this machine as a node does; `time_s` is its time instead of a minute."""
    folder.mkdir(exist_ok=True)
    ready = parse_task(f"{HEAD}{lines}\n{commands}", file="job.sbatch")
    if time_s:
        run = ready.run.replace('"time_s": 60,', f'"time_s": {time_s},')
        assert run != ready.run
        ready = replace(ready, run=run)
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        **{"CAVVY_JOB_ID": "j", "CAVVY_ATTEMPT": "1", "NODE_RANK": "0", "NNODES": "1"},
        **{"CAVVY_HOSTS": "127.0.0.1", "CAVVY_MPI": f"{sys.executable} x", **variables},
    }
    done = subprocess.run(
        ["bash", "-e", "-c", ready.run],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_list_of_hosts_may_be_cut_off(tmp_path: Path) -> None:
    """`head` has often ended before `scontrol` writes."""
    code, said = run_script(
        tmp_path,
        "#SBATCH -n 1",
        "scontrol show hostnames 'a[1-20000]' | head -n 1\n" * 3,
    )
    assert (code, said) == (0, "a1\n" * 3)


def test_steps_wait_for_the_cores_of_others(tmp_path: Path) -> None:
    """Since Slurm 20.11, a step has its cores for itself."""
    step = "srun -n1 sh -c 'mkdir busy && sleep 0.5 && rmdir busy && echo alone' & "
    code, said = run_script(tmp_path, "#SBATCH -n 1", f"{step}\n{step}\nwait\n")
    assert (code, said.count("alone"), said.count("waiting for them")) == (0, 2, 1)


def test_gpus_of_steps(tmp_path: Path) -> None:
    code, said = run_script(
        tmp_path,
        "#SBATCH -n 2 --gres=gpu:2 -o out.txt",
        'echo "$SLURM_GPUS_ON_NODE $SLURM_JOB_GPUS"\n'
        "srun bash -c 'echo all $SLURM_PROCID $CUDA_VISIBLE_DEVICES'\n"
        "srun --gpus-per-task=1 bash -c 'echo one $SLURM_PROCID $CUDA_VISIBLE_DEVICES'\n"
        "for i in 0 1; do srun -n1 --gres=gpu:1 --exact sh -c \\\n"
        "  'echo own $CUDA_VISIBLE_DEVICES; until [ -e $0 ]; do sleep 0.02; done' $PWD/go & done\n"
        'until [ "$(grep -c own out.txt)" = 2 ]; do sleep 0.05; done\n'
        "touch go; wait\n",
        CUDA_VISIBLE_DEVICES="3,5",
        NPROC_PER_NODE="2",
    )
    assert code == 0, said
    assert sorted(said.splitlines()) == sorted(
        ["2 3,5", "all 0 3,5", "all 1 3,5", "one 0 3", "one 1 5", "own 3", "own 5"]
    )
    assert (tmp_path / "out.txt").read_text() == said


def test_the_time_of_a_script_ends_it_after_its_signal(tmp_path: Path) -> None:
    """`--signal` says how long before the end the script is warned."""
    code, said = run_script(
        tmp_path,
        "#SBATCH -t 1 --signal=B:USR1@1",
        "trap 'echo warned; exit 3' USR1\nfor i in $(seq 3000); do sleep 0.02; done\n",
        1,
    )
    assert (code, said) == (3, "warned\n")
    code, said = run_script(tmp_path, "#SBATCH -t 1", "srun sleep 60\necho on\n", 1)
    assert code == 143
    assert "DUE TO TIME LIMIT" in said
    assert "on\n" not in said
    # the work is not complete, although its script says so
    code, said = run_script(
        tmp_path,
        "#SBATCH -t 1",
        "trap 'exit 0' TERM\nfor i in $(seq 3000); do sleep 0.02; done\n",
        1,
    )
    assert code == 143


@pytest.mark.parametrize(
    "line",
    [
        "--array=0-9%-1",
        "--array=0-3%99999999999999999999",
        "--mem-per-gpu=1G",
        "--container-image='a b'",
        "--container-image='a\x1b[2J'",
        "--signal=USR1@99999 --signal=USR1@999999",
    ],
)
def test_values_that_no_job_can_have_are_refused(line: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_task(f"{HEAD}#SBATCH {line}\ntrue\n", file="job.sbatch")
    assert "\x1b" not in str(refused.value).split("\n", 1)[0]


def test_a_hostile_script_is_refused_at_once() -> None:
    """Each of these once took minutes or gigabytes, also of a server that reads it."""
    many = ",".join(f"0-{999_999_990 + number % 10}" for number in range(5000))
    with pytest.raises(SpecError, match="--array: the index 999,999,990 is too large"):
        parse_task(f"{HEAD}#SBATCH --array={many}\ntrue\n", file="job.sbatch")
    for lines in (f"#SBATCH --comment={'x' * 900_000}\n", "#SBATCH -N1\n" * 80_000):
        with pytest.raises(SpecError, match="the lines of #SBATCH are too long together"):
            parse_task(f"{HEAD}{lines}true\n", file="job.sbatch")
    with pytest.raises(SpecError, match="the lines of #PBS are too long together"):
        parse_task(f"{HEAD}#PBS -N {'x' * 900_000}\ntrue\n", file="job.pbs")
    late = f"{HEAD}true\n" + "#SBATCH -N1\n" * 80_000
    assert len(parse_file(late, file="job.sbatch").kept) == 20


def test_a_script_asks_to_run_again(tmp_path: Path) -> None:
    code, said = run_script(
        tmp_path,
        "#SBATCH --requeue",
        "echo ${SLURM_RESTART_COUNT:-none}; scontrol requeue $SLURM_JOB_ID; sleep 60\n",
        CAVVY_ATTEMPT="2",
    )
    assert code == 75  # of which Cavvy makes another attempt
    assert said.splitlines()[0] == "1"


def test_a_notice_reaches_the_program_as_the_signal_that_the_script_names(tmp_path: Path) -> None:
    ready = parse_task(
        f"{HEAD}#SBATCH --signal=USR1@60\n"
        "srun bash -c 'trap \"echo saves; exit 0\" USR1; echo ready; while sleep 0.1; do :; done'\n",
        file="job.sbatch",
    )
    env = {**os.environ, "CAVVY_JOB_ID": "j", "NNODES": "1", "CAVVY_MPI": sys.executable}
    env["CAVVY_HOSTS"] = "127.0.0.1"
    with subprocess.Popen(
        ["bash", "-c", ready.run], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        (tools,) = list_children()[job.pid]
        os.kill(tools, signal.SIGTERM)
        assert job.stdout.read() == "saves\n"
    assert job.returncode == 0


def test_the_plan_of_a_script_is_plain(tmp_path: Path) -> None:
    found = parse_file(f"{HEAD}#SBATCH -N 2 -n 4 -t 5\nx\n", file="a.sh")
    plan = json.loads(found.before)
    assert (plan["ntasks"], plan["tasks_per_node"], plan["time_s"]) == (4, 2, 300)


def answer_asks(place: Path, answers: list[dict[str, object]]) -> list[dict[str, object]]:
    """Answer what programs ask at a socket, as the agent does, one after the other."""
    asked: list[dict[str, object]] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(place))
    listener.listen()

    def serve() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as lines:
                lines.write('{"every_s": 5}\n')  # what the agent tells every program
                ask = json.loads(lines.readline())["ask"]
                asked.append({"to": ask["to"], **json.loads(ask["body"])})
                other = {"answer": {"id": "of another program", "status": 500, "body": {}}}
                mine = {"answer": {"id": ask["id"], **answer}}
                lines.write(json.dumps(other) + "\n" + json.dumps(mine) + "\n")
                lines.flush()
        listener.close()

    threading.Thread(target=serve, daemon=True).start()
    return asked


def test_sbatch_asks_the_server(tmp_path: Path) -> None:
    made: dict[str, object] = {"status": 200, "body": {"number": 12345678, "name": "next"}}
    refused: dict[str, object] = {"status": 422, "body": {"message": "no", "hint": "do this"}}
    ended: list[dict[str, object]] = [
        {"status": 200, "body": {"state": state, "exit_code": code}}
        for state, code in (("RUNNING", None), ("FAILED", 7))
    ]
    asked = answer_asks(tmp_path / "s", [made, made, *ended, refused])
    (tmp_path / "w" / "sub").mkdir(parents=True)
    (tmp_path / "w" / "next.sbatch").write_text("#!/bin/sh\necho next\n")
    code, said = run_script(
        tmp_path / "w",
        "#SBATCH -n 1",
        "export LR=0.1; unset GONE\n"
        "sbatch -t 5 -d afterok:$SLURM_JOB_ID next.sbatch a 'b c'\n"
        "cd sub; sbatch --parsable --wait --export=NONE,LR --wrap='echo hi'; echo code $?\n"
        "sbatch ../next.sbatch; echo code $?\n"
        "sbatch --nope ../next.sbatch; echo code $?\n"
        "sbatch nothing.sh; echo code $?\n",
        CAVVY_NOTICE=str(tmp_path / "s"),
        GONE="1",
    )
    assert code == 0
    assert said.splitlines() == [
        "Submitted batch job 12345678",
        "cavvy: its name is next",
        "12345678",
        "code 7",
        "sbatch: error: no",
        "do this",
        "code 1",
        "sbatch: error: unrecognized option '--nope'",
        "code 1",
        "sbatch: error: [Errno 2] No such file or directory: 'nothing.sh'",
        "code 1",
    ]
    first, second, third, *_ = asked
    job = first["options"][1][1].partition(":")[2]  # type: ignore[index]
    assert first["options"] == [["time", "5"], ["dependency", f"afterok:{job}"]]
    assert 10_000_000 <= int(job) < 100_000_000
    assert (first["to"], first["name"], first["arguments"]) == (
        "slurm/submit",
        "next.sbatch",
        ["a", "b c"],
    )
    assert (first["env"], first["unset"], first["folder"]) == ({"LR": "0.1"}, ["GONE"], "")
    assert (second["script"], second["folder"]) == ("#!/bin/sh\necho hi\n", "sub")
    assert (second["env"], second["inherits"]) == ({"LR": "0.1"}, False)
    assert (third["to"], third["number"]) == ("slurm/state", 12345678)


def test_a_script_that_does_not_name_sbatch_may_not_submit(tmp_path: Path) -> None:
    (tmp_path / "call.sh").write_text("sbatch --wrap 'echo hi'\n")
    _, said = run_script(tmp_path, "#SBATCH -n 1", "# sbatch\nsh call.sh; echo code $?\n")
    assert "only a batch script that names sbatch may submit jobs\ncode 1\n" in said
    (note,) = parse_file(f"{HEAD}#SBATCH -n 1\nsbatch a.sh\n", file="job.sbatch").notes
    assert "the script calls sbatch" in note
    assert parse_file(f"{HEAD}#SBATCH -n 1\n# sbatch a.sh\n", file="job.sbatch").notes == ()


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        (["--gres=gpu:1,lscratch:100"], [("--gres", False)]),
        (["--gres=shard:1"], [("--gres", True)]),
        (["--gres=gpu:tesla:2"], [("--gres", True)]),
        (["--gpus=h100_3g.40gb:1"], [("--gpus", True)]),
        (["--mem=0"], [("--mem", False)]),
        (["--hint=nomultithread", "--distribution=block"], [("--hint", 0), ("--distribution", 0)]),
        (["--tres-per-task=cpu:2"], [("--tres-per-task", True)]),
        (["--container-mounts=/a:/b"], [("--container-mounts", True)]),
        (["--gres=none"], []),
    ],
)
def test_no_option_is_left_out_without_a_word(
    lines: list[str], kept: list[tuple[str, bool]]
) -> None:
    text = HEAD + "".join(f"#SBATCH {line}\n" for line in lines) + "true\n"
    found = parse_file(text, file="job.sbatch")
    assert [(each.key, each.refused) for each in found.kept] == kept


def test_an_option_replaces_what_is_refused() -> None:
    text = f"{HEAD}#SBATCH --gres=gpu:tesla:2\n#SBATCH --dependency=afterok:5\ntrue\n"
    overrides = json.dumps({"resources": {"gpu": "A100:2"}, "after": [{"earlier": "success"}]})
    task = parse_task(text, file="job.sbatch", options=ReadOptions(overrides=overrides))
    assert [(each.name, each.count_min) for each in task.resources.accelerators] == [("A100", 2)]
    with pytest.raises(SpecError, match=r"tesla.*--gpu NAME:COUNT replaces it"):
        parse_task(text, file="job.sbatch")


def test_beginnings_and_other_names_of_options() -> None:
    text = f"{HEAD}#SBATCH --tasks-per-node=3\n#SBATCH --job=short\n#SBATCH --nodes=2\ntrue\n"
    task = parse_task(text, file="job.sbatch")
    assert (task.name, task.nodes, task.resources.cpus_min) == ("short", 2, 3)
    with pytest.raises(SpecError, match="sbatch has no option --cpus"):  # of a task, or of a GPU
        parse_task(f"{HEAD}#SBATCH --cpus=2\ntrue\n", file="job.sbatch")
    with pytest.raises(SpecError, match="did you mean --partition") as error:
        parse_task(f"{HEAD}#SBATCH --partiton=gpu\n#SBATCH --bogus=1\ntrue\n", file="job.sbatch")
    assert "--gpus?" not in str(error.value), "which is another word"
    assert not str(error.value).startswith("job.sbatch was read as"), "the error comes first"


def test_tasks_of_each_gpu() -> None:
    plan = read_plan("--gpus-per-node=4 -N 2 --ntasks-per-gpu=1 -c 8")
    assert (plan["ntasks"], plan["per_node"], plan["set"]["SLURM_NTASKS_PER_GPU"]) == (8, 4, "1")
    with pytest.raises(SpecError, match="--ntasks-per-gpu needs GPUs"):
        read("--ntasks-per-gpu=1")


def read_plan(line: str) -> dict[str, Any]:
    found = parse_file(f"{HEAD}#SBATCH {line}\nsrun x\n", file="a.sh")
    plan: dict[str, Any] = json.loads(found.before)
    return plan


def test_variables_of_memory_are_those_of_the_option(tmp_path: Path) -> None:
    show = 'echo "$SLURM_MEM_PER_NODE,$SLURM_MEM_PER_CPU,$SLURM_GPUS,$SLURM_JOB_QOS"\n'
    for line, said in (
        ("--mem=1G -c 2", "1024,,,\n"),
        ("--mem-per-cpu=500 -c 2 --qos=long", ",500,,long\n"),
        ("-G 2 -n 2", ",,2,\n"),
    ):
        assert run_script(tmp_path, f"#SBATCH {line}", show) == (0, said)


@pytest.mark.parametrize(
    ("commands", "names"),
    [
        ("cd $SLURM_TMPDIR; echo ${SLURM_JOB_ID} $SLURMD_NODENAME\n", []),
        ("tar -C $SLURM_SITE_SCRATCH\necho $SLURM_SITE_SCRATCH\n", ["$SLURM_SITE_SCRATCH"]),
        ("echo ${SLURM_OTHER:-x} ${SLURM_OTHER+set} # $SLURM_LATER\n", []),
        ("SLURM_MINE=1\necho $SLURM_MINE\n#echo $SLURM_NOT\n", []),
        ("OMP_NUM_THREADS=2 aprun -n 4 ./a\ntime ibrun ./b\n", ["aprun", "ibrun"]),
        ("echo aprun; x=$(seff 1)\n", ["seff"]),
    ],
)
def test_names_that_a_node_lacks_are_said(commands: str, names: list[str]) -> None:
    found = parse_file(f"{HEAD}#SBATCH -n 1\n{commands}", file="a.sh")
    assert [each.key for each in found.kept] == names


def test_options_of_plug_ins_and_unknown_ones() -> None:
    found = parse_file(f"{HEAD}#SBATCH --nvmps -n 2\n#SBATCH --quotatype=auto\nx\n", file="a.sh")
    assert [each.key for each in found.kept] == ["--nvmps", "--quotatype"]
    assert json.loads(found.before)["ntasks"] == 2
    with pytest.raises(SpecError, match="a plug-in of one cluster"):
        read("--frobnicate=yes")


def test_a_step_in_an_image_of_its_own_is_refused_unless_the_job_has_one() -> None:
    text = f"{HEAD}#SBATCH -n 1\nsrun -l \\\n  --container-image=a:1 x\n"
    with pytest.raises(SpecError, match="a step runs in the image of the job") as error:
        parse_task(text, file="a.sh")
    assert "a.sh:4:" in str(error.value)
    task = parse_task(text, file="a.sh", options=ReadOptions(overrides="image: b:2"))
    assert task.image == "b:2"
    options, command = node_tools.parse_step(
        ["--container-image=a:1", "--no-container-mount-home", "x"]
    )
    assert (options["container-image"], command) == ("a:1", ["x"])


def test_a_job_asks_for_itself(tmp_path: Path) -> None:
    code, said = run_script(
        tmp_path,
        "#SBATCH -t 1-02:00 -J mine -c 2 --mem=2G -o out.txt",
        "squeue -j $SLURM_JOB_ID -h -o '%j|%t|%l|%D|%C'\n"
        "squeue -h -j $SLURM_JOB_ID --Format TimeLimit:12\n"
        "squeue -u me -ho %.6j\n"
        "sacct -nPj $SLURM_JOB_ID -o JobName,State,NCPUS,ReqMem\n"
        "scontrol show job $SLURM_JOB_ID | grep -oP 'StdOut=\\K\\S+'\n"
        "scontrol show job $SLURM_JOB_ID | awk -F= '/TimeLimit/{print $3}'\n"
        "squeue -j 1 -h\n",
    )
    assert (code, said.splitlines()[:6]) == (
        0,
        [
            "mine|R|1-02:00:00|1|2",
            "1-02:00:00  ",
            "  mine",
            "mine|RUNNING|2|2048M",
            str(tmp_path / "out.txt"),
            "1-02:00:00 TimeMin",
        ],
    )
    assert "Invalid job id specified: 1" in said


def test_columns_of_sacct_have_titles_and_absent_fields_are_named(tmp_path: Path) -> None:
    code, said = run_script(
        tmp_path, "#SBATCH -J mine", "sacct -j $SLURM_JOB_ID --format=JobName%6,MaxRSS,State\n"
    )
    assert (code, said.splitlines()) == (
        0,
        [
            "JobName"[:6] + "     MaxRSS      State ",
            "------ ---------- ---------- ",
            "  mine               RUNNING ",
            "cavvy: no values are known here for MaxRSS",
        ],
    )


def test_a_job_ends_itself(tmp_path: Path) -> None:
    for commands in ("scancel $SLURM_JOB_ID\n", "trap 'exit 0' TERM; scancel $SLURM_JOB_ID\n"):
        code, said = run_script(tmp_path, "#SBATCH -n 1", f"{commands}echo on\n")
        assert code == 143
        assert "CANCELLED" in said
        assert "on\n" not in said
    code, said = run_script(
        tmp_path,
        "#SBATCH -n 1",
        "trap 'echo got' USR1\nscancel -b -s USR1 $SLURM_JOB_ID\nscancel 7\n",
    )
    assert (code, "got" in said, "can end only itself" in said) == (1, True, True)


def test_the_file_that_sbatch_makes_is_there_if_the_script_names_it(tmp_path: Path) -> None:
    code, said = run_script(
        tmp_path, "#SBATCH -n 1", 'echo a\nsleep 0.1; echo "$(cat slurm-$SLURM_JOB_ID.out)"\n'
    )
    assert (code, said) == (0, "a\na\n")


def test_a_script_with_a_nul_byte_is_refused_at_its_place() -> None:
    with pytest.raises(SpecError, match="3:6: a script cannot contain a NUL byte"):
        parse_file("#!/bin/bash\n#SBATCH -N 1\necho \0\n", file="job.sbatch")


CLUSTERED = "-N 2 --ntasks-per-node=2 --mem=4G --constraint=ib --exclusive\n#SBATCH -o f -J j"


def test_a_cluster_gets_the_options_of_the_script() -> None:
    task = parse_task(f"{HEAD}#SBATCH {CLUSTERED}\ntrue\n", file="job.sbatch")
    (options,) = task.resources.options
    assert options.provider == "slurm"
    assert json.loads(options.values) == {
        "sbatch": ["--ntasks-per-node=2", "--mem=4G", "--constraint=ib", "--exclusive"]
    }


def test_what_names_a_thing_of_a_cluster_is_kept_for_it() -> None:
    text = f"{HEAD}#SBATCH --dependency=afterok:12 --begin=now+1hour --reservation=r\ntrue\n"
    assert {each.key for each in parse_file(text, file="j.sbatch").kept if each.refused} == {
        "--dependency",
        "--begin",
    }
    chosen = ReadOptions(overrides="resources: {providers: [slurm]}")
    assert parse_file(text, file="j.sbatch", options=chosen).kept == ()
    both = ReadOptions(overrides="resources: {providers: [slurm, aws]}")
    assert parse_file(text, file="j.sbatch", options=both).refused


def run_in_cluster(tmp_path: Path, commands: str, **variables: str) -> tuple[int, str]:
    """Run a script on a node of a cluster with a stand-in for its programs."""
    gang, programs = tmp_path / "gang", tmp_path / "programs"
    for folder in (gang, programs):
        folder.mkdir()
    (gang / "batch.env").write_text("export SLURM_JOB_ID='77'\nexport SLURM_NTASKS='6'\n")
    for name in ("srun", "squeue", "scancel"):
        (programs / name).write_text('#!/bin/sh\necho "real $(basename "$0") $*"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    own = {"CAVVY_BATCH": str(gang), "PATH": path, **variables}
    code, said = run_script(tmp_path / "work", "#SBATCH -n 2 -J mine", commands, **own)
    assert (gang / "script-ended").exists()
    return code, said


def test_in_a_cluster_the_script_has_its_job_and_its_programs(tmp_path: Path) -> None:
    commands = "srun -n 6 hostname; echo $SLURM_JOB_ID $SLURM_NTASKS $SLURM_JOB_NAME\nexit 4\n"
    assert run_in_cluster(tmp_path, commands) == (4, "real srun -n 6 hostname\n77 6 mine\n")


def test_in_a_cluster_the_other_nodes_wait_for_the_script(tmp_path: Path) -> None:
    (tmp_path / "gang").mkdir()
    (tmp_path / "gang/script-ended").touch()
    (tmp_path / "gang/batch.env").touch()
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    own = {"CAVVY_BATCH": str(tmp_path / "gang"), "NODE_RANK": "1", "NNODES": "2", "PATH": path}
    assert run_script(tmp_path / "work", "#SBATCH -N 2", "echo never", **own) == (0, "")


def test_the_steps_of_a_script_in_a_cluster_are_those_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\nprintf '%s\\n' 7.batch 7.0 7.1 7.2\n")
    squeue.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert node_tools.list_cluster_steps() == ["7.1", "7.2"], "the first one runs the agents"


def test_brackets_of_an_array_are_skipped_as_by_sbatch() -> None:
    task = read("--array=[0-90]%20")
    assert ([(each.first, each.last) for each in task.array], task.parallel) == ([(0, 90)], 20)


@pytest.mark.parametrize(
    ("commands", "refused"),
    [
        ('ARGS=(\n  --container-image $PWD/a.sqsh\n)\nsrun "${ARGS[@]}" hostname\n', True),
        ("srun --container-image=a hostname\n", True),
        ("# --container-image a\nsrun hostname\n", False),
        ("./submit --container-image a\n", False),
    ],
)
def test_images_of_steps_are_refused_also_in_arrays_of_the_shell(
    commands: str, refused: bool
) -> None:
    kept = parse_file(f"#!/bin/bash\n#SBATCH -N 2\n{commands}").kept
    assert [each.key for each in kept if each.refused] == ["srun --container-image"] * refused
