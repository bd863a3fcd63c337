# SPDX-License-Identifier: Apache-2.0
"""Ops as projects write them: constructors, and hooks of every version."""

from __future__ import annotations

import enum
import types
from typing import Any

import numpy as np
import pytest

from forebay.errors import ConfigError, ForebayError
from forebay.surfaces.pipeline.codes import CustomException, CustomExceptionCode, ProductErrCode, err_of
from forebay.surfaces.pipeline.ops import hooks
from forebay.surfaces.pipeline.ops.hooks import OpHooks, Prepared
from forebay.surfaces.pipeline.ops.op import REQUEST, Op, RequestOp, ResponseOp
from forebay.surfaces.pipeline.protocol import tensors
from forebay.surfaces.pipeline.protocol.messages import Request


class Own(ProductErrCode):
    SOLD_OUT = 71


def made(**methods: Any) -> Op:
    return type("Made", (Op,), methods)(name="made")


def error_of(call: Any, *arguments: Any) -> tuple[int, str, bool]:
    with pytest.raises(ForebayError) as caught:
        call(*arguments)
    found = err_of(caught.value)
    return found.err_no, found.text, found.product


# ---------------------------------------------------------------------------------------------------------------------
# Constructors


def test_a_bare_op_is_given_nothing() -> None:  # P28
    op = Op("bow")
    assert set(op.given) == {
        *("server_endpoints", "fetch_list", "client_config", "client_type", "concurrency", "timeout", "retry"),
        *("batch_size", "auto_batching_timeout"),
    }
    assert set(op.given.values()) == {None}
    assert (op.concurrency_idx, op.client, op.local_service_handler) == (None, None, None)
    assert op.fetch_names == []


def test_the_seeds_call_is_kept_as_it_was_written() -> None:  # P28
    read = RequestOp()
    op = Op(
        name="bow",
        input_ops=[read],
        server_endpoints=["127.0.0.1:9393"],
        fetch_list=["prediction"],
        client_config="conf.prototxt",
        concurrency=1,
        timeout=-1,
        retry=1,
    )
    assert op.given["server_endpoints"] == ["127.0.0.1:9393"]
    assert (op.given["timeout"], op.given["retry"], op.given["batch_size"]) == (-1, 1, None)
    assert op.fetch_names == op._fetch_names == ["prediction"]
    assert op.get_input_ops() == [read]


def test_parameters_may_be_given_by_position() -> None:  # P28
    read = RequestOp()
    op = Op("bow", [read], ["h:1"], ["p"], "conf", "grpc", 2, 500, 3, 4, 20, "handler", None)
    assert list(op.given.values()) == [["h:1"], ["p"], "conf", "grpc", 2, 500, 3, 4, 20]
    assert op.local_service_handler == "handler"


def test_ops_without_a_name_get_one() -> None:  # P29
    first, second = Op(), Op()
    assert first.name.startswith("Op")
    assert second.name.startswith("Op")
    assert first.name != second.name


def test_inputs_are_one_op_several_or_none() -> None:  # P30
    read = RequestOp()
    assert Op("a", read).get_input_ops() == Op("b", (read,)).get_input_ops() == [read]
    assert Op("c").get_input_ops() == Op("d", None).get_input_ops() == []
    Op("e").get_input_ops().append(read)
    assert Op("f").get_input_ops() == []


def test_inputs_may_be_set_after_an_op_is_made() -> None:  # P30
    read, other = RequestOp(), Op("other")
    op = Op("a", other, concurrency=2, client_type="grpc")
    op.set_input_ops([read])
    assert (op.get_input_ops(), read.readers, other.readers) == ([read], [op], [])
    assert (op.concurrency, op.client_type) == (2, "grpc")
    with pytest.raises(ConfigError, match="input_ops"):
        op.set_input_ops(["read"])  # type: ignore[list-item]
    assert op.get_input_ops() == [read]


