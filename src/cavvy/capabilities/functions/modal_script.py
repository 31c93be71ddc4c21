"""Rewrites scripts that use `modal` for Cavvy, as far as both have the same. The script is parsed,
and never run; what is not rewritten stays as it is, and a note says so with its line.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_SAME_NAMES = {
    *("App", "Image", "Function", "FunctionCall", "enter", "exit", "method", "parameter"),
    *("Dict", "Queue", "Volume"),
}
_OPTIONS = {
    "max_containers": "max_replicas",
    "concurrency_limit": "max_replicas",
    "min_containers": "min_replicas",
    "keep_warm": "min_replicas",
    "scaledown_window": "idle",
    "container_idle_timeout": "idle",
    "allow_concurrent_inputs": "concurrency",
}
_SAME_OPTIONS = {"image", "gpu", "env", "name", "timeout", "retries", "cpu"}
# options without a counterpart, and why the function works without
_DROPPED = {
    "serialized": "",
    "is_generator": "",
    "include_source": "",
    "enable_memory_snapshot": "a process loads anew",
    "experimental_options": "it belongs to modal's own cloud",
    "proxy": "it belongs to modal's own cloud",
    "i6pn": "it belongs to modal's own cloud",
    "routing_region": "it belongs to modal's own cloud",
    "buffer_containers": "use min_replicas to keep processes",
    "startup_timeout": "loading has no limit of its own",
    "single_use_containers": "a process runs many calls",
    "max_inputs": "a process runs many calls",
    "region": "write resources={'regions': [...]}",
    "cloud": "write resources={'providers': [...]}",
    "ephemeral_disk": "write resources={'disk': '100GB'}",
    "nonpreemptible": "write spot=False",
    "block_network": "functions reach the network",
    "restrict_modal_access": "it belongs to modal's own cloud",
    "network_file_systems": "use volumes",
    "mounts": "the folder of the file is sent along",
}
_MISSING = {
    "Sandbox": "sandboxes are made otherwise: see Cavvy's guides",
    "NetworkFileSystem": "use a volume",
    "Mount": "the folder of the file is sent along",
    "CloudBucketMount": "write volumes or inputs with the bucket's URL",
    "Cls": 'look methods up: cavvy.Function.lookup("app", "Class.method")',
    "asgi_app": "write @app.asgi_app() above a function: classes have no web apps",
    "wsgi_app": "write @app.wsgi_app() above a function: classes have no web apps",
    "web_server": "there are no web servers in functions: `cavvy serve` runs one",
    "web_endpoint": "write @app.endpoint() above a function: classes have no endpoints",
    "fastapi_endpoint": "write @app.endpoint() above a function: classes have no endpoints",
    "enable_output": "lines of functions are always shown; remove this block",
    "is_local": "ask `'CAVVY_JOB' not in os.environ`",
    "interact": "functions have no terminal",
    "Tunnel": "use `cavvy forward`",
    "forward": "use `cavvy forward`",
}
_IMAGE_SAME = {"run_commands", "env", "pip_install_from_requirements", "imports"}
_IMAGE_DROPPED = {
    "add_local_dir": "the folder of the file is sent along",
    "add_local_file": "the folder of the file is sent along",
    "add_local_python_source": "the folder of the file is sent along",
    "copy_local_dir": "the folder of the file is sent along",
    "copy_local_file": "the folder of the file is sent along",
    "entrypoint": "functions start without the image's entry point",
}
# decorators of web endpoints, and the method of an app here
_WEB = {
    "asgi_app": "asgi_app",
    "wsgi_app": "wsgi_app",
    "fastapi_endpoint": "endpoint",
    "web_endpoint": "endpoint",
}
_OF_CALLS = ("timeout", "retries", "schedule")  # options that endpoints do not have
_PERIODS = {"minutes": "*/{} * * * *", "hours": "0 */{} * * *", "days": "0 0 */{} * *"}


class ScriptNote(NamedTuple):
    """What was not rewritten or behaves otherwise. `open` says that the user has to change it."""

    line: int
    text: str
    open: bool


class _Edit(NamedTuple):
    begin: int
    end: int
    text: str


class NoModalScript(Exception):
    """Raised if a file is no script that imports modal, and why."""


def rewrite_script(text: str) -> tuple[str, Sequence[ScriptNote]]:
    """Return the script for Cavvy, and notes by line. Raises NoModalScript."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise NoModalScript(f"it is no Python file that can be read: {error}") from None
    rewriter = _Rewriter(text, tree)
    if not rewriter.modules and not rewriter.names:
        raise NoModalScript("it does not import modal")
    made = rewriter.rewrite()
    ast.parse(made)  # a fault of this module must not reach the user as a file
    return made, sorted(rewriter.notes)


