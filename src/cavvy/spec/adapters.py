"""LoRA adapters of an engine: where their files come from, and the options that let the engine
serve them.

A source is a path that the replica has, `hf://ORGANIZATION/NAME`, which the engine loads from
Hugging Face when the adapter is first needed, or the URL of a bucket. What a bucket or a revision
on Hugging Face (`hf://ORGANIZATION/NAME@REVISION`) holds is an input of the task, in a folder that
the adapter's name determines, because engines cannot load these sources themselves.
"""

import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from cavvy.domain.values import Struct
from cavvy.spec.problems import listed

_FOLDER = ".cavvy/adapters"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_HUB = re.compile(r"hf://([A-Za-z0-9._-]+/[A-Za-z0-9._-]+)(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?")
_BUCKETS = ("s3://", "gs://", "az://")
_SLOTS = 8  # of a replica, if the options do not state them; the default of SGLang
_RANK = 64  # SGLang needs the highest rank; vLLM's default is 16


class LoraOptions(Struct, frozen=True, kw_only=True):
    """An engine's options for adapters. `slots` state how many a replica can hold, the first one
    that is given. `listed` is the option that names all adapters, which are loaded at the start;
    the other engines load adapters on demand. Cavvy sets the options `own`."""

    slots: tuple[str, ...] = ()
    own: tuple[str, ...]
    listed: str = ""
    named: bool = False  # whether `listed` takes names, too
    files: bool = False  # whether an adapter is a file
    environment: str = ""
    fixed: Mapping[str, str] = {}


# sources: docs/features/lora.md of vLLM; docs.sglang.io/docs/advanced_features/lora;
# text-generation-inference/conceptual/lora; tools/server/README.md of llama.cpp; read 2026-11
LORA_OPTIONS: Mapping[str, LoraOptions] = {
    "vllm": LoraOptions(
        slots=("max-cpu-loras", "max-loras"),
        own=("enable-lora", "lora-modules"),
        environment="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
        fixed={"enable-lora": "true"},
    ),
    "sglang": LoraOptions(
        slots=("max-loaded-loras", "max-loras-per-batch"),
        own=("enable-lora", "lora-paths"),
        fixed={
            "enable-lora": "true",
            "max-lora-rank": str(_RANK),
            "lora-target-modules": "all",
        },
    ),
    "tgi": LoraOptions(own=("lora-adapters",), listed="lora-adapters", named=True),
    "llama.cpp": LoraOptions(
        own=("lora", "lora-init-without-apply"),
        listed="lora",
        files=True,
        fixed={"lora-init-without-apply": "true"},
    ),
}


class LoraAdapter(Struct, frozen=True):
    """An adapter. `path` is what the engine gets as its source. It is copied from `url`, if there
    is one, before the engine starts."""

    name: str
    path: str
    url: str = ""


def is_adapter_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name))


def read_adapter(name: str, source: str, engine: str) -> LoraAdapter:
    """Return the adapter. Raises ValueError, which says what is wrong with its source."""
    options = LORA_OPTIONS[engine]
    folder = f"{_FOLDER}/{quote(name, safe='')}"
    source = source.strip()
    if re.search(r"[\s,]", source) or not source:
        raise ValueError("a source is a path or a URL without spaces and commas")
    if source.startswith("hf://"):
        found = _HUB.fullmatch(source)
        if found is None:
            raise ValueError("write hf://ORGANIZATION/NAME, perhaps with @REVISION")
        if options.files:
            raise ValueError(f"{engine} loads adapters from files; write the path of a .gguf file")
        if found[2]:
            return LoraAdapter(name, folder, f"hf://{found[1]}@{quote(found[2], safe='')}/")
        return LoraAdapter(name, found[1])
    if source.startswith(_BUCKETS):
        file = source.rpartition("/")[2]
        if options.files and not file:
            raise ValueError(f"{engine} loads adapters from files; write the URL of a .gguf file")
        return LoraAdapter(name, f"{folder}/{file}" if options.files else folder, source)
    if "://" in source:
        raise ValueError(f"write a path, hf://ORGANIZATION/NAME, or a URL with {listed(_BUCKETS)}")
    return LoraAdapter(name, source)


def count_slots(engine: str, options: Mapping[str, str], adapters: int) -> int:
    """Return how many adapters a replica holds at the same time. Raises ValueError."""
    names = LORA_OPTIONS[engine].slots
    for name in names:
        if (text := options.get(name)) is not None:
            if not (text.isascii() and text.isdecimal() and 0 < int(text) < 10_000):
                raise ValueError(f"the option {name} is not a number of adapters")
            return int(text)
    return max(1, min(_SLOTS, adapters)) if names else adapters


def write_lora_options(
    engine: str, adapters: Sequence[LoraAdapter], options: Mapping[str, str]
) -> dict[str, str]:
    """Return the options that let the engine serve the adapters, and those of the file. Raises
    ValueError."""
    lora = LORA_OPTIONS[engine]
    found = dict(lora.fixed)
    slots = count_slots(engine, options, len(adapters))
    if lora.listed:
        found[lora.listed] = ",".join(
            f"{each.name}={each.path}" if lora.named else each.path for each in adapters
        )
    elif not any(name in options for name in lora.slots):
        found[lora.slots[-1]] = str(slots)
    return {**found, **options}


def set_environment(engine: str, run: str) -> str:
    """Return the engine's command with the variables that it needs for adapters."""
    environment = LORA_OPTIONS[engine].environment
    if not environment:
        return run
    return f"exec env {environment} {run.removeprefix('exec ').removeprefix('env ')}"