def test_a_request_op_of_ones_own_reads_tensors_as_the_default_does() -> None:  # P56
    class Reads(RequestOp):
        def unpack_request_package(self, request: Any) -> Any:
            (tensor,) = request.tensors
            found, lod = self.proto_tensor_2_numpy(tensor)
            return {tensor.name: found, "lod": lod}, request.logid, None, ""

    request = Request()
    tensors.pack(request.tensors.add(), "x", np.array([[1.5, 2.5]], np.float32), lod=[0, 1])
    values, _, _, _ = Reads().unpack_request_package(request)
    (default, _, _, _) = RequestOp().unpack_request_package(request)
    assert values["x"].tolist() == default["x"].tolist() == [[1.5, 2.5]]
    assert np.array_equal(values["lod"], default["x.lod"])
    request.tensors[0].elem_type = 13
    request.tensors[0].byte_data = b"\x80\x04N."  # a pickle is not read, whoever asks
    with pytest.raises(ForebayError):
        Reads().unpack_request_package(request)


@pytest.mark.parametrize("wrong", ["read", 1, [1], ["read"], {"read": 1}])
def test_what_is_no_op_is_refused_by_name(wrong: Any) -> None:  # P30
    with pytest.raises(ConfigError, match=r"op 'bow': input_ops: expected"):
        Op("bow", wrong)


def test_request_and_response_ops_load_their_resources_at_once() -> None:  # P55, P59
    calls: list[str] = []

    class Reads(RequestOp):
        def init_op(self):
            calls.append("request")

    class Writes(ResponseOp):
        def init_op(self):
            calls.append("response")

    Reads()
    Writes(input_ops=[Op("last")])
    assert calls == ["request", "response"]


def test_a_resource_that_does_not_load_aborts() -> None:  # P55
    class Reads(RequestOp):
        def init_op(self):
            raise FileNotFoundError("imdb.vocab")

    with pytest.raises(FileNotFoundError):
        Reads()


# ---------------------------------------------------------------------------------------------------------------------
# The forms of the hooks


def test_preprocess_of_every_version_gets_what_it_takes() -> None:  # P39, P41
    inputs = {REQUEST: {"x": 1}}
    seen: list[Any] = []
    methods: list[Any] = [
        lambda self, input_dicts: seen.append((input_dicts,)) or {},
        lambda self, input_data, log_id: seen.append((input_data, log_id)) or {},
        lambda self, input_dicts, data_id, log_id: seen.append((input_dicts, data_id, log_id)) or {},
        lambda self, *arguments: seen.append(arguments) or {},
        lambda self, input_dicts, **names: seen.append((input_dicts, names)) or {},
        lambda self, input_dicts, *, log_id: seen.append((input_dicts, log_id)) or {},
        lambda self, input_dicts, data_id=0, log_id=0: seen.append((input_dicts, data_id, log_id)) or {},
        lambda self, input_dicts, verbose=False: seen.append((input_dicts, verbose)) or {},
        lambda self, input_dicts=None: seen.append((input_dicts,)) or {},
    ]
    for method in methods:
        OpHooks(made(preprocess=method)).preprocess(inputs, 3, 7)
    assert seen == [
        (inputs,),
        (inputs, 7),
        (inputs, 3, 7),
        (inputs, 3, 7),
        (inputs, {"data_id": 3, "log_id": 7}),
        (inputs, 7),
        (inputs, 3, 7),
        (inputs, False),
        (inputs,),
    ]


def test_the_third_parameter_of_postprocess_is_the_log_id() -> None:  # P47, trap 4
    seen: list[Any] = []
    methods: list[Any] = [
        lambda self, input_dicts, fetch_dict: seen.append(()) or {},
        lambda self, input_dicts, fetch_dict, log_id: seen.append((log_id,)) or {},
        lambda self, input_dicts, fetch_dict, third: seen.append((third,)) or {},
        lambda self, input_dicts, fetch_data, data_id, log_id: seen.append((data_id, log_id)) or {},
        lambda self, *arguments: seen.append(arguments[2:]) or {},
        lambda self, **names: seen.append(sorted(names)) or {},
    ]
    for method in methods:
        OpHooks(made(postprocess=method)).postprocess({}, {"y": 1}, 3, 7)
    assert seen == [(), (7,), (7,), (3, 7), (3, 7), ["data_id", "fetch_data", "input_dicts", "log_id"]]


def test_process_may_leave_the_log_id_out() -> None:  # P44
    seen: list[Any] = []
    methods: list[Any] = [
        lambda self, feed_dict_list, typical_logid: seen.append((feed_dict_list, typical_logid)) or {},
        lambda self, feed_batch, typical_logid=0: seen.append((feed_batch, typical_logid)) or {},
        lambda self, feed_batch: seen.append((feed_batch,)) or {},
    ]
    for method in methods:
        OpHooks(made(process=method)).process([{"x": 1}], 7)
    assert seen == [([{"x": 1}], 7), ([{"x": 1}], 7), ([{"x": 1}],)]


