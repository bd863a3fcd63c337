# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document: valid, complete, and with every reference leading somewhere."""

import json
from typing import Any, Literal

import jsonschema_rs
import msgspec
import numpy as np
import pydantic
import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from forebay.protocols.openapi import PUBLIC_PATHS, Described, document
from forebay.serving.models.schema import WireType
from forebay.types.file import File

JSON, MSGPACK, XMSGPACK = "application/json", "application/msgpack", "application/x-msgpack"
ERRORS = {"400", "404", "406", "413", "415", "422", "429", "500", "503", "504"}


class In(msgspec.Struct):
    x: int
    default: "list[In]" = []


class Out(msgspec.Struct):
    label: str
    score: float


class Animal(pydantic.BaseModel):
    name: str
    young: "list[Animal]" = []


def one(**options):
    fields = {"name": "fish", "input": WireType(In), "output": WireType(Out, "output")}
    return Described(**(fields | options))


def references(node):
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def check(doc):
    """Validate against the meta-schema of OpenAPI 3.1 and look up every reference."""
    doc = json.loads(json.dumps(doc))
    schemathesis.openapi.from_dict(doc).validate()
    for reference in references(doc):
        node = doc
        for step in reference.removeprefix("#/").split("/"):
            node = node[step]
    for schema in doc["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema | {"$schema": "https://json-schema.org/draft/2020-12/schema"})
    ids = [operation["operationId"] for item in doc["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids))
    assert all(name.isidentifier() for name in ids)
    return doc


def test_the_validator_would_notice():
    doc = document("t", "1", [one()])
    del doc["paths"]["/"]["post"]["responses"]["200"]["description"]
    with pytest.raises(jsonschema_rs.ValidationError):
        check(doc)


def test_one_endpoint():
    doc = check(document("Fish", "1.2", [one(description="Which fish?")]))
    assert doc["openapi"] == "3.1.0"
    assert doc["info"] == {"title": "Fish", "version": "1.2"}
    assert set(doc["paths"]) == {"/", "/models/fish", "/models"} | PUBLIC_PATHS | {"/metrics"}
    for path in ("/", "/models/fish"):
        post = doc["paths"][path]["post"]
        assert post["description"] == "Which fish?"
        assert set(post["requestBody"]["content"]) == {JSON, MSGPACK, XMSGPACK}
        assert post["requestBody"]["content"][JSON]["schema"] == {"$ref": "#/components/schemas/In"}
        assert set(post["responses"]["200"]["content"]) == {JSON, MSGPACK}
        assert set(post["responses"]) == ERRORS | {"200"}
    assert "security" not in doc


def test_operations_are_grouped_by_model_and_titled_by_docstrings():
    embed = one(path="/embed", call="embed", description="Embeds a fish.\n\nMore.")
    fish = [one(version="1", description="Names a fish.\n\nMore."), one(version="2", methods=[embed])]
    doc = check(document("t", "1", [*fish, one(name="server", description="")], manages=True))
    assert doc["tags"] == [
        {"name": "fish", "description": "versions 1, 2: Names a fish"},
        {"name": "server", "description": ""},
    ]
    told = {path: (post["summary"], post["tags"]) for path, item in doc["paths"].items() if (post := item.get("post"))}
    assert told["/models/fish"] == ("Names a fish", ["fish"])
    assert told["/models/fish/embed"] == ("Embeds a fish", ["fish"])
    assert told["/models/server"] == ("Call server", ["server"])
    groups = {tag for item in doc["paths"].values() for each in item.values() for tag in each["tags"]}
    assert {tag for tag in groups if " " not in tag} == {"fish", "server"}, "no group of ours has the name of a model"
    assert {"the server", "version management"} <= groups


def test_two_endpoints_have_no_root():
    doc = check(document("t", "1", [one(), one(name="fowl")]))
    assert "/" not in doc["paths"]
    assert {"/models/fish", "/models/fowl"} <= set(doc["paths"])
    assert "post" not in check(document("t", "1", []))["paths"].get("/", {})


def test_headers():
    parameters = document("t", "1", [one()])["components"]["parameters"]
    by_name = {parameter["name"]: parameter["schema"] for parameter in parameters.values()}
    timeout = jsonschema_rs.validator_for(by_name["X-Request-Timeout-Ms"])
    assert timeout.is_valid(1)
    assert not timeout.is_valid(0)
    name = jsonschema_rs.validator_for(by_name["X-Request-Id"])
    assert name.is_valid("a-1!~")
    assert name.is_valid("a" * 128)
    for wrong in ("", "a" * 129, "a b", "é", "a\n"):
        assert not name.is_valid(wrong)


def test_errors():
    doc = document("t", "1", [one()])
    responses = doc["components"]["responses"]
    limited = responses[doc["paths"]["/"]["post"]["responses"]["429"]["$ref"].rpartition("/")[2]]
    assert "Retry-After" in limited["headers"]
    body = {"error": {"code": "queue_full", "message": "m", "request_id": "r"}}
    error = jsonschema_rs.validator_for(doc["components"]["schemas"]["ForebayError"])
    assert error.is_valid(body)
    assert error.is_valid({"error": body["error"] | {"detail": [1]}})
    assert not error.is_valid({"error": {"code": "queue_full"}})


def test_batchable_means_arrays():
    post = check(document("t", "1", [one(batchable=True)]))["paths"]["/"]["post"]
    assert post["requestBody"]["content"][MSGPACK]["schema"] == {
        "type": "array",
        "items": {"$ref": "#/components/schemas/In"},
        "minItems": 1,
    }
    assert post["responses"]["200"]["content"][JSON]["schema"]["items"] == {"$ref": "#/components/schemas/Out"}


def test_raw():
    doc = check(document("t", "1", [one(input=WireType(bytes), output=WireType(bytes, "output"), batchable=True)]))
    post = doc["paths"]["/"]["post"]
    binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    assert post["requestBody"]["content"] == binary
    assert post["responses"]["200"]["content"] == binary


def form_of(kind):
    content = check(document("t", "1", [one(input=WireType(kind), is_named=True)]))["paths"]["/"]["post"]["requestBody"]
    return content["content"]["multipart/form-data"]["schema"]


def test_bytes_are_themselves_in_a_form():
    class Picture(msgspec.Struct):
        image: File
        more: list[bytes]
        mask: bytes | None
        nested: list[list[bytes]]
        width: int = 1

    binary = {"type": "string", "format": "binary"}
    base64 = {"type": "string", "contentEncoding": "base64"}
    assert form_of(Picture)["properties"] == {
        "image": binary,
        "more": {"type": "array", "items": binary},
        "mask": {"anyOf": [binary, {"type": "null"}]},
        "nested": {
            "type": "array",
            "items": {"type": "array", "items": base64},
        },  # each is JSON, as nothing else says it
        "width": {"type": "integer", "default": 1},
    }
    assert form_of(In)["properties"]["default"]["items"] == {"$ref": "#/components/schemas/In"}


@pytest.mark.parametrize("kind", [str, float, list[int], int | str, Literal["a", "b"]])
def test_a_value_without_fields_is_the_one_part_of_a_form(kind):
    # A client that was generated sent the bare value as a form, which is none.
    sample = WireType(kind).json_schema("{name}")[0]
    assert form_of(kind) == {
        "type": "object",
        "additionalProperties": sample,
        "minProperties": 1,
        "maxProperties": 1,
    }


def test_arrays_say_that_they_have_items():
    # Generators leave out what has an array without them.
    schema, _ = WireType(NDArray[np.float32]).json_schema("{name}")
    assert schema == {"type": "array", "items": {}}


def test_a_form_has_fields_whatever_they_are():
    assert form_of(Any) == {"type": "object"}
    assert form_of(dict[str, int]) == {"type": "object", "additionalProperties": {"type": "integer"}}
    assert form_of(Animal | None)["anyOf"][0] == {"$ref": "#/components/schemas/Animal"}


def test_streams():
    content = check(document("t", "1", [one(streams=True)]))["paths"]["/"]["post"]["responses"]["200"]["content"]
    assert list(content) == ["text/event-stream"]
    assert content["text/event-stream"]["x-itemSchema"] == {"$ref": "#/components/schemas/Out"}


def test_a_stream_can_be_asked_for_by_a_query():
    paths = check(document("t", "1", [one(streams=True, is_named=True)]))["paths"]
    for path in ("/", "/models/fish"):
        get = paths[path]["get"]
        (sample,) = [parameter for parameter in get["parameters"] if parameter.get("in") == "query"]
        assert sample["schema"] == {"$ref": "#/components/schemas/In"}
        assert (sample["style"], sample["explode"]) == ("form", True)
        assert list(get["responses"]["200"]["content"]) == ["application/json", "text/event-stream"]
        assert "422" in get["responses"]
    assert "parameters" not in check(document("t", "1", [one(is_named=True)]))["paths"]["/models/fish"]["get"]


def test_versions_that_stand_side_by_side_have_paths_of_their_own():
    versions = [one(version="2"), one(version="1", input=WireType(str)), one(name="cat", version="1")]
    paths = check(document("t", "1", versions))["paths"]
    assert {path for path in paths if "versions" in path} == {"/models/fish/versions/1", "/models/fish/versions/2"}
    content = paths["/models/fish/versions/1"]["post"]["requestBody"]["content"]
    assert content[JSON]["schema"] == {"type": "string"}
    assert paths["/models/fish"]["post"]["requestBody"] == paths["/models/fish/versions/2"]["post"]["requestBody"]
    assert "/" in check(document("t", "1", versions[:2]))["paths"]


def test_methods_of_versions_that_are_asked_together_stand_at_their_common_path():
    method = one(path="/more", call="more")
    versions = [one(version="1"), one(version="2", methods=[method]), one(version="3", methods=[one(path="/own")])]
    paths = check(document("t", "1", versions, apart=versions[2:]))["paths"]
    assert {path for path in paths if path.endswith(("/more", "/own"))} == {
        "/more",
        "/models/fish/more",
        "/models/fish/versions/2/more",
        "/models/fish/versions/3/own",
    }


def test_managing_is_described_where_it_is_possible():
    paths = check(document("t", "1", [one()], api_key=True, manages=True))["paths"]
    for what in ("load", "swap", "unload"):
        post = paths[f"/models/{{name}}/versions/{{version}}/{what}"]["post"]
        assert [parameter["name"] for parameter in post["parameters"]] == ["name", "version"]
    assert paths["/models/{name}/weights"]["post"]["requestBody"]["required"]
    assert not any("{" in path for path in document("t", "1", [one()])["paths"])


def test_api_key():
    doc = check(document("t", "1", [one()], api_key=True))
    assert doc["security"] == [{"ApiKey": []}, {"Bearer": []}]
    assert doc["components"]["securitySchemes"]["ApiKey"]["name"] == "X-API-Key"
    assert doc["components"]["securitySchemes"]["Bearer"]["scheme"] == "bearer"
    for path, item in doc["paths"].items():
        for operation in item.values():
            if path in PUBLIC_PATHS:
                assert operation["security"] == []
                assert "401" not in operation["responses"]
            else:
                assert "security" not in operation
                assert "401" in operation["responses"]


def test_types_of_the_same_name_do_not_mix():
    first, second = (
        msgspec.defstruct("Holder", [("inner", msgspec.defstruct("Inner", [("a", kind)])), ("other", In)])
        for kind in (int, str)
    )
    doc = check(
        document(
            "t",
            "1",
            [
                one(name="a", input=WireType(first)),
                one(name="b/c", input=WireType(second), output=WireType(second, "output")),
                one(name="d", input=WireType(first)),
            ],
        )
    )
    schemas = doc["components"]["schemas"]
    assert schemas["Inner"]["properties"]["a"] == {"type": "integer"}
    assert schemas["b_c_Inner"]["properties"]["a"] == {"type": "string"}
    assert schemas["b_c_Holder"]["properties"]["inner"] == {"$ref": "#/components/schemas/b_c_Inner"}
    ask = doc["paths"]["/models/b/c"]["post"]
    assert ask["requestBody"]["content"][JSON]["schema"] == {"$ref": "#/components/schemas/b_c_Holder"}
    assert not [name for name in schemas if name.startswith(("a_", "d_", "b_c_2"))]


def test_a_type_named_like_ours():
    ForebayError = msgspec.defstruct("ForebayError", [("a", int)])
    doc = check(document("t", "1", [one(input=WireType(ForebayError))]))
    assert "error" in doc["components"]["schemas"]["ForebayError"]["properties"]
    assert "a" in doc["components"]["schemas"]["fish_ForebayError"]["properties"]


def test_fields_named_like_keywords():
    Odd = msgspec.defstruct("Odd", [("default", In), ("mapping", In), ("enum", int), ("properties", dict[str, In])])
    Other = msgspec.defstruct("In", [("x", str)])
    doc = check(document("t", "1", [one(name="a", input=WireType(Other)), one(name="b", input=WireType(Odd))]))
    properties = doc["components"]["schemas"]["b_Odd"]["properties"]
    assert properties["default"] == properties["mapping"] == {"$ref": "#/components/schemas/b_In"}


def test_tagged_unions_keep_their_mapping():
    A = msgspec.defstruct("A", [("x", int)], tag=True)
    B = msgspec.defstruct("B", [("x", int)], tag=True)
    Clash = msgspec.defstruct("A", [("y", int)])
    doc = check(document("t", "1", [one(name="a", input=WireType(Clash)), one(name="b", input=WireType(A | B))]))
    schema = doc["paths"]["/models/b"]["post"]["requestBody"]["content"][JSON]["schema"]
    assert schema["discriminator"]["mapping"] == {
        "A": "#/components/schemas/b_A",
        "B": "#/components/schemas/b_B",
    }


def test_pydantic_types():
    doc = check(document("t", "1", [one(input=WireType(Animal), output=WireType(list[Animal], "output"))]))
    assert "Animal" in doc["components"]["schemas"]


class Herd(pydantic.BaseModel, title="A Herd"):
    animals: list[Animal]


def test_a_pydantic_type_is_one_component_wherever_it_stands():
    same = {"input": WireType(Herd), "output": WireType(Herd, "output")}
    doc = check(document("t", "1", [one(name="fish", **same), one(name="bird", **same)]))
    for path in ("/models/fish", "/models/bird"):
        asked = doc["paths"][path]["post"]
        for content in (asked["requestBody"]["content"], asked["responses"]["200"]["content"]):
            assert content[JSON]["schema"] == {"$ref": "#/components/schemas/A_Herd"}
    assert doc["components"]["schemas"]["A_Herd"]["required"] == ["animals"]


def test_a_pydantic_title_that_is_no_name_of_a_component():
    odd, nameless = (pydantic.create_model("Odd", x=int, __config__={"title": title}) for title in ("a b/ü", ""))
    doc = check(document("t", "1", [one(name="a", input=WireType(odd)), one(name="b", input=WireType(nameless))]))
    assert {"a_b__", ""} & {*doc["components"]["schemas"]} == {"a_b__"}


def test_the_document_is_the_callers_own():
    first = document("t", "1", [one()])
    first["components"]["schemas"].clear()
    first["components"]["parameters"]["Timeout"]["schema"].clear()
    check(document("t", "1", [one()]))


def test_requests_made_from_the_document_can_be_read():
    endpoint = one()
    schema = schemathesis.openapi.from_dict(document("t", "1", [endpoint]))
    decode = WireType(In).decoder("json")

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(case=schema["/models/fish"]["post"].as_strategy())
    def try_all(case):
        if case.media_type == JSON:
            decode(json.dumps(case.body).encode())

    try_all()


names = st.text(min_size=1, max_size=12).filter(lambda text: text.isprintable())


@settings(max_examples=15, deadline=None)
@given(names=st.lists(names, max_size=3, unique=True), flags=st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_any_names_make_a_valid_document(names, flags):
    streams, batchable, api_key = flags
    endpoints = [
        one(name=name, output=WireType(Any, "output"), streams=streams, batchable=batchable, version="3")
        for name in names
    ]
    check(document("t", "1", endpoints, api_key=api_key, manages=api_key))
