"""A process that runs the calls of one function, or of the methods of one class.

`python3 worker.py APP.json DESCRIPTOR NAME`, started by the broker. It imports only the standard
library, files that do, and the app's own code; what takes long to import, where it is used.
"""

import importlib
import importlib.util
import inspect
import json
import os
import select
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TextIO

if __name__ == "__main__":  # the root of the files that were sent with the working folder
    sys.path[0] = os.path.abspath(os.path.join(__file__, *[os.pardir] * 5))

from cavvy.capabilities.functions import payload
from cavvy.capabilities.functions.app import MAIN, find_app
from cavvy.capabilities.functions.errors import CallCancelled, NotSendable
from cavvy.capabilities.functions.frames import (
    MOST_BYTES,
    CallFrames,
    Head,
    clean,
    current_call,
    pack,
)

if TYPE_CHECKING:
    import asyncio

_TOGETHER_S = 0.004  # for which results wait for each other
_TEXTS = ("type", "text", "trace")  # what errors and the app's code say
_PARTS = 32  # values of a generator that are sent before the caller must take some


class WorkerProcess:
    """The connection to the broker, and the calls that it has given."""

    def __init__(self, spec: dict[str, Any], connection: socket.socket, name: str) -> None:
        self.spec, self.name = spec, name
        self._connection, self._reader = connection, CallFrames()
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)
        self._inbox: deque[tuple[Head, bytes]] = deque()
        self._lock = threading.Lock()
        self._outbox, self._held = bytearray(), threading.Event()
        self._credit: dict[int, threading.Semaphore] = {}
        self._cancelled: set[int] = set()
        self._files = 0
        own = spec["functions"]
        mine = [each for each in own.values() if (each["class"] or each["name"]) == name]
        self.concurrency = int(mine[0]["concurrency"])
        self.batch, self.wait_s = mine[0]["batch"], mine[0]["wait_s"]
        self._spool = os.path.join(os.getcwd(), ".cavvy", "spool")

    def run(self) -> None:
        """Load the code, and run calls until the broker says that it is over."""
        try:
            load_app(self.spec, self.name)
            app = find_app(self.spec["app"])
            assert app is not None
        except BaseException as error:  # noqa: BLE001 - the code raises anything
            self.send({"op": "broken", "id": 0, "text": explain_load(error)})
            return
        threading.Thread(target=self._send_held, daemon=True, name="results").start()
        self.send({"op": "ready", "id": 0})
        self.app = app
        try:
            if self.concurrency > 1 and not self.batch:
                self._run_together()
            else:
                self._run_one_by_one()
        finally:
            for each in app.classes.values():
                each.leave()

    def send(self, head: Head, body: bytes = b"") -> None:
        """Send a frame, at once unless more calls wait here: then the frames of a few milliseconds
        leave together, which spares the broker and the caller work.
        """
        head = {name: clean(each) if name in _TEXTS else each for name, each in head.items()}
        with self._lock:
            held = bool(self._outbox)
            self._outbox += pack(head, body)
            if self._inbox and len(self._outbox) < MOST_BYTES:
                if not held:
                    self._held.set()  # another thread sends it soon, even if the next call is long
                return
            self._send_outbox()

    def _send_outbox(self) -> None:
        if self._outbox:
            data, self._outbox = self._outbox, bytearray()
            self._connection.sendall(data)

    def _send_held(self) -> None:
        """Send what is held, a few milliseconds later."""
        while True:
            self._held.wait()
            self._held.clear()
            sleep(_TOGETHER_S)
            with self._lock, suppress(OSError):
                self._send_outbox()

    def _run_one_by_one(self) -> None:
        while (found := self._next()) is not None:
            head, body = found
            if head["op"] != "call" or self._drop_cancelled(head):
                continue
            options = self.spec["functions"][head["fn"]]
            if options["batch"]:
                self._run_batch(self._collect(found, options["batch"], options["wait_s"]))
            else:
                self._run_call(head, body)

    def _run_together(self) -> None:
        """Run several calls at the same time: coroutines in a loop, and functions in threads."""
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        loop = asyncio.new_event_loop()
        running = threading.Thread(target=loop.run_forever, daemon=True)
        running.start()
        with ThreadPoolExecutor(self.concurrency, "call") as threads:
            while (found := self._next()) is not None:
                if found[0]["op"] == "call" and not self._drop_cancelled(found[0]):
                    threads.submit(self._run_call, *found, loop)
        loop.call_soon_threadsafe(loop.stop)
        running.join()
        loop.close()

    def _next(self, timeout_s: float | None = None) -> tuple[Head, bytes] | None:
        """Return the next call; None at the end, or after the time."""
        while not self._inbox:
            if not self._receive(timeout_s):
                return None
        if self._inbox[0][0]["op"] == "leave":  # it stays, so that all who ask hear it
            return None
        return self._inbox.popleft()

    def _drop_cancelled(self, head: Head) -> bool:
        """Return whether a call was cancelled before it began. It is answered nevertheless: until
        then the broker counts it as one of the calls of this process.
        """
        if head["id"] not in self._cancelled:
            return False
        self._cancelled.discard(head["id"])
        text = "the call was cancelled before it began"
        self.send({"op": "failed", "id": head["id"], "kind": "CallCancelled", "text": text})
        return True

    def _receive(self, timeout_s: float | None = None) -> bool:
        """Read what arrives next; return False at the end, or after the time."""
        # not the connection's own timeout: it is also that of another thread's `sendall`
        if timeout_s is not None and not self._arrivals.poll(timeout_s * 1000):
            return False
        data = self._connection.recv(1 << 18)
        for head, body in self._reader.feed(data):
            if head["op"] == "more":
                if (credit := self._credit.get(head["id"])) is not None:
                    credit.release()
            elif head["op"] == "cancel":
                self._cancelled.add(head["id"])
                if (credit := self._credit.get(head["id"])) is not None:
                    credit.release()  # a generator that waits for its caller ends
            else:
                self._inbox.append((head, body))
        return bool(data)

    def _run_call(
        self, head: Head, body: bytes, loop: "asyncio.AbstractEventLoop | None" = None
    ) -> None:
        token = current_call.set(head)
        try:
            args, kwargs, given = self._read_arguments(head, body)
            call = self._find(head["fn"], given)
            if loop is not None and inspect.iscoroutinefunction(call):
                import asyncio

                result = asyncio.run_coroutine_threadsafe(call(*args, **kwargs), loop).result()
            else:
                result = call(*args, **kwargs)
                if inspect.iscoroutine(result):
                    result = run_coroutine(result)
            if inspect.isasyncgen(result):
                result = list_async(result)
            if inspect.isgenerator(result):
                if not self.app.functions[head["fn"]].is_generator:
                    raise TypeError(
                        f"{head['fn']} returned a generator, but is no generator function itself, "
                        "so its caller waits for one result: return a list, or `yield from` it"
                    )
                self._send_parts(head, result)
                result = None
            self._send_result(head, result)
        except BaseException as error:
            self._send_failure(head, error)
            if isinstance(error, SystemExit | KeyboardInterrupt) and loop is None:
                raise
        finally:
            current_call.reset(token)
            self._cancelled.discard(head["id"])
            sys.stdout.flush()

    def _collect(
        self, first: tuple[Head, bytes], most: int, wait_s: float
    ) -> list[tuple[Head, bytes]]:
        """Return the calls of a batch: those that have arrived until it is full, or until the time
        since the first is over."""
        joined, until = [first], monotonic() + wait_s
        rest: list[tuple[Head, bytes]] = []
        while len(joined) < most:
            left_s = until - monotonic()
            if not self._inbox and left_s <= 0:
                break
            found = self._next(max(left_s, 0.0005))
            if found is None:
                break
            same = found[0]["op"] == "call" and found[0]["fn"] == first[0]["fn"]
            (joined if same else rest).append(found)
        self._inbox.extendleft(reversed(rest))
        return [each for each in joined if not self._drop_cancelled(each[0])]

    def _run_batch(self, joined: list[tuple[Head, bytes]]) -> None:
        read = []
        for head, body in joined:
            try:
                read.append((head, self._read_arguments(head, body)))
            except Exception as error:  # noqa: BLE001 - objects raise anything
                self._send_failure(head, error)
        if not read:
            return
        token = current_call.set(read[0][0])
        try:
            call = self._find(read[0][0]["fn"], read[0][1][2])
            columns = zip(*(args for _, (args, _, _) in read), strict=True)
            named = {name: [kwargs[name] for _, (_, kwargs, _) in read] for name in read[0][1][1]}
            results = call(*map(list, columns), **named)
            if inspect.iscoroutine(results):
                results = run_coroutine(results)
            if not isinstance(results, list) or len(results) != len(read):
                told = f"a list of {len(results)}" if isinstance(results, list) else type(results)
                raise TypeError(
                    f"{read[0][0]['fn']} has `batch`, so it must return a list with one result for "
                    f"each of the {len(read)} calls; it returned {told}"
                )
        except BaseException as error:  # noqa: BLE001 - functions raise anything
            for head, _ in read:
                self._send_failure(head, error)
            return
        finally:
            current_call.reset(token)
        for (head, _), result in zip(read, results, strict=True):
            try:
                self._send_result(head, result)
            except NotSendable as error:
                self._send_failure(head, error)

    def _read_arguments(
        self, head: Head, body: bytes
    ) -> tuple[tuple[Any, ...], dict[str, Any], payload.Arguments | None]:
        if "file" in head:
            with open(head["file"], "rb") as file:
                body = file.read()
        if head.get("enc") == "json":
            given = json.loads(body or b"{}")
            return tuple(given.get("args", ())), dict(given.get("kwargs", {})), None
        args, kwargs, given = payload.load(body)
        return args, kwargs, given

    def _find(self, name: str, given: payload.Arguments | None) -> Callable[..., Any]:
        """Return the function, or the method of the instance for the arguments of the class."""
        function = self.app.functions[name]
        if function.owner is None:
            assert function.raw is not None
            return function.raw
        found = getattr(function.owner.make(given or ((), {})), name.rpartition(".")[2])
        return found  # type: ignore[no-any-return]

    def _send_parts(self, head: Head, values: Iterator[Any]) -> None:
        number = head["id"]
        credit = self._credit[number] = threading.Semaphore(_PARTS)
        try:
            for value in values:
                while not credit.acquire(blocking=self.concurrency > 1):
                    if not self._receive():
                        raise SystemExit
                if number in self._cancelled:
                    raise CallCancelled(f"the call of {head['fn']} was cancelled")
                self._send_value("part", head, value)
        finally:
            del self._credit[number]

    def _send_result(self, head: Head, result: object) -> None:
        self._send_value("done", head, result)

    def _send_value(self, op: str, head: Head, value: object) -> None:
        if head.get("reply") == "json":
            try:
                data = json.dumps(value).encode()
            except (TypeError, ValueError) as error:
                raise NotSendable(
                    f"the result of {head['fn']} is no JSON: {error}",
                    "return strings, numbers, lists and dicts",
                ) from error
        else:
            data = payload.dump(value, f"the result of {head['fn']} ({type(value).__name__})")
        answer: Head = {"op": op, "id": head["id"]}
        if len(data) > MOST_BYTES and op == "done":
            self._files += 1
            path = os.path.join(self._spool, f"w{os.getpid()}-{self._files}")
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
            self.send({**answer, "file": path, "size": len(data)})
        elif len(data) > MOST_BYTES:
            for begin in range(0, len(data), MOST_BYTES):
                piece = data[begin : begin + MOST_BYTES]
                more = begin + MOST_BYTES < len(data)
                self.send({**answer, "more": more}, piece)
        else:
            self.send(answer, data)

    def _send_failure(self, head: Head, error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error, limit=None))
        own = f"{os.sep}on_node{os.sep}worker.py"
        kept = traceback.extract_tb(error.__traceback__)
        frames = [each for each in kept if not each.filename.endswith(own)]
        lines = traceback.format_list(frames) + traceback.format_exception_only(error)
        if error.__cause__ is None and error.__context__ is None:
            trace = "Traceback of the function:\n" + "".join(lines)
        body = b""
        if head.get("reply") != "json":
            try:
                body = payload.dump(error.with_traceback(None), "")
                payload.load(body)  # some exceptions can be dumped, but not loaded
            except Exception:  # noqa: BLE001 - exceptions raise anything
                body = b""
        if len(body) > MOST_BYTES:
            body = b""
        text = say_error(error)
        told = {"type": type(error).__name__, "text": text[:20_000], "trace": trace[-50_000:]}
        self.send({"op": "failed", "id": head["id"], "kind": "error", **told}, body)


