"""Run commands with invalid inputs, and check every answer.

`newcomer_inputs.py` has those for services, budgets, accounts and credentials.

Usage: .venv/bin/python scripts/drills/wrong_inputs.py [WORD...]

Each case is a command line with a mistake in its arguments, its file, its environment or its
terminal. The answer must have the documented exit code, a line `error:` and, with few exceptions, a
line `hint:` or a correction in the message. It must not contain a traceback or a message of a
library, and must come within a few seconds. If WORDs are given, only cases that contain one of them
run. The drill prints the wrong answers, and exits with 1 if there are any.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.drills import newcomer_inputs

CAVVY = str(Path(sys.executable).with_name("cavvy"))
LIMIT_S = 15  # seconds; enough for a command on a loaded machine
USAGE, FAILED, UNREACHABLE, INTERRUPTED = 2, 1, 69, 130
# Texts of libraries, of the interpreter and of the server's own interface.
FOREIGN = re.compile(
    r"Traceback|^Usage:|^Error:|Try '|Aborted!|pydantic|msgspec|openapi|httpx|asyncio|sqlite3?\.|"
    r"(?:query|path|body|header)\.[a-z]+\b(?!/)|(?:String|Input) should|Errno|has no attribute|"
    r"NoneType|a fault in cavvy|"
    r"Exception ignored|codec can't|object at 0x|positional argument|/v1/|unhashable|"
    r"Expected `|at `\$|not a valid (?:float|integer)|Expecting value|document start|"
    r"Invalid value|No such (?:option|command)|KeyError|ValueError|TypeError|click\.",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command line and its valid exit codes. If `shell` is True, a shell runs the line, and
    $CAVVY is the command.
    """

    line: str
    codes: Sequence[int] = (USAGE,)
    given: str = ""  # standard input
    env: Mapping[str, str] = field(default_factory=dict)
    shell: bool = False
    hint: bool = True
    # True: an answer without `error:` is valid, for example if standard error is closed
    silent: bool = False


