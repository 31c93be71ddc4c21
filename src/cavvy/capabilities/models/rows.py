"""Published models and their signed lists, whose rows have a name in a project."""

from msgspec.json import Decoder

from cavvy.capabilities.models.nouns import ModelRepository, ModelVersion
from cavvy.store.drivers import RunTransaction
from cavvy.store.named_rows import NamedRows


class SqlModels:
    """The rows of published models."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        database = read, write
        self.repositories = NamedRows(
            *database, "model_repositories", "repository", Decoder(ModelRepository).decode
        )
        self.models = NamedRows(
            *database,
            "models",
            "model",
            Decoder(ModelVersion).decode,
            ("snapshot",),
            lambda model: (model.snapshot,),
        )
