"""The protocol of the cluster autoscaler's external gRPC cloud provider, as the autoscaler speaks it:
messages of the protobuf runtime, with the fields of externalgrpc.proto and of Kubernetes' Node.

Nothing here is shared with what Cavvy encodes and decodes by itself.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_F = descriptor_pb2.FieldDescriptorProto
_KINDS = {
    "string": _F.TYPE_STRING,
    "int32": _F.TYPE_INT32,
    "int64": _F.TYPE_INT64,
    "double": _F.TYPE_DOUBLE,
    "bytes": _F.TYPE_BYTES,
}
SERVICE = "clusterautoscaler.cloudprovider.v1.externalgrpc.CloudProvider"
# message: {field: (number, type)}; "*" repeats, "%" is a map from strings
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "NodeGroup": {
        "id": (1, "string"),
        "minSize": (2, "int32"),
        "maxSize": (3, "int32"),
        "debug": (4, "string"),
    },
    "ExternalGrpcNode": {
        "providerID": (1, "string"),
        "name": (2, "string"),
        "labels": (3, "%string"),
        "annotations": (4, "%string"),
    },
    "Time": {"seconds": (1, "int64"), "nanos": (2, "int32")},
    "NodeGroupsResponse": {"nodeGroups": (1, "*NodeGroup")},
    "NodeGroupForNodeRequest": {"node": (1, "ExternalGrpcNode")},
    "NodeGroupForNodeResponse": {"nodeGroup": (1, "NodeGroup")},
    "PricingNodePriceRequest": {
        "node": (1, "ExternalGrpcNode"),
        "startTime": (2, "Time"),
        "endTime": (3, "Time"),
        "startTimestamp": (4, "Time"),
        "endTimestamp": (5, "Time"),
    },
    "PricingNodePriceResponse": {"price": (1, "double")},
    "GPULabelResponse": {"label": (1, "string")},
    "GetAvailableGPUTypesResponse": {"gpuTypes": (1, "%Empty")},
    "NodeGroupTargetSizeRequest": {"id": (1, "string")},
    "NodeGroupTargetSizeResponse": {"targetSize": (1, "int32")},
    "NodeGroupIncreaseSizeRequest": {"delta": (1, "int32"), "id": (2, "string")},
    "NodeGroupDecreaseTargetSizeRequest": {"delta": (1, "int32"), "id": (2, "string")},
    "NodeGroupDeleteNodesRequest": {"nodes": (1, "*ExternalGrpcNode"), "id": (2, "string")},
    "NodeGroupNodesRequest": {"id": (1, "string")},
    "NodeGroupNodesResponse": {"instances": (1, "*Instance")},
    "Instance": {"id": (1, "string"), "status": (2, "InstanceStatus")},
    "InstanceStatus": {"instanceState": (1, "int32"), "errorInfo": (2, "InstanceErrorInfo")},
    "InstanceErrorInfo": {
        "errorCode": (1, "string"),
        "errorMessage": (2, "string"),
        "instanceErrorClass": (3, "int32"),
    },
    "NodeGroupTemplateNodeInfoRequest": {"id": (1, "string")},
    "NodeGroupTemplateNodeInfoResponse": {"nodeInfo": (1, "Node"), "nodeBytes": (2, "bytes")},
    "NodeGroupAutoscalingOptionsRequest": {"id": (1, "string")},
    "NodeGroupAutoscalingOptionsResponse": {"nodeGroupAutoscalingOptions": (1, "Empty")},
    "Empty": {},
    "Node": {"metadata": (1, "ObjectMeta"), "spec": (2, "NodeSpec"), "status": (3, "NodeStatus")},
    "ObjectMeta": {"name": (1, "string"), "labels": (11, "%string")},
    "NodeSpec": {"providerID": (3, "string")},
    "NodeStatus": {
        "capacity": (1, "%Quantity"),
        "allocatable": (2, "%Quantity"),
        "conditions": (4, "*NodeCondition"),
    },
    "Quantity": {"string": (1, "string")},
    "NodeCondition": {"type": (1, "string"), "status": (2, "string")},
}
# method: request and response
_METHODS = {
    "NodeGroups": ("Empty", "NodeGroupsResponse"),
    "NodeGroupForNode": ("NodeGroupForNodeRequest", "NodeGroupForNodeResponse"),
    "PricingNodePrice": ("PricingNodePriceRequest", "PricingNodePriceResponse"),
    "PricingPodPrice": ("Empty", "PricingNodePriceResponse"),
    "GPULabel": ("Empty", "GPULabelResponse"),
    "GetAvailableGPUTypes": ("Empty", "GetAvailableGPUTypesResponse"),
    "Cleanup": ("Empty", "Empty"),
    "Refresh": ("Empty", "Empty"),
    "NodeGroupTargetSize": ("NodeGroupTargetSizeRequest", "NodeGroupTargetSizeResponse"),
    "NodeGroupIncreaseSize": ("NodeGroupIncreaseSizeRequest", "Empty"),
    "NodeGroupDeleteNodes": ("NodeGroupDeleteNodesRequest", "Empty"),
    "NodeGroupDecreaseTargetSize": ("NodeGroupDecreaseTargetSizeRequest", "Empty"),
    "NodeGroupNodes": ("NodeGroupNodesRequest", "NodeGroupNodesResponse"),
    "NodeGroupTemplateNodeInfo": (
        "NodeGroupTemplateNodeInfoRequest",
        "NodeGroupTemplateNodeInfoResponse",
    ),
    "NodeGroupGetOptions": (
        "NodeGroupAutoscalingOptionsRequest",
        "NodeGroupAutoscalingOptionsResponse",
    ),
}


def _describe() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="ca.proto", package="ca", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            made = message.field.add(name=field, number=number)
            made.label = _F.LABEL_REPEATED if kind[0] in "*%" else _F.LABEL_OPTIONAL
            if kind[0] == "%":
                title = f"{field[0].upper()}{field[1:]}Entry"
                entry = message.nested_type.add(name=title)
                entry.options.map_entry = True
                _set(entry.field.add(name="key", number=1, label=_F.LABEL_OPTIONAL), "string")
                _set(entry.field.add(name="value", number=2, label=_F.LABEL_OPTIONAL), kind[1:])
                made.type, made.type_name = _F.TYPE_MESSAGE, f".ca.{name}.{title}"
            else:
                _set(made, kind.lstrip("*"))
    return file


def _set(field: Any, kind: str) -> None:
    if kind in _KINDS:
        field.type = _KINDS[kind]
    else:
        field.type, field.type_name = _F.TYPE_MESSAGE, f".ca.{kind}"


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_describe())


def make(name: str, /, **fields: Any) -> Any:
    """Return a message."""
    found = message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"ca.{name}"))
    return found(**fields)


def read(name: str, data: bytes) -> Any:
    """Read a message; a field that the protocol does not have is an error."""
    message = make(name)
    message.ParseFromString(data)
    from google.protobuf import unknown_fields

    assert not len(unknown_fields.UnknownFieldSet(message)), f"unknown fields in {name}"
    return message


def call(send: Any, method: str, **fields: Any) -> Any:
    """Call a method by `send`, which takes and returns bytes, and read its answer."""
    request, response = _METHODS[method]
    return read(response, send(method, make(request, **fields).SerializeToString()))