class CallOutput:
    """Standard output or error with the call's name before each line. The lines also go to the
    caller, if it wants them."""

    def __init__(self, process: WorkerProcess, target: TextIO) -> None:
        self._process, self._target = process, target
        self._begun: dict[int, str] = {}

    def write(self, text: str) -> int:
        head = current_call.get()
        key = threading.get_ident()
        lines = (self._begun.pop(key, "") + text).split("\n")
        if lines[-1]:
            self._begun[key] = lines[-1]
        for line in lines[:-1]:
            self._put(head, line)
        return len(text)

    def flush(self) -> None:
        if rest := self._begun.pop(threading.get_ident(), ""):
            self._put(current_call.get(), rest)
        self._target.flush()

    def _put(self, head: Head | None, line: str) -> None:
        if head is None:
            self._target.write(f"{line}\n")
            return
        name = f"{head['fn']} {head['key']}" if "key" in head else head["fn"]
        self._target.write(f"{name} | {line}\n")
        if head.get("logs"):
            said = {"op": "log", "id": head["id"], "text": line[:8000]}
            self._process.send(said)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def say_error(error: BaseException) -> str:
    """Return what an error says, also if its own code fails to say it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - exceptions raise anything
        return "(its text cannot be read)"


def load_app(spec: dict[str, Any], name: str) -> None:
    """Import the app's module, and add the functions whose code was sent as a value."""
    root = os.getcwd()
    if root not in sys.path:
        sys.path.insert(1, root)
    if spec["file"]:
        path = os.path.join(root, spec["file"])
        if spec["module"] in ("__main__", MAIN):
            found = importlib.util.spec_from_file_location(MAIN, path)
            assert found is not None
            assert found.loader is not None
            module = importlib.util.module_from_spec(found)
            sys.modules[MAIN] = sys.modules["__main__"] = module
            found.loader.exec_module(module)
        else:
            importlib.import_module(spec["module"])
    if spec["code"]:
        version = ".".join(map(str, sys.version_info[:2]))
        if version != spec["python"]:
            raise RuntimeError(
                f"{name} was sent as code of Python {spec['python']}, and this node has Python "
                f"{version}: write it into a module, or use Image.from_registry("
                f"'python:{spec['python']}')"
            )
        from cavvy.capabilities.functions.app import App

        with open(os.path.join(root, spec["code"]), "rb") as file:
            code = file.read()
        app = find_app(spec["app"]) or App(spec["app"])
        for kind, each, raw, keys in payload.load(code):
            app.functions.pop(each, None)
            if kind == "class":
                app.cls(raw, **keys)
            else:
                app.function(raw, name=each, **keys)
    if find_app(spec["app"]) is None:
        raise LookupError(f"{spec['file']} makes no app {spec['app']} when it is imported")


