"""`squeue`, `sacct` and `scontrol show job` for a batch script's node: what they say of the job
itself, and of the jobs that it has submitted.

The file runs on the node beside `node_tools`, on Python 3.8 or later. Fields and their widths are
those of https://slurm.schedmd.com/squeue.html and https://slurm.schedmd.com/sacct.html.
"""

from __future__ import annotations

import json
import os
import re
import time

import tools  # type: ignore[import-not-found,unused-ignore]  # `node_tools`, by its name on a node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SUBMITTED = "submitted"  # the file with the numbers of the jobs that this job has submitted
SHORT_STATES = {
    **{"RUNNING": "R", "PENDING": "PD", "CONFIGURING": "CF", "COMPLETING": "CG"},
    **{"COMPLETED": "CD", "FAILED": "F", "CANCELLED": "CA"},
}
ENDED = ("COMPLETED", "FAILED", "CANCELLED")
# the letters of `squeue -o`, their titles and the names of `squeue -O` and `sacct -o`
LETTERS = {
    **{"i": "jobid", "A": "jobid", "F": "arrayjobid", "K": "arraytaskid", "j": "name"},
    **{"u": "username", "P": "partition", "a": "account", "q": "qos", "t": "statecompact"},
    **{"T": "state", "M": "timeused", "l": "timelimit", "L": "timeleft", "D": "numnodes"},
    **{"C": "numcpus", "m": "minmemory", "N": "nodelist", "R": "reasonlist", "r": "reason"},
    **{"S": "starttime", "e": "endtime", "Z": "workdir", "o": "command", "B": "batchhost"},
    **{"U": "userid", "E": "dependency", "p": "priority", "Q": "priority", "b": "tres-per-node"},
}
TITLES = {
    **{"statecompact": "ST", "timeused": "TIME", "numnodes": "NODES", "numcpus": "CPUS"},
    **{"reasonlist": "NODELIST(REASON)", "username": "USER", "timelimit": "TIME_LIMIT"},
    **{"timeleft": "TIME_LEFT", "minmemory": "MIN_MEMORY", "starttime": "START_TIME"},
    **{"endtime": "END_TIME", "workdir": "WORK_DIR"},
}
ALIASES = {
    **{"jobname": "name", "user": "username", "elapsed": "timeused", "nnodes": "numnodes"},
    **{"ncpus": "numcpus", "alloccpus": "numcpus", "allocnodes": "numnodes", "start": "starttime"},
    **{"end": "endtime", "timelimit": "timelimit", "reqmem": "minmemory", "ntasks": "numtasks"},
    **{"reqcpus": "numcpus", "nodes": "nodelist", "jobarrayid": "jobid", "jobidraw": "jobid"},
}
QUEUE = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
LONG_QUEUE = "%.18i %.9P %.8j %.8u %.8T %.10M %.9l %.6D %R"
ACCOUNTED = "JobID,JobName,Partition,Account,AllocCPUS,State,ExitCode"


def show_queue(words: list[str]) -> int:
    """What squeue does."""
    try:
        options, numbers = parse(words, "jobs:j job:j format:o Format:O user:u name:n states:t")
    except ValueError as error:
        tools.tell(f"squeue: error: {error}")
        return 1
    rows = [row for row in list_rows(numbers) if row["state"] not in ENDED]
    if wanted := options.get("t"):
        names = {each.strip().upper() for each in wanted.split(",")}
        rows = [row for row in rows if names & {row["state"], row["statecompact"], "ALL"}]
    if name := options.get("n"):
        rows = [row for row in rows if row["name"] in name.split(",")]
    heads = "noheader" not in options
    if "O" in options:
        write_listed(options["O"], rows, heads=heads, width=20)
        return 0
    pattern = options.get("o", LONG_QUEUE if "long" in options else QUEUE)
    if heads:
        titles = {name: TITLES.get(name, name.upper()) for name in LETTERS.values()}
        print(write_letters(pattern, titles))
    for row in rows:
        print(write_letters(pattern, row))
    return 0


def show_accounts(words: list[str]) -> int:
    """What sacct does."""
    try:
        options, numbers = parse(
            words, "jobs:j job:j format:o user:u starttime:S endtime:E state:s delimiter:d"
        )
    except ValueError as error:
        tools.tell(f"sacct: error: {error}")
        return 1
    heads = "noheader" not in options
    rows = [{**row, "exitcode": row["exitcode"] or "0:0"} for row in list_rows(numbers)]
    fields = options.get("o", ACCOUNTED)
    mark = options.get("d", "|")
    if "parsable" in options or "parsable2" in options:
        names = [name.partition("%")[0] for name in fields.split(",")]
        lines = [names] if heads else []
        lines += [[find_value(row, name) for name in names] for row in rows]
        end = mark if "parsable" in options else ""
        print("".join(mark.join(line) + end + "\n" for line in lines), end="")
        say_absent(names)
        return 0
    write_listed(fields, rows, heads=heads, width=10, rules=True)
    return 0


