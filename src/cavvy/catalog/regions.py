"""Where a provider's region is: its country and area, so that `--region eu` works beside exact
names.

Areas are continents as travellers use them: us, eu (Europe with the United Kingdom, Switzerland and
Norway), asia, north-america (without the us, which is its own), south-america, oceania, africa,
middle-east. Countries are ISO 3166 codes (de, jp; `uk` is read as gb). A region of
unknown location has no area and is found by its exact name only.
"""

import re
from functools import cache

AREAS = ("us", "eu", "asia", "north-america", "south-america", "oceania", "africa", "middle-east")

_COUNTRIES = {
    "us": "us",
    "eu": "at be bg ch cz de dk ee es fi fr gb gr hr hu ie is it lt lv nl no pl pt ro rs se si sk "
    "ua",
    "asia": "cn hk id in jp kr kz my ph sg th tw vn",
    "north-america": "ca mx",
    "south-america": "ar br cl co pe",
    "oceania": "au nz",
    "africa": "eg ke ng za",
    "middle-east": "ae bh il kw qa sa tr",
}
_AREA_OF = {
    country: area for area, countries in _COUNTRIES.items() for country in countries.split()
}

# Regions by country, from the providers' published lists of regions.
_REGIONS = {
    "us": "us-east-1 us-east-2 us-west-1 us-west-2 us-gov-east-1 us-gov-west-1 us-central1 "
    "us-central2 us-east1 "
    "us-east4 us-east5 us-south1 us-west1 us-west2 us-west3 us-west4 us-ashburn-1 us-phoenix-1 "
    "us-chicago-1 "
    "us-sanjose-1 us-east us-south centralus eastus eastus2 northcentralus southcentralus "
    "westcentralus "
    "westus westus2 westus3 nyc1 nyc2 nyc3 sfo1 sfo2 sfo3 atl1 us-carlsbad-1 us-newyork-1 "
    "us-santaclara-1 "
    "us-midwest-1 us-south-1 us-south-2 us-south-3 us-west-3 us-central2-a us-central2-b "
    "east-coast-ny2 west-coast-ca1",
    "ca": "ca-central-1 ca-west-1 northamerica-northeast1 northamerica-northeast2 canadacentral "
    "canadaeast ca-tor "
    "ca-toronto-1 ca-montreal-1 ca-montreal-3 tor1",
    "mx": "mx-central-1 northamerica-south1 mexicocentral mx-queretaro-1",
    "br": "sa-east-1 southamerica-east1 brazilsouth brazilsoutheast br-sao sa-saopaulo-1",
    "cl": "southamerica-west1 chilecentral sa-santiago-1",
    "gb": "eu-west-2 europe-west2 uksouth ukwest eu-gb uk-london-1 lon1",
    "ie": "eu-west-1 northeurope",
    "fr": "eu-west-3 europe-west9 francecentral francesouth eu-paris-1",
    "de": "eu-central-1 europe-west3 europe-west10 germanynorth germanywestcentral eu-de "
    "eu-frankfurt-1 fra1 "
    "europe-central-1",
    "se": "eu-north-1 europe-north2 swedencentral swedensouth se-stockholm-1",
    "it": "eu-south-1 europe-west8 europe-west12 italynorth it-fr2 it-mi2",
    "es": "eu-south-2 europe-southwest1 spaincentral eu-es",
    "ch": "eu-central-2 europe-west6 switzerlandnorth switzerlandwest ch-lug1",
    "fi": "europe-north1 eu-north1 fin-01 fin-02 fin-03",
    "be": "europe-west1",
    "nl": "europe-west4 westeurope ams2 ams3",
    "pl": "europe-central2 polandcentral",
    "no": "norwayeast norwaywest no-kristiansand-1 no-luster-1",
    "at": "austriaeast",
    "jp": "ap-northeast-1 ap-northeast-3 asia-northeast1 asia-northeast2 japaneast japanwest "
    "jp-tok jp-osa "
    "asia-northeast-1 ap-tokyo-1",
    "kr": "ap-northeast-2 asia-northeast3 koreacentral koreasouth",
    "in": "ap-south-1 ap-south-2 asia-south1 asia-south2 centralindia southindia westindia "
    "jioindiacentral "
    "jioindiawest blr1",
    "sg": "ap-southeast-1 asia-southeast1 southeastasia sgp1",
    "id": "ap-southeast-3 asia-southeast2 indonesiacentral",
    "my": "ap-southeast-5 malaysiawest",
    "th": "ap-southeast-7 asia-southeast3",
    "hk": "ap-east-1 asia-east2 eastasia",
    "tw": "ap-east-2 asia-east1",
    "cn": "cn-north-1 cn-northwest-1",
    "au": "ap-southeast-2 ap-southeast-4 australia-southeast1 australia-southeast2 "
    "australiacentral australiacentral2 "
    "australiaeast australiasoutheast au-syd",
    "nz": "ap-southeast-6 newzealandnorth",
    "za": "af-south-1 africa-south1 southafricanorth southafricawest af-johannesburg-1",
    "ae": "me-central-1 uaecentral uaenorth",
    "bh": "me-south-1",
    "qa": "me-central1 qatarcentral",
    "sa": "me-central2",
    "il": "il-central-1 me-west1 israelcentral",
}
_COUNTRY_OF = {
    region: country for country, regions in _REGIONS.items() for region in regions.split()
}
# A region's name may mean different places with different providers.
_COUNTRY_OF_PROVIDERS = {
    ("nebius", "eu-west1"): "fr",
    ("nebius", "us-central1"): "us",
    ("lambda", "us-south-1"): "us",
}
_NAMES = {
    "usa": "us",
    "canada": "ca",
    "australia": "au",
    "india": "in",
    "germany": "de",
    "finland": "fi",
    "norway": "no",
    "uk": "gb",
    "france": "fr",
    "iceland": "is",
    "singapore": "sg",
    "sweden": "se",
    "japan": "jp",
    "poland": "pl",
    "netherlands": "nl",
    "spain": "es",
    "italy": "it",
}


@cache
def locate(provider: str, region: str) -> tuple[str | None, str | None]:
    """The country and the area of a region; None where it cannot be told."""
    plain = region.strip().lower()
    country = (
        _COUNTRY_OF_PROVIDERS.get((provider, plain))
        or _COUNTRY_OF.get(plain)
        or _country_in_words(plain)
    )
    if country is not None:
        return country, _AREA_OF.get(country)
    if plain in AREAS:
        return None, plain
    return None, None


def is_region(wanted: str, provider: str, region: str, zone: str | None) -> bool:
    """Whether a place is meant by a wish: its region, its zone, its country or its area,
    whatever the case.
    """
    wish = wished_place(wanted)
    if wish in (region.lower(), (zone or region).lower()):
        return True
    return wish in locate(provider, region)


def is_known_place(wanted: str) -> bool:
    """Whether a wish names an area or a country that the table has, as opposed to a provider's
    own region.
    """
    return wished_place(wanted) in AREAS or wished_place(wanted) in _AREA_OF


def wished_place(wanted: str) -> str:
    wish = wanted.strip().lower()
    return {"uk": "gb", "europe": "eu"}.get(wish, wish)


def _country_in_words(region: str) -> str | None:
    """`us-texas`, `ch-lug1`, `helsinki-finland-1`, `de`."""
    words = re.split(r"[-_ ]+", region)
    if words[0] in _AREA_OF:
        return words[0]
    return next((_NAMES[word] for word in words if word in _NAMES), None)
