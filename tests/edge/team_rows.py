"""What the tests of who may see what know of a project's devices."""

from datetime import datetime

from tests.edge.rig import rows_of

from cavvy.capabilities.edge.nouns import EdgeDevice, EdgeSettings, EdgeSite, Rollout
from cavvy.capabilities.models.nouns import ModelVersion
from cavvy.store.sql import Store


async def add_rows(store: Store, project: str, now: datetime) -> str:
    """Add a device, which serves a model that a rollout brings."""
    name = f"model-of-{project}-mark"
    model = ModelVersion(
        project=project,
        name=f"{name}@1",
        snapshot="0" * 64,
        files=(),
        main="m.onnx",
        created_at=now,
    )
    await rows_of(store).models.put(model)
    device = EdgeDevice(project=project, name=name, site="s", key="0" * 64, enrolled_at=now)
    await rows_of(store).devices.put(device)
    await rows_of(store).sites.put(EdgeSite(project=project, name=name))
    variables = {"MARK": name}
    await rows_of(store).settings.put(
        EdgeSettings(project=project, name=f"site/{name}", variables=variables)
    )
    rollout = Rollout(
        project=project, name=f"{name}-1", model=name, to=1, wave_at=now, created_at=now
    )
    await rows_of(store).rollouts.put(rollout)
    return name