def show_job(number: str) -> int:
    """What `scontrol show job` does."""
    rows = list_rows([number] if number else [])
    if not rows:
        tools.tell("slurm_load_jobs error: Invalid job id specified")
        return 1
    row, env = rows[0], os.environ
    if row["jobid"] != env["SLURM_JOB_ID"]:
        print(f"JobId={row['jobid']} JobName={row['name']}\n   JobState={row['state']}")
        return 0
    plan = json.loads(env[tools.PLAN])
    output, error = (
        os.path.join(env["SLURM_SUBMIT_DIR"], tools.fill(plan[key], dict(env))) if plan[key] else ""
        for key in ("output", "error")
    )
    print(
        f"JobId={row['jobid']} JobName={row['name']}\n"
        f"   UserId={row['username']}({os.getuid()}) Account={row['account']} QOS={row['qos']}\n"
        f"   JobState=RUNNING Reason=None Dependency=(null)\n"
        f"   Requeue=1 Restarts={env.get('SLURM_RESTART_COUNT', '0')} BatchFlag=1 ExitCode=0:0\n"
        f"   RunTime={row['timeused']} TimeLimit={row['timelimit']} TimeMin=N/A\n"
        f"   StartTime={row['starttime']} EndTime={row['endtime']}\n"
        f"   Partition={row['partition']} NodeList={row['nodelist']} BatchHost={row['batchhost']}\n"
        f"   NumNodes={row['numnodes']} NumCPUs={row['numcpus']} NumTasks={env['SLURM_NTASKS']}"
        f" CPUs/Task={env.get('SLURM_CPUS_PER_TASK', '1')}\n"
        f"   Command={row['command']}\n"
        f"   WorkDir={row['workdir']}\n"
        f"   StdErr={error or output}\n"
        f"   StdIn=/dev/null\n"
        f"   StdOut={output}\n"
    )
    return 0


def parse(words: list[str], valued: str) -> tuple[dict[str, str], list[str]]:
    """Return options, and the numbers of jobs that -j or the end of the line names. `valued` lists
    the options with a value, each with its letter. Raises ValueError.
    """
    letters = dict(each.split(":") for each in valued.split())
    switches = {
        **{"h": "noheader", "n": "noheader", "l": "long", "P": "parsable2", "p": "parsable"},
        **{"r": "array", "a": "all", "X": "allocations", "v": "verbose"},
    }
    found: dict[str, str] = {}
    numbers: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            numbers += word.split(",")
            continue
        name, given, value = word.lstrip("-").partition("=")
        if not word.startswith("--"):
            name, value, given = word[1], word[2:].removeprefix("="), word[2:]
        letter = letters.get(name, name if name in letters.values() else "")
        if not letter:
            found[switches.get(name, name)] = "1"
            if not word.startswith("--") and value:  # several letters, such as -hr
                words.insert(0, f"-{value}")
            continue
        if not given:
            if not words:
                raise ValueError(f"option '{word}' requires an argument")
            value = words.pop(0)
        if letter == "j":
            numbers += value.split(",")
        else:
            found[letter] = value
    return found, [each for each in numbers if each]


def list_rows(numbers: list[str]) -> list[dict[str, str]]:
    """Return what is known of some jobs; without numbers, of this one and those it submitted."""
    env = os.environ
    own = env["SLURM_JOB_ID"]
    ours = {own, f"{env.get('SLURM_ARRAY_JOB_ID')}_{env.get('SLURM_ARRAY_TASK_ID')}"}
    submitted = read_submitted()
    rows = []
    for number in numbers or [own, *submitted]:
        plain = number.partition(".")[0]
        if plain in ours:
            rows.append(describe_own())
        elif plain.isdecimal():
            try:
                state = tools.ask_server("slurm/state", {"number": int(plain)})
            except (OSError, tools.SubmissionRefused) as error:
                tools.tell(f"slurm_load_jobs error: Invalid job id specified: {plain}: {error}")
                continue
            rows.append(describe_other(plain, submitted.get(plain, ""), state))
    return rows


def read_submitted() -> dict[str, str]:
    """Return the numbers of the jobs that this job has submitted, each with its name."""
    path = os.path.join(os.environ[tools.FOLDER], SUBMITTED)
    try:
        with open(path, encoding="utf-8") as file:
            return dict(line.rstrip("\n").split(" ", 1) for line in file)
    except OSError:
        return {}


