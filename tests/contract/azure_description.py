"""Checks requests to Azure Resource Manager against the description that Microsoft's packages
azure-mgmt-compute and azure-mgmt-network ship: method, path, version, parameters and body.
"""

import types
import typing
from collections.abc import Callable, Mapping
from datetime import datetime
from enum import Enum
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from azure.mgmt.compute import models as compute_models
from azure.mgmt.compute.operations import _operations as compute
from azure.mgmt.network import models as network_models
from azure.mgmt.network.operations import _operations as network

# the types in JSON of the types of the description
_PLAIN: Mapping[Any, Any] = {
    str: str, datetime: str, bytes: str, float: int | float, int: int, bool: bool,
    list: list, dict: dict,
}  # fmt: skip
_OPEN = ("VirtualMachineSizeTypes",)  # its description says that it does not list all sizes
_NAME = "THE-NAME"  # in the path of an operation, in place of the resource's name


class Operation(NamedTuple):
    """One operation. `name` is the argument of `build` with the resource's name, `options` are
    arguments for optional parameters, and `model` describes the body.
    """

    build: Callable[..., Any]
    name: str = ""
    options: Mapping[str, object] = {}
    group: bool = True  # the operation is within a resource group
    model: type | None = None

    def describe(self, subscription: str, group: str) -> tuple[str, str, Mapping[str, str]]:
        """The method, the path and the parameters that the description has."""
        given: dict[str, object] = {"subscription_id": subscription, **self.options}
        if self.group:
            given["resource_group_name"] = group
        if self.name:
            given[self.name] = _NAME
        request = self.build(**given)
        parts = urlsplit(request.url)
        return request.method, parts.path, {k: v[0] for k, v in parse_qs(parts.query).items()}


_NIC, _IP = "network_interface_name", "public_ip_address_name"
_SET = "availability_set_name"
_NET, _NSG = "virtual_network_name", "network_security_group_name"
OPERATIONS = {
    "sizes": Operation(
        compute.build_resource_skus_list_request, options={"filter": "*"}, group=False
    ),
    "usages": Operation(compute.build_usage_list_request, "location", group=False),
    "list": Operation(compute.build_virtual_machines_list_request),
    "power": Operation(
        compute.build_virtual_machines_list_all_request,
        options={"status_only": "true"},
        group=False,
    ),
    "get": Operation(
        compute.build_virtual_machines_get_request, "vm_name", {"expand": "instanceView"}
    ),
    "put": Operation(
        compute.build_virtual_machines_create_or_update_request,
        "vm_name",
        model=compute_models.VirtualMachine,
    ),
    "delete": Operation(
        compute.build_virtual_machines_delete_request, "vm_name", {"force_deletion": "true"}
    ),
    "list interfaces": Operation(network.build_network_interfaces_list_request),
    "delete interfaces": Operation(network.build_network_interfaces_delete_request, _NIC),
    "list addresses": Operation(network.build_public_ip_addresses_list_request),
    "delete addresses": Operation(network.build_public_ip_addresses_delete_request, _IP),
    "list sets": Operation(compute.build_availability_sets_list_request),
    "delete sets": Operation(compute.build_availability_sets_delete_request, _SET),
    "put sets": Operation(
        compute.build_availability_sets_create_or_update_request,
        _SET,
        model=compute_models.AvailabilitySet,
    ),
    "get network": Operation(network.build_virtual_networks_get_request, _NET),
    "put network": Operation(
        network.build_virtual_networks_create_or_update_request,
        _NET,
        model=network_models.VirtualNetwork,
    ),
    "get rules": Operation(network.build_network_security_groups_get_request, _NSG),
    "put rules": Operation(
        network.build_network_security_groups_create_or_update_request,
        _NSG,
        model=network_models.NetworkSecurityGroup,
    ),
}


@cache
def _describe(subscription: str, group: str) -> Mapping[str, tuple[str, str, Mapping[str, str]]]:
    return {key: each.describe(subscription, group) for key, each in OPERATIONS.items()}


def find_operation(
    method: str, path: str, query: Mapping[str, str], *, subscription: str, group: str
) -> tuple[str, str]:
    """The operation of a request and the name of its resource. Raises ValueError if the
    description has no such request.
    """
    for key, (verb, wanted, parameters) in _describe(subscription, group).items():
        head, mark, tail = wanted.partition(_NAME)
        name = path.removeprefix(head).removesuffix(tail) if mark else ""
        if verb != method or "/" in name or path != head + name + tail or (mark and not name):
            continue
        version = "api-version"
        known = query.keys() <= parameters.keys() | {"$skipToken"}
        if not known or query.get(version) != parameters[version]:
            raise ValueError(f"{key}: the parameters are {dict(query)}, not {dict(parameters)}")
        return key, name
    raise ValueError(f"no operation {method} {path}")


def check_body(value: Any, operation: str) -> None:
    """Raises ValueError for a field that is unknown, only for reading, or of another type."""
    model = OPERATIONS[operation].model
    assert model is not None
    _check(value, model, operation)


def _check(value: Any, kind: Any, where: str) -> None:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _check_any(value, arguments, where)
    if any(base.__name__ == "Model" for base in getattr(kind, "__mro__", ())):
        return _check_model(value, kind, where)
    plain = _PLAIN.get(origin or kind)
    if plain is not None and (
        not isinstance(value, plain) or isinstance(value, bool) != (kind is bool)
    ):
        raise ValueError(f"{where}: {value!r} is not {kind}")
    if origin is list:
        for number, each in enumerate(value):
            _check(each, arguments[0], f"{where}[{number}]")
    elif origin is dict:
        for name, each in value.items():
            _check(each, arguments[1], f"{where}.{name}")


def _check_any(value: Any, kinds: tuple[Any, ...], where: str) -> None:
    """`value` has one of these kinds. A string of an enumeration is one of its values."""
    enums = [each for each in kinds if isinstance(each, type) and issubclass(each, Enum)]
    if enums and enums[0].__name__ not in _OPEN:
        if value not in [member.value for each in enums for member in each]:
            raise ValueError(f"{where}: {value!r} is not a value of {enums[0].__name__}")
        return
    faults = []
    for each in kinds:
        if each is type(None) or each in enums:
            continue
        try:
            return _check(value, each, where)
        except ValueError as fault:
            faults.append(str(fault))
    raise ValueError("; ".join(faults))


def _check_model(value: Any, model: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {value!r} is not an object")
    fields = _fields(model)
    for name, each in value.items():
        if name not in fields:
            raise ValueError(f"{where}: {model.__name__} has no field {name}")
        kind, writable = fields[name]
        if not writable:
            raise ValueError(f"{where}: {name} is only for reading")
        _check(each, kind, f"{where}.{name}")


@cache
def _fields(model: Any) -> Mapping[str, tuple[Any, bool]]:
    """The fields of a model by their names in JSON: the type, and whether requests may have it."""
    package = compute_models if ".compute." in model.__module__ else network_models
    hints = typing.get_type_hints(model, {**vars(typing), "_models": package, "datetime": datetime})
    found = {}
    for base in model.__mro__:
        for attribute, field in vars(base).items():
            if hasattr(field, "_rest_name_input"):
                name = field._rest_name_input or attribute
                found[name] = (hints[attribute], "create" in (field._visibility or ["create"]))
    return found
