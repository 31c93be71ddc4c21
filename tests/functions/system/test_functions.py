"""Functions with a real embedded server, on this machine."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.server_state import home_with_jobs

import cavvy
from cavvy.capabilities.functions import wire
from cavvy.client import connect
from cavvy.client.service_wire import list_named_services
from cavvy.client.state import read_server

pytestmark = pytest.mark.system
_APP = """
import asyncio, os, sys, threading, time
import cavvy
import helper

app = cavvy.App("demo")

@app.function(max_replicas=2)
def square(x):
    print("squaring", x)
    return helper.multiply(x, x)

@app.function()
def divide(a, b):
    return a / b

@app.function()
def count(n):
    for i in range(n):
        yield bytes(200_000) if i == 3 else i

@app.function()
def length(data):
    return len(data), data

@app.function(retries=2)
def flaky(path):
    with open(path, "a") as file:
        file.write("x")
    if os.path.getsize(path) < 3:
        raise OSError("not yet")
    return "at last"

@app.function(timeout="0.3s")
def slow():
    time.sleep(60)

@app.function()
def dies(path):
    with open(path, "a") as file:
        file.write("x")
    if os.path.getsize(path) < 2:
        os._exit(3)
    return "alive"

@app.function(concurrency=4)
async def nap(seconds):
    await asyncio.sleep(seconds)
    return seconds

@app.function(max_replicas=2)
def wait(x):
    time.sleep(0.005)
    return x

@app.function()
def outer(x):
    return square.remote(x) + 1

@app.function()
def ping(n):
    return pong.remote(n)

@app.function()
def pong(n):
    return n and ping.remote(n - 1)

@app.cls()
class Counter:
    def __init__(self, start=0):
        self.start = start

    @cavvy.enter()
    def load(self):
        self.total = self.start

    @cavvy.method()
    def add(self, x):
        self.total += x
        return self.total

    @cavvy.method(batch=4, wait="200ms")
    def sizes(self, texts):
        return [(len(each), len(texts)) for each in texts]

class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(a)

@app.function()
def odd():
    raise Odd(1, 2)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with home_with_jobs(tmp_path_factory.mktemp("functions") / "home") as made:
        yield made


def run_main(tmp_path: Path, main: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run an app with this main function by `cavvy run`."""
    (tmp_path / "helper.py").write_text("def multiply(a, b):\n    return a * b\n")
    body = "".join(f"    {line}\n" for line in main.strip().splitlines())
    (tmp_path / "app.py").write_text(f"{_APP}\n@app.main()\ndef main(path: str = ''):\n{body}")
    command = [sys.executable, "-m", "cavvy", "run", "app.py", *words]
    return subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )


def test_calls_in_all_ways(home: Path, tmp_path: Path) -> None:
    done = run_main(
        tmp_path,
        """
print(square.remote(3), divide.local(8, 2), divide(6, 2))
print(list(square.map(range(600))) == [x * x for x in range(600)])
print(sorted(square.map(range(4), order_outputs=False)))
print(list(divide.starmap([(6, 3), (9, 3)])))
print([type(x).__name__ for x in divide.map([1, 2], [0, 2], return_exceptions=True)])
square.for_each([1, 2])
print([x if isinstance(x, int) else len(x) for x in count.remote(100)] == [0, 1, 2, 200000, *range(4, 100)])
for _ in count.remote(1000):
    break
calls = [square.spawn(x) for x in range(3)]
print(cavvy.FunctionCall.gather(*calls), calls[0].get(timeout=1))
size, data = length.remote(b"x" * 5_000_000)
print(size, len(data))
print(outer.remote(4))
async def both():
    return await asyncio.gather(nap.remote.aio(0.2), nap.remote.aio(0.1)), [x async for x in count.remote.aio(2)]
print(asyncio.run(both()))
""",
    )
    assert done.stdout.splitlines() == [
        "9 4.0 3.0",
        "True",
        "[0, 1, 4, 9]",
        "[2.0, 3.0]",
        "['ZeroDivisionError', 'float']",
        "True",
        "[0, 1, 4] 0",
        "5000000 5000000",
        "17",
        "([0.2, 0.1], [0, 1])",
    ], done.stderr
    assert "square | squaring 3" in done.stderr
    assert done.returncode == 0


def test_failures(home: Path, tmp_path: Path) -> None:
    done = run_main(
        tmp_path,
        """
print(flaky.remote(path + "/flaky"), dies.remote(path + "/dies"))
print(ping.remote(0))
for call in (
    slow.remote, odd.remote, lambda: ping.remote(1), lambda: square.remote(threading.Lock())
):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, "|", str(error).splitlines()[0])
call = nap.spawn(60)
time.sleep(0.5)
call.cancel()
try:
    call.get()
