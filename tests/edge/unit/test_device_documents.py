"""What devices send is what servers read, and the other way round."""

import dataclasses
import json
from typing import Any

import msgspec
import pytest

from cavvy.capabilities.edge.nouns import ModelReport
from cavvy.capabilities.edge.on_device import documents
from cavvy.capabilities.edge.on_device.documents import (
    CheckedIn,
    CheckIn,
    CloudService,
    GivenTask,
    ModelTold,
    PathsTold,
    PeersTold,
    Samples,
    SumsTold,
    WantedVersion,
    read_answer,
    write,
)

ALL = [
    each
    for each in vars(documents).values()
    if isinstance(each, type) and dataclasses.is_dataclass(each)
]


def test_the_server_keeps_each_figure_that_a_device_tells_of_a_model() -> None:
    """The server takes over what both call by one name."""
    told = {each.name for each in dataclasses.fields(ModelTold)}
    assert told
    assert told <= set(ModelReport.__struct_fields__)


def test_a_report_arrives_as_it_was_made() -> None:
    sums = SumsTold(requests=3, errors=1, timed=2, logs=-5.25, squares=14.5)
    paths = PathsTold(device={3: 2}, lost=1)
    models = (ModelTold(name="m", serving=1, sums=sums, paths=paths), ModelTold(name="n"))
    made = CheckIn(models=models, free_mib=9, clock=2.5, settings="")
    sent = json.dumps(write(made))
    assert msgspec.json.decode(sent, type=CheckIn) == made
    assert "null" not in sent, "older servers do not know what may be null"
    assert json.loads(sent)["models"][1].keys().isdisjoint({"sums", "paths"})


def test_an_answer_arrives_as_it_was_made() -> None:
    wanted = WantedVersion(name="m", number=2, window=(2, 3), site_window=(), wait=True)
    made = CheckedIn(
        now=3.5,
        every_s=60.0,
        models=[wanted],
        clouds=[CloudService(model="m", url="https://h/x", key="k", below=0.5)],
        program=WantedVersion(name="p", number=1, window=(), site_window=()),
        settings="r",
        peers=PeersTold(key="k", at={"m": ["10.0.0.1:1"]}),
        tasks=[GivenTask(id="a1", command=["ls"])],
    )
    read = read_answer(msgspec.json.encode(made), "p")
    assert dataclasses.replace(read, every_s=60.0) == made


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_only_what_was_there_from_the_beginning_is_needed(kind: type) -> None:
    """A field that is added later has a default, because the other side may be older."""
    fields = dataclasses.fields(kind)
    needed = {each.name for each in fields if _has_no_default(each)}
    first = {
        "Enrolment": {"key"},
        "Proof": {"project", "device", "nonce", "signature"},
        "ModelTold": {"name"},
        "TaskOutput": {"output", "exit_code"},
        "SampleTold": {"number", "model"},
        "Samples": {"samples"},
        "Enrolled": {"project", "device", "site", "allow_exec"},
        "Nonce": {"nonce"},
        "DeviceToken": {"token", "valid_s"},
        "WantedVersion": {"name", "number"},
        "CloudService": {"model", "url"},
        "GivenTask": {"id", "command"},
        "CheckedIn": {"models"},
    }
    assert needed == first.get(kind.__name__, set())


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


@pytest.mark.parametrize(
    "sent",
    [
        {"free_mib": -1},
        {"models": [{"name": "m"}] * 65},
        {"models": [{"name": "m" * 64}]},
        {"models": [{"name": "m", "paths": {"device": {"84": 1}}}]},
        {"clock": 1e300},
    ],
)
def test_servers_check_the_limits(sent: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(sent, CheckIn, strict=False)
    assert msgspec.convert({"samples": []}, Samples).samples == []
