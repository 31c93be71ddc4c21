"""A device plugin with pretended GPUs, over the kubelet's real interface: FOLDER COUNT. Needs
grpcio.

A file `unhealthy` in the folder names one device a line; these turn unhealthy. The few messages are
written by hand, field by field, as protocol buffers are.
"""

import os
import sys
import time
from concurrent import futures

import grpc

RESOURCE = "nvidia.com/gpu"


def field(number, data):
    """One length-delimited field."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def read(data):
    """The length-delimited fields of a message, by number."""
    found, at = {}, 0
    while at < len(data):
        key, at = read_varint(data, at)
        size, at = read_varint(data, at)
        if key & 7 == 2:
            found.setdefault(key >> 3, []).append(data[at : at + size])
            at += size
    return found


def read_varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def list_and_watch(folder, count):
    def serve(request, context):
        told = None
        while context.is_active():
            bad = set()
            if os.path.exists(f"{folder}/unhealthy"):
                with open(f"{folder}/unhealthy") as file:
                    bad = set(file.read().split())
            if bad != told:
                told = bad
                names = [f"GPU-{number}" for number in range(count)]
                states = [(name, "Unhealthy" if name in bad else "Healthy") for name in names]
                yield b"".join(
                    field(1, field(1, name.encode()) + field(2, state.encode()))
                    for name, state in states
                )
            time.sleep(0.3)

    return serve


def allocate(request, context):
    answer = b""
    for container in read(request).get(1, []):
        ids = ",".join(each.decode() for each in read(container).get(1, []))
        answer += field(1, field(1, field(1, b"NVIDIA_VISIBLE_DEVICES") + field(2, ids.encode())))
    return answer


def main(folder, count):
    path = f"{folder}/fakegpu.sock"
    if os.path.exists(path):
        os.unlink(path)
    unary = grpc.unary_unary_rpc_method_handler
    handlers = {
        "GetDevicePluginOptions": unary(lambda request, context: b""),
        "ListAndWatch": grpc.unary_stream_rpc_method_handler(list_and_watch(folder, count)),
        "GetPreferredAllocation": unary(lambda request, context: b""),
        "Allocate": unary(allocate),
        "PreStartContainer": unary(lambda request, context: b""),
    }
    server = grpc.server(futures.ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", handlers)]
    )
    server.add_insecure_port(f"unix://{path}")
    server.start()
    with grpc.insecure_channel(f"unix://{folder}/kubelet.sock") as channel:
        message = field(1, b"v1beta1") + field(2, b"fakegpu.sock") + field(3, RESOURCE.encode())
        channel.unary_unary("/v1beta1.Registration/Register")(
            message, timeout=20, wait_for_ready=True
        )
    server.wait_for_termination()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
