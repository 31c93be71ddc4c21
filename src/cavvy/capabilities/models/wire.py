"""Request and response types of the routes for published models, and the client functions for
them."""

from msgspec import field

from cavvy.client.client import ApiClient
from cavvy.client.model_wire import ModelView
from cavvy.client.paths import project_path, query, segment
from cavvy.client.wire import Answer, Ask


class ModelAsk(Ask, frozen=True, kw_only=True):
    """Publish files of a snapshot that was uploaded before. `main` is the file to serve, and
    `below` the folder of the snapshot that holds the model."""

    name: str
    snapshot: str
    main: str = ""
    below: str = ""
    job: str = ""
    residency: str = ""
    notes: dict[str, float] = field(default_factory=dict)
    made_by: str = ""


class SigningKeysView(Answer, frozen=True, kw_only=True):
    """The version of the list of keys, and the ID of the key of each role."""

    version: int
    keys: dict[str, str]


class SignedListsView(Answer, frozen=True, kw_only=True):
    """The newest signed lists of The Update Framework by role (root, targets, model-NAME), and the
    roles of which the server has the keys. `unsigned` has the manifests of the asked model's
    versions that its key has yet to sign, by the paths that the list of the model is to name."""

    lists: dict[str, str]
    held: list[str]
    unsigned: dict[str, str] = field(default_factory=dict)


class SignedListsAsk(Ask, frozen=True, kw_only=True):
    """Signed lists by role, each with the next version. The server signs those whose keys it has.
    `keys` are private keys in PEM by role, which the server is to have: in its place, none is kept
    whose role the lists give another key."""

    lists: dict[str, str]
    keys: dict[str, str] = field(default_factory=dict)


class SignedModelAsk(Ask, frozen=True, kw_only=True):
    """The signed list of a model."""

    list: str


class PromoteAsk(Ask, frozen=True, kw_only=True):
    """The number of the version to which a label is moved."""

    number: int


class PromotedView(Answer, frozen=True, kw_only=True):
    """The version that has the label now, and the one that had it; "" if there is none."""

    name: str
    former: str


def publish_model(client: ApiClient, project: str, ask: ModelAsk) -> ModelView:
    """Publish the next version of a model. Raises ApiError."""
    return client.ask(f"{project_path(project)}/models", ModelView, ask)


def promote_model(
    client: ApiClient, project: str, model: str, label: str, number: int
) -> PromotedView:
    """Move a label to a version of a model. Raises ApiError."""
    path = _label(project, model, label)
    return client.ask(path, PromotedView, PromoteAsk(number=number), method="PUT")


def unlabel_model(client: ApiClient, project: str, model: str, label: str) -> PromotedView:
    """Take a label from a model. Raises ApiError."""
    return client.ask(_label(project, model, label), PromotedView, method="DELETE")


def rotate_signing_keys(client: ApiClient, project: str) -> SigningKeysView:
    """Replace the keys that sign a project's models. Raises ApiError."""
    path = f"{project_path(project)}/edge/keys"
    return client.ask(path, SigningKeysView, method="POST", retry=False)


def read_signed_lists(client: ApiClient, project: str, model: str = "") -> SignedListsView:
    """Return the signed lists of a project. Raises ApiError."""
    path = f"{project_path(project)}/edge/lists{query(model=model or None)}"
    return client.ask(path, SignedListsView)


def replace_signed_lists(client: ApiClient, project: str, ask: SignedListsAsk) -> SigningKeysView:
    """Replace signed lists, and keys of the server. Raises ApiError."""
    path = f"{project_path(project)}/edge/lists"
    return client.ask(path, SigningKeysView, ask, method="PUT", retry=False)


def sign_model(client: ApiClient, project: str, model: str, signed: str) -> SigningKeysView:
    """Replace the signed list of a model, which its key has signed. Raises ApiError."""
    path = f"{project_path(project)}/models/{segment('model', model)}/list"
    ask = SignedModelAsk(list=signed)
    return client.ask(path, SigningKeysView, ask, method="PUT", retry=False)


def _label(project: str, model: str, label: str) -> str:
    path = f"{project_path(project)}/models/{segment('model', model)}"
    return f"{path}/labels/{segment('label', label)}"
