"""The documents that agents read are defined once, and no field of the work goes unnoticed."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from tests.control.unit.test_control_reports import ATTEMPT, JOB, NODE

import cavvy
from cavvy.agent import documents
from cavvy.agent.config import BadConfig, ConfigFields, read_work
from cavvy.agent.documents import (
    PROTOCOL,
    BuildConfig,
    CheckConfig,
    CheckpointConfig,
    GitConfig,
    TransferConfig,
    TunnelConfig,
    TunnelPeerConfig,
    VolumeConfig,
    WorkConfig,
    WorkdirConfig,
)
from cavvy.control.agents import work as assignments
from cavvy.domain.tasks import ImageBuild, TaskSpec, Volume

SRC = Path(cavvy.__file__).parent
RECORDS = {name: kind for name, kind in vars(documents).items() if is_dataclass(kind)}
RECORDS["AgentConfig"] = documents.AgentConfigFile  # the agent's own class, with paths
WORK = WorkConfig(
    job="j",
    job_id="i",
    project="p",
    attempt=1,
    addresses=["10.0.0.1"],
    run="x",
    git=GitConfig(url="https://h/r"),
    workdir=WorkdirConfig(snapshot="0"),
    build=BuildConfig(path=".", args={"A": "1"}),
    check=CheckConfig(share=0.5),
    checkpoint=CheckpointConfig(path="c"),
    inputs=[TransferConfig(source="/a", target="b", mode="stream")],
    outputs=[TransferConfig(source="a", target="/b", every_s=2.5)],
    volumes=[VolumeConfig(kind="host", source="/d", path="d")],
    tunnel=TunnelConfig(prefix=30, peers=[TunnelPeerConfig(key="k", endpoint="e", address="a")]),
)
# The fields that came with the first version of their record. Never add to them: older agents do
# not know a new field, so it needs a mark.
FIRST = {
    WorkConfig: "job job_id project attempt nodes addresses master_port accelerators_per_node run "
    "setup setup_key image env secrets params workdir git checkpoint inputs outputs grace_s idle_s "
    "log_limit_mib",
    WorkdirConfig: "snapshot",
    GitConfig: "url commit",
    CheckpointConfig: "path storage every_s",
    TransferConfig: "",
    BuildConfig: "path dockerfile target args",
    CheckConfig: "share link_mbps kind memory_mib bandwidth_gbs",
    VolumeConfig: "kind source path read_only options",
    TunnelConfig: "prefix peers",
    TunnelPeerConfig: "key endpoint address missing",
}
# The marked fields that agents of these versions know. A new mark needs a newer version.
KNOWN = {
    2: {"sync"},
    3: {"source", "target", "mode", "every_s", "image_login", "build", "check", "volumes"},
}


def test_older_agents_ignore_no_field_silently() -> None:
    newest = 0
    for record, first in FIRST.items():
        for each in fields(record):
            mark, name = each.metadata, f"{record.__name__}.{each.name}"
            assert (each.name in first.split()) != ("since" in mark or "harmless" in mark), (
                f"older agents would silently ignore {name}: mark it with `since` or `harmless`"
            )
            version = mark.get("since", 0)
            newest = max(newest, version)
            assert not version or version > max(KNOWN) or each.name in KNOWN[version], (
                f"agents of version {version} are in use and do not know {name}: raise PROTOCOL"
            )
    assert newest == PROTOCOL


def test_every_record_of_the_work_is_checked() -> None:
    assert add_structs(WorkConfig, set()) == set(FIRST)


class FieldReads(ast.NodeVisitor):
    """Finds which fields of the records a module reads. The types of names come from annotations,
    and from assignments and loops over typed values.
    """

    def __init__(self) -> None:
        self.read: set[tuple[str, str]] = set()
        self._names: dict[str, str] = {}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if node.name in RECORDS:
            self._names["self"] = node.name
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        self._bind(node.arg, ast.unparse(node.annotation) if node.annotation else "")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._bind(ast.unparse(node.target), ast.unparse(node.annotation))
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._follow(node.targets[0], node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._follow(node.target, node.iter)
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.DictComp) -> None:
        for each in node.generators:
            self._follow(each.target, each.iter)
        self.generic_visit(node)

    visit_GeneratorExp = visit_DictComp = visit_SetComp = visit_ListComp

    def visit_Attribute(self, node: ast.Attribute) -> None:
        kind = self._kind(node.value)
        if kind and isinstance(node.ctx, ast.Load):
            self.read.add((kind, node.attr))
        self.generic_visit(node)

    def _follow(self, target: ast.expr, value: ast.expr) -> None:
        """Give the names of the target the types of the value's parts, such as of `a, b`."""
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "enumerate":
            value = value.args[0]
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        values = value.elts if isinstance(value, ast.Tuple) else [value] * len(names)
        for name, part in zip(names, values, strict=False):
            self._bind(ast.unparse(name), self._kind(part))

    def _bind(self, name: str, annotation: str) -> None:
        found = re.search(rf"\b({'|'.join(RECORDS)})\b", annotation)
        if found:
            self._names[name] = found[1]

    def _kind(self, value: ast.expr) -> str:
        if isinstance(value, ast.Subscript):
            return self._kind(value.value)
        if isinstance(value, ast.Attribute) and (owner := self._kind(value.value)):
            annotation = RECORDS[owner].__annotations__.get(value.attr, "")
            found = re.search(rf"\b({'|'.join(RECORDS)})\b", annotation)
            return found[1] if found else ""
        return self._names.get(ast.unparse(value), "")