FILES: Mapping[str, bytes] = {
    "good.yaml": b"name: good\nrun: echo hello\n",
    "typo.yaml": b"name: a\nrnu: 'true'\n",
    "tab.yaml": b"name: a\n\trun: x\n",
    "twice.yaml": b"name: a\nname: b\nrun: x\n",
    "list.yaml": b"- a\n- b\n",
    "number.yaml": b"42\n",
    "empty.yaml": b"",
    "nul.yaml": b"name: a\0b\nrun: x\n",
    "latin.yaml": b"name: caf\xe9\nrun: x\n",
    "utf16.yaml": "name: a\nrun: x\n".encode("utf-16"),
    "python.yaml": b"run: !!python/object/apply:os.system [id]\n",
    "bomb.yaml": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(
        b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(8)
    ),
    "quote.yaml": b"name: 'a\nrun: x\n",
    "brace.yaml": b"resources: {gpu: H100\nrun: x\n",
    "anchor.yaml": b"run: *nothing\n",
    "binary.yaml": bytes(range(256)),
    "deep.yaml": b"[" * 5000,
    "range.yaml": b"run: x\nresources: {cpu: 8..2}\n",
    "memory.yaml": b"run: x\nresources: {memory: much}\n",
    "gpu.yaml": b"run: x\nresources: {gpu: H1000:8}\n",
    "negative.yaml": b"run: x\nresources: {gpu: H100:-1}\n",
    "past.yaml": b"run: x\nlimits: {deadline: 2001-01-01 10:00}\n",
    "february.yaml": b"run: x\nlimits: {deadline: 2031-02-30 10:00}\n",
    "budget.yaml": b"run: x\nlimits: {budget: -5}\n",
    "cron.yaml": b"run: x\nschedule: 61 25 * * *\n",
    "zone.yaml": b"run: x\nschedule: {cron: 0 3 * * *, time_zone: Mars/Olympus}\n",
    "name.yaml": b"name: Bad_Name!\nrun: x\nresources: {cpu: 1}\n",
    "env.yaml": b"run: x\nenv: {1A: b}\n",
    "nodes.yaml": b"run: x\nnodes: 0\n",
    "norun.yaml": b"name: a\nresources: {cpu: 1}\n",
    "workdir.yaml": b"run: x\nworkdir: ./not-here\n",
    "input.yaml": b"run: x\ninputs: {/data: ftp://host/x}\n",
    "outside.yaml": b"run: x\nworkdir: .\nworkdir_exclude: [../..]\n",
    "parameter.yaml": b"run: echo ${{ params.lr }}\nparams: {lr: 0.1}\n",
    "unknown-parameter.yaml": b"run: echo ${{ params.rl }}\nparams: {lr: 0.1}\n",
    "impossible.yaml": b"run: x\nresources: {cpu: 9999}\n",
    "secret.yaml": b"run: x\nsecrets: [NOT_SET]\n",
}
BAD_FILES = [name for name in FILES if name not in ("good.yaml", "parameter.yaml")]
# only a server finds these mistakes, so `validate` accepts the files
AT_RUN = {"impossible.yaml", "secret.yaml"}
COMMANDS = (  # commands that take the name of a job, with a job that does not exist
    "status none",
    "ps none",
    "logs none",
    "logs -f none",
    "events none",
    "stop none",
    "retry none",
    "rerun none",
    "cost none",
    "wait none",
    "drill preempt none",
    "exec none -- true",
    "ssh none",
    "forward none 8080",
    "cp none:/a b",
    "diff none other",
)
LINES: Mapping[int, str] = {
    USAGE: """
nosuch
statsu
launch good.yaml
kill x
ps --nosuch
ps --limit abc
ps --limit 0
ps --limit
ps --phase bogus
ps train extra
ps -o xml
ps --watch
ps -p Bad_Project
ps -p ''
run
run good.yaml --name 'Bad Name'
run good.yaml -p 'Bad Project'
run good.yaml --param x
run good.yaml --param nope=1
run parameter.yaml --param lr
run good.yaml -o json
run good.yaml --gpu H1000:8
run good.yaml --gpu H100:many
run good.yaml --nodes 0
run good.yaml --nodes many
run good.yaml --budget much
run good.yaml --deadline yesterday
run good.yaml --max-price -1
run good.yaml --env 1A=b
run none.yaml
run .
run /dev/null
validate
validate none.yaml
validate .
plan
plan none.yaml
plan good.yaml --limit x
plan good.yaml --by beauty
plan good.yaml --output-size much
offers --gpu H1000
offers --gpu H100:x
check lambda --live --max-usd nan
offers --cpus -3
offers --cpus 8..2
offers --memory lots
offers --spot --on-demand
offers --max-price abc
offers --sort beauty
estimate
estimate --model nosuch
estimate --model gpt2 --gpu H1000
estimate --model gpt2 --optimizer best
estimate none.py
init --template nosuch
status
status ''
status a b
logs good --tail x
logs good --rank -1
logs good --attempt 0
wait
wait good --timeout soon
wait good --for ever
stop
stop --all x
down
down --all --project p
key
secret set
secret set 1BAD
secret set 'A B'
secret delete
drill
drill preempt
drill preempt good --notice soon
cp
cp a b
cp a
forward good
forward good abc
forward good 99999999
exec good
server nosuch
machines dismiss x
machines start
joined dismiss
join --valid-h 0
catalog refresh --sha256 x
export
export nosuch good.yaml
simulate --nosuch
check nosuch
image build
bench
profile
tune
""",
    FAILED: """
logs good --rank 7
logs good --attempt 99
retry good
drill preempt good
exec good -- true
secret delete NOT_SET
joined dismiss nosuch
machines start nosuch
catalog refresh --from /dev/null
catalog diff none.db other.db
""",
}


