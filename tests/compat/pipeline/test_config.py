# SPDX-License-Identifier: Apache-2.0
"""The configuration of a pipeline server: keys, defaults, ranges, precedence, and how it says what is wrong."""

import math
import re

import msgspec
import pytest
import yaml

from forebay.errors import ConfigError
from forebay.surfaces.pipeline.config import OP_DEFAULTS, masked, read, settle
from forebay.surfaces.pipeline.ops.op import Op
from forebay.surfaces.pipeline.predictors import PredictorSettings

SEED = """
# gRPC port
rpc_port: 18080

# http port, do not start HTTP service when the value is less or equals 0.
http_port: 18071

worker_num: 1

 # Whether to use process server or not. The default is false
build_dag_each_worker: false

dag:
    is_thread_op: true
    retry: 1
    use_profile: false
    tracer:
        interval_s: 600

op:
    bow:
        concurrency: 1
        client_type: brpc
        retry: 1
        timeout: 3000
        server_endpoints: ["127.0.0.1:9393"]
        client_config: "imdb_bow_client_conf/serving_client_conf.prototxt"
        fetch_list: ["prediction"]    
        
        # Batch size, default 1
        batch_size: 1
        auto_batching_timeout: 2000
"""  # noqa: W291, W293 - the blanks at the ends of lines are part of what must load

ENSEMBLE = """
op:
    bow:
        concurrency: 1
        client_type: brpc
        timeout: 3000
        server_endpoints: ["127.0.0.1:9393"]
        fetch_list: ["prediction"]
    cnn:
        client_type: brpc
        server_endpoints: ["127.0.0.1:9292"]
    combine:
        #R etry times, no retry by default
        retry: 1
        auto_batching_timeout: 2000
"""

OCR = """
worker_num: 20
build_dag_each_worker: False
rpc_port: 18091
http_port: 9998
dag:
    is_thread_op: False
    retry: 10
    use_profile: True
    channel_size: 0
    tracer:
        interval_s: 10
op:
    det:
        concurrency: 6
        local_service_conf:
            client_type: local_predictor
            model_config: ocr_det_model
            fetch_list: ["save_infer_model/scale_0.tmp_1"]
            device_type: 0
            devices: ""
            use_mkldnn: True
            thread_num: 6
            ir_optim: True
            precision: "fp32"
            mkldnn_op_list: ["conv2d"]
    rec:
        concurrency: 3
        timeout: -1
        retry: 1
        local_service_conf:
            client_type: local_predictor
            model_config: ocr_rec_model
            devices: 0
            mem_optim: true
            min_subgraph_size: 3
            use_calib: false
"""

# Order of the keys, a list in lines, a fetch_list without a value, comments in Chinese.
BERT = """
dag:
  #线程: True; 进程: False
  is_thread_op: false
  tracer:
    interval_s: 30
http_port: 18082
op:
  bert:
    concurrency: 2
    local_service_conf:
      client_type: local_predictor
      device_type: 1
      devices: '2'
      fetch_list:
      #模型路径
      model_config:  bert_seq128_model/
  faster_rcnn:
    concurrency: 10
    local_service_conf:
      precision: "FP16"
      devices: "0" # "0,1"
      fetch_list:
      - save_infer_model/scale_0.tmp_1
      model_config: ../../serving_server/
rpc_port: 9998
worker_num: 20
"""

INT8 = """
worker_num: 10
http_port: 18080
rpc_port: 9993

dag:
    is_thread_op: False
op:
    imagenet:
        concurrency: 1

        local_service_conf:

            model_config: serving_server/

            device_type: 2

            devices: "0" # "0,1"

            client_type: local_predictor

            fetch_list: ["save_infer_model/scale_0.tmp_0"]

            precision: "int8" 

            use_calib: False

            ir_optim: True 
"""  # noqa: W291 - the same

# Keys that the original has never read where they stand, or that only one of its versions reads.
UNREAD = {
    "build_dag_each_request: true\n": ["build_dag_each_request"],
    "grpc_gateway_port: 18080\n": ["grpc_gateway_port"],
    "op:\n    pre_det:\n        device_type: 0\n        devices: ''\n": [
        "op.pre_det.device_type",
        "op.pre_det.devices",
    ],
    "op:\n    seg:\n        local_service_conf:\n            concurrency: 1\n": [
        "op.seg.local_service_conf.concurrency"
    ],
    "op:\n    bert:\n        local_service_conf:\n            device_type: 7\n            ipu_config: ./ipu_config\n": [
        "op.bert.local_service_conf.ipu_config"
    ],
}

PORT = {"rpc_port": 18080}


def written(tmp_path, text):
    path = tmp_path / "config.yml"
    path.write_text(text, encoding="utf-8")
    return path


