# SPDX-License-Identifier: Apache-2.0
"""Small ONNX models, each with one thing to know about it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

WEIGHTS = np.array([[1.0], [10.0], [100.0]], np.float32)


def save(path, nodes, inputs, outputs, constants=(), opset=17):
    """Writes a model; inputs and outputs are `(name, type, shape)`."""
    import onnx
    from onnx import helper, numpy_helper

    def infos(side):
        return [
            helper.make_tensor_value_info(name, getattr(onnx.TensorProto, kind), shape) for name, kind, shape in side
        ]

    graph = helper.make_graph(
        [helper.make_node(*node[:3], **(node[3] if len(node) > 3 else {})) for node in nodes],
        "small",
        infos(inputs),
        [one if not isinstance(one, tuple) else infos([one])[0] for one in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants],
    )
    onnx.save(
        helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 1)], ir_version=8
        ),
        path,
    )
    return Path(path)


def linear(path, rows: str | int = "n"):
    """Three numbers by their weights; the batch dimension is free, or what `rows` says."""
    return save(
        path,
        [("MatMul", ["x", "w"], ["price"])],
        [("x", "FLOAT", [rows, 3])],
        [("price", "FLOAT", [rows, 1])],
        [("w", WEIGHTS)],
    )


def outside(path, file="weights.bin", size=1 << 16):
    """A vector by weights that lie in another file, which the library maps into memory; the weights are ones."""
    import onnx
    from onnx.external_data_helper import set_external_data

    save(
        path,
        [("Mul", ["x", "w"], ["y"])],
        [("x", "FLOAT", ["n", 1])],
        [("y", "FLOAT", ["n", size])],
        [("w", np.ones((1, size), np.float32))],
    )
    model = onnx.load(path)
    (weights,) = model.graph.initializer
    set_external_data(weights, location=file, offset=0, length=len(weights.raw_data))
    (Path(path).parent / file).parent.mkdir(exist_ok=True)
    (Path(path).parent / file).write_bytes(weights.raw_data)
    weights.ClearField("raw_data")
    Path(path).write_bytes(model.SerializeToString())
    return Path(path)


def elementwise(path):
    """One label for each word, whatever stands beside it."""
    return save(
        path,
        [("Mul", ["ids", "two"], ["labels"])],
        [("ids", "INT64", ["n", "length"])],
        [("labels", "INT64", ["n", "length"])],
        [("two", np.int64(2))],
    )


def masked_mean(path, *, names=("length", "length")):
    """The mean of what the mask shows: zeros behind it change nothing."""
    return save(
        path,
        [
            ("Mul", ["values", "mask"], ["shown"]),
            ("ReduceSum", ["shown", "last"], ["sum"], {"keepdims": 0}),
            ("ReduceSum", ["mask", "last"], ["count"], {"keepdims": 0}),
            ("Div", ["sum", "count"], ["mean"]),
        ],
        [("values", "FLOAT", ["n", names[0]]), ("mask", "FLOAT", ["n", names[1]])],
        [("mean", "FLOAT", ["n"])],
        [("last", np.array([1], np.int64))],
    )


def mean(path):
    """The mean of all: zeros behind a sample would move it."""
    return save(
        path,
        [("ReduceMean", ["values"], ["mean"], {"axes": [1], "keepdims": 0})],
        [("values", "FLOAT", ["n", "length"])],
        [("mean", "FLOAT", ["n"])],
    )


def peak(path):
    """The maximum of all: zeros behind a sample move it where all are below."""
    return save(
        path,
        [("ReduceMax", ["values"], ["peak"], {"axes": [1], "keepdims": 0})],
        [("values", "FLOAT", ["n", "length"])],
        [("peak", "FLOAT", ["n"])],
    )


def one_inside(path):
    """Declares any number of samples, and reshapes to one."""
    return save(
        path,
        [
            ("Mul", ["x", "none"], ["nothing"]),
            ("ReduceSum", ["nothing"], ["zero"], {"keepdims": 0}),
            ("Add", ["zero", "sizes"], ["sums"]),  # else onnxruntime finds it out by itself
            ("Cast", ["sums"], ["shape"], {"to": 7}),
            ("Reshape", ["x", "shape"], ["y"]),
        ],
        [("x", "FLOAT", ["n", 4])],
        [("y", "FLOAT", ["m", 4])],
        [("sizes", np.array([1, 4], np.float32)), ("none", np.float32(0))],
    )


def across(path):
    """What a sample is answered depends on those beside it."""
    return save(path, [("Softmax", ["x"], ["y"], {"axis": 0})], [("x", "FLOAT", ["n", 2])], [("y", "FLOAT", ["n", 2])])


def trained(path):
    """Normalises a batch as training does: by the mean and variance of all that is in it."""
    return save(
        path,
        [("BatchNormalization", ["x", "one", "zero", "zero", "one"], ["y", "m", "v"], {"training_mode": 1})],
        [("x", "FLOAT", ["n", 2])],
        [("y", "FLOAT", ["n", 2])],
        [("one", np.ones(2, np.float32)), ("zero", np.zeros(2, np.float32))],
    )


def quantised(path, *, labels=False):
    """A network of two layers, quantised as onnxruntime does where no samples are known: one scale for a whole tensor.

    Args:
        labels: Give the place of the largest number, which a small difference does not change.
    """
    from onnxruntime.quantization import quantize_dynamic

    random = np.random.default_rng(1)
    weights = [random.standard_normal((16, 16)).astype(np.float32) for _ in range(2)]
    plain = save(
        path.with_name("plain.onnx"),
        [("MatMul", ["x", "a"], ["h"]), ("Relu", ["h"], ["r"]), ("MatMul", ["r", "b"], ["y"])]
        + [("ArgMax", ["y"], ["label"], {"axis": 1, "keepdims": 0})] * labels,
        [("x", "FLOAT", ["n", 16])],
        [("label", "INT64", ["n"])] if labels else [("y", "FLOAT", ["n", 16])],
        [("a", weights[0]), ("b", weights[1])],
    )
    quantize_dynamic(plain, path)
    return path


def looping(path, turns):
    """Goes round as often as it is told by the file."""
    import onnx
    from onnx import helper

    info = helper.make_tensor_value_info
    turn = helper.make_graph(
        [helper.make_node("Identity", [one], [f"{one}_out"]) for one in ("go", "v")],
        "turn",
        [info("i", onnx.TensorProto.INT64, []), info("go", onnx.TensorProto.BOOL, []), info("v", 1, ["n"])],
        [info("go_out", onnx.TensorProto.BOOL, []), info("v_out", 1, ["n"])],
    )
    return save(
        path,
        [("Loop", ["turns", "go", "x"], ["y"], {"body": turn})],
        [("x", "FLOAT", ["n"])],
        [("y", "FLOAT", ["n"])],
        [("turns", np.int64(turns)), ("go", np.array(True))],
    )


def table(path, beyond=0):
    """Reads rows of a table of four; another number fails the run.

    Args:
        beyond: The number of its first row.
    """
    return save(
        path,
        [("Sub", ["at", "first"], ["place"]), ("Gather", ["rows", "place"], ["row"], {"axis": 0})],
        [("at", "INT64", ["n"])],
        [("row", "FLOAT", ["n", 2])],
        [("rows", np.arange(8, dtype=np.float32).reshape(4, 2)), ("first", np.int64(beyond))],
    )


def texts(path):
    """Gives the texts back."""
    return save(path, [("Identity", ["in:0"], ["out:0"])], [("in:0", "STRING", ["n"])], [("out:0", "STRING", ["n"])])


def single(path):
    """Gives back a single value of each kind, without any axis, beside a sum."""
    kinds = {"flag": "BOOL", "count": "INT64", "weight": "FLOAT", "word": "STRING"}
    return save(
        path,
        [("ReduceSum", ["x"], ["sum"]), *(("Identity", [name], [f"{name}_out"]) for name in kinds)],
        [("x", "FLOAT", ["n"]), *((name, kind, []) for name, kind in kinds.items())],
        [("sum", "FLOAT", [1]), *((f"{name}_out", kind, []) for name, kind in kinds.items())],
    )


def sequence(path):
    """Gives a sequence of tensors, which no request carries."""
    import onnx
    from onnx import helper

    out = helper.make_tensor_sequence_value_info("parts", onnx.TensorProto.FLOAT, None)
    return save(path, [("SequenceConstruct", ["x"], ["parts"])], [("x", "FLOAT", ["n", 2])], [out])


def maps(path):
    """Gives a map from class to probability for each row, as classifiers of scikit-learn are converted."""
    import onnx
    from onnx import helper

    value = helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)
    kind = helper.make_sequence_type_proto(helper.make_map_type_proto(onnx.TensorProto.INT64, value))
    named = {"domain": "ai.onnx.ml", "classlabels_int64s": [0, 1]}
    out = helper.make_value_info("chances", kind)
    return save(path, [("ZipMap", ["x"], ["chances"], named)], [("x", "FLOAT", ["n", 2])], [out])
