"""JarvisLabs: each node is one container, on which the server starts the agent by SSH."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import project_number, project_text
from cavvy.providers.vm.abilities import make_manifest
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(
    provider="jarvislabs",
    variables=("JL_API_KEY",),
    files=("~/.config/jl/config.toml",),
    names=("token",),
    made_at="https://jarvislabs.ai/settings/api-keys",
)
_DOCS = "https://docs.jarvislabs.ai/cli"
_CONTAINER = f"an instance is a container of one of JarvisLabs's templates ({_DOCS})"

MANIFEST = make_manifest(
    "jarvislabs",
    "JarvisLabs",
    cloud="cavvy.providers.jarvislabs.cloud:JarvislabsCloud",
    machine="an instance",
    deletion=_DOCS,
    rights="an API key of the account; JarvisLabs describes no narrower permissions",
    unsupported={
        Feature.GANG: "JarvisLabs's containers cannot join a private network; only its virtual "
        "machines can (https://docs.jarvislabs.ai/sdk)",
        Feature.IMAGE: f"{_CONTAINER}; the setting `template` selects one for all instances",
        Feature.BUILD: _CONTAINER,
        Feature.LOGIN: _CONTAINER,
        Feature.SELF_END: "JarvisLabs bills an instance's disk until the API destroys the instance "
        f"({_DOCS}), and instances get no API key; the server destroys paused instances",
        Feature.VOLUMES: _DOCS,
        Feature.MOUNTS: "an instance is a container without access to folders of its host or to "
        f"NFS ({_DOCS})",
        Feature.NETWORK: _DOCS,
        Feature.DISK: "the setting `disk_gib` selects the size of the disk for all instances; a "
        f"size for one task is not supported yet ({_DOCS})",
        Feature.NOTICE: "JarvisLabs describes no notice before it pauses a spot instance "
        f"({_DOCS})",
    },
    settings=(
        KEYS.setting(),
        project_text(
            "regions",
            "The regions to use, separated by commas: `india-chennai-01`, `india-noida-01`, "
            "`europe-01`. The default is all regions.",
        ),
        project_text(
            "template",
            "The template of instances, by its id in the list that `jl templates` prints.",
            "pytorch",
        ),
        project_number(
            "disk_gib",
            "The size of an instance's disk.",
            unit="GB",
            default=100,
            minimum=1,
            whole=True,
        ),
    ),
    endpoint="https://backend{region}.jarvislabs.net",
    endpoint_consequence="The addresses of the API. `{region}` stands for the letters of the "
    "region: `c`, `n` or `eu`.",
)
