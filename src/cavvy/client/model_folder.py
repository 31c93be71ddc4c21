"""The working folder that the server makes of a job's newest checkpoint."""

from cavvy.client.client import ApiClient
from cavvy.client.paths import project_path, segment
from cavvy.client.wire import Answer, Ask


class ModelFolderAsk(Ask, frozen=True, kw_only=True):
    """`snapshots` are uploaded folders that are merged with the job's newest checkpoint. `below` is
    the folder in which the checkpoint is placed. If `below` is null, the uploaded folders are
    merged without the checkpoint.
    """

    snapshots: list[str]
    below: str | None


class ModelFileView(Answer, frozen=True, kw_only=True):
    """A file of the checkpoint; `path` is relative to the folder of the model."""

    path: str
    size: int


class ModelFolderView(Answer, frozen=True, kw_only=True):
    """The snapshot of the merged folder, and the files of the checkpoint in it."""

    snapshot: str
    files: list[ModelFileView]


def make_model_folder(
    client: ApiClient, project: str, job: str, snapshots: list[str], below: str | None
) -> ModelFolderView:
    """Create the working folder of the model. Raises ApiError `job-not-found`, `no-model`,
    `snapshot-missing`, `disk-full`.
    """
    path = f"{project_path(project)}/jobs/{segment('job', job)}/model"
    return client.ask(path, ModelFolderView, ModelFolderAsk(snapshots=snapshots, below=below))
