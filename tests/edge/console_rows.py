"""What devices have on the console: see `tests/console/system/test_console_matrix.py`."""

from collections.abc import Mapping
from datetime import UTC, datetime

from tests.edge.rig import rows_of

from cavvy.capabilities.edge.nouns import DeviceReport, EdgeDevice, ModelReport, Rollout
from cavvy.capabilities.models.nouns import ModelFile, ModelVersion
from cavvy.store.sql import Store

_MODEL = "/models/vision/zebra-net"
# An address for each page, and for each action its address and the fields of its form.
PAGES = {"/devices": "/devices", "/devices/{project}/{name}": "/devices/vision/zebra-press"}
CHANGES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "/devices": ("/devices", {"do": "retire", "device": "vision/zebra-press"}),
    "/models/{project}/{name}/promote": (f"{_MODEL}/promote", {"label": "x", "number": "1"}),
    "/models/{project}/{name}/labels/{label}/remove": (f"{_MODEL}/labels/zebra-label/remove", {}),
    "/devices/{project}/rollouts/{name}/halt": ("/devices/vision/rollouts/zebra-net-1/halt", {}),
}
OF_PROJECT: set[str] = set()  # pages whose address names a project as a field
DATA: set[str] = set()  # of charts


async def fill(store: Store) -> None:
    """Write a device, a model with a label and a rollout."""
    now = datetime.now(UTC)
    report = DeviceReport(at=now, models=(ModelReport(name="zebra-net", serving=1),), free_mib=900)
    device = EdgeDevice(
        project="vision",
        name="zebra-press",
        site="lyon",
        key="0" * 64,
        enrolled_at=now,
        report=report,
    )
    file = ModelFile(path="zebra.onnx", sha256="0" * 64, size=1 << 20)
    version = ModelVersion(
        project="vision",
        name="zebra-net@1",
        snapshot="0" * 64,
        files=(file,),
        main="zebra.onnx",
        created_at=now,
        labels={"zebra-label": 1},
    )
    rollout = Rollout(
        project="vision", name="zebra-net-1", model="zebra-net", to=1, wave_at=now, created_at=now
    )
    await rows_of(store).devices.put(device)
    await rows_of(store).models.put(version)
    await rows_of(store).rollouts.put(rollout)