def wrong(source):
    with pytest.raises(ConfigError) as caught:
        read(source)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    "text", [SEED, ENSEMBLE, OCR, BERT, INT8], ids=["seed", "ensemble", "ocr", "bert and detection", "low precision"]
)
def test_files_written_for_the_original_load_unchanged(tmp_path, text):
    # P121, P35
    config, warnings = read(written(tmp_path, text))
    assert warnings == []
    assert set(config.op) == set(yaml.safe_load(text)["op"])
    for name, section in config.op.items():
        assert PredictorSettings.of_op(name, settle(name, {}, section)).kind in {"brpc", "local_predictor", None}


@pytest.mark.parametrize("text", UNREAD)
def test_keys_of_the_original_that_nothing_reads_load_with_a_warning(tmp_path, text):
    # P121, P33
    config, warnings = read(written(tmp_path, f"port: 18080\n{text}"))
    assert [re.findall("the key '([^']*)'", one) for one in warnings] == [[key] for key in UNREAD[text]]
    for name, section in config.op.items():
        PredictorSettings.of_op(name, settle(name, {}, section))


def test_an_encrypted_model_loads_and_is_refused_in_words():
    # P116, P121
    section = {"server_endpoints": ["127.0.0.1:9400"], "use_encryption_model": True, "encryption_key": "./key"}
    config, warnings = read({**PORT, "op": {"imagenet": section}})
    assert warnings == []
    settled = settle("imagenet", {}, config.op["imagenet"])
    with pytest.raises(ConfigError, match="op 'imagenet': encrypted models are not supported"):
        PredictorSettings.of_op("imagenet", settled)
    assert "./key" not in masked(config, {"imagenet": settled})


def test_what_a_file_leaves_out_has_the_documented_value():
    # P117
    config, _ = read(PORT)
    dag = config.dag
    assert (config.rpc_port, config.http_port, config.worker_num) == (18080, None, 1)
    assert not config.build_dag_each_worker
    assert (dag.is_thread_op, dag.retry, dag.use_profile, dag.tracer.interval_s) == (True, 1, False, -1)
    assert (dag.channel_size, dag.client_type, dag.first_arrival) == (0, "brpc", False)
    assert (dag.enable_prometheus, dag.prometheus_port) == (False, 19393)


def test_the_address_is_this_machine_unless_told():
    # P123
    assert read(PORT)[0].host == "127.0.0.1"
    assert read({**PORT, "host": "0.0.0.0"})[0].host == "0.0.0.0"


def test_a_dict_says_the_same_as_a_file(tmp_path):
    # P120
    from_file, _ = read(written(tmp_path, OCR))
    assert from_file.folder == str(tmp_path)  # where relative paths in it start from
    from_dict, _ = read(yaml.safe_load(OCR))
    assert from_dict == msgspec.structs.replace(from_file, folder=".", places=from_dict.places)


def test_a_tag_that_would_make_an_object_is_refused(tmp_path):
    # P120, P158
    message = wrong(written(tmp_path, "rpc_port: 18080\nop: !!python/object/apply:os.system ['true']\n"))
    assert "config.yml:2" in message


@pytest.mark.parametrize("value", [0, -1, None])
def test_without_an_http_port_there_is_no_http(value):
    # P117, trap 12
    assert read({**PORT, "http_port": value})[0].http_port is None


def test_the_oldest_files_name_the_port_of_grpc_port():
    # P117
    assert read({"port": 18080})[0].rpc_port == 18080


@pytest.mark.parametrize("key", ["channel_recv_frist_arrive", "channel_recv_first_arrive"])
def test_first_arrival_is_accepted_in_both_spellings(key):
    # P74
    assert read({**PORT, "dag": {key: True}})[0].dag.first_arrival