def list_reads() -> Iterator[tuple[str, str]]:
    for path in (SRC / "agent").rglob("*.py"):
        reads, module = FieldReads(), ast.parse(path.read_text())
        for _ in range(2):  # names may be used above their annotations
            reads.visit(module)
        yield from reads.read


def test_the_agent_reads_every_field_of_its_documents() -> None:
    read = set(list_reads())
    unread = {
        f"{name}.{each.name}"
        for name, record in RECORDS.items()
        for each in fields(record)
        if name != "AgentConfigFile" and (name, each.name) not in read
    }
    assert not unread, "the agent ignores these fields"


def test_providers_write_only_fields_that_agents_read() -> None:
    """Programs on nodes have only the standard library, so they build configurations as objects."""
    known = {each.name for each in fields(documents.AgentConfigFile)}
    written = 0
    texts = {path: path.read_text() for path in (SRC / "providers").rglob("*.py")}
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)) if '"protocol"' in text else ():
            if not isinstance(node, ast.Dict):
                continue
            keys = {each.value for each in node.keys if isinstance(each, ast.Constant)}
            if {"protocol", "lease_s"} <= keys:
                written += 1
                assert keys <= known, path
    assert written >= 3


# the sections that only capabilities read, which may be taken out
OF_CAPABILITIES = {"EarlyStop", "EdgeStep", "SweepSearch"}
NO_READERS = ("spec", "sdk", "capabilities/importers", "task_files")  # they make and describe tasks


def test_someone_reads_every_field_of_a_task() -> None:
    readers = [
        each for each in SRC.rglob("*.py") if not str(each.relative_to(SRC)).startswith(NO_READERS)
    ]
    text = "\n".join(each.read_text() for each in readers)
    read = set(re.findall(r"\b(?:task|request|spec)\.(\w+)", text)) | set(assignments._AS_STATED)
    unread = set(TaskSpec.__struct_fields__) - read
    assert not unread, "no one reads these fields"
    read = set(re.findall(r"\.(\w+)\b(?!\()", text))
    sections = add_structs(TaskSpec, set())
    assert len(sections) > 30
    own = "\n".join(each.read_text() for each in (SRC / "capabilities").rglob("*.py"))
    taken = {name for name in OF_CAPABILITIES if name not in own}
    unread = {
        f"{kind.__name__}.{name}"
        for kind in sections
        if kind.__name__ not in taken
        for name in get_type_hints(kind)
        if name not in read
    }
    assert not unread, "no one reads these fields of sections"


