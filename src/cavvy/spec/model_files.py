"""Finds which engine serves the files of a model, and writes the service file. `cavvy
deploy` uses this module for files that a job has stored.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from cavvy.domain.values import Struct
from cavvy.spec.engines import ENGINES
from cavvy.spec.problems import ProblemNotes
from cavvy.spec.tree import MapNode, Node, ScalarNode, check_single, compose_all, to_value

MODEL_FOLDER = "model"  # folder of a model's files in the working folder
# keys of a job's file that also apply to the service; the other keys concern the work of the job
_KEPT = (
    "params",
    "resources",
    "image",
    "workdir",
    "setup",
    "env",
    "secrets",
    "volumes",
    "tags",
    "encrypt",
)
_WEIGHTS = (".safetensors", ".bin")  # weights of a Hugging Face folder
_SINGLE = {".gguf": "llama.cpp", ".onnx": "onnxruntime"}  # engines that serve one file


class ServedModel(Struct, frozen=True, kw_only=True):
    """A model that was found: its file or folder, and the engine that serves the model."""

    engine: str
    path: str  # relative to the folder of the files; "" for this folder itself


def find_models(files: Iterable[str]) -> Sequence[ServedModel]:
    """Return the models among the files with these relative paths; models in outer folders come
    first. A Hugging Face folder has config.json and weights; a model repository of Triton has a
    config.pbtxt in the folder of each model.
    """
    paths = sorted((PurePosixPath(each) for each in files), key=lambda each: len(each.parts))
    weights = {each.parent for each in paths if each.suffix in _WEIGHTS}
    found: dict[ServedModel, None] = {}
    for path in paths:
        model = _find_model(path, weights)
        if model is not None:
            found[model] = None
    repositories = {each.path for each in found if each.engine == "triton"}
    return [each for each in found if each.engine == "triton" or not _is_in(each, repositories)]


def write_service(job_text: str, name: str, model: ServedModel, inputs: Sequence[str] = ()) -> str:
    """Return the service file for a model, with the resources, image, setup, folder and variables
    of a job's file. `inputs` are the URLs or paths of the model's files. Raises SpecError if the
    text is not a table.
    """
    notes = ProblemNotes("the job's file", job_text)
    root = check_single(documents, notes) if (documents := compose_all(job_text, notes)) else None
    notes.check()
    found = {key.text: value for key, value in _list_entries(root)}
    kept = {key: _read(key, found[key]) for key in _KEPT if key in found}
    if inputs:
        kept["inputs"] = [{"source": each, "target": MODEL_FOLDER} for each in inputs]
    else:
        kept.setdefault("workdir", ".")
    service: dict[str, object] = {
        "engine": model.engine,
        "model": f"./{PurePosixPath(MODEL_FOLDER) / model.path}",
    }
    if ENGINES[model.engine].chats:
        service["models"] = name
    return json.dumps({"name": name, **kept, "service": service}, indent=2, ensure_ascii=False)


def _read(key: str, value: Node) -> object:
    """Return the value of a key of the job's file. The values of variables are strings, so that a
    version such as 3.10 is not read as a number."""
    if key not in ("env", "tags"):
        return to_value(value)
    return {
        name.text: each.text if isinstance(each, ScalarNode) else to_value(each)
        for name, each in _list_entries(value)
    }


def _list_entries(node: Node | None) -> Sequence[tuple[ScalarNode, Node]]:
    return node.entries if isinstance(node, MapNode) else ()


def _find_model(path: PurePosixPath, weights: set[PurePosixPath]) -> ServedModel | None:
    if path.suffix in _SINGLE:
        return ServedModel(engine=_SINGLE[path.suffix], path=str(path))
    if path.name == "config.json" and path.parent in weights:
        return ServedModel(engine="vllm", path=_name(path.parent))
    if path.name == "config.pbtxt" and len(path.parts) > 1:
        return ServedModel(engine="triton", path=_name(path.parent.parent))
    return None


def _is_in(model: ServedModel, folders: set[str]) -> bool:
    return any(not each or model.path.startswith(f"{each}/") for each in folders)


def _name(folder: PurePosixPath) -> str:
    return "" if folder == PurePosixPath() else str(folder)
