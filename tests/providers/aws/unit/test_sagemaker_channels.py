"""Inputs whose target is the folder of a data channel: SageMaker copies them, and the agent finds
them in place.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.records import make_gang_spec, make_offer

from cavvy.agent.config import AgentConfig, ConfigFields, read_work
from cavvy.agent.data.paths import find_folders, find_output
from cavvy.agent.work.prepare import bring_inputs
from cavvy.domain.tasks import Transfer
from cavvy.domain.values import replace
from cavvy.providers.base import AgentEndpoint, GangSpec, Refused
from cavvy.providers.contract.memory_cloud import make_node_endpoint
from cavvy.providers.formats.services.sagemaker import CHANNELS, DataChannel
from cavvy.providers.managed.provider import make_container_script
from cavvy.providers.sagemaker.jobs import SageMakerService, list_channels, list_placed

ROOT = "/opt/ml/input/data"
OFFER = make_offer("sagemaker/us-east-1/ml.m5.large", 1, vcpus=2, memory_mib=8192)
TRAIN = Transfer(source="s3://bucket/train/", target=f"{ROOT}/train", region=OFFER.region)


def gang(*inputs: Transfer, **options: Any) -> GangSpec:
    return make_gang_spec(
        OFFER,
        name="cv-a-b-0",
        installation="a",
        agent_endpoint=AgentEndpoint(address="https://192.0.2.1", token="t"),
        inputs=inputs,
        options=options,
    )


def test_an_input_at_the_folder_of_a_channel_is_a_channel() -> None:
    spec = gang(TRAIN, channels={"weights": "s3://bucket/weights"})
    assert list_channels(spec) == [
        DataChannel(name="weights", uri="s3://bucket/weights"),
        DataChannel(name="train", uri="s3://bucket/train/"),
    ]
    assert list_placed(spec) == [f"{ROOT}/train"]


@pytest.mark.parametrize(
    "changes",
    [
        {"target": "data/train"},
        {"target": f"{ROOT}/train/images"},
        {"target": f"{ROOT}/.."},
        {"source": "gs://bucket/train/"},
        # the prefix of SageMaker would select s3://bucket/train2 too, and may be one object
        {"source": "s3://bucket/train"},
        {"stream": True},
        {"region": "eu-west-1"},
        {"region": None},  # unknown
    ],
)
def test_the_agent_copies_all_other_inputs(changes: dict[str, Any]) -> None:
    spec = gang(replace(TRAIN, **changes))
    assert list_channels(spec) == []
    assert list_placed(spec) == []


def test_the_agent_copies_what_exceeds_the_number_of_channels() -> None:
    inputs = [replace(TRAIN, target=f"{ROOT}/train-{number}") for number in range(CHANNELS + 2)]
    spec = gang(*inputs, channels={"weights": "s3://bucket/weights"})
    assert len(list_channels(spec)) == CHANNELS
    assert list_placed(spec) == [each.target for each in inputs[: CHANNELS - 1]]


def test_fast_file_mode_is_an_option() -> None:
    (channel,) = list_channels(gang(TRAIN, input_mode="FastFile"))
    assert channel.stream
    with pytest.raises(Refused, match="input_mode: Pipe is not one of File, FastFile"):
        list_channels(gang(TRAIN, input_mode="Pipe"))


def test_a_channel_has_one_source() -> None:
    with pytest.raises(Refused, match="remove the channel or the input"):
        list_channels(gang(TRAIN, channels={"train": "s3://bucket/other"}))


def test_the_agent_is_told_which_inputs_are_in_place() -> None:
    published: list[bytes] = []

    def publish(content: bytes) -> str:
        published.append(content)
        return "0" * 64

    endpoint = replace(make_node_endpoint(), publish=publish)
    make_container_script(gang(TRAIN), endpoint, SageMakerService.traits, "S", (), ["/opt/x"])
    assert b'"placed": ["/opt/x"]' in b"".join(published)


def test_the_agent_leaves_an_input_that_is_in_place(tmp_path: Path) -> None:
    """A link in an output may lead to it, as to any other input."""
    there = tmp_path / "channel"
    there.mkdir()
    (there / "data").write_text("data")
    fields = {"gang": "g", "rank": 0, "address": "http://a", "token": "t", "placed": [str(there)]}
    config = AgentConfig(ConfigFields({**fields, "home": f"{tmp_path}/home"}, "configuration"))
    os.makedirs(config.folder)
    transfer = {"source": "s3://bucket/train/", "target": str(there)}
    told = {"job": "j", "job_id": "1", "project": "p", "attempt": 1, "run": "x"}
    back = {"source": str(there), "target": "s3://bucket/back/"}
    work = read_work(ConfigFields({**told, "inputs": [transfer], "outputs": [back]}, "work"))
    bring_inputs(config, work, -1)
    assert not there.is_symlink()
    assert json.dumps(os.listdir(there)) == '["data"]'
    assert find_output(config, work, 0)[0] == str(there)
    Path(config.folder, "link").symlink_to(there / "data")
    folders = find_folders(config, work)
    with os.fdopen(folders.open_file(f"{config.folder}/link")) as file:
        assert file.read() == "data"