class _Rewriter:
    def __init__(self, text: str, tree: ast.Module) -> None:
        self._text, self._tree = text, tree
        data = text.encode()
        self._starts = [0]
        for line in data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._data = data
        self._edits: list[_Edit] = []
        self.notes: list[ScriptNote] = []
        self.modules: set[str] = set()  # names of the module `modal`
        self.names: dict[str, str] = {}  # names that were imported from it
        self._apps: set[str] = set()
        self._endpoints: list[ast.expr] = []  # decorators of the app above web endpoints
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.modules |= {a.asname or a.name for a in node.names if a.name == "modal"}
            elif isinstance(node, ast.ImportFrom) and node.module == "modal" and not node.level:
                self.names |= {each.asname or each.name: each.name for each in node.names}

    def rewrite(self) -> str:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assign(node)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._decorate(node)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call):
                self._call(node)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute | ast.Name):
                self._name(node)
        return self._apply()

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name == "modal":
                    new = "cavvy" + (f" as {each.asname}" if each.asname else "")
                    self._replace(each, new)
                elif each.name.startswith("modal."):
                    self._note(node, f"{each.name} has no counterpart", open_=True)
        elif node.module == "modal" and not node.level:
            kept = [each for each in node.names if each.name in _SAME_NAMES]
            listed = ", ".join(
                each.name + (f" as {each.asname}" if each.asname else "") for each in kept
            )
            indent = " " * node.col_offset
            lines = [f"from cavvy import {listed}"] if listed else []
            if any(each.name not in _SAME_NAMES for each in node.names):
                lines.append("import cavvy")
            self._replace(node, f"\n{indent}".join(lines))
        elif (node.module or "").startswith("modal."):
            self._note(node, f"{node.module} has no counterpart", open_=True)

    def _assign(self, node: ast.Assign) -> None:
        target, value = node.targets[0], node.value
        if not isinstance(target, ast.Name) or not isinstance(value, ast.Call):
            return
        name = self._modal_name(value.func)
        if name in ("App", "Stub"):
            self._apps.add(target.id)

    def _decorate(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        """Move what modal's decorators say into the one of the app or the method."""
        owner, web, more, gone = None, None, list[str](), list[ast.expr]()
        for each in node.decorator_list:
            called = each.func if isinstance(each, ast.Call) else each
            name = self._modal_name(called)
            if isinstance(called, ast.Attribute) and called.attr in ("function", "cls"):
                owner = each
            elif name in _WEB:
                web = each
            elif name in ("method", "batched", "concurrent"):
                keys = self._read_keys(each)
                if name == "batched":
                    more.append(f"batch={keys.get('max_batch_size', '8')}")
                    more.append(_say_wait(keys.get("wait_ms", "0")))
                elif name == "concurrent":
                    more.append(f"concurrency={keys.get('max_inputs', '1')}")
                if name != "method":
                    gone.append(each)
                else:
                    owner = each
        if web is not None and owner is not None:
            more += self._endpoint(owner, web)
            gone.append(web)
        if gone:
            self._move(owner, more, gone)

    def _move(self, owner: ast.expr | None, more: list[str], gone: list[ast.expr]) -> None:
        """Add arguments to a decorator, and remove those that they come from."""
        if owner is None:  # modal.batched makes a method, too
            self._replace(gone[0], f"{self._spell(gone[0], 'method')}({', '.join(more)})")
            gone = gone[1:]
        elif isinstance(owner, ast.Call):
            if more:
                self._add_arguments(owner, more)
        else:
            _, end = self._span(owner)
            self._edits.append(_Edit(end, end, f"({', '.join(more)})"))
        for each in gone:
            self._remove_line(each)

    def _endpoint(self, owner: ast.expr, web: ast.expr) -> list[str]:
        """Make the decorator of the app one of a web endpoint, and return its other arguments."""
        called = owner.func if isinstance(owner, ast.Call) else owner
        name = self._modal_name(web.func if isinstance(web, ast.Call) else web)
        assert isinstance(called, ast.Attribute)
        self._replace_attribute(called, _WEB[name])
        self._endpoints.append(owner)
        keys = self._read_keys(web)
        if _WEB[name] == "endpoint":
            self._note(web, "FastAPI's own parameters need @app.asgi_app()", open_=False)
        for each in keys.keys() - {"method"}:
            self._note(web, f"{each} was removed from the web endpoint", open_=False)
        return [f"method={keys['method']}"] if "method" in keys else []

    def _read_keys(self, node: ast.expr) -> dict[str, str]:
        if not isinstance(node, ast.Call):
            return {}
        return {each.arg: self._source(each.value) for each in node.keywords if each.arg}

    def _call(self, node: ast.Call) -> None:
        name = self._modal_name(node.func)
        function = node.func
        if name in ("App", "Stub"):
            self._app(node)
        elif name.startswith("Image.") or self._is_image(function):
            self._image(node, name)
        elif name in ("Function.from_name", "Function.lookup"):
            self._replace(function, f"{self._spell(function, 'Function')}.lookup")
        elif name:
            self._value(node, name)
        elif isinstance(function, ast.Attribute):
            self._method_call(node, function)

    def _value(self, node: ast.Call, name: str) -> None:
        """Rewrite what makes a secret, a volume, a schedule and the like: these are plain values
        here."""
        keys = self._read_keys(node)
        match name:
            case "Secret.from_name":
                self._secret(node)
            case "Cron":
                self._replace(node, self._first(node))
                if node.keywords:
                    self._note(node, "cron lines are in UTC", open_=False)
            case "Period":
                self._period(node)
            case "Retries":
                self._replace(node, keys.get("max_retries", self._first(node) or "2"))
                self._note(node, "retries follow each other without a pause", open_=False)
            case "enter":
                for each in node.keywords:
                    self._remove_argument(node, each)
                    self._note(each, f"{each.arg} was removed: a process loads anew", open_=False)
            case _ if name.partition(".")[0] in ("Volume", "Dict", "Queue"):
                self._stored(node, name)
            case _ if name.startswith("Secret."):
                self._note(node, "store the values: cavvy secret set NAME", open_=True)
            case _ if name.startswith("gpu."):
                kind, count = name.removeprefix("gpu."), keys.get("count", "1")
                self._replace(node, f'"{kind}:{count}"' if count != "1" else f'"{kind}"')

    def _stored(self, node: ast.Call, name: str) -> None:
        """Rewrite what makes a volume, a dict or a queue."""
        kind, _, way = name.partition(".")
        if way == "from_name":
            self._replace(node, f"{self._spell(node.func, kind)}({self._first(node)})")
            if kind == "Volume":
                told = "except on this machine, the volume must exist, or have a size"
                self._note(node, told, open_=False)
        elif way == "ephemeral" and kind != "Volume":
            self._replace(node.func, f"{self._spell(node.func, kind)}.ephemeral")
        elif way in ("delete", "objects.delete") and kind != "Volume":
            self._note(node, "`cavvy state rm` removes it", open_=True)
        elif not way:
            self._note(node, f'{kind} needs a name: cavvy.{kind}("NAME")', open_=True)
        else:
            self._note(node, f'{name} has no counterpart: use {kind}("NAME")', open_=True)

    def _secret(self, node: ast.Call) -> None:
        """Name the variables of a secret: here, each is a secret of its own."""
        for each in node.keywords:
            if each.arg == "required_keys" and isinstance(each.value, ast.List):
                names = ", ".join(self._source(one) for one in each.value.elts)
                if names:
                    self._replace(node, names)
                    self._note(node, f"store each of them: cavvy secret set {names}", open_=False)
                    return
        first = self._first(node)
        self._replace(node, first)
        told = f"name the variables of the secret {first} instead, which are one secret each"
        self._note(node, f"{told}: cavvy secret set NAME", open_=True)

    def _method_call(self, node: ast.Call, function: ast.Attribute) -> None:
        owner = function.value
        if isinstance(owner, ast.Name) and owner.id in self._apps:
            if function.attr in ("function", "cls"):
                self._options(node)
            elif function.attr == "local_entrypoint":
                self._replace_attribute(function, "main")
            elif function.attr == "deploy":
                self._note(node, "use `cavvy deploy`", open_=True)
        elif function.attr == "remote_gen" or (function.attr == "call" and self._called(owner)):
            self._replace_attribute(function, "remote")
        elif function.attr in ("with_options", "get_web_url", "web_url", "keep_warm"):
            self._note(node, f"`{function.attr}` has no counterpart", open_=True)

    def _called(self, owner: ast.expr) -> bool:
        """Return whether this names a function of the file with a decorator of an app."""
        return isinstance(owner, ast.Name) and any(
            isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            and each.name == owner.id
            and each.decorator_list
            for each in self._tree.body
        )

    def _app(self, node: ast.Call) -> None:
        self._replace(node.func, self._spell(node.func, "App"))
        first = node.args[0] if node.args else None
        for each in node.keywords:
            if each.arg == "name":
                first = each.value
                self._replace(each, self._source(first))
            elif each.arg not in ("image",):
                self._note(each, f"App({each.arg}=...) belongs to functions", open_=True)
                self._remove_argument(node, each)
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            good = re.sub(r"[^a-z0-9]+", "-", first.value.lower()).strip("-")[:50].strip("-")
            if good != first.value:
                self._replace(first, f'"{good}"')
                self._note(first, f"the name of an app has a-z, 0-9 and -: {good}", open_=False)
        if first is None:
            self._note(node, "an app needs a name", open_=True)
            self._add_arguments(node, ['"app"'])

    def _options(self, node: ast.Call) -> None:
        for each in node.keywords:
            key, value = each.arg, each.value
            if key in _OF_CALLS and node in self._endpoints:
                self._remove_argument(node, each)
                self._note(each, f"{key} was removed: a web endpoint gets requests", open_=False)
            elif key is None or key in _SAME_OPTIONS or key in ("secrets", "volumes"):
                self._check_option(each)
            elif key in _OPTIONS:
                self._replace(each, f"{_OPTIONS[key]}={self._source(value)}")
            elif key == "memory":
                self._memory(each)
            elif key == "schedule":
                continue
            elif key in _DROPPED:
                self._remove_argument(node, each)
                if _DROPPED[key]:
                    self._note(each, f"{key} was removed: {_DROPPED[key]}", open_=False)
            else:
                self._note(each, f"{key} has no counterpart", open_=True)
                self._remove_argument(node, each)

    def _check_option(self, each: ast.keyword) -> None:
        if each.arg == "cpu" and isinstance(each.value, ast.Tuple):
            self._replace(each.value, self._source(each.value.elts[0]))
            self._note(each, "cpu is a minimum, without a limit", open_=False)
        elif each.arg == "gpu" and self._source(each.value) in ('"any"', "'any'"):
            self._note(each, 'name accelerators instead of "any", such as "L4"', open_=True)

    def _memory(self, each: ast.keyword) -> None:
        value = each.value
        if isinstance(value, ast.Tuple):
            value = value.elts[0]
            self._note(each, "memory is a minimum, without a limit", open_=False)
        if isinstance(value, ast.Constant) and isinstance(value.value, int):
            self._replace(each, f'memory="{value.value}MB"')
        else:
            self._replace(each, f'memory=f"{{{self._source(value)}}}MB"')

    def _period(self, node: ast.Call) -> None:
        keys = self._read_keys(node)
        (unit, count), *rest = [*keys.items(), ("", "")]
        if unit in _PERIODS and count.isdigit() and rest == [("", "")]:
            line = _PERIODS[unit].format(count)
            self._replace(node, f'"{line.replace("*/1 ", "* ")}"')
            told = f"the period became the cron line {line.replace('*/1 ', '* ')}, in UTC"
            self._note(node, told, open_=False)
        else:
            self._note(node, "write the period as a cron line", open_=True)

    def _is_image(self, function: ast.expr) -> bool:
        """Return whether this calls a method of an image in a chain that begins at modal's."""
        while isinstance(function, ast.Attribute):
            inner = function.value
            if not isinstance(inner, ast.Call):
                break
            function = inner.func
            if self._modal_name(function).startswith("Image."):
                return True
        return False

    def _image(self, node: ast.Call, name: str) -> None:
        function = node.func
        assert isinstance(function, ast.Attribute)
        step = function.attr
        prefix = self._spell(function, "Image")
        if name == "Image.debian_slim":
            version = self._read_keys(node).get("python_version") or self._first(node)
            self._replace(node, f"{prefix}.python({version})")
            told = "the image is the node's own Python; for a container, write "
            self._note(node, f"{told}Image.from_registry('python:3.12-slim')", open_=False)
        elif name in ("Image.from_registry", "Image.from_dockerfile"):
            self._drop_keys(
                node, {"add_python", "setup_dockerfile_commands", "secret", "force_build"}
            )
        elif name in ("Image.from_name", "Image.from_id", "Image.micromamba", "Image.from_aws_ecr"):
            self._note(node, f"{name} has no counterpart: use Image.from_registry", open_=True)
        elif step in ("pip_install", "uv_pip_install"):
            self._replace_attribute(function, "pip_install")
            for each in node.args:
                if isinstance(each, ast.List | ast.Tuple):
                    self._replace(each, f"*{self._source(each)}")
            self._drop_keys(
                node,
                {"gpu", "pre", "extra_options", "extra_index_url", "find_links", "force_build",
                 "secrets", "uv_version"},
            )  # fmt: skip
        elif step == "uv_sync":
            self._uv_sync(node)
        elif step == "apt_install":
            self._apt_install(node, function)
        elif step in _IMAGE_DROPPED:
            _, inner_end = self._span(function.value)
            _, end = self._span(node)
            self._edits.append(_Edit(inner_end, end, ""))
            told = f"{step} was removed: {_IMAGE_DROPPED[step]}"
            self._note_at(node.end_lineno or node.lineno, told, open_=False)
        elif step in _IMAGE_SAME:
            self._drop_keys(node, {"secrets", "gpu", "force_build", "volumes"})
        else:
            self._note(node, f"Image.{step} has no counterpart", open_=True)

    def _uv_sync(self, node: ast.Call) -> None:
        for key in node.keywords:
            if key.arg == "uv_project_dir":
                self._replace(key, f"folder={self._source(key.value)}")
        options = {"groups", "extras", "extra_options"}
        self._drop_keys(node, {"force_build", "frozen", "uv_version", "gpu", *options})

    def _apt_install(self, node: ast.Call, function: ast.Attribute) -> None:
        words = [self._source(each) for each in node.args]
        if all(isinstance(each, ast.Constant) for each in node.args):
            listed = " ".join(str(each.value) for each in node.args)  # type: ignore[attr-defined]
            line = f'"apt-get update && apt-get install -y {listed}"'
        else:
            joined = ", ".join(words)
            line = f'"apt-get update && apt-get install -y " + " ".join([{joined}])'
        self._replace_call(node, function, f"run_commands({line})")
        self._note(node, "apt needs root on the node: use a container for it", open_=False)

    def _drop_keys(self, node: ast.Call, keys: set[str]) -> None:
        for each in node.keywords:
            if each.arg in keys:
                self._remove_argument(node, each)
                if each.arg not in ("force_build", "uv_version"):
                    self._note(each, f"{each.arg} was removed from this step", open_=False)

    def _name(self, node: ast.Attribute | ast.Name) -> None:
        """Rewrite what is left of modal's names."""
        name = self._modal_name(node)
        if not name or self._is_inside(node):
            return
        top = name.partition(".")[0]
        if top in _MISSING:
            self._note(node, f"{name}: {_MISSING[top]}", open_=True)
        elif isinstance(node, ast.Name):
            if top not in _SAME_NAMES and top not in ("Secret", "Volume", "Cron", "Period"):
                self._note(node, f"{name} has no counterpart", open_=True)
        elif top in _SAME_NAMES and isinstance(node.value, ast.Name):
            if node.value.id == "modal":
                self._replace(node.value, "cavvy")
        elif isinstance(node.value, ast.Name):
            self._note(node, f"modal.{name} has no counterpart", open_=True)

    def _modal_name(self, node: ast.expr) -> str:
        """Return what an expression means below modal, such as Image.debian_slim, or ""."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        if node.id in self.modules:
            return ".".join(parts)
        if node.id in self.names:
            return ".".join([self.names[node.id], *parts])
        return ""

    def _spell(self, node: ast.expr, name: str) -> str:
        """Return what a name of Cavvy is called where an expression uses modal."""
        while isinstance(node, ast.Attribute | ast.Call):
            node = node.value if isinstance(node, ast.Attribute) else node.func
        root = node.id if isinstance(node, ast.Name) else "modal"
        if root in self.names:
            return root if self.names[root] in _SAME_NAMES else f"cavvy.{name}"
        return f"{'cavvy' if root == 'modal' else root}.{name}"

    def _first(self, node: ast.Call) -> str:
        if node.args:
            return self._source(node.args[0])
        return self._read_keys(node).get("name", "")

    def _source(self, node: ast.expr) -> str:
        begin, end = self._span(node)
        return self._data[begin:end].decode()

    def _span(self, node: ast.expr | ast.stmt | ast.keyword | ast.alias) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self._starts[node.lineno - 1] + node.col_offset
        return begin, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _replace(self, node: ast.expr | ast.stmt | ast.keyword | ast.alias, text: str) -> None:
        self._edits.append(_Edit(*self._span(node), text))

    def _replace_attribute(self, node: ast.Attribute, text: str) -> None:
        _, end = self._span(node)
        self._edits.append(_Edit(end - len(node.attr.encode()), end, text))

    def _replace_call(self, node: ast.Call, function: ast.Attribute, text: str) -> None:
        """Replace the method and the arguments of a call."""
        _, end = self._span(function)
        _, last = self._span(node)
        self._edits.append(_Edit(end - len(function.attr.encode()), last, text))

    def _add_arguments(self, node: ast.Call, more: list[str]) -> None:
        _, end = self._span(node)
        inside = self._data[self._span(node.func)[1] : end - 1].decode()
        text = _without_comments(inside).rstrip()
        comma = "" if text.endswith(("(", ",")) else ", "
        self._edits.append(_Edit(end - 1, end - 1, comma + ", ".join(more)))

    def _remove_argument(self, node: ast.Call, each: ast.keyword) -> None:
        """Remove a keyword with the comma behind it."""
        begin, end = self._span(each)
        _, last = self._span(node)
        rest = self._data[end : last - 1].decode()
        comma = re.match(r"\s*,[ \t]*", rest)
        if comma:
            end += len(comma.group().encode())
        else:
            before = self._data[self._span(node.func)[1] : begin].decode()
            if found := re.search(r",\s*$", before):
                begin -= len(found.group().encode())
        line = self._starts[each.lineno - 1]
        rest_of_line = self._data[end : self._data.find(b"\n", end) + 1]
        if line <= begin and not self._data[line:begin].strip() and not rest_of_line.strip():
            begin, end = line, end + len(rest_of_line)  # the line has nothing else
        self._edits.append(_Edit(begin, end, ""))

    def _remove_line(self, node: ast.expr) -> None:
        """Remove a decorator with its line."""
        begin, end = self._span(node)
        while self._data[begin - 1 : begin] not in (b"\n", b"") and begin:
            begin -= 1
        while end < len(self._data) and self._data[end : end + 1] != b"\n":
            end += 1
        self._edits.append(_Edit(begin, min(end + 1, len(self._data)), ""))

    def _is_inside(self, node: ast.expr) -> bool:
        begin, end = self._span(node)
        return any(each.begin <= begin and end <= each.end for each in self._edits)

    def _note(
        self, node: ast.expr | ast.stmt | ast.keyword | ast.alias, text: str, *, open_: bool
    ) -> None:
        self._note_at(node.lineno, text, open_=open_)

    def _note_at(self, line: int, text: str, *, open_: bool) -> None:
        note = ScriptNote(line, text, open_)
        if note not in self.notes:
            self.notes.append(note)

    def _apply(self) -> str:
        """Apply the edits; those inside of another one are applied to its text if it keeps it."""
        kept: list[_Edit] = []
        for each in sorted(set(self._edits), key=lambda one: (one.begin, -one.end)):
            if kept and each.begin < kept[-1].end:
                outer = kept[-1]
                old = self._data[each.begin : each.end].decode()
                if old and outer.text.count(old) == 1:
                    kept[-1] = outer._replace(text=outer.text.replace(old, each.text))
                continue
            kept.append(each)
        data = self._data
        for each in reversed(kept):
            data = data[: each.begin] + each.text.encode() + data[each.end :]
        return data.decode()


def _without_comments(text: str) -> str:
    try:
        found = list(tokenize.generate_tokens(io.StringIO(f"{text})\n").readline))
    except (tokenize.TokenError, SyntaxError, IndentationError):
        return text
    words = [each.string for each in found if each.type not in (tokenize.COMMENT, tokenize.NL)]
    joined = "".join(word for word in words if word.strip())
    return joined.removesuffix(")")


def _say_wait(milliseconds: str) -> str:
    if milliseconds.isdigit():
        return f'wait="{milliseconds}ms"'
    return f"wait=({milliseconds}) / 1000"


def count_open(notes: Sequence[ScriptNote]) -> int:
    """Return how many places the user has to change."""
    return sum(each.open for each in notes)


def say_notes(path: str, notes: Sequence[ScriptNote]) -> Iterator[str]:
    """Yield a line for each note."""
    for each in notes:
        mark = "change this" if each.open else "note"
        yield f"{path}:{each.line}: {mark}: {each.text}"