@pytest.mark.parametrize(
    "key,value",
    [
        ("rpc_port", 80),
        ("rpc_port", 65536),
        ("rpc_port", "18080"),
        ("http_port", 80),
        ("worker_num", 0),
        ("worker_num", 1.5),
        ("worker_num", True),
        ("build_dag_each_worker", "yes please"),
        ("dag.retry", 0),
        ("dag.channel_size", -1),
        ("dag.is_thread_op", 1),
        ("dag.request_parse", "evil"),
        ("dag.tracer.interval_s", "often"),
        ("op.a.concurrency", 0),
        ("op.a.concurrency", 1_000_000_000),  # F134
        ("worker_num", 1_000_000_000),  # F134
        ("op.a.local_service_conf.thread_num", 1_000_000_000),  # F134
        ("op.a.retry", 0),
        ("op.a.batch_size", 0),
        ("op.a.timeout", "long"),
        ("op.a.timeout", math.nan),
        ("op.a.auto_batching_timeout", math.nan),
        ("op.a.auto_batching_timeout", math.inf),
        ("dag.timeout", math.nan),
        ("dag.tracer.interval_s", math.nan),
        ("dag.client_type", "brcp"),
        ("dag.external_store.type", "shmem"),
        ("op.a.fetch_list", "prediction"),
        ("op.a.local_service_conf.thread_num", 0),
        ("op.a.local_service_conf.precision", "fp31"),
        ("op.a", ["concurrency"]),
        ("dag", "thread"),
    ],
)
def test_what_is_out_of_range_or_of_another_type_is_refused_with_place_and_rule(tmp_path, key, value):
    # P38
    inner = value
    for name in reversed(key.split(".")):
        inner = {name: inner}
    source = {**PORT, **inner}
    text = yaml.safe_dump(source, sort_keys=False)
    message = wrong(written(tmp_path, text))
    assert f"{key}: expected " in message
    assert f", got {'true' if value is True else repr(value)}" in message
    last = key.rpartition(".")[2]
    line = 1 + max(number for number, one in enumerate(text.splitlines()) if one.strip().startswith(last))
    assert f"config.yml:{line}:" in message
    assert "yml_dict" in wrong(source)


def test_a_key_that_nothing_reads_is_a_warning_with_its_place_and_the_nearest(tmp_path):
    # P33
    text = "rpc_port: 18080\nworker_nun: 3\nop:\n    a:\n        concurency: 2\n        zzz: 1\n"
    config, warnings = read(written(tmp_path, text))
    assert config.worker_num == 1
    assert len(warnings) == 3
    assert any("config.yml:2" in one and "'worker_nun'" in one and "'worker_num'" in one for one in warnings)
    assert any("config.yml:5" in one and "'op.a.concurency'" in one and "'concurrency'" in one for one in warnings)
    assert any("config.yml:6" in one and "'op.a.zzz'" in one for one in warnings)


def test_the_oldest_wire_is_refused_with_advice():
    assert "v0.4" in wrong({**PORT, "wire": "v0.3"})


@pytest.mark.parametrize(
    "key,in_constructor,in_file",
    [
        ("concurrency", 3, 5),
        ("timeout", 200, 3000.5),
        ("retry", 2, 3),
        ("batch_size", 4, 8),
        ("auto_batching_timeout", 1.5, 2000),
        ("client_type", "grpc", "brpc"),
        ("server_endpoints", ["127.0.0.1:1"], ["127.0.0.1:2"]),
        ("client_config", "a", "b"),
        ("fetch_list", ["x"], ["y"]),
    ],
)
def test_the_constructor_comes_before_the_file_and_the_file_before_the_default(key, in_constructor, in_file):
    # P31, P32, trap 5: a retry that stands in the file holds
    section = read({**PORT, "op": {"a": {key: in_file}}})[0].op["a"]
    assert settle("a", {key: in_constructor}, section)[key] == in_constructor
    assert settle("a", {key: None}, section)[key] == in_file
    assert settle("a", {key: None}, {})[key] == OP_DEFAULTS[key]


def test_what_a_constructor_is_given_must_be_in_range_too():
    # P38
    with pytest.raises(ConfigError, match="op 'a': concurrency: expected a whole number from 1 to 1024, got 0"):
        settle("a", {"concurrency": 0}, {})


def test_an_op_may_be_given_the_retry_that_the_original_has_by_default():
    # P28, P87
    assert settle("a", Op("a", retry=0).given, {"retry": 3})["retry"] == 1
    with pytest.raises(ConfigError, match="op 'a': retry: expected a whole number >= 1, got -1"):
        settle("a", Op("a", retry=-1).given, {})


def test_the_settings_of_an_op_of_which_nothing_is_said():
    # P28
    found = settle("a", {}, {})
    assert (found["concurrency"], found["timeout"], found["retry"], found["batch_size"]) == (1, -1, 1, 1)
    assert all(found[key] is None for key in ("server_endpoints", "fetch_list", "client_config", "client_type"))
    assert found["auto_batching_timeout"] is None


def test_the_configuration_that_holds_is_told_without_its_secrets():
    # P122
    store = {"type": "redis", "url": "redis://me:pa55word@host:6379/0"}
    config, _ = read({**PORT, "dag": {"external_store": store}})
    ops = {"a": settle("a", {"concurrency": 7, "encryption_key": "pa55word"}, {})}
    told = masked(config, ops)
    assert "pa55word" not in told
    found = yaml.safe_load(told)
    assert found["dag"]["external_store"] == {"type": "redis", "url": "redis://***@host:6379/0"}
    assert found["op"]["a"]["encryption_key"] == "***"
    assert found["op"]["a"]["concurrency"] == 7
    assert found["rpc_port"] == 18080