def describe_own() -> dict[str, str]:
    env, plan = os.environ, json.loads(os.environ[tools.PLAN])
    began, limit, now = int(env["SLURM_JOB_START_TIME"]), plan["time_s"], int(time.time())
    array = env.get("SLURM_ARRAY_JOB_ID", "")
    nodes = env["SLURM_JOB_NODELIST"]
    memory = plan["memory_mib"]
    return {
        "jobid": env["SLURM_JOB_ID"],
        "arrayjobid": array or env["SLURM_JOB_ID"],
        "arraytaskid": env.get("SLURM_ARRAY_TASK_ID", "N/A"),
        "name": env["SLURM_JOB_NAME"],
        "username": env.get("USER", str(os.getuid())),
        "userid": str(os.getuid()),
        "partition": plan["partition"] or "cavvy",
        "account": plan["account"] or "(null)",
        "qos": plan.get("set", {}).get("SLURM_JOB_QOS", "normal"),
        "state": "RUNNING",
        "statecompact": "R",
        "timeused": write_time(now - began),
        "timelimit": write_time(limit) if limit else "UNLIMITED",
        "timeleft": write_time(max(0, began + limit - now)) if limit else "UNLIMITED",
        "numnodes": env["SLURM_JOB_NUM_NODES"],
        "numcpus": str(int(env["SLURM_CPUS_ON_NODE"]) * int(env["SLURM_JOB_NUM_NODES"])),
        "numtasks": env["SLURM_NTASKS"],
        "minmemory": f"{memory}M" if memory else "0",
        "nodelist": nodes,
        "reasonlist": nodes,
        "reason": "None",
        "batchhost": nodes.split(",")[0],
        "starttime": write_date(began),
        "endtime": write_date(began + limit) if limit else "Unknown",
        "workdir": env["SLURM_SUBMIT_DIR"],
        "command": os.path.join(env[tools.FOLDER], "slurm_script"),
        "dependency": "(null)",
        "priority": "1",
        "tres-per-node": f"gres:gpu:{plan['gpus']}" if plan["gpus"] else "N/A",
        "exitcode": "",
    }


def describe_other(number: str, name: str, state: dict[str, Any]) -> dict[str, str]:
    code = state["exit_code"]
    return {
        **dict.fromkeys((*LETTERS.values(), "numtasks"), "N/A"),
        "jobid": number,
        "arrayjobid": number,
        "name": name,
        "username": os.environ.get("USER", ""),
        "partition": "cavvy",
        "state": state["state"],
        "statecompact": SHORT_STATES.get(state["state"], "UN"),
        "exitcode": "" if code is None else f"{code}:0",
    }


def find_value(row: dict[str, str], name: str) -> str:
    plain = name.strip().lower()
    return row.get(ALIASES.get(plain, plain), "")


def say_absent(names: list[str]) -> None:
    """Say which fields have no values here."""
    known = {*LETTERS.values(), *ALIASES, "exitcode", "numtasks", "state"}
    absent = [name for name in names if name.strip().lower() not in known]
    if absent:
        tools.tell(f"cavvy: no values are known here for {', '.join(absent)}")


def write_letters(pattern: str, row: dict[str, str]) -> str:
    """Fill a pattern such as `%.18i %j`: a point aligns to the right."""

    def replace(found: re.Match[str]) -> str:
        value = row.get(LETTERS.get(found[3], ""), "")
        width = int(found[2] or 0)
        if not width:
            return value
        return value[:width].rjust(width) if found[1] else value[:width].ljust(width)

    return re.sub(r"%(\.?)(\d*)([A-Za-z])", replace, pattern)


def write_listed(
    fields: str, rows: list[dict[str, str]], *, heads: bool, width: int, rules: bool = False
) -> None:
    """Write columns, such as those of NAME:30 or NAME%30."""
    columns: list[tuple[str, int]] = []
    for field in fields.split(","):
        name, _, size = re.sub("[:%]", "\n", field, count=1).partition("\n")
        columns.append((name.strip(), int(size.lstrip("-.")) if size.lstrip("-.") else width))
    lines: list[list[str]] = []
    if heads:
        titles = [name if rules else TITLES.get(name.lower(), name.upper()) for name, _ in columns]
        lines.append(titles)
        lines += [["-" * size for _, size in columns]] if rules else []
    lines += [[find_value(row, name) for name, _ in columns] for row in rows]
    for line in lines:
        cells = []
        for value, (_, wide) in zip(line, columns):  # noqa: B905
            cells.append(value[:wide].rjust(wide) + " " if rules else value[:wide].ljust(wide))
        print("".join(cells))
    say_absent([name for name, _ in columns])


def write_time(seconds: int) -> str:
    """Write a length of time as Slurm does: [D-][HH:]MM:SS."""
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def write_date(when: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(when))
