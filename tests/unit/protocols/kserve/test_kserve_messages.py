# SPDX-License-Identifier: Apache-2.0
"""Our table of messages is that of a client that is not ours, as far as it goes."""

import json
import subprocess
import sys
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool

from forebay.protocols.kserve.messages import METHODS, SERVICE, described

CLIENTS = Path(__file__).resolve().parents[4] / ".venv/environments/kserve-clients/bin/python"

TOLD = """
def told(pool, service):
    seen, enums = {}, {}
    def look(kind):
        if kind.full_name not in seen:
            fields = seen[kind.full_name] = {}
            for one in kind.fields:
                other = one.message_type or one.enum_type
                fields[one.name] = [one.number, one.type, one.is_repeated, other.full_name if other else None,
                    one.containing_oneof.name if one.containing_oneof else None]
                if one.enum_type:
                    enums[one.enum_type.full_name] = {value.name: value.number for value in one.enum_type.values}
                if one.message_type:
                    look(one.message_type)
    methods = {}
    for one in pool.FindServiceByName(service).methods:
        look(one.input_type), look(one.output_type)
        methods[one.name] = [one.input_type.full_name, one.output_type.full_name, one.client_streaming,
            one.server_streaming]
    return {"messages": seen, "enums": enums, "methods": methods}
"""


def test_the_table_is_that_of_a_real_client():
    script = f"""{TOLD}
import json, tritonclient.grpc.service_pb2
from google.protobuf import descriptor_pool
print(json.dumps(told(descriptor_pool.Default(), {SERVICE!r})))
"""
    theirs = json.loads(subprocess.run([CLIENTS, "-c", script], capture_output=True, text=True, check=True).stdout)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(descriptor_pb2.FileDescriptorProto.FromString(described()))
    scope = {}
    exec(TOLD, scope)
    ours = json.loads(json.dumps(scope["told"](pool, SERVICE)))
    assert ours["methods"] == theirs["methods"]
    assert sorted(METHODS) == sorted(ours["methods"])
    assert ours["enums"]["inference.DataType"] == theirs["enums"]["inference.DataType"]
    for name, fields in ours["messages"].items():
        for field, about in fields.items():
            their = theirs["messages"][name][field]
            # What excludes what in a configuration is not told: we give one of each.
            assert about[:4] == their[:4], (name, field)
            assert about[4] == their[4] or name == "inference.ModelConfig", (name, field)


def test_clients_of_other_libraries_may_be_in_the_same_process():  # T8, T27: a handler imports tritonclient
    script = """
from google.protobuf import descriptor_pb2, descriptor_pool
from forebay.protocols.kserve.messages import described, messages
before = messages().ModelInferRequest(model_name="ours")
theirs = descriptor_pb2.FileDescriptorProto.FromString(described())
theirs.name = "grpc_service.proto"
descriptor_pool.Default().Add(theirs)
descriptor_pool.Default().FindMessageTypeByName("inference.ModelInferRequest")
assert messages().ModelInferRequest.FromString(before.SerializeToString()).model_name == "ours"
"""
    subprocess.run([sys.executable, "-c", script], check=True)