@pytest.mark.parametrize(
    "hook, method",
    [
        ("preprocess", lambda self: {}),
        ("preprocess", lambda self, a, b, c, d: {}),
        ("process", lambda self, a, b, c: {}),
        ("postprocess", lambda self, a: {}),
        ("postprocess", lambda self, a, b, c, d, e: {}),
    ],
)
def test_a_hook_that_cannot_be_called_is_told_at_the_start(hook: str, method: Any) -> None:  # P41
    with pytest.raises(ConfigError, match=rf"op 'made': {hook} takes \d values; write it as {hook}\(self, "):
        OpHooks(made(**{hook: method}))


def test_a_parameter_nobody_knows_is_named() -> None:  # P41
    with pytest.raises(ConfigError, match="needs 'tenant', which is not known"):
        OpHooks(made(preprocess=lambda self, input_dicts, *, tenant: {}))


def test_the_request_op_too_is_checked() -> None:  # P56
    class Reads(RequestOp):
        def unpack_request_package(self, request, more):  # pyright: ignore[reportIncompatibleMethodOverride]
            return {}

    with pytest.raises(ConfigError, match="unpack_request_package takes 2 values"):
        hooks.unpack(Reads(), a_request([], []))


def test_default_hooks_can_be_called_in_the_form_of_every_version() -> None:  # P40, P47
    op = Op("made")
    inputs = {"before": {"x": 1}}
    assert op.preprocess(inputs) == {"x": 1}
    assert op.preprocess(inputs, 0, 0) == ({"x": 1}, False, None, "")
    assert op.postprocess(inputs, {"y": 1}) == {"y": 1}
    assert op.postprocess(inputs, {"y": 1}, 7) == op.postprocess(inputs, {"y": 1}, 3, 7) == ({"y": 1}, None, "")


def test_several_inputs_need_a_preprocess_of_ones_own() -> None:  # P40
    joined = Op("join", [Op("a"), Op("b")])
    err_no, text, _ = error_of(OpHooks(joined).preprocess, {"a": {}, "b": {}}, 0, 0)
    assert err_no == CustomExceptionCode.NOT_IMPLEMENTED.value
    assert "[join] this Op has multiple previous inputs (a, b). Please override preprocess." in text


# ---------------------------------------------------------------------------------------------------------------------
# What hooks return


def test_results_of_every_version_have_one_meaning() -> None:  # P41
    data = {"x": 1}
    for found in (data, (data, False, None, ""), (data, None, None, None)):
        assert OpHooks(made(preprocess=lambda self, i, found=found: found)).preprocess({}, 0, 0) == Prepared(data)
    for found in ((data, True, None, ""), (data, 1, None, None)):
        op = made(preprocess=lambda self, i, d, n, found=found: found)
        assert OpHooks(op).preprocess({}, 0, 0) == Prepared(data, skips=True)
    for found in (data, (data, None, ""), (data, None, None)):
        assert OpHooks(made(postprocess=lambda self, i, f, found=found: found)).postprocess({}, {}, 0, 0) == data
    for found in (data, (data, 0, ""), (data, None, None), (data, CustomExceptionCode.OK, "")):
        assert OpHooks(made(process=lambda self, f, found=found: found)).process([{}], 0) == data


def test_a_list_stands_for_the_tuple_it_could_be() -> None:  # F43: the original unpacks whatever it gets
    data = {"x": 1}
    one = OpHooks(made(preprocess=lambda self, i: [data, True, None, ""]))
    assert one.preprocess({}, 0, 0) == Prepared(data, skips=True)
    one = OpHooks(made(preprocess=lambda self, i: [[data, data], False, None, ""]))
    assert one.preprocess({}, 0, 0) == Prepared([data, data])
    one = OpHooks(made(preprocess=lambda self, i: [None, False, 71, "sold out"]))
    assert error_of(one.preprocess, {}, 0, 0) == (71, "sold out", True)
    assert OpHooks(made(postprocess=lambda self, i, f: [data, None, ""])).postprocess({}, {}, 0, 0) == data
    assert OpHooks(made(process=lambda self, f: [data, 0, ""])).process([{}], 0) == data
    four = [data, data, data, data]  # and four dicts are four dicts
    assert OpHooks(made(preprocess=lambda self, i: four)).preprocess({}, 0, 0) == Prepared(four)
    assert OpHooks(made(process=lambda self, f: four[:3])).process([{}], 0) == four[:3]