def add_structs(kind: Any, found: set[type]) -> set[type]:
    """Add the structs and data classes in an annotation, and those in their fields."""
    for part in get_args(kind):
        add_structs(part, found)
    is_record = isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, msgspec.Struct))
    if is_record and kind not in found:
        found.add(kind)
        for inner in get_type_hints(kind).values():
            add_structs(inner, found)
    return found


def test_every_field_of_the_work_is_set() -> None:
    text = "\n".join(each.read_text() for each in (SRC / "control" / "agents").glob("*.py"))
    named = set(re.findall(r"\b(\w+)=", text)) | set(assignments._AS_STATED)
    converted = {BuildConfig: ImageBuild, VolumeConfig: Volume}
    for record, source in converted.items():
        assert {each.name for each in fields(record)} <= {each.name for each in fields(source)}
    unset = {
        f"{record.__name__}.{each.name}"
        for record in FIRST.keys() - converted.keys()
        for each in fields(record)
        if each.name not in named
    }
    assert unset == {"WorkConfig.log_limit_mib"}, "the API sets only this one"


def test_fields_as_stated_keep_their_values() -> None:
    assert set(assignments._AS_STATED) >= {"run", "setup", "setup_uses", "volumes"}
    task = replace_task(setup="make", setup_uses=("a",), params={"lr": 1e-5, "on": True, "n": "x"})
    work = assignments.make_assignment(
        msgspec.structs.replace(JOB, task=task), ATTEMPT, [NODE], accelerators=0, secrets={}
    )
    assert (work.setup, work.setup_uses) == ("make", ["a"])
    assert work.params == {"lr": "1e-05", "on": "true", "n": "x"}
    assert work.grace_s == timedelta(seconds=10).total_seconds()


def replace_task(**changes: Any) -> TaskSpec:
    return msgspec.structs.replace(JOB.task, **changes)


def list_bare(value: Any) -> Any:
    """The encoded value without the fields that have their defaults."""
    if isinstance(value, list):
        return [list_bare(each) for each in value]
    if type(value) not in FIRST:
        return value
    found = {each: getattr(value, each.name) for each in fields(value)}
    return {
        each.name: list_bare(inner)
        for each, inner in found.items()
        if inner != each.default
        and not (each.default_factory is not MISSING and inner == each.default_factory())
    }


def test_what_a_server_sends_is_what_an_agent_reads() -> None:
    whole = msgspec.json.decode(msgspec.json.encode(WORK))
    assert read_work(ConfigFields(whole, "work")) == WORK
    assert read_work(ConfigFields(list_bare(WORK), "work")) == WORK
    assert read_work(ConfigFields(list_bare(replace(WORK, addresses=[])), "work")).addresses
    with pytest.raises(BadConfig, match=r"work.build: `path` must be text"):
        read_work(ConfigFields({**whole, "build": {}}, "work"))


NODE_PROGRAM = """
import json, sys
package = type(sys)("cavvy_agent")
package.__path__ = [sys.argv[1]]
sys.modules["cavvy_agent"] = package
from cavvy_agent.config import ConfigFields, read_work
work = read_work(ConfigFields(json.load(sys.stdin), "work"))
slow = {"dataclasses", "inspect", "typing"} & set(sys.modules)
print(json.dumps([work, sorted(slow), work.streams, work.mirrored], default=vars))
"""


def test_a_node_reads_the_same_without_data_classes() -> None:
    given = json.dumps(list_bare(WORK))
    command = [sys.executable, "-I", "-S", "-c", NODE_PROGRAM, SRC / "agent"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    work, slow, streams, mirrored = json.loads(done.stdout)
    assert (slow, streams, mirrored) == ([], [0], {"0": 2.5})
    assert work == msgspec.to_builtins(WORK)
