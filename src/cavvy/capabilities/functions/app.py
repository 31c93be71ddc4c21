"""Apps: functions and classes whose calls run in processes of jobs.

This file also runs on nodes, so it imports only the standard library and files that do. What takes
long to import is imported where it is used: each process that runs calls imports this file.
"""

import inspect
import os
import re
import sys
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

from cavvy.capabilities.functions.frames import current_call
from cavvy.capabilities.functions.image import FunctionImage
from cavvy.capabilities.functions.limits import check_limits, make_keys
from cavvy.capabilities.functions.options import FunctionOptions, check_priority, read_options
from cavvy.capabilities.functions.web import WebEndpoint, make_endpoints
from cavvy.frame.discover import load
from cavvy.sdk.errors import InvalidArgument

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

# the name under which nodes load the program that a user started, which is `__main__` there
MAIN = "__cavvy_main__"
_ENTER, _EXIT, _METHOD = "__cavvy_enter__", "__cavvy_exit__", "__cavvy_method__"
_MOST_KEY = 200  # characters
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?")
_apps: dict[str, "App"] = {}


class CodePlace(NamedTuple):
    """Where an app was made: its module, and the module's file, or "" without a file."""

    module: str
    file: str


class BothWays(Generic[_P, _R]):
    """Something to call, of which `aio` is the version for `await` or `async for`."""

    def __init__(self, call: Callable[_P, _R], aio: Callable[..., Any]) -> None:
        self._call, self.aio = call, aio

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return self._call(*args, **kwargs)