@pytest.mark.parametrize(
    "hook, found, said",
    [
        ("preprocess", None, "None"),
        ("preprocess", "text", "str"),
        ("preprocess", ({}, False), "a tuple of 2"),
        ("preprocess", [{}, 1], "a list that holds int"),
        ("postprocess", [1], "list"),  # P48
        ("postprocess", ({}, None), "a tuple of 2"),
        ("postprocess", None, "None"),
        ("process", ({}, 0), "a tuple of 2"),
        ("process", ({}, "bad", ""), "str"),
    ],
)
def test_a_result_of_another_shape_is_7000_with_op_and_hook(hook: str, found: Any, said: str) -> None:  # P41, P48
    one = OpHooks(made(**{hook: lambda self, *arguments: found}))
    arguments = {"preprocess": ({}, 0, 0), "process": ([{}], 0), "postprocess": ({}, {}, 0, 0)}[hook]
    err_no, text, product = error_of(getattr(one, hook), *arguments)
    assert (err_no, product) == (7000, False)
    assert text.startswith(f"[made] Failed to {hook}: {hook} should return ")
    assert text.endswith(f"it returned {said}")


@pytest.mark.parametrize("code, number", [(70, 70), (100001, 100001), (Own.SOLD_OUT, 71)])
def test_product_errors_end_the_request_with_their_own_number(code: Any, number: int) -> None:  # P43, P94, trap 16
    before = OpHooks(made(preprocess=lambda self, i, d, n: ({}, False, code, "sold out")))
    assert error_of(before.preprocess, {}, 0, 0) == (number, "sold out", True)
    after = OpHooks(made(postprocess=lambda self, i, f, d, n: (None, code, "sold out")))
    assert error_of(after.postprocess, {}, {}, 0, 0) == (number, "sold out", True)


@pytest.mark.parametrize("code", [0, "71", True, 1 << 31, enum.Enum("Codes", {"A": 0}).A])  # pyright: ignore[reportAttributeAccessIssue]
def test_what_is_no_product_code_is_7000(code: Any) -> None:  # P43
    one = OpHooks(made(preprocess=lambda self, i, d, n: ({}, False, code, "")))
    err_no, text, product = error_of(one.preprocess, {}, 0, 0)
    assert (err_no, product) == (7000, False)
    assert "a number other than 0" in text


def test_process_without_a_result_is_a_client_error() -> None:  # P46
    err_no, text, _ = error_of(OpHooks(made(process=lambda self, f, t: None)).process, [{}], 0)
    assert err_no == 9000
    assert "returned nothing" in text


def test_an_error_code_of_process_is_the_requests() -> None:  # P46
    one = OpHooks(made(process=lambda self, f, t: (None, 5000, "no such feed")))
    assert error_of(one.process, [{}], 0) == (5000, "no such feed", False)


def test_an_exception_is_10000_with_op_hook_and_message() -> None:  # P92, P95
    class Broken(Op):
        def preprocess(self, input_dicts, data_id=None, log_id=None):
            raise KeyError("image")

    err_no, text, product = error_of(OpHooks(Broken("made")).preprocess, {}, 0, 0)
    assert (err_no, product) == (10000, False)
    assert text == "[made] Failed to preprocess: 'image'"
    assert "Broken" not in text
    _, text, _ = error_of(OpHooks(Broken("made"), debug=True).preprocess, {}, 0, 0)
    assert text == "[made] Failed to preprocess: Broken.preprocess: KeyError: 'image'"


def test_the_traceback_goes_to_the_log_only() -> None:  # P95
    def preprocess(self: Any, input_dicts: Any) -> Any:
        raise SystemExit("leaving")

    with pytest.raises(ForebayError) as caught:
        OpHooks(made(preprocess=preprocess)).preprocess({}, 0, 0)
    assert "leaving" in caught.value.message
    assert "Traceback" not in caught.value.message
    assert "Traceback" in getattr(caught.value, "trace", "")


