"""Selects the task inputs that SageMaker itself copies to the nodes as data channels.

An input becomes a channel under two conditions. The input's target must be the folder of a channel,
such as `/opt/ml/input/data/train`. The input's source must be a folder in an S3 bucket that is
known to be in the job's region:
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_S3DataSource.html. As on every
provider, the agent copies the inputs that are not channels.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Transfer
from cavvy.providers.base import GangSpec, Refused
from cavvy.providers.formats.services.sagemaker import CHANNELS, DataChannel, make_texts

_INPUTS = "/opt/ml/input/data"
_TARGET = re.compile(rf"{_INPUTS}/(?P<name>[A-Za-z0-9._-]{{1,64}})/?")
_MODES = {"File": False, "FastFile": True}  # whether objects are read only when they are opened


def list_channels(gang: GangSpec) -> Sequence[DataChannel]:
    """Return the data channels of a job, from the option `channels` and from the job's inputs.
    Raises Refused.
    """
    stream, named = _read_mode(gang), read_texts(gang.options, "channels")
    own = [DataChannel(name=name, uri=uri, stream=stream) for name, uri in named.items()]
    chosen = [
        DataChannel(name=_name(each), uri=each.source, stream=stream) for each in _choose(gang)
    ]
    if both := sorted({each.name for each in chosen} & named.keys()):
        raise Refused(
            f"resources.options.sagemaker.channels: an input has the target "
            f"{_INPUTS}/{both[0]} too; remove the channel or the input"
        )
    return own + chosen


def list_placed(gang: GangSpec) -> Sequence[str]:
    """Return the targets of the inputs that are channels."""
    return [each.target for each in _choose(gang)]


def list_variables(channels: Sequence[DataChannel], offer: Offer) -> Mapping[str, str]:
    """Return the environment variables that scripts for SageMaker read most often. SageMaker's
    training toolkit, the entry point of AWS's images, normally sets the variables, but Cavvy's
    command replaces the toolkit:
    https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
    """
    folders = {
        f"SM_CHANNEL_{re.sub('[^A-Z0-9]', '_', each.name.upper())}": f"{_INPUTS}/{each.name}"
        for each in channels
    }
    return {
        **folders,
        "SM_MODEL_DIR": "/opt/ml/model",
        "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
        "SM_NUM_GPUS": str(offer.accelerator_count),
    }


def read_texts(options: Mapping[str, Any], name: str) -> Mapping[str, str]:
    """Return the option `name` as a table with string values. Raises Refused."""
    found = options.get(name) or {}
    if not isinstance(found, Mapping):
        raise Refused(f"resources.options.sagemaker.{name} must be a table of names and values")
    return make_texts(found)


def _choose(gang: GangSpec) -> Sequence[Transfer]:
    fitting = [
        each
        for each in gang.inputs
        if _name(each)
        # The prefix of a folder ends with a slash; else it would select train2 for train too.
        and each.source.startswith("s3://")
        and each.source.endswith("/")
        and not each.stream  # the work expects a pipe
        and each.mount is None
        # SageMaker does not read buckets in other regions. The region is unknown if the server
        # cannot query it, and for buckets at endpoints other than Amazon's, which SageMaker cannot
        # reach.
        and each.region == gang.offer.region
    ]
    return fitting[: CHANNELS - len(read_texts(gang.options, "channels"))]


def _name(each: Transfer) -> str:
    """Return the name of the channel whose folder is the target of an input, or "" if the target is
    another path."""
    found = _TARGET.fullmatch(each.target)
    return "" if found is None or found["name"] in (".", "..") else found["name"]


def _read_mode(gang: GangSpec) -> bool:
    mode = str(gang.options.get("input_mode", "File"))
    if mode not in _MODES:
        raise Refused(
            f"resources.options.sagemaker.input_mode: {mode} is not one of {', '.join(_MODES)}"
        )
    return _MODES[mode]
