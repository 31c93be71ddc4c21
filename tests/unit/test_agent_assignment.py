"""The work as the control plane defines it and as nodes read it are one definition."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from cavvy.agent import config
from cavvy.agent.config import ConfigFields, WorkConfig
from cavvy.domain.messages import (
    Assignment,
    CheckpointWork,
    CheckWork,
    GitWork,
    TransferWork,
    TunnelPeer,
    TunnelWork,
    WorkdirWork,
)
from cavvy.domain.tasks import ImageBuild, Volume, VolumeKind

READERS = {
    Assignment: "WorkConfig",
    CheckpointWork: "CheckpointConfig",
    CheckWork: "CheckConfig",
    GitWork: "GitConfig",
    TransferWork: "TransferConfig",
    TunnelPeer: "TunnelPeerConfig",
    TunnelWork: "TunnelConfig",
    WorkdirWork: "WorkdirConfig",
    ImageBuild: "BuildConfig",
    Volume: "VolumeConfig",
}
OF_PROVIDERS = {"size_gib", "type", "keep"}  # of a volume, which is made before the node starts


def name_of(kind: Any) -> str:
    """The annotation by which an agent reads what is encoded from `kind`."""
    origin, inner = get_origin(kind), get_args(kind)
    if NoneType in inner:
        [some] = [each for each in inner if each is not NoneType]
        return f"{name_of(some)} | None"
    if origin is Sequence:
        return f"list[{name_of(inner[0])}]"
    if origin in (dict, Mapping):
        return "dict[str, str]"
    if is_dataclass(kind):
        return READERS[kind]  # type: ignore[index]  # a class, not an instance
    return "str" if issubclass(kind, StrEnum) else str(kind.__name__)


def test_a_node_reads_every_field_of_the_work_with_its_type() -> None:
    for definition, reader in READERS.items():
        hints = get_type_hints(definition)
        sent = {
            each.name: name_of(hints[each.name])
            for each in fields(definition)
            if each.name not in OF_PROVIDERS
        }
        assert getattr(config, reader).__annotations__ == sent, reader


def test_the_defaults_of_a_node_are_those_of_the_control_plane() -> None:
    work = Assignment(
        job="j",
        job_id="i",
        project="p",
        attempt=1,
        nodes=1,
        addresses=["10.0.0.1"],
        master_port=29500,
        accelerators_per_node=0,
        run="x",
        git=GitWork(url="https://h/r"),
        build=ImageBuild(path="."),
        check=CheckWork(share=0.5),
        checkpoint=CheckpointWork(path="c"),
        inputs=[TransferWork(source="/a", target="b")],
        volumes=[Volume(kind=VolumeKind.HOST, source="/d", path="d")],
    )
    whole = msgspec.json.decode(msgspec.json.encode(work))

    def bare(value: Any) -> Any:
        """Without the fields that have a default."""
        if isinstance(value, tuple | list):
            return [bare(each) for each in value]
        if not is_dataclass(value):
            return value
        left = {each.name: (each, getattr(value, each.name)) for each in fields(value)}
        return {name: bare(found) for name, (each, found) in left.items() if found != each.default}

    def read(raw: object) -> object:
        return plain(WorkConfig(ConfigFields(raw, "work")))

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        if isinstance(value, config.ConfigRecord):
            return {name: plain(each) for name, each in vars(value).items()}
        return value

    assert read(bare(work)) == read(whole)