def test_a_custom_exception_is_told_only_if_it_says_so() -> None:  # P93
    def raising(*arguments: Any) -> OpHooks:
        def preprocess(self: Any, input_dicts: Any) -> Any:
            raise CustomException(*arguments)

        return OpHooks(made(preprocess=preprocess))

    code = CustomExceptionCode.INPUT_PARAMS_ERROR
    assert error_of(raising(code, "no image", True).preprocess, {}, 0, 0) == (5000, "no image", False)
    assert error_of(raising(100001, "no image", True).preprocess, {}, 0, 0)[:2] == (100001, "no image")
    with pytest.raises(ForebayError) as caught:
        raising(code, "the secret", False).preprocess({}, 0, 0)
    assert err_of(caught.value).err_no == 10000
    assert "secret" not in caught.value.message
    assert "the secret" in getattr(caught.value, "trace", "")


# ---------------------------------------------------------------------------------------------------------------------
# Which version an op was written for


@pytest.mark.parametrize(
    "methods, generation",
    [
        ({}, None),
        ({"init_op": lambda self: None}, None),
        ({"preprocess": lambda self, input_dicts: {}}, 0),
        ({"postprocess": lambda self, input_dicts, fetch_dict: {}}, 0),
        ({"postprocess": lambda self, input_dicts, fetch_dict, log_id: {}}, 1),
        ({"preprocess": lambda self, i, d, n: {}, "postprocess": lambda self, i, f, log_id: {}}, 1),
        ({"postprocess": lambda self, i, f, data_id, log_id: {}}, 2),
        ({"preprocess": lambda self, i: {}, "postprocess": lambda self, i, f, data_id, log_id: {}}, 2),
        ({"preprocess": lambda self, *arguments: {}}, None),
        ({"process": lambda self, feed_batch, typical_logid: {}}, None),
    ],
)
def test_the_version_is_read_off_the_signatures(methods: Any, generation: int | None) -> None:  # P57
    assert hooks.generation_of(made(**methods)) == generation


def test_texts_are_read_as_v03_did_only_for_ops_of_v03() -> None:  # P57, trap 1
    old = made(preprocess=lambda self, input_dicts: {})
    new = made(preprocess=lambda self, input_dicts, data_id, log_id: {})
    assert hooks.parse_mode_of([Op("bow"), Op("cnn"), old]) == "literal"
    assert hooks.parse_mode_of([old, new]) == "raw"
    assert hooks.parse_mode_of([Op("bow")]) == "raw"
    assert hooks.parse_mode_of([]) == "raw"


def test_a_hook_set_on_an_instance_or_by_a_mixin_is_the_projects_own() -> None:  # P36
    class Mixin:
        def process(self, feed_batch, typical_logid=0):
            return {}

    class Mixed(Mixin, Op):
        pass

    assert hooks.overrides(Mixed("made"), "process")
    op = Op("made")
    assert not hooks.overrides(op, "process")
    op.process = types.MethodType(lambda self, feed_batch, typical_logid: {}, op)
    assert hooks.overrides(op, "process")


# ---------------------------------------------------------------------------------------------------------------------
# Reading requests


def a_request(keys: list[str], values: list[str], **fields: Any) -> Any:
    return types.SimpleNamespace(key=keys, value=values, tensors=[], logid=fields.pop("logid", 0), **fields)


class Reads(RequestOp):
    found: Any = None

    def unpack_request_package(self, request):
        return self.found(request) if callable(self.found) else self.found


@pytest.mark.parametrize(
    "found, unpacked",
    [
        ({"x": 1}, hooks.Unpacked({"x": 1}, 77)),  # the version without a log id takes that of the request
        (({"x": 1}, 78, None, ""), hooks.Unpacked({"x": 1}, 78)),
        (({"x": 1}, None, None, None), hooks.Unpacked({"x": 1}, 0)),
        (({"x": 1}, 1 << 63, None, ""), hooks.Unpacked({"x": 1}, 0)),
    ],
)
def test_a_request_is_read_in_the_form_of_every_version(found: Any, unpacked: Any) -> None:  # P56, P11
    op = Reads()
    op.found = found
    assert hooks.unpack(op, a_request([], [], logid=77)) == unpacked


