# SPDX-License-Identifier: Apache-2.0
"""Objects of Kubernetes, held to the definitions of their kinds (CRDs); fields that these do not know are faults.

The definitions belong to other projects (KubeRay, cert-manager and the Prometheus operator, all under Apache-2.0) and
are not copied here.
FOREBAY_TEST_CRDS names a folder that has them, from these folders of their repositories:

    helm-chart/kuberay-operator/crds    ray.io_rayclusters.yaml, ray.io_rayjobs.yaml
    deploy/crds                         cert-manager.io_certificates.yaml, cert-manager.io_issuers.yaml
    example/prometheus-operator-crd     monitoring.coreos.com_podmonitors.yaml
"""

import functools
import os
import re
from pathlib import Path

import pytest
import yaml

FOLDER = os.environ.get("FOREBAY_TEST_CRDS")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}


def require_crds():
    if FOLDER is None:
        pytest.skip("no definitions of other projects' kinds: FOREBAY_TEST_CRDS=FOLDER")


@functools.cache
def schemas():
    """The schemas by API version and kind."""
    found = {}
    assert FOLDER is not None
    for file in Path(FOLDER).glob("*.yaml"):
        spec = yaml.load(file.read_text(), LOADER)["spec"]
        for version in spec["versions"]:
            key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
            found[key] = version["schema"]["openAPIV3Schema"]
    return found


def faults(document):
    """Says what is wrong with an object."""
    schema = schemas()[document["apiVersion"], document["kind"]]
    properties = {**schema["properties"], "metadata": {"x-kubernetes-preserve-unknown-fields": True}}
    return list(_faults(document, {**schema, "properties": properties}, document["kind"]))


def _faults(value, schema, place):
    kind = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str) or isinstance(value, bool):
            yield f"{place}: {value!r} is neither a number nor a text"
    elif kind is not None and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{place}: {value!r} is no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {value!r} is none of {schema['enum']}"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{place}: {value!r} is not like {schema['pattern']}"
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from _faults(one, schema.get("items", {}), f"{place}[{index}]")
    if not isinstance(value, dict):
        return
    yield from (f"{place} has no {name}" for name in schema.get("required", ()) if name not in value)
    known, more = schema.get("properties", {}), schema.get("additionalProperties")
    for name, one in value.items():
        if name in known:
            yield from _faults(one, known[name], f"{place}.{name}")
        elif isinstance(more, dict):
            yield from _faults(one, more, f"{place}.{name}")
        elif not more and not schema.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{place} has {name}, which is not known"
