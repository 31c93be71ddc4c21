#!/usr/bin/env python3
"""A stand-in of nvidia-smi with MIG, whose GPUs are kept in the file $FAKE_SMI: a program that tests
put into PATH. It has the commands that Cavvy uses, refuses all others, and prints the driver's texts
(NVIDIA's MIG user guide): "Insufficient Resources", "In use by another client", "Not Found".

Each GPU of the file has "uuid", "name", "memory", "mig", "profiles" (name, ID, slices, processors,
first slices) and "instances" (name, start, size, processors, whether it has a compute instance,
busy). It may have "programs" (PIDs), "held" (by a program that is not listed) and "pending", the
noted mode.
"""

import fcntl
import json
import os
import sys

ROW = "|   {}  MIG {:<14} {:>4} {:>8} {:>11}:{:<6}|"


def main(arguments):
    with open(os.environ["FAKE_SMI"], "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        gpus = json.load(file)
        code = answer(arguments, gpus)
        file.seek(0)
        file.truncate()
        json.dump(gpus, file)
    return code


def answer(arguments, gpus):
    if arguments[:1] == ["mig"]:
        return mig(arguments[1:], gpus)
    text = " ".join(arguments)
    if text.startswith("--query-"):
        return query(text, gpus)
    if arguments[:1] == ["-i"] and arguments[2:3] == ["-mig"]:
        return switch(find(gpus, arguments[1]), arguments[3] == "1")
    elif text == "-L":
        for index, gpu in enumerate(gpus):
            print(f"GPU {index}: {gpu['name']} (UUID: {gpu['uuid']})")
            for device, (number, each) in enumerate(sorted(ready(gpu))):
                print(f"  MIG {each['name']:<12} Device  {device}: (UUID: {uuid(gpu, number)})")
    elif arguments[:3] == ["-q", "-x", "-i"]:
        for device, (number, _) in enumerate(sorted(ready(find(gpus, arguments[3])))):
            print(f"<mig_device>\n<index>{device}</index>")
            print(f"<gpu_instance_id>{number}</gpu_instance_id>\n</mig_device>")
    else:
        return refuse()
    return 0


def query(text, gpus):
    for index, gpu in enumerate(gpus):
        mode = say(gpu["mig"])
        if text.startswith("--query-gpu=index,uuid,name,memory.total,mig.mode.current "):
            print(f"{index}, {gpu['uuid']}, {gpu['name']}, {gpu['memory']}, {mode}")
        elif text.startswith("--query-gpu=index,uuid,mig.mode.current,mig.mode.pending "):
            print(f"{index}, {gpu['uuid']}, {mode}, {say(gpu.get('pending', gpu['mig']))}")
        elif text.startswith("--query-compute-apps=gpu_uuid,pid "):
            for pid in gpu.get("programs", []):
                print(f"{gpu['uuid']}, {pid}")
        else:
            return refuse()
    return 0


def say(mode):
    return "Enabled" if mode else "Disabled"


def refuse():
    print("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.")
    return 2


def switch(gpu, on):
    """Switch the mode, or note it for the next reset if the GPU is "held"."""
    if on == gpu["mig"]:
        gpu.pop("pending", None)
    elif gpu.get("held"):
        gpu["pending"] = on
        print("Warning: MIG mode is in pending enable state for GPU 00000000:07:00.0:In use by")
        print("another client")
    else:
        gpu["mig"] = on
        print("Enabled MIG Mode for GPU 00000000:07:00.0")
    print("All done.")
    return 0


def ready(gpu):
    return [(int(n), each) for n, each in gpu["instances"].items() if each["compute"]]


def uuid(gpu, number):
    return f"MIG-{gpu['uuid'].removeprefix('GPU-')}-{number}-{gpu['instances'][str(number)]['n']}"


def find(gpus, name):
    return next(each for index, each in enumerate(gpus) if name in (each["uuid"], str(index)))


def mig(arguments, gpus):
    options = {}
    while arguments:
        option = arguments.pop(0)
        takes = option in ("-i", "-cgi", "-gi", "-ci")
        options[option] = arguments.pop(0) if takes else True
    chosen = [find(gpus, options["-i"])] if "-i" in options else gpus
    chosen = [(gpus.index(each), each) for each in chosen if each["mig"]]
    if not chosen:
        print("No MIG-enabled devices found.")
        return 6
    for name, run in COMMANDS.items():
        if name in options:
            return run(chosen, options)
    return 2


def list_profiles(chosen, options):
    for index, gpu in chosen:
        for name, number, *_ in gpu["profiles"]:
            print(
                f"|   {index}  MIG {name:<14} {number:>3}     0/7        9.75       No     14   |"
            )
    return 0


def list_places(chosen, options):
    for index, gpu in chosen:
        for _, number, size, _, starts in gpu["profiles"]:
            noun = "Placements" if len(starts) > 1 else "Placement "
            spots = ",".join(map(str, starts))
            print(f"GPU  {index} Profile ID {number:>2} {noun}: {{{spots}}}:{size}")
    return 0


def list_instances(chosen, options):
    if not any(gpu["instances"] for _, gpu in chosen):
        print("No GPU instances found: Not Found")
        return 6
    for index, gpu in chosen:
        for number, each in gpu["instances"].items():
            print(ROW.format(index, each["name"], 19, number, each["start"], each["size"]))
    return 0


def create(chosen, options):
    (index, gpu) = chosen[0]
    name, _, start = options["-cgi"].partition(":")
    size, processors, starts = next(each[2:] for each in gpu["profiles"] if each[0] == name)
    others = gpu["instances"].values()
    taken = {at for each in others for at in range(each["start"], each["start"] + each["size"])}
    busy = sum(each["processors"] for each in others)
    mine = set(range(int(start), int(start) + size))
    if int(start) not in starts or mine & taken or busy + processors > 7:
        print(
            f"Unable to create a GPU instance on GPU  {index} using profile {name}: "
            "Insufficient Resources"
        )
        print("Failed to create GPU instances: Insufficient Resources")
        return 6
    gpu["count"] = gpu.get("count", 0) + 1
    number = next(n for n in range(1, 15) if str(n) not in gpu["instances"])
    gpu["instances"][str(number)] = {
        "name": name,
        "start": int(start),
        "size": size,
        "processors": processors,
        "compute": "-C" in options,
        "busy": False,
        "n": gpu["count"],
    }
    print(
        f"Successfully created GPU instance ID  {number} on GPU  {index} using profile MIG {name}"
    )
    return 0


def destroy(kind):
    def run(chosen, options):
        (index, gpu) = chosen[0]
        each = gpu["instances"].get(options["-gi"])
        what = f"{kind} instance ID  {options['-gi']} from GPU  {index}"
        fault = ""
        if each is None or (kind == "compute" and not each["compute"]):
            fault = "Not Found"
        elif each["busy"] or (kind == "GPU" and each["compute"]):
            fault = "In use by another client"
        if fault:
            print(f"Unable to destroy {what}: {fault}\nFailed to destroy {kind} instances: {fault}")
            return 6
        if kind == "compute":
            each["compute"] = False
        else:
            del gpu["instances"][options["-gi"]]
        print(f"Successfully destroyed {what}")
        return 0

    return run


COMMANDS = {
    "-lgipp": list_places,
    "-lgip": list_profiles,
    "-lgi": list_instances,
    "-cgi": create,
    "-dci": destroy("compute"),
    "-dgi": destroy("GPU"),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