def test_a_request_op_may_refuse_with_a_product_error() -> None:  # P26, P43
    op = Reads()
    op.found = lambda request: ({}, 0, Own.SOLD_OUT, f"no method {request.method}")
    assert error_of(hooks.unpack, op, a_request([], [], method="other")) == (71, "no method other", True)


@pytest.mark.parametrize(
    "found", [None, 1, [], ({}, 0), ({}, 0, None), ({}, 0, 0, "x"), ({}, 0, "71", "x"), ({}, 0, 1 << 31, "x")]
)
def test_a_request_op_that_returns_something_else_is_8000(found: Any) -> None:  # P56
    op = Reads()
    op.found = found
    err_no, text, _ = error_of(hooks.unpack, op, a_request([], []))
    assert err_no == 8000
    assert text.startswith("rpc package error: unpack_request_package ")


def test_an_exception_while_a_request_is_read_is_8000() -> None:  # P56
    op = Reads()
    op.found = lambda request: request.value[5]
    err_no, text, _ = error_of(hooks.unpack, op, a_request(["x"], ["1"]))
    assert (err_no, text) == (8000, "rpc package error: list index out of range")


TEXTS = {
    "1": (1, 1),
    "0.1, -0.2": ("0.1, -0.2", (0.1, -0.2)),
    "[1, 2]": ("[1, 2]", [1, 2]),
    "'quoted'": ("'quoted'", "quoted"),
    "None": ("None", None),
    "True": ("True", True),
    "i am very sad | 0": ("i am very sad | 0",) * 2,
    "aGVsbG8=": ("aGVsbG8=",) * 2,
    "{'a': 1}": ("{'a': 1}", {"a": 1}),
    "__import__('os')": ("__import__('os')",) * 2,
    "1 + 1": ("1 + 1",) * 2,
}


def test_texts_are_read_by_the_mode_of_the_server() -> None:  # P57, P154, trap 1
    request = a_request(list(map(str, range(len(TEXTS) + 1))), [*TEXTS, "array([1, 2])"])
    op = RequestOp()
    assert list(hooks.unpack(op, request).inputs.values()) == [*TEXTS, "array([1, 2])"]
    op.request_parse = "ndarray"
    *others, array = hooks.unpack(op, request).inputs.values()
    assert others == list(TEXTS)
    np.testing.assert_array_equal(array, np.array([1, 2]))
    op.request_parse = "literal"
    *others, array = hooks.unpack(op, request).inputs.values()
    assert others == [literal for _, literal in TEXTS.values()]
    np.testing.assert_array_equal(array, np.array([1, 2]))


def test_each_key_needs_a_value() -> None:  # P10, F109
    err_no, text, _ = error_of(hooks.unpack, RequestOp(), a_request(["x", "y"], ["1"]))
    assert err_no == 8000
    assert "2 keys and 1 values" in text
    assert hooks.unpack(RequestOp(), a_request(["x"], ["1", "2"])).inputs == {"x": "1"}


def test_tensors_of_a_request_become_arrays() -> None:  # P57
    from forebay.surfaces.pipeline.protocol import messages, tensors

    request = messages.Request(key=["a"], value=["text"], logid=5)
    tensors.pack(request.tensors.add(), "x", np.arange(6, dtype="float32").reshape(2, 3))
    found = hooks.unpack(RequestOp(), request)
    assert found.log_id == 5
    assert found.inputs["a"] == "text"
    np.testing.assert_array_equal(found.inputs["x"], np.arange(6, dtype="float32").reshape(2, 3))


def test_the_seeds_request_op_works() -> None:  # P58
    class Dataset:
        def get_words_and_label(self, line: str) -> tuple[list[int], list[int]]:
            words, _, label = line.partition("|")
            return [len(word) for word in words.split()], [int(label)]

    class ImdbRequestOp(RequestOp):
        def init_op(self):
            self.imdb_dataset = Dataset()

        def unpack_request_package(self, request):
            dictdata = {}
            for idx, key in enumerate(request.key):
                if key != "words":
                    continue
                words = request.value[idx]
                word_ids, _ = self.imdb_dataset.get_words_and_label(words)
                dictdata[key] = np.array(word_ids)
            return dictdata

    found = hooks.unpack(ImdbRequestOp(), a_request(["words", "other"], ["i am very sad | 0", "x"]))
    assert list(found.inputs) == ["words"]
    assert found.inputs["words"].tolist() == [1, 2, 4, 3]