except cavvy.CallCancelled as error:
    print("cancelled")
divide.remote(1, 0)
""",
        "--",
        "--path",
        str(tmp_path),
    )
    assert done.stdout.splitlines() == [
        "at last alive",
        "0",
        "CallTimeout | slow took longer than 0.3 s",
        "CallFailed | Odd: 1",
        "CallDeadlock | ping is called by itself (ping > pong), and would wait for its own "
        "process: call `.local()` there, or `.spawn()` and do not wait",
        "NotSendable | argument 1 of square (lock) cannot be sent: cannot pickle '_thread.lock' "
        "object",
        "cancelled",
    ], done.stderr
    assert done.returncode == 1
    assert 'app.py", line 15, in divide\n    return a / b' in done.stderr
    assert "ZeroDivisionError: division by zero" in done.stderr


def test_classes_keep_their_state_and_batch(home: Path, tmp_path: Path) -> None:
    done = run_main(
        tmp_path,
        """
counter = Counter(10)
print(counter.add.remote(1), counter.add.remote(2), Counter().add.remote(5))
calls = [counter.sizes.spawn(text) for text in ("a", "bb", "ccc", "dddd")]
print(cavvy.FunctionCall.gather(*calls))
""",
    )
    assert done.stdout.splitlines() == [
        "11 13 5",
        "[(1, 4), (2, 4), (3, 4), (4, 4)]",
    ], done.stderr


def test_a_missing_module_is_named_with_its_line(home: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import os, cavvy\n"
        "if 'CAVVY_JOB' in os.environ:\n"
        "    import nowhere_to_be_found\n"
        "app = cavvy.App('broken')\n"
        "@app.function()\n"
        "def f(): ...\n"
        "@app.main()\n"
        "def main(): f.remote()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "cavvy", "run", "app.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "app.py:3: import nowhere_to_be_found" in done.stderr
    assert "pip_install('nowhere_to_be_found')" in done.stderr


def test_calls_of_another_machine_take_the_tunnel(home: Path, tmp_path: Path) -> None:
    """The caller finds no socket, as if the node were elsewhere."""
    done = run_main(
        tmp_path,
        """
from cavvy.capabilities.functions import jobs
def dial_here(path):
    raise OSError("elsewhere")
