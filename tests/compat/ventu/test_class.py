# SPDX-License-Identifier: Apache-2.0
"""The class: construction, settings, schemas, hooks, warm-up, logging."""

import json
import logging
import subprocess
import sys
import warnings

import numpy as np
import pydantic
import pydantic.v1
import pytest
from tests.circles import left_in_circles
from tests.waiting import PATIENCE_S

from forebay.surfaces.ventu import Ventu


class Req(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(json_schema_extra={"example": {"text": "hello"}, "batch_size": 3})

    text: str


class Resp(pydantic.BaseModel):
    n: int


class Plain(pydantic.BaseModel):
    text: str


class RespWithExample(Resp):
    model_config = pydantic.ConfigDict(json_schema_extra={"example": {"n": 5}})


class Counting(Ventu):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.singles, self.batches = [], []

    def inference(self, data):
        self.singles.append(data)
        return {"n": len(data.text)}

    def batch_inference(self, batch):
        self.batches.append(batch)
        return [{"n": len(item.text)} for item in batch]


# B52
def test_a_subclass_hands_its_arguments_on_and_finds_the_known_attributes():
    model = Counting(Req, Resp, True, "further", "positionals", name="counting")
    assert model.use_msgpack is True
    assert (model.req_schema, model.resp_schema) == (Req, Resp)
    assert (model.req_example, model.resp_example, model.warmup_size) == ({"text": "hello"}, None, 3)
    assert model.config.name == "counting"
    assert model.logger.name == "ventu.ventu"
    assert callable(model.metric_registry.register)
    assert callable(model.app)
    assert callable(model.sock.run)
    assert model.app is model.app
    assert model.sock is model.sock


# B53
def test_settings_come_from_keywords_then_the_environment_then_defaults(monkeypatch):
    assert Ventu(Plain, Resp).config.model_dump() == {
        "name": "Deep Learning Service",
        "version": "latest",
        "host": "localhost",
        "port": 8000,
        "socket": "batching.socket",
    }
    monkeypatch.setenv("VENTU_PORT", "8123")
    monkeypatch.setenv("ventu_name", "from the environment")
    config = Ventu(Plain, Resp, name="given").config
    assert (config.port, config.name) == (8123, "given")
    assert Ventu(Plain, Resp).config.name == "from the environment"


# B53
def test_a_version_may_be_a_number():
    config = Ventu(Plain, Resp, name=7, version=0.2).config
    assert (config.name, config.version) == ("7", "0.2")


# B53
@pytest.mark.parametrize("setting", [{"port": 79}, {"port": 65536}, {"prot": 8000}])
def test_a_setting_that_is_not_possible_is_refused_at_construction(setting):
    with pytest.raises(pydantic.ValidationError, match=next(iter(setting))):
        Ventu(Plain, Resp, **setting)


# B54
def test_hooks_that_are_not_written_hand_on_what_they_get(ask, work):
    class Echo(pydantic.BaseModel):
        text: str

    model = Ventu(Echo, Echo)
    assert ask(model).post(b'{"text": "same"}').json() == {"text": "same"}
    assert work(model).ask(b'{"text": "same"}')[0] == ['{"text": "same"}']


# B54
def test_hooks_run_in_their_order(ask, work):
    class Steps(Ventu):
        def preprocess(self, data):
            return [data.text]

        def inference(self, data):
            return [*data, "one"]

        def batch_inference(self, batch):
            return [[*data, "many"] for data in batch]

        def postprocess(self, data):
            return {"steps": [*data, "post"]}

    class Said(pydantic.BaseModel):
        steps: list[str]

    model = Steps(Plain, Said)
    assert ask(model).post(b'{"text": "a"}').json() == {"steps": ["a", "one", "post"]}
    results, _ = work(model).ask(b'{"text": "a"}', b'{"text": "b"}')
    assert [json.loads(result)["steps"] for result in results] == [["a", "many", "post"], ["b", "many", "post"]]


# B55
def test_each_mode_calls_its_own_hook_only(ask, work):
    model = Counting(Plain, Resp)
    assert ask(model).post(b'{"text": "abc"}').json() == {"n": 3}
    assert (len(model.singles), len(model.batches)) == (1, 0)
    work(model).ask(b'{"text": "abc"}')
    assert (len(model.singles), len(model.batches)) == (1, 1)


# B56
@pytest.mark.parametrize("kind", [list, tuple, iter, np.array, lambda rows: (row for row in rows)], ids=range(5))
def test_a_batch_may_be_answered_with_any_sequence(kind, work):
    class Rows(Ventu):
        def batch_inference(self, batch):
            return kind([[len(item.text), 1] for item in batch])

        def postprocess(self, data):
            return {"n": data[0]}

    results, errors = work(Rows(Plain, Resp)).ask(b'{"text": "abc"}', b'{"text": "ab"}')
    assert (results, errors) == (['{"n": 3}', '{"n": 2}'], [False, False])


def spelled():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydantic's own, about the spelling that projects use

        class Original(pydantic.BaseModel):
            text: str

            class Config:
                schema_extra = {"example": {"text": "hi"}, "batch_size": 2}  # noqa: RUF012 - as projects write it

        class Inherited(Original):
            more: str = ""

        class Renamed(pydantic.BaseModel):
            text: str

            class Config:
                json_schema_extra = {"example": {"text": "hi"}, "batch_size": 2}  # noqa: RUF012 - as projects write it

    class Modern(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(json_schema_extra={"examples": [{"text": "hi"}], "batch_size": 2})
        text: str

    class First(pydantic.v1.BaseModel):
        text: str

        class Config:
            schema_extra = {"example": {"text": "hi"}, "batch_size": 2}  # noqa: RUF012 - as projects write it

    return [Original, Inherited, Renamed, Modern, First]


# B57, B59
@pytest.mark.parametrize("schema", spelled(), ids=lambda schema: schema.__name__)
def test_examples_are_found_however_they_are_spelled(schema, ask):
    model = Counting(schema, Resp)
    assert (model.req_example, model.warmup_size) == ({"text": "hi"}, 2)
    assert ask(model).post(b'{"text": "abc"}').json() == {"n": 3}
    assert model.singles[0].text == "hi"
    refused = ask(model).post(b"{}")
    assert refused.status_code == 422
    assert [set(error) >= {"loc", "msg", "type"} for error in refused.json()] == [True]


# B57
def test_a_schema_without_examples_and_one_with_a_function_are_fine():
    class Callable(pydantic.v1.BaseModel):
        class Config:
            @staticmethod
            def schema_extra(schema):
                schema["example"] = 1

    class OldPlain(pydantic.v1.BaseModel):
        pass

    for schema in (Plain, Callable, OldPlain):
        assert Ventu(schema, schema).req_example is None


# B57
def test_no_warning_is_ours():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Counting(spelled()[0], Resp)
        assert model.app is not None
        assert model.ventu_service.document()


# B58
def test_an_example_of_the_answer_needs_one_of_the_request():
    with pytest.raises(AssertionError, match="require request examples if response examples are provided"):
        Ventu(Plain, RespWithExample)


# B59
def test_names_of_the_first_pydantic_still_work(ask):
    from pydantic import Field, confloat, conint, conlist, constr, validator  # noqa: F401

    class Old(pydantic.v1.BaseModel):
        text: pydantic.v1.constr(min_length=2)  # pyright: ignore[reportInvalidTypeForm]

        @pydantic.v1.validator("text")
        def not_spam(cls, value):
            if value == "spam":
                raise ValueError("no spam")
            return value

    class New(pydantic.BaseModel):
        text: constr(min_length=2)  # pyright: ignore[reportInvalidTypeForm]
        score: confloat(ge=0, le=1) = Field(0.5)  # pyright: ignore[reportInvalidTypeForm]

    for schema in (Old, New):
        client = ask(Counting(schema, Resp))
        assert client.post(b'{"text": "abc"}').json() == {"n": 3}
        assert client.post(b'{"text": "x"}').json()[0]["loc"] == ["text"]
    assert ask(Counting(Old, Resp)).post(b'{"text": "spam"}').json() == [
        {"loc": ["text"], "msg": "no spam", "type": "value_error"}
    ]


def test_a_schema_that_is_none_is_refused():
    with pytest.raises(TypeError, match="pydantic model"):
        Ventu(dict, Resp)


# B71
def test_nothing_is_written_by_default_and_a_root_handler_sees_everything(ask, work, caplog, capfd):
    class Broken(Counting):
        def inference(self, data):
            raise RuntimeError("boom")

    assert ask(Broken(Plain, Resp)).post(b'{"text": "abc"}').status_code == 500
    assert capfd.readouterr().err == ""
    with caplog.at_level(logging.DEBUG):
        ask(Broken(Plain, Resp)).post(b'{"text": "abc"}')
        work(Counting(Plain, Resp)).ask(b"{}")
    names = {record.name for record in caplog.records}
    assert {"ventu.ventu", "ventu.service", "ventu.protocol"} <= names
    assert any(record.exc_info for record in caplog.records if record.name == "ventu.service")
    assert any(type(handler) is logging.NullHandler for handler in logging.getLogger("ventu").handlers)


# B72
def test_the_model_is_warmed_up_once_before_it_serves():
    model = Counting(Req, Resp)
    assert model.app is model.app
    assert [item.text for item in model.singles] == ["hello"]
    assert model.batches == []
    assert model.sock is model.sock
    assert [[item.text for item in batch] for batch in model.batches] == [["hello"] * 3]


# B72
def test_the_health_check_tells_whether_there_was_anything_to_check():
    assert Counting(Req, Resp).health_check() is True
    assert Counting(Req, Resp).health_check(batch=True) is True
    assert Counting(Plain, Resp).health_check() is None


# B72
def test_a_wrong_result_of_the_example_ends_the_program_before_it_serves():
    class Wrong(Counting):
        def inference(self, data):
            return {"n": 6}

        def batch_inference(self, batch):
            return [{"n": 6}] * len(batch)

    model = Wrong(Req, RespWithExample)
    with pytest.raises(AssertionError, match="does not match"):
        _ = model.app
    with pytest.raises(AssertionError, match="does not match"):
        model.run_unix("/nowhere/at/all")
    with pytest.raises(AssertionError, match="does not match"):
        model.run_tcp("127.0.0.1", 1)


# B72
def test_what_a_hook_raises_in_the_warm_up_reaches_the_caller():
    class Broken(Counting):
        def postprocess(self, data):
            raise LookupError("no labels")

    with pytest.raises(LookupError, match="no labels"):
        _ = Broken(Req, Resp).app
    with pytest.raises(LookupError, match="no labels"):
        _ = Broken(Req, Resp).sock


# B73
def test_every_result_of_the_warm_up_batch_is_compared_with_the_one_example(work):
    assert work(Counting(Req, RespWithExample)).ask(b'{"text": "abc"}')[0] == ['{"n": 3}']

    class LastWrong(Counting):
        def batch_inference(self, batch):
            return [{"n": 5}] * (len(batch) - 1) + [{"n": 4}]

    with pytest.raises(AssertionError, match="does not match"):
        _ = LastWrong(Req, RespWithExample).sock


# B74
def test_results_are_compared_exactly():
    class Almost(Ventu):
        def inference(self, data):
            return {"n": 5.0000001}

    class Float(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(json_schema_extra={"example": {"n": 5.0}})
        n: float

    with pytest.raises(AssertionError, match="does not match"):
        _ = Almost(Req, Float).app


def test_without_pydantic_the_error_says_what_to_install():
    script = (
        "import sys; sys.modules['pydantic'] = None\n"
        "from forebay.surfaces.ventu.surface import VentuSurface\n"
        "try:\n    from forebay.surfaces.ventu import Ventu\n"
        "except Exception as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert "pip install forebay[pydantic]" in done.stdout


def test_a_body_whose_inference_fails_leaves_nothing_in_a_circle(monkeypatch):
    monkeypatch.setattr(Counting, "inference", lambda _self, _data: 1 / 0)
    monkeypatch.setattr("forebay.surfaces.ventu.service.log.disabled", True)  # else pytest keeps the error
    service = Counting(Req, Resp).ventu_service

    def ask(times):
        for _ in range(times):
            assert service.answer(b'{"text": "a"}').status == 500

    ask(3)
    with left_in_circles() as left:
        ask(20)
    assert len(left) < 20, sorted(set(left))
