"""Makes a device's private key and signs texts with it: `python -m cavvy.edge.keys make|sign FOLDER
[TEXT]`. `make` prints the public key in hexadecimal, and `sign` the signature."""

from __future__ import annotations

import os
import sys


def main(arguments: list[str]) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    do, folder, text = arguments
    path = f"{folder}/device.key"
    if do == "make" and not os.path.exists(path):
        fresh = f"{path}.new"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(Ed25519PrivateKey.generate().private_bytes_raw())
            file.flush()
            os.fsync(file.fileno())
        os.rename(fresh, path)
    with open(path, "rb") as file:
        key = Ed25519PrivateKey.from_private_bytes(file.read())
    made = key.sign(text.encode()) if do == "sign" else key.public_key().public_bytes_raw()
    sys.stdout.write(made.hex())


if __name__ == "__main__":
    main(sys.argv[1:])