jobs.dial_here = dial_here
print(wait.remote(3), list(wait.map(range(300))) == list(range(300)))
size, data = length.remote(b"x" * 3_000_000)
print(size, len(data), [len(x) if isinstance(x, bytes) else x for x in count.remote(5)])
""",
    )
    assert done.stdout.splitlines() == [
        "3 True",
        "3000000 3000000 [0, 1, 2, 200000, 4]",
    ], done.stderr


def test_an_app_that_ends_its_process(home: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import os, cavvy\n"
        "if 'CAVVY_JOB' in os.environ: os._exit(7)\n"
        "app = cavvy.App('ends')\n"
        "@app.function()\n"
        "def f(): ...\n"
        "@app.main()\n"
        "def main(): f.remote()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "cavvy", "run", "app.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "the process of f ended (exit code 7) while it loaded the app" in done.stderr
    assert done.returncode == 1


def test_functions_without_a_file_are_sent_as_code(home: Path, tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    code = (
        "import cavvy, threading\n"
        "app = cavvy.App('cells')\n"
        "base = 10\n"
        "@app.function()\n"
        "def add(x): return x + base\n"
        "print(add.remote(5), list(add.map([1, 2])))\n"
        "lock = threading.Lock()\n"
        "other = cavvy.App('locked')\n"
        "@other.function()\n"
        "def locked():\n"
        "    with lock: pass\n"
        "try: locked.remote()\n"
        "except cavvy.NotSendable as error: print(error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == [
        "15 [11, 12]",
        "locked (<string>:9) uses the global `lock` in line 11, a lock, which cannot be sent to "
        "another process",
    ], done.stderr


def test_a_deployed_app_is_called_by_name(home: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import cavvy\n"
        "app = cavvy.App('embed')\n"
        "@app.function(idle='1s')\n"
        "def square(x): return x * x\n"
        "@app.function()\n"
        "def count(n): yield from range(n)\n"
    )
    deploy = [sys.executable, "-m", "cavvy", "deploy", "app.py"]

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        return done.stdout + done.stderr

    assert "deployed in project default" in run(*deploy)
    assert "is deployed already" in run(*deploy)
    code = (
        "import cavvy\n"
        "square, count = (cavvy.Function.lookup('embed', x) for x in ('square', 'count'))\n"
        "print(square.remote(5), list(count.remote(3)), list(square.map([1, 2])))\n"
        "plain = cavvy.Function.lookup('embed', 'square', trust=False)\n"
        "assert plain.remote(5) == square.remote(5)\n"
        "try: plain.remote('x')\n"
        "except cavvy.CallFailed as error: assert 'TypeError' in str(error)\n"
        "try: cavvy.Function.lookup('embed', 'cube')\n"
        "except cavvy.CavvyError as error: print(error)\n"
    )
    called = (
        "25 [0, 1, 2] [1, 4]\nthe app embed has no function cube\n  hint: it has square, count\n"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [each.communicate(timeout=120)[0] for each in both] == [called] * 2
    with connect() as client:
        assert sum(each.name.startswith("embed") for each in client.jobs("default").jobs) == 1
    text = (tmp_path / "app.py").read_text()
    scheduled = f"{text}@app.function(schedule='0 3 1 1 *')\ndef nightly(): ...\n"
    (tmp_path / "app.py").write_text(scheduled.replace("x * x", "x * x + 1"))
    assert "deployed in project default" in run(*deploy)
    assert run(sys.executable, "-c", code).startswith("26 [0, 1, 2] [2, 5]")
    assert "embed-nightly" in run(sys.executable, "-m", "cavvy", "schedules")
    with connect() as client:  # as after a deployment that was interrupted
        (repeats,) = [each.id for each in client.jobs("default").jobs if each.held]
        client.stop("default", repeats)
    assert "is deployed already" in run(*deploy)
    for _ in range(2):
        assert run(sys.executable, "-m", "cavvy", "schedules").count("embed-nightly") == 1
        assert "is deployed already" in run(*deploy)
    (tmp_path / "app.py").write_text(text)
    assert "deployed in project default" in run(*deploy)
    assert "embed-nightly" not in run(sys.executable, "-m", "cavvy", "schedules")
    (tmp_path / "app.py").write_text(scheduled)
    assert "deployed in project default" in run(*deploy)
    with connect() as client:  # as after a removal that was interrupted
        wire.delete_app(client, "default", "embed")
    remove = [sys.executable, "-m", "cavvy", "apps", "rm", "embed"]
    assert "embed was removed" in run(*remove)
    assert "embed-nightly" not in run(sys.executable, "-m", "cavvy", "schedules")
    assert "has no app embed" in run(*remove)


def test_what_a_run_of_a_schedule_does(tmp_path: Path) -> None:
    """The files of its job lie in a folder, as on a node."""
    (tmp_path / "timed.py").write_text(
        "import cavvy\n"
        "app = cavvy.App('timed')\n"
        "@app.function(schedule='0 3 * * *')\n"
        "def nightly(where='here'): print('ran', where)\n"
        "@app.function(schedule='0 4 * * *')\n"
        "async def fails(): raise OSError('as expected')\n"
    )
    code = (
        "import json, shlex, timed\n"
        "from cavvy.capabilities.functions.deployed import make_scheduled\n"
        "for each in timed.app.functions.values():\n"
        "    task, files = make_scheduled(timed.app, each)\n"
        "    shown = json.loads(task.text)['run'] if task.text.startswith('{') else task.text\n"
        "    print(json.dumps([shown, {k: str(v) for k, v in files.items()}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    for line, code_, shown in zip(
        done.stdout.splitlines(), (0, 1), ("ran here", "OSError: as expected"), strict=True
    ):
        text, files = json.loads(line)
        for inside, path in files.items():
            (tmp_path / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / inside)
        command = next(each for each in text.splitlines() if "once.py" in each)
        command = command.partition("run:")[2] or command
        ran = subprocess.run(
            ["sh", "-c", command.strip().strip("'")], cwd=tmp_path, capture_output=True, text=True
        )
        assert (ran.returncode, shown in ran.stdout + ran.stderr) == (code_, True), ran


def test_no_result_is_lost_with_processes_the_broker_or_the_server(
    home: Path, tmp_path: Path
) -> None:
    done = run_main(
        tmp_path,
        """
