"""Prime Intellect: each node is one pod, on which the server starts the agent by SSH."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import project_flag, project_text, regions_setting
from cavvy.providers.vm.abilities import make_manifest
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(
    provider="primeintellect",
    variables=("PRIME_API_KEY",),
    files=("~/.prime/config.json",),
    names=('"api_key"',),
    made_at="https://app.primeintellect.ai/dashboard/tokens",
)
_REFERENCE = "https://docs.primeintellect.ai/api-reference"
_AVAILABILITY = f"{_REFERENCE}/check-gpu-availability"
_CREATE = f"{_REFERENCE}/pods/create-pod"
_CONTAINER = (
    f"the pods of some clouds are containers, which cannot start further containers ({_CREATE})"
)

MANIFEST = make_manifest(
    "primeintellect",
    "Prime Intellect",
    cloud="cavvy.providers.primeintellect.cloud:PrimeIntellectCloud",
    machine="a pod",
    deletion=f"{_REFERENCE}/pods/delete-pod",
    rights="an API key with the permissions Availability: read and Instances: read and write; the "
    "key must also be able to read and write SSH keys",
    unsupported={
        Feature.SPOT: "the API does not report whether a spot pod was reclaimed "
        f"({_REFERENCE}/pods/get-pod), so Cavvy starts on-demand pods only",
        Feature.IMAGE: f"{_CONTAINER}; the setting `image` selects the image of all pods",
        Feature.BUILD: _CONTAINER,
        Feature.LOGIN: _CONTAINER,
        Feature.CAPACITY: "Prime Intellect reports whether a configuration is in stock, but not "
        f"how many pods are free ({_AVAILABILITY})",
        Feature.SELF_END: "only the API can terminate a pod "
        f"({_REFERENCE}/managing-pods), and nodes get no API key, because a key may terminate all "
        "pods of the account",
        Feature.VOLUMES: _CREATE,
        Feature.MOUNTS: "the pods of some clouds are containers without access to folders of their "
        f"host or to NFS ({_CREATE})",
        Feature.NETWORK: f"the network of most pods is not reported ({_AVAILABILITY})",
        Feature.DISK: f"pods get the default disk of their configuration ({_AVAILABILITY})",
        Feature.NOTICE: "the API describes no notice before a pod ends "
        f"({_REFERENCE}/pods/get-pod)",
    },
    settings=(
        KEYS.setting(),
        project_text(
            "clouds",
            "The clouds to use, by Prime Intellect's names, separated by commas, such as "
            "`hyperstack, lambdalabs`. The default is all clouds.",
        ),
        regions_setting("data centers"),
        project_flag(
            "community",
            "Also use the community cloud: cheaper pods on computers of other people, who can "
            "read the data and programs of pods.",
        ),
        project_text(
            "image",
            "The image of pods, by Prime Intellect's name. Only configurations that have the "
            "image are offered.",
            "ubuntu_22_cuda_12",
        ),
        project_text(
            "team", "The id of the team that pays for pods. The default is your own wallet."
        ),
    ),
    endpoint="https://api.primeintellect.ai/api/v1",
)