def make_cases() -> Iterator[Case]:
    """All cases. Those that need no separate process come first."""
    for code, text in LINES.items():
        for line in text.strip().splitlines():
            yield Case(line=line, codes=(code,))
    for code, text in (
        (USAGE, newcomer_inputs.USAGE),
        (FAILED, newcomer_inputs.FAILED),
        (UNREACHABLE, newcomer_inputs.UNREACHABLE),
    ):
        for line in text.strip().splitlines():
            yield Case(line=line, codes=(code,))
    for name in (*BAD_FILES, *newcomer_inputs.FILES):
        if name not in AT_RUN:
            yield Case(line=f"validate {name}", codes=(USAGE, 0) if "workdir" in name else (USAGE,))
        yield Case(line=f"run -d {name}", codes=(FAILED if name in AT_RUN else USAGE,))
    for line in COMMANDS:
        yield Case(line=line, codes=(FAILED,))
    yield Case(line="run -", given="", codes=(USAGE,))
    yield Case(line="run -", given="[broken", codes=(USAGE,))


def make_process_cases() -> Iterator[Case]:
    """Cases about the environment and the terminal."""
    for home, codes in (("/dev/null", (FAILED,)), ("/proc/none", (69,)), ("relative", (0,))):
        yield Case(line="ps", env={"CAVVY_HOME": home}, codes=codes, silent=0 in codes)
    settings = {
        "open.toml": "[providers.local\n",
        "key.toml": "[providers.local]\nnosuch = 1\n",
        "table.toml": "[nosuch]\na = 1\n",
        "provider.toml": "[providers.nosuch]\nenabled = true\n",
        "type.toml": "[server]\nstart_timeout_s = 'long'\n",
        "binary.toml": "\x01\x02",
    }
    for name, text in settings.items():
        codes = (USAGE, FAILED) if name == "key.toml" else (USAGE,)
        line = f"printf '%s' {shlex.quote(text)} > {name}; CAVVY_CONFIG={name} $CAVVY check"
        yield Case(line=line, shell=True, codes=codes, silent=len(codes) > 1)
    yield Case(line="ps", env={"CAVVY_CONFIG": "/dev"}, codes=(0, USAGE), silent=True)
    yield Case(line="check", env={"CAVVY_CONFIG": "none.toml"}, codes=(0, USAGE), silent=True)
    yield Case(line="ps", env={"CAVVY_PROJECT": "A B"}, codes=(0, USAGE), silent=True)
    yield Case(line="status good", env={"CAVVY_PROJECT": "A B"})
    for encoding in ({"LANG": "C", "LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}):
        for line in ("ps", "status good", "events good", "offers --limit 3"):
            yield Case(line=line, env=encoding, codes=(0,), silent=True)
        yield Case(line="validate latin.yaml", env=encoding)
        yield Case(line="status größe", env=encoding, codes=(FAILED,))
    for size in ("1", "0", "-5", "abc"):
        yield Case(line="ps", env={"COLUMNS": size}, codes=(0,), silent=True)
    yield Case(line="ps", env={"TERM": "nosuch", "TZ": "Mars/Olympus"}, codes=(0,), silent=True)
    for line in ("ps", "offers --limit 5", "events good -o json", "logs good", "catalog info"):
        yield Case(line=f"$CAVVY {line} >/dev/full", shell=True, codes=(FAILED,), hint=False)
        yield Case(line=f"$CAVVY {line} | head -n 0", shell=True, codes=(0,), silent=True)
        yield Case(line=f"$CAVVY {line} >&-", shell=True, codes=(0,), silent=True)
    yield Case(line="$CAVVY status none 2>&-", shell=True, codes=(FAILED,), silent=True)
    yield Case(line="$CAVVY status none 2>/dev/full", shell=True, codes=(FAILED,), silent=True)
    yield Case(line="$CAVVY run - <&-", shell=True)
    yield Case(line="$CAVVY secret set TOKEN <&-", shell=True)
    yield Case(
        line="mkdir d; chmod 0 d; cd d; rmdir ../d; $CAVVY ps", shell=True, codes=(0,), silent=True
    )
    yield Case(
        line="mkdir e; cd e; rmdir ../e; $CAVVY run ../good.yaml",
        shell=True,
        codes=(USAGE, 0),
        silent=True,
    )


def judge(case: Case, code: int, text: str, seconds: float) -> list[str]:
    """The faults of an answer."""
    wrong = []
    if code not in case.codes:
        wrong.append(f"exit code {code}, expected {' or '.join(map(str, case.codes))}")
    if found := FOREIGN.search(text):
        wrong.append(f"text of a library: {found[0]!r}")
    if code and not case.silent:
        if not re.search("^error: ", text, re.MULTILINE):
            wrong.append("no error line")
        if case.hint and not re.search(
            r"^\s*(?:hint|expected): |`cavvy|; |did you mean|expected|write |--", text, re.MULTILINE
        ):
            wrong.append("no hint")
    if seconds > LIMIT_S:
        wrong.append(f"{seconds:.0f} s")
    return wrong


def run_case(case: Case, folder: Path, env: Mapping[str, str]) -> list[str]:
    """Run a case as a process. Returns the faults, with the answer."""
    argv = ["sh", "-c", case.line] if case.shell else [CAVVY, *shlex.split(case.line)]
    began = time.monotonic()
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env={**env, **case.env},
            input=case.given.encode(),
            capture_output=True,
            timeout=2 * LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [f"{case.line}: no answer within {2 * LIMIT_S} s"]
    text = done.stderr.decode("utf-8", "replace") + done.stdout.decode("utf-8", "replace")
    wrong = judge(case, done.returncode, text, time.monotonic() - began)
    return (
        [f"{case.line} {dict(case.env) or ''}: {'; '.join(wrong)}\n{text[:800]}"] if wrong else []
    )


def interrupt(folder: Path, env: Mapping[str, str], after_s: float) -> list[str]:
    """Press Ctrl-C while a command starts."""
    started = subprocess.Popen(
        [CAVVY, "ps"], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    time.sleep(after_s)
    started.send_signal(signal.SIGINT)
    text = started.communicate(timeout=LIMIT_S)[0].decode()
    if started.returncode in (0, INTERRUPTED) and not FOREIGN.search(text):
        return []
    # not counted, because the interpreter had not started the program yet
    if "cavvy/cl" not in text:
        return []
    return [f"Ctrl-C after {after_s:.2f} s: exit code {started.returncode}\n{text[-1500:]}"]


def prepare(folder: Path) -> dict[str, str]:
    """Write the files, and start a server with an ended job. Returns the environment."""
    newcomers = newcomer_inputs.FILES | newcomer_inputs.AT_SERVE
    for name, data in (FILES | newcomers).items():
        (folder / name).write_bytes(data)
    (folder / "settings.toml").touch()
    env = {name: value for name, value in os.environ.items() if not name.startswith("CAVVY_")}
    env |= {
        "CAVVY": CAVVY,
        "CAVVY_HOME": str(folder / "home"),
        "CAVVY_CONFIG": str(folder / "settings.toml"),
        "COLUMNS": "80",
        "LC_ALL": "C",
    }
    subprocess.run(
        [CAVVY, "run", "good.yaml"], cwd=folder, env=env, check=True, capture_output=True
    )
    return env


def main(words: Sequence[str] = ()) -> int:
    cases = [*make_cases(), *make_process_cases()]
    cases = [case for case in cases if not words or any(word in case.line for word in words)]
    with tempfile.TemporaryDirectory(prefix="wrong-") as root:
        folder = Path(root)
        env = prepare(folder)
        try:
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                found = pool.map(lambda case: run_case(case, folder, env), cases)
                wrong = [text for texts in found for text in texts]
            if not words:
                for after_ms in (*range(5, 65, 5), *range(90, 360, 30)):
                    wrong += interrupt(folder, env, after_ms / 1000)
        finally:
            for home in ("home", "relative"):
                own = {**env, "CAVVY_HOME": str(folder / home)}
                subprocess.run([CAVVY, "server", "stop"], env=own, check=False, capture_output=True)
    print("\n".join(wrong))
    print(f"{len(cases)} wrong inputs, {len(wrong)} wrong answers")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