import signal, subprocess
from cavvy.client.state import read_server
def find(program):
    found = subprocess.run(["pgrep", "-f", f"on_node/{program}.py"], capture_output=True, text=True)
    own = os.environ["CAVVY_HOME"]
    return [int(x) for x in found.stdout.split() if os.readlink(f"/proc/{x}/cwd").startswith(own)]
got = []
for number, value in enumerate(wait.map(range(900))):
    got.append(value)
    if number in (100, 300):
        os.kill(find("serve" if number == 100 else "worker")[0], signal.SIGKILL)
    if number == 600:
        os.kill(read_server(os.environ["CAVVY_HOME"]).pid, signal.SIGKILL)
print(got == list(range(900)))
""",
    )
    assert done.stdout.splitlines() == ["True"], done.stderr


def test_kept_calls_outlive_processes_the_job_and_the_server(home: Path, tmp_path: Path) -> None:
    """Each has its result, and each key one call."""
    (tmp_path / "app.py").write_text(
        "import cavvy, time\n"
        "app = cavvy.App('kept')\n"
        "@app.function(max_replicas=2, retries=2)\n"
        "def wait(x: int):\n"
        "    time.sleep(0.01)\n"
        "    return x, cavvy.current_call_key()\n"
        "@app.function(once=True)\n"
        "def once(x): return cavvy.current_call_key()\n"
    )
    deploy = [sys.executable, "-m", "cavvy", "deploy", "app.py"]
    subprocess.run(deploy, cwd=tmp_path, check=True, timeout=120)
    spawn = (
        "import cavvy\n"
        "wait, once = (cavvy.Function.lookup('kept', x) for x in ('wait', 'once'))\n"
        "keys = [f'k{x}' for x in range(300)]\n"
        "print(*[x.id for x in wait.spawn_map(range(300), keys=keys)])\n"
        "assert once.remote(1) == once.remote(1) != once.remote(2)\n"
    )
    words = [sys.executable, "-c", spawn]
    first = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
    again = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
    assert first == again  # other programs with the same keys
    calls = [cavvy.FunctionCall.from_id(each) for each in first.split()]
    for number, program in ((20, "worker"), (60, "serve"), (120, "server")):
        calls[number].get(timeout=120)
        if program == "server":
            server = read_server(str(home))
            assert server is not None
            os.kill(server.pid, signal.SIGKILL)
        else:
            os.kill(find_programs(home, program)[0], signal.SIGKILL)
    found = cavvy.FunctionCall.gather(*calls)
    assert [value for value, _ in found] == list(range(300))
    assert [key for _, key in found] == [each.rpartition("/")[2] for each in first.split()]
    answer = [sys.executable, "-m", "cavvy", "call", "kept", "wait", "--json", '{"x": 5}']
    done = subprocess.run(answer, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)[0] == 5, done.stderr
    removed = subprocess.run(
        [sys.executable, "-m", "cavvy", "apps", "rm", "kept"], capture_output=True, text=True
    )
    assert removed.stdout == "kept was removed\n", removed.stderr
    with pytest.raises(cavvy.CavvyError, match="has no call"):
        cavvy.FunctionCall.from_id(first.split()[0]).get(timeout=10)


def test_functions_share_dicts_and_queues(home: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("""
import os, signal
import cavvy

