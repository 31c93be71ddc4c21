"""Checks manifests against the schemas that newer Kubernetes versions publish; run by tests, with a
package of theirs.

    python schemas.py < MANIFESTS.json

Prints a JSON object: the versions, and each refusal as [version, kind, reason]. Unknown fields are
refused too.
"""

import functools
import json
import sys

from kubernetes_validate import utils

utils.schema_contents = functools.cache(utils.schema_contents)
versions, problems = list(dict.fromkeys(utils.all_versions())), []
for manifest in json.load(sys.stdin):
    for version in versions:
        try:
            utils.validate(manifest, version, strict=True)
        except (
            utils.ValidationError,
            utils.SchemaNotFoundError,
            utils.InvalidSchemaError,
        ) as error:
            problems.append([version, manifest["kind"], getattr(error, "message", str(error))])
json.dump({"versions": versions, "problems": problems}, sys.stdout)
