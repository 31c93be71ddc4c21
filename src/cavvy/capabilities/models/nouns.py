"""Published models, and the signed lists that name their versions."""

from collections.abc import Iterable, Mapping
from datetime import datetime

from cavvy.domain.values import Struct, field

MOST_LABELS = 16  # of a model


class ModelDelta(Struct, frozen=True, kw_only=True):
    """What makes a file of a model from its former content, the one with the SHA-256 `old` in the
    version `base`. `sha256` and `size` are those of the delta."""

    base: int
    old: str
    sha256: str
    size: int  # bytes


class ModelFile(Struct, frozen=True, kw_only=True):
    """A file of a model."""

    path: str
    sha256: str
    size: int  # bytes
    deltas: tuple[ModelDelta, ...] = ()


class ModelVersion(Struct, frozen=True, kw_only=True):
    """A published version of a model. `name` is "MODEL@NUMBER"; `main` is the file to serve.
    `residency` is the area or country that the model must not leave, or "". Each of the `labels`
    has a number that grows whenever the label is moved: of the versions of a model with the same
    label, the one with the highest number has it."""

    project: str
    name: str
    snapshot: str
    files: tuple[ModelFile, ...]
    main: str
    job: str = ""
    step: str = ""  # ID of the job whose step published it
    residency: str = ""
    made_by: str = ""
    created_at: datetime
    notes: Mapping[str, float] = field(default_factory=dict)  # measured, such as an accuracy
    labels: Mapping[str, int] = field(default_factory=dict)
    version: int = 0

    @property
    def model(self) -> str:
        return self.name.rpartition("@")[0]

    @property
    def number(self) -> int:
        return int(self.name.rpartition("@")[2])

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(each.size for each in self.files)


def find_labels(versions: Iterable[ModelVersion]) -> Mapping[tuple[str, str, str], ModelVersion]:
    """Return the version that has each label, by project, model and label."""
    found: dict[tuple[str, str, str], ModelVersion] = {}
    for each in versions:
        for label, moved in each.labels.items():
            key = each.project, each.model, label
            other = found.get(key)
            if other is None or (moved, each.number) > (other.labels[label], other.number):
                found[key] = each
    return found


class ModelRepository(Struct, frozen=True, kw_only=True):
    """The files of a project's repository, by name, and the private keys by role, sealed. A
    repository is created with the first model of a project."""

    project: str
    name: str = "models"
    files: Mapping[str, str]
    keys: Mapping[str, str]
    version: int = 0
