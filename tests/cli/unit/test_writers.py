"""Each place of the commands and of the SDK that writes a file, and by which door."""

import ast
from collections.abc import Iterator
from pathlib import Path

import cavvy

SRC = Path(cavvy.__file__).parent
ROOMS = ("cli", "sdk", "capabilities")
# what runs on devices, nodes and servers, in folders of their own, and programs for users to change
ELSEWHERE = (
    *("edge/on_device", "functions/on_node", "importers/slurm/node_tools.py", "templates"),
    *("importers/slurm/node_queries.py", "sandboxes/on_node"),
    *("serving/decide", "serving/gateway", "serving/server"),
    *("language_models/file_store.py", "language_models/response_holders.py"),
)
# methods and functions that write to a path of this machine; `Landing` and `new_file` have others
_WRITES = {"write_text", "write_bytes", "symlink_to", "link_to", "hardlink_to"}
_WRITES |= {"copy", "copy2", "copyfile", "copytree", "move", "extractall", "unpack_archive"}
_WRITES |= {"savefig", "write_table", "rename", "ZipFile", "write_image"}
_MODULES = {"os", "shutil", "tarfile", "zipfile"}
# Names that are doors themselves: `view/output_file.py`.
_DOORS = {"write_text", "open_output"}

OWN = "a temporary folder that this command has made"
TUNED = "the program that is tuned writes; its files go to a temporary folder"
STATE = "Cavvy's own folder, which only the user can write to"
CHECKED = "a library writes; `check_output` stands before"
PIPE = "to the input of a program in a sandbox, which is no file of this machine"
KNOWN = {
    "cli/view/output_file.py:open_output": "the door for files that the user names",
    "cli/view/new_file.py:new_file": "the door for files that must be complete",
    "capabilities/choose/report.py:_print": OWN,
    "capabilities/simulation/view.py:_write_parquet": CHECKED,
    "capabilities/simulation/traces/plots.py:save_figure": CHECKED,
    "capabilities/simulation/traces/plots.py:draw_inline": "to memory",
    "sdk/examples.py:Audio.encode": "to memory",
    "sdk/examples.py:_encode_picture": "to memory",
    "cli/view/statement.py:write_parquet": CHECKED,
    "capabilities/functions/jobs.py:keep_file": STATE,
    "capabilities/sandboxes/hosts.py:_keep": STATE,
    "capabilities/sandboxes/trees.py:keep_snapshot": STATE,
    "capabilities/sandboxes/command.py:_send_input": PIPE,
    "capabilities/sandboxes/sandbox.py:_FileCall._send": PIPE,
    "cli/image.py:_build": OWN,
    "capabilities/models/version_files.py:_copy": OWN,
    "capabilities/models/command.py:_convert": OWN,
    "capabilities/models/conversion.py:convert_confined": OWN,
    "capabilities/models/conversion.py:_take": OWN,
    "capabilities/models/wheels.py:collect_wheels": OWN,
    "capabilities/models/model_keys.py:make_key": "a new file that the user names, over no other",
    "capabilities/estimates/kernel_bench.py:measure_job": OWN,
    "cli/reach/sshd.py:host_key": STATE,
    "cli/setup.py:_Setup._store_key": STATE,
    "cli/setup.py:_Setup.undo": STATE,
    "capabilities/tuning/probe/kept_files.py:KeptFiles._copy.call": TUNED,
    "capabilities/tuning/probe/kept_files.py:KeptFiles._rename.call": TUNED,
    "capabilities/tuning/probe/modes.py:WindowModes._list_patches.move_as_told": "it moves tensors",
    "capabilities/tuning/session.py:TuningSession._environment": OWN,
    "capabilities/tuning/session.py:TuningSession._start": OWN,
    "capabilities/runners/gitlab.py:_end_build": "the folder of the build, by the runner",
}


def find_writers() -> Iterator[str]:
    for room in ROOMS:
        for path in sorted((SRC / room).rglob("*.py")):
            if any(path.is_relative_to(SRC / "capabilities" / each) for each in ELSEWHERE):
                continue
            tree = ast.parse(path.read_text())
            for name, function in list_functions(tree, ""):
                if any(map(is_writer, walk_own(function))):
                    yield f"{path.relative_to(SRC)}:{name}"


def list_functions(tree: ast.AST, within: str) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{within}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, node
            yield from list_functions(node, f"{name}.")
        else:
            yield from list_functions(node, within)


def walk_own(function: ast.AST) -> Iterator[ast.AST]:
    """Walk a function without those that stand in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
            yield from walk_own(node)


def is_writer(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    name = getattr(called, "attr", getattr(called, "id", ""))
    if name in ("open", "open_file"):
        return opens_to_write(node)
    if isinstance(called, ast.Attribute):
        owner = called.value.id if isinstance(called.value, ast.Name) else ""
        is_method = name in ("copy", "rename", "move") and owner not in _MODULES
        return name in _WRITES and not (is_method and name != "rename")
    return name in _WRITES - _DOORS - {"write_table", "copy"}


def opens_to_write(node: ast.Call) -> bool:
    given = [*node.args, *(each.value for each in node.keywords)]
    texts = [each.value for each in given if isinstance(each, ast.Constant)]
    modes = [each for each in texts if isinstance(each, str) and set(each) <= set("rwaxbt+")]
    flags = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return any(set("wax+") & set(each) for each in modes) or not flags.isdisjoint(
        {"O_WRONLY", "O_RDWR", "O_CREAT"}
    )


def test_each_place_that_writes_a_file_goes_through_a_door() -> None:
    """A new one uses `view/output_file.py`, `view/new_file.py` or `client/landing.py`, or is named
    above with the reason why no other person chooses where it writes."""
    found = set(find_writers())
    assert sorted(found - KNOWN.keys()) == [], "these write without a door"
    gone = {each for each in KNOWN.keys() - found if (SRC / each.partition(":")[0]).exists()}
    assert sorted(gone) == []