app = cavvy.App("sharing")
work, scores = cavvy.Queue("work"), cavvy.Dict("scores")

@app.function(max_replicas=2)
def score(results):
    with_size = 0
    while (item := work.get(timeout=60)) is not None:
        scores[item] = item * item
        results.put(bytes(300_000))
        with_size += 1
    return with_size

@app.main()
def main():
    from cavvy.client.state import read_server
    with cavvy.Queue.ephemeral() as results:
        calls = [score.spawn(results) for _ in range(2)]
        work.put_many(range(10))
        results.get()
        os.kill(read_server(os.environ["CAVVY_HOME"]).pid, signal.SIGKILL)
        work.put_many([10, *[None] * 2])
        print(sum(cavvy.FunctionCall.gather(*calls)), results.len())
    print(sorted(scores.items())[-1], len(scores), work.len())
    scores.clear()
""")
    command = [sys.executable, "-m", "cavvy", "run", "app.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["11 10", "(10, 100) 11 0"], done.stderr


def test_a_web_endpoint_is_deployed_with_its_url(home: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("""
import cavvy

app = cavvy.App("site")

@app.endpoint(method="POST")
def score(text: str, times: int = 1):
    for number in range(times):
        yield f"{text} {number}\\n"
""")
    command = [sys.executable, "-m", "cavvy", "deploy", "app.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    (url,) = re.findall(r"score is at (http://\S+)\n", done.stdout)
    body = json.dumps({"text": "a"}).encode()
    with urllib.request.urlopen(f"{url}?times=2", body, timeout=120) as got:
        assert got.read() == b"a 0\na 1\n"
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(url, timeout=60)
    # an endpoint that the app has no more ends, and all of them end with the app
    (tmp_path / "app.py").write_text((tmp_path / "app.py").read_text().replace("score", "rate"))
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert list_served() == {"site-rate"}
    # the service of someone else is not replaced
    service = {"name": "site-more", "run": "true", "service": {"port": 8000}}
    (tmp_path / "more.yaml").write_text(json.dumps(service))
    serve = [sys.executable, "-m", "cavvy", "serve", "more.yaml"]
    subprocess.run(serve, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    (tmp_path / "app.py").write_text((tmp_path / "app.py").read_text().replace("rate", "more"))
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "would replace the service site-more" in refused.stderr
    remove = [sys.executable, "-m", "cavvy", "apps", "rm", "site"]
    subprocess.run(remove, check=True, capture_output=True, timeout=120)
    assert list_served() == {"site-more"}
    subprocess.run([*remove[:3], "stop", "site-more"], check=True, timeout=120, capture_output=True)


def list_served() -> set[str]:
    """The services that do not end."""
    with connect() as client:
        found = list_named_services(client, "default")
    return {each.name for each in found if each.state != "ending"}


def test_dev_calls_main_again_when_a_file_is_saved(home: Path, tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(
        "import cavvy, helper, time\n"
        "app = cavvy.App('saved')\n"
        "@app.function(max_replicas=1)\n"
        "def answer(): return helper.VALUE\n"
        "@app.main()\n"
        "def main(wait: float = 0.0):\n"
        "    print(answer.remote(), flush=True)\n"
        "    time.sleep(wait)\n"
    )
    helper = tmp_path / "helper.py"
    helper.write_text("VALUE = 1\n")
    with connect() as client:  # those of an earlier try of this test
        before = {each.id for each in client.jobs("default").jobs}
    command = [sys.executable, "-m", "cavvy", "dev", "app.py", "--", "--wait", "600"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as dev:
        assert dev.stdout is not None
        assert dev.stderr is not None
        assert dev.stdout.readline() == "1\n"
        for value in ("2", "3"):  # main still runs, and files of the same size are other files
            helper.write_text(f"VALUE = {value}\n")
            assert dev.stdout.readline() == f"{value}\n"
        app.write_text("import cavvy\nno python(\n")
        while "was never closed" not in dev.stderr.readline():
            pass
        app.write_text(
            "import cavvy\n"
            "app = cavvy.App('saved')\n"
            "@app.function()\n"
            "def other(): return 'other'\n"
            "@app.main()\n"
            "def main(wait: float = 0.0): print(other.remote(), flush=True)\n"
        )
        assert dev.stdout.readline() == "other\n"
        dev.send_signal(signal.SIGINT)
        assert dev.wait(120) == 0
    with connect() as client:
        found = [each for each in client.jobs("default").jobs if each.id not in before]
    jobs = [each for each in found if each.name.startswith("saved")]
    assert len(jobs) == 1  # it went on, and ended with the command


def find_programs(home: Path, program: str) -> list[int]:
    """Return the processes of this program of functions in the jobs of a server."""
    command = ["pgrep", "-f", f"on_node/{program}.py"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return [int(x) for x in found if os.readlink(f"/proc/{x}/cwd").startswith(str(home))]


def test_the_tutorial(home: Path, tmp_path: Path) -> None:
    """Its packages are not installed: the model of the class is a list."""
    page = (Path(__file__).parents[3] / "docs/tutorials/functions.md").read_text()
    first, _, model, elsewhere, nightly = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    model = model.replace("import numpy", "").replace(
        "numpy.linspace(0, 1, 26)", "[at / 25 for at in range(26)]"
    )
    functions = first.partition("@app.main()")[0]
    (tmp_path / "app.py").write_text(functions + model + nightly)
    (tmp_path / "first.py").write_text(first)
    (tmp_path / "elsewhere.py").write_text(elsewhere)
    command = [sys.executable, "-m", "cavvy"]
    shown = {
        "first": [*command, "run", "first.py", "--", "--text", "two words"],
        "model": [*command, "run", "app.py"],
        "deploy": [*command, "deploy", "app.py"],
        "elsewhere": [sys.executable, "elsewhere.py"],
    }
    out = {
        name: subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        for name, words in shown.items()
    }
    assert out["first"].stdout == "2 words\n", out["first"].stderr
    assert out["model"].stdout == "1000 scores, the best is 8.24\n", out["model"].stderr
    assert 'lookup("reviews", "Scorer.score")' in out["deploy"].stdout, out["deploy"].stderr
    assert out["elsewhere"].stdout == "3.6\n", out["elsewhere"].stderr


def test_the_tutorial_of_an_embedding_service(home: Path, tmp_path: Path) -> None:
    """Its package is not installed: the model counts letters."""
    page = (Path(__file__).parents[3] / "docs/tutorials/embedding-service.md").read_text()
    app, index, read = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    app = app.replace('.pip_install("scikit-learn")', "")
    app = re.sub(r"\n *from sklearn.*\n", "", app)
    app = re.sub(r"self.model = .*", "self.model = 64", app)
    app = re.sub(r"return \[\[round.*", "return [[float(len(x))] * self.model for x in text]", app)
    for name, text in (("app", app), ("index", index), ("read", read)):
        (tmp_path / f"{name}.py").write_text(text)

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        return done.stdout or done.stderr

    command = [sys.executable, "-m", "cavvy"]
    assert run(*command, "run", "app.py").startswith("horses run ")
    assert "search: revision" in run(*command, "deploy", "app.py")
    assert "text: string" in run(*command, "apps", "show", "search")
    call = [*command, "call", "search", "Embedder.embed", "--json"]
    assert json.loads(run(*call, '{"text": "a horse"}')) == [7.0] * 64
    assert "text must be string, not integer" in run(*call, '{"text": 5}')
    name = run(sys.executable, "index.py").strip()
    assert run(sys.executable, "read.py", name) == "64 numbers\n"
    assert len(json.loads(run(*command, "apps", "calls", "search", "-o", "json"))) == 200
    assert "embedding" in run(*command, "apps", "logs", "search")
    assert run(*command, "apps", "rm", "search") == "search was removed\n"