class CallRunner(Protocol):
    """What runs the calls of an app in this program: `AppRun` of `calls`."""

    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...

    def call(self, function: "Function", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    async def call_async(
        self, function: "Function", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...

    def spawn(self, function: "Function", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def spawn_all(
        self,
        function: "Function",
        items: Iterable[tuple[Sequence[Any], Mapping[str, Any]]],
        keys: Iterable[str] | None,
    ) -> Iterator[Any]: ...

    def stream(
        self, function: "Function", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Any]: ...

    def map(
        self,
        function: "Function",
        items: Iterable[Sequence[Any]],
        kwargs: dict[str, Any],
        *,
        ordered: bool,
        catch: bool,
    ) -> Iterator[Any]: ...


class Function:
    """A function of an app. Calling it as any function runs it here, as `local` does."""

    def __init__(
        self,
        app: "App",
        name: str,
        raw: Callable[..., Any] | None,
        options: FunctionOptions,
        *,
        owner: "FunctionClass | None" = None,
        given: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> None:
        self.app, self.name, self.raw, self.options = app, name, raw, options
        self.owner, self.given = owner, given  # of a method: its class, and the class's arguments
        self.key: str | None = None  # of its next calls: see `once`
        self.priority: int | None = None  # of its next calls: see `with_options`
        # makes the keys of its limits from arguments, as far as it has limits
        self.find_keys: Callable[[tuple[Any, ...], Mapping[str, Any]], list[str]] | None = None
        if raw is not None and options.limit:
            bound = owner is not None
            self.find_keys = lambda args, kwargs: make_keys(
                name, raw, options.limit, args, kwargs, bound=bound
            )
        # whether a call yields values
        self.is_generator = inspect.isgeneratorfunction(raw) or inspect.isasyncgenfunction(raw)
        if raw is not None:
            self.__doc__, self.__wrapped__ = raw.__doc__, raw
            self.__name__, self.__qualname__ = raw.__name__, raw.__qualname__
            self.__module__ = raw.__module__

    @staticmethod
    def lookup(
        app: str,
        name: str,
        *,
        project: str | None = None,
        trust: bool = True,
        consent: bool = False,
    ) -> "Function":
        """Return a function of an app that `cavvy deploy` has deployed, by its name: for a method,
        CLASS.METHOD. Results are pickles, whose loading can run code of the app here; with
        `trust=False`, arguments and results are JSON, and exceptions arrive as CallFailed. A job
        that the first call starts is yours: `consent` agrees to its cost, unless you have done so
        when you deployed the app. Raises CavvyError if there is no such function.
        """
        found: Function = load("cavvy.capabilities.functions.deployed:find_function")(
            app, name, project, trust=trust, consent=consent
        )
        return found

    @property
    def remote(self) -> BothWays[..., Any]:
        """Run the function elsewhere, and return its result. Of a generator, yield its values."""
        return BothWays(self._remote, self._remote_aio)

    @property
    def map(self) -> BothWays[..., Iterator[Any]]:
        """Call the function for each of the items, and yield the results: in the order of the
        items, or with `order_outputs=False` as they come. Several iterables give several arguments;
        `kwargs` are the same for all calls. With `return_exceptions`, an exception is a result.
        """
        return BothWays(self._map, self._map_aio)

    @property
    def starmap(self) -> BothWays[..., Iterator[Any]]:
        """Call the function with each of the tuples of arguments; otherwise as `map`."""
        return BothWays(self._starmap, self._starmap_aio)

    @property
    def for_each(self) -> BothWays[..., None]:
        """Call the function for each of the items, and discard the results."""
        return BothWays(self._for_each, self._for_each_aio)

    @property
    def spawn(self) -> BothWays[..., Any]:
        """Start a call, and return a `FunctionCall` at once, whose `get` waits for the result."""
        return BothWays(self._spawn, self._spawn_aio)

    @property
    def spawn_map(self) -> BothWays[..., list[Any]]:
        """Start a call for each of the items, and return the `FunctionCall`s. `keys` are the keys
        of the calls, as of `once`. Calls of a deployed app go to the server many at a time."""
        return BothWays(self._spawn_map, self._spawn_map_aio)

    def once(self, key: str) -> "Function":
        """Return this function for a call with a key: `f.once("order 17").remote(...)`. All calls
        of it with the same key are one call, with one result, whichever programs make them. Only
        calls of deployed apps can have a key. A process that is lost in the middle of a call runs
        it again, so effects of the function itself need the key, too: `cavvy.current_call_key()`.
        """
        if not isinstance(key, str) or not key or len(key) > _MOST_KEY:
            hint = f"use a string of 1 to {_MOST_KEY} characters"
            raise InvalidArgument(f"{self.name}.once: {key!r} is no key", hint)
        made = self._copy()
        made.key = key
        return made

    def with_options(self, *, priority: int) -> "Function":
        """Return this function for calls of another priority than that of its decorator, from -100
        to 100: `f.with_options(priority=5).remote(x)`. Those of a higher one are first."""
        check_priority(f"{self.name}.with_options", priority)
        made = self._copy()
        made.priority = priority
        return made

    def make_head(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the broker must know of a call, besides its arguments. Raises
        InvalidArgument."""
        head: dict[str, Any] = {}
        if self.priority is not None:
            head["priority"] = self.priority
        if self.find_keys is not None:
            head["limits"] = self.find_keys(args, kwargs)
        return head

    def _copy(self) -> "Function":
        made = Function(
            self.app, self.name, self.raw, self.options, owner=self.owner, given=self.given
        )
        made.is_generator, made.find_keys = self.is_generator, self.find_keys
        made.key, made.priority = self.key, self.priority
        return made

    def local(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function here."""
        if self.owner is not None:
            made = self.owner.make(self.given or ((), {}))
            return getattr(made, self.name.rpartition(".")[2])(*args, **kwargs)
        if self.raw is None:
            raise InvalidArgument(
                f"{self.name} was looked up by its name, so its code is not here",
                "call `remote`, or import the function from its module",
            )
        return self.raw(*args, **kwargs)

    __call__ = local

    def __get__(self, owner: object, kind: type | None = None) -> "Function":
        return self

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return find_known, (self.app.name, self.name, self.given)

    def __repr__(self) -> str:
        return f"<Function {self.app.name}.{self.name}>"

    def _remote(self, *args: Any, **kwargs: Any) -> Any:
        run = self.app.running()
        return run.stream(self, args, kwargs) if self.is_generator else run.call(self, args, kwargs)

    def _remote_aio(self, *args: Any, **kwargs: Any) -> Any:
        run = self.app.running()
        if self.is_generator:
            return iterate_async(lambda: run.stream(self, args, kwargs))
        return run.call_async(self, args, kwargs)

    def _map(
        self,
        *items: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        order_outputs: bool = True,
        return_exceptions: bool = False,
    ) -> Iterator[Any]:
        pairs: Iterable[tuple[Any, ...]] = zip(*items, strict=False)
        return self._starmap(
            pairs,
            kwargs=kwargs,
            order_outputs=order_outputs,
            return_exceptions=return_exceptions,
        )

    def _map_aio(self, *items: Iterable[Any], **options: Any) -> AsyncIterator[Any]:
        return iterate_async(lambda: self._map(*items, **options))

    def _starmap(
        self,
        items: Iterable[Sequence[Any]],
        *,
        kwargs: Mapping[str, Any] | None = None,
        order_outputs: bool = True,
        return_exceptions: bool = False,
    ) -> Iterator[Any]:
        if self.is_generator:
            raise InvalidArgument(
                f"{self.name} is a generator ({name_place(self.raw)}), and `map` needs one result "
                "for each call",
                f"return a list in {self.name}, or call {self.name}.remote for each item",
            )
        return self.app.running().map(
            self, items, dict(kwargs or {}), ordered=order_outputs, catch=return_exceptions
        )

    def _starmap_aio(self, items: Iterable[Sequence[Any]], **options: Any) -> AsyncIterator[Any]:
        return iterate_async(lambda: self._starmap(items, **options))

    def _for_each(
        self,
        *items: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        ignore_exceptions: bool = False,
    ) -> None:
        for _ in self._map(
            *items, kwargs=kwargs, order_outputs=False, return_exceptions=ignore_exceptions
        ):
            pass

    async def _for_each_aio(self, *items: Iterable[Any], **options: Any) -> None:
        import asyncio

        await asyncio.to_thread(self._for_each, *items, **options)

    def _spawn(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_generator:
            raise InvalidArgument(
                f"{self.name} is a generator ({name_place(self.raw)}), which cannot be spawned",
                f"iterate over {self.name}.remote(...), or return a list",
            )
        return self.app.running().spawn(self, args, kwargs)

    def _spawn_map(
        self,
        *items: Iterable[Any],
        kwargs: Mapping[str, Any] | None = None,
        keys: Iterable[str] | None = None,
    ) -> list[Any]:
        pairs = ((args, kwargs or {}) for args in zip(*items, strict=False))
        return list(self.app.running().spawn_all(self, pairs, keys))

    async def _spawn_map_aio(self, *items: Iterable[Any], **options: Any) -> list[Any]:
        import asyncio

        return await asyncio.to_thread(self._spawn_map, *items, **options)

    async def _spawn_aio(self, *args: Any, **kwargs: Any) -> Any:
        import asyncio

        return await asyncio.to_thread(self._spawn, *args, **kwargs)


class FunctionClass:
    """A class of an app, whose instances live in processes of jobs. Calling it returns a handle,
    whose methods have `remote`, `map` and so on.
    """

    def __init__(self, app: "App", raw: type, options: FunctionOptions) -> None:
        self.app, self.raw, self.options, self.name = app, raw, options, raw.__name__
        self.__doc__, self.__module__, self.__qualname__ = (
            raw.__doc__,
            raw.__module__,
            raw.__qualname__,
        )
        self.methods = {
            name: (each, read_options(f"{raw.__name__}.{name}", getattr(each, _METHOD), options))
            for name, each in vars(raw).items()
            if hasattr(each, _METHOD)
        }
        if not self.methods:
            hint = "put @cavvy.method() above the methods that are called"
            raise InvalidArgument(f"the class {self.name} ({name_place(raw)}) has no method", hint)
        for name, (each, own) in self.methods.items():
            check_limits(f"{self.name}.{name}", each, own.limit)
        self._made: dict[bytes, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> "ClassHandle":
        return ClassHandle(self, args, kwargs)

    def list_functions(self) -> Iterator[Function]:
        for name, (raw, options) in self.methods.items():
            yield Function(self.app, f"{self.name}.{name}", raw, options, owner=self)

    def make(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Return the instance in this process for these arguments of the class. The first time, it
        is made, and its methods marked with `enter` are called.
        """
        import pickle

        key = pickle.dumps(given, 5) if given != ((), {}) else b""
        if key not in self._made:
            made = self._construct(*given)
            _call_marked(made, _ENTER)
            self._made[key] = made
        return self._made[key]

    def _construct(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a new instance. Attributes that are `parameter()` are set to the arguments. Raises
        TypeError."""
        parameters = {
            name: each for name, each in vars(self.raw).items() if isinstance(each, ClassParameter)
        }
        if not parameters:
            return self.raw(*args, **kwargs)
        made = self.raw()
        values = {**dict(zip(parameters, args, strict=False)), **kwargs}
        unknown = [name for name in values if name not in parameters]
        if unknown or len(args) > len(parameters):
            raise TypeError(f"{self.name} has the parameters {', '.join(parameters)}")
        for name, each in parameters.items():
            value = values.get(name, each.default)
            if value is _NO_DEFAULT:
                raise TypeError(f"{self.name} needs the parameter {name}")
            setattr(made, name, value)
        return made

    def leave(self) -> None:
        """Call the methods marked with `exit` of all instances in this process."""
        made, self._made = list(self._made.values()), {}
        for each in made:
            _call_marked(each, _EXIT)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return find_known, (self.app.name, self.name, None)

    def __repr__(self) -> str:
        return f"<class {self.app.name}.{self.name}>"


class ClassHandle:
    """A handle of instances of a class with certain arguments; see `FunctionClass`."""

    def __init__(self, kind: FunctionClass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._kind, self._given = kind, (args, kwargs)

    def __getattr__(self, name: str) -> Any:
        kind = self._kind
        if name in kind.methods:
            raw, options = kind.methods[name]
            full = f"{kind.name}.{name}"
            return Function(kind.app, full, raw, options, owner=kind, given=self._given)
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(kind.make(self._given), name)  # what is no method is read here

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _make_handle, (self._kind, self._given)


class App:
    """Functions and classes that run together, under a name. `image` is that of functions without
    one of their own.
    """

    def __init__(
        self, name: str, *, image: FunctionImage | None = None, project: str | None = None
    ) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidArgument(
                f"App: {name!r} is no name of an app", "use a-z, 0-9 and -, such as embed"
            )
        self._set(name, image, project)
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
            frame = frame.f_back
        file = frame.f_globals.get("__file__") or ""
        self.place = CodePlace(
            frame.f_globals.get("__name__", "__main__"),
            os.path.abspath(file) if file and os.path.isfile(file) else "",
        )
        _apps[name] = self

    @classmethod
    def looked_up(cls, name: str) -> "App":
        """Return an app of which only the name is known here."""
        made = cls.__new__(cls)
        made._set(name, None, None)
        return made

    def _set(self, name: str, image: FunctionImage | None, project: str | None) -> None:
        self.name, self.image, self.project = name, image, project
        self.functions: dict[str, Function] = {}
        self.classes: dict[str, FunctionClass] = {}
        self.web: dict[str, WebEndpoint] = {}
        self.entry: Callable[..., Any] | None = None  # the function marked with `main`
        self.place = CodePlace("", "")
        self.consent = False  # to what the jobs cost
        self.runner: CallRunner | None = None

    def function(self, raw: Callable[..., Any] | None = None, **keys: Any) -> Any:
        """Make a function one of the app: `@app.function(cpu=4, retries=2)`. The arguments are
        those of `FunctionOptions`.
        """

        def add(raw: Callable[..., Any]) -> Function:
            if not callable(raw) or isinstance(raw, type):
                hint = "for a class, use @app.cls()"
                raise InvalidArgument(f"@app.function: {raw!r} is no function", hint)
            name = keys.pop("name", None) or raw.__name__
            made = Function(self, name, raw, read_options(name, keys, None))
            check_limits(name, raw, made.options.limit)
            self._check_new(name, raw)
            self.functions[name] = made
            return made

        return add if raw is None else add(raw)

    def cls(self, raw: type | None = None, **keys: Any) -> Any:
        """Make a class one of the app: its instances live on for many calls. The arguments are
        those of `FunctionOptions`.
        """

        def add(raw: type) -> FunctionClass:
            if not isinstance(raw, type):
                raise InvalidArgument(f"@app.cls: {raw!r} is no class", "use @app.function()")
            made = FunctionClass(self, raw, read_options(raw.__name__, keys, None))
            self._check_new(raw.__name__, raw)
            self.classes[raw.__name__] = made
            self.functions.update({each.name: each for each in made.list_functions()})
            return made

        return add if raw is None else add(raw)

    def endpoint(
        self, raw: Callable[..., Any] | None = None, *, method: str = "GET", **keys: Any
    ) -> Any:
        """Let HTTP requests call a function, at a URL that `cavvy deploy` prints. Its arguments are
        those of the query and of a body of JSON; a parameter `request` gets the request itself. It
        answers with JSON, a text, bytes, or, of a generator, a stream of these."""
        add = make_endpoints(self.name, self.web, "endpoint", method, keys)
        return add if raw is None else add(raw)

    def asgi_app(self, raw: Callable[..., Any] | None = None, **keys: Any) -> Any:
        """Serve the app of ASGI that a function returns, such as one of FastAPI, at a URL that
        `cavvy deploy` prints."""
        add = make_endpoints(self.name, self.web, "asgi", "GET", keys)
        return add if raw is None else add(raw)

    def wsgi_app(self, raw: Callable[..., Any] | None = None, **keys: Any) -> Any:
        """Serve the app of WSGI that a function returns, such as one of Flask, likewise."""
        add = make_endpoints(self.name, self.web, "wsgi", "GET", keys)
        return add if raw is None else add(raw)

    def main(self, raw: Callable[..., _T] | None = None) -> Any:
        """Mark the function that `cavvy run` calls here, on this computer: `@app.main()`. Its
        parameters are options of the command line.
        """

        def add(raw: Callable[..., _T]) -> Callable[..., _T]:
            self.entry = raw
            return raw

        return add if raw is None else add(raw)

    @contextmanager
    def run(self, *, quiet: bool = False, consent: bool = False) -> Iterator[CallRunner]:
        """Keep the app's jobs running inside a `with` block. Without it, the first call starts
        them, and the end of the program stops them. With `consent`, they may cost money; without,
        only offers that are free are used, and others raise ConsentNeeded.
        """
        self.consent = self.consent or consent
        run = self.running(quiet=quiet)
        try:
            yield run
        finally:
            run.close()

    def running(self, *, quiet: bool = False) -> "CallRunner":
        """Return the jobs of the app in this program."""
        if self.runner is None or self.runner.closed:
            # `import cavvy` and nodes need no client of the control plane
            self.runner = load("cavvy.capabilities.functions.calls:AppRun")(self, quiet=quiet)
        assert self.runner is not None
        return self.runner

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _find_app, (self.name,)

    def __repr__(self) -> str:
        return f"<App {self.name}>"

    def _check_new(self, name: str, raw: object) -> None:
        """Raise InvalidArgument if another function has this name. A cell of a notebook may define
        a function again."""
        known = self.functions.get(name)
        if known is None or known.raw is None or not self.place.file:
            return
        if known.raw.__code__ is not getattr(raw, "__code__", None):
            raise InvalidArgument(
                f"the app {self.name} has two functions {name}: {name_place(known.raw)} and "
                f"{name_place(raw)}",
                'rename one of them, or pass name="..." to @app.function',
            )


_NO_DEFAULT = object()


class ClassParameter:
    """What `parameter` makes."""

    def __init__(self, default: object) -> None:
        self.default = default


def parameter(*, default: Any = _NO_DEFAULT) -> Any:
    """Make an attribute of a class an argument of the class: `size: int = cavvy.parameter()`.
    A class with such attributes needs no `__init__`."""
    return ClassParameter(default)


def enter() -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Mark a method of a class that is called once in each process, before its first call."""
    return lambda raw: _mark(raw, _ENTER, True)


def exit() -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Mark a method of a class that is called when its process ends."""
    return lambda raw: _mark(raw, _EXIT, True)


def method(**keys: Any) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Mark a method of a class that can be called elsewhere. With `batch`, it gets a list for each
    of its parameters and returns a list: the calls of at most `wait` are joined.
    """
    return lambda raw: _mark(raw, _METHOD, keys)


def current_call_key() -> str | None:
    """Return the ID of the call that runs here, which stays the same when it runs again after a
    lost process; None outside of calls that the server keeps."""
    head = current_call.get()
    return None if head is None else head.get("key")


def find_known(app: str, name: str, given: Any) -> object:
    """Return the function or class of this name in an app of this process. Raises LookupError."""
    known = _find_app(app)
    if name in known.classes:
        return known.classes[name]
    if name not in known.functions:
        raise LookupError(f"the app {app} has no function {name} here")
    found = known.functions[name]
    if given is None:
        return found
    return Function(known, name, found.raw, found.options, owner=found.owner, given=given)


def find_app(name: str) -> App | None:
    """Return the app of this name that this process has made."""
    return _apps.get(name)


def list_apps() -> Sequence[App]:
    """Return the apps that this process has made."""
    return list(_apps.values())


def drop_apps(module: str) -> None:
    """Forget the apps that a module has made, which is loaded again."""
    for name in [name for name, each in _apps.items() if each.place.module == module]:
        del _apps[name]


def name_place(raw: object) -> str:
    """Return where a function or class is defined, as FILE:LINE."""
    code = getattr(raw, "__code__", None)
    if code is not None:
        return f"{_shorten(code.co_filename)}:{code.co_firstlineno}"
    try:
        lines = inspect.getsourcelines(raw)  # type: ignore[arg-type]  # raises TypeError otherwise
        return f"{_shorten(inspect.getsourcefile(raw) or '?')}:{lines[1]}"  # type: ignore[arg-type]
    except (OSError, TypeError):
        return getattr(raw, "__module__", "?")


def _shorten(path: str) -> str:
    try:
        return os.fspath(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path


def _find_app(name: str) -> App:
    if name not in _apps:
        raise LookupError(f"there is no app {name} in this process")
    return _apps[name]


def _make_handle(kind: FunctionClass, given: tuple[Any, Any]) -> ClassHandle:
    return ClassHandle(kind, *given)


def _mark(raw: Callable[..., _T], mark: str, value: object) -> Callable[..., _T]:
    setattr(raw, mark, value)
    return raw


def _call_marked(made: object, mark: str) -> None:
    for name, each in list(vars(type(made)).items()):
        if getattr(each, mark, None):
            found = getattr(made, name)()
            if inspect.isawaitable(found):
                import asyncio

                asyncio.run(_wait_for(found))


async def _wait_for(awaitable: Awaitable[_T]) -> _T:
    return await awaitable


async def iterate_async(make: Callable[[], Iterator[_T]]) -> AsyncIterator[_T]:
    """Yield the values of an iterator that blocks."""
    import asyncio

    end = object()
    made = await asyncio.to_thread(make)
    try:
        while (value := await asyncio.to_thread(next, made, end)) is not end:
            yield value  # type: ignore[misc]  # not `end`
    finally:
        if (close := getattr(made, "close", None)) is not None:
            await asyncio.to_thread(close)