def explain_load(error: BaseException) -> str:
    """Return why the code cannot be loaded, with the line of the app's code."""
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if "importlib" not in each.filename and "on_node" not in each.filename
    ]
    own = [each for each in frames if each.filename.startswith(os.getcwd())] or frames
    where = ""
    if own:
        path = os.path.relpath(own[-1].filename, os.getcwd())
        where = f"{path}:{own[-1].lineno}: {own[-1].line}: "
    text = f"{where}{type(error).__name__}: {say_error(error)}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        top = error.name.partition(".")[0]
        text += (
            f". The package of `{top}` is not installed where the function runs: add it to the "
            f"image, such as image=cavvy.Image.python().pip_install({top!r}), or put the module "
            "into the app's folder"
        )
    return text


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine."""
    import asyncio

    return asyncio.run(coroutine)


def list_async(values: Any) -> Iterator[Any]:
    """Yield the values of an asynchronous generator."""
    import asyncio

    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                yield loop.run_until_complete(anext(values))
            except StopAsyncIteration:
                return
    finally:
        loop.run_until_complete(values.aclose())
        loop.close()


def main() -> None:
    """Run the worker of the arguments."""
    with open(sys.argv[1], encoding="utf-8") as file:
        spec = json.load(file)
    connection = socket.socket(fileno=int(sys.argv[2]))
    process = WorkerProcess(spec, connection, sys.argv[3])
    sys.stdout = CallOutput(process, sys.stdout)
    sys.stderr = CallOutput(process, sys.stderr)
    process.run()
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    main()
