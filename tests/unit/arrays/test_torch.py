# SPDX-License-Identifier: Apache-2.0
"""Tensors of torch in batches, and functions compiled by it."""

import numpy as np
import pytest
from tests.later import torch

from forebay import Batch, BatchMismatch, Lazy, hook, jit
from forebay.arrays.compilers import find_compiler
from forebay.arrays.tree_rows import concatenate, slice_rows, to_host
from forebay.arrays.value_hooks import collecting


@pytest.fixture(autouse=True)
def _only_with_torch():
    pytest.importorskip("torch")


@pytest.fixture(name="without_numpy")
def _without_numpy(monkeypatch):
    def refuse(*args, **kwargs):
        pytest.fail("a tensor was turned into a numpy array")

    monkeypatch.setattr(torch.Tensor, "numpy", refuse)
    monkeypatch.setattr(torch.Tensor, "__array__", refuse)


@pytest.mark.usefixtures("without_numpy")
def test_tensors_stay_tensors():  # S14
    batch = Batch.concatenate(
        [{"a": torch.ones(2, 2)}, {"a": torch.zeros(1, 2)}], onto=Batch.stack([{"a": torch.ones(2)}])
    )
    joined = batch.pad(1).realize()["a"]
    assert isinstance(joined, torch.Tensor)
    assert joined.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0], [0, 0]]
    assert [row["a"].tolist() for row in batch.split(3)[1]] == [[0, 0]]
    assert isinstance(concatenate([torch.ones(2), torch.ones(1)]), torch.Tensor)


@pytest.mark.usefixtures("without_numpy")
def test_a_single_entry_is_not_copied():  # S7 S14
    entry = torch.arange(6).reshape(3, 2)
    assert Batch.concatenate([entry]).realize().data_ptr() == entry.data_ptr()
    assert slice_rows(entry, 1, 3).data_ptr() == entry[1:].data_ptr()


def test_types_that_numpy_does_not_have():  # S14
    joined = Batch.stack([torch.ones(2, dtype=torch.bfloat16)] * 2).realize()
    assert joined.dtype == torch.bfloat16
    assert to_host(joined).tolist() == [[1, 1], [1, 1]]


def test_devices_are_not_mixed():  # S14
    with pytest.raises(BatchMismatch, match=r"expected torch.float32\[2\] on meta, got torch.float32\[2\] on cpu"):
        Batch.stack([torch.ones(2, device="meta"), torch.ones(2)])


def test_libraries_are_not_mixed():  # S14
    with pytest.raises(BatchMismatch, match=r"expected float32\[2\], got torch.float32\[2\]"):
        Batch.stack([np.ones(2, np.float32), torch.ones(2)])


def test_lazy_tensors():  # S8
    assert Batch.stack([Lazy(torch.ones(2), lambda: torch.zeros(2)), torch.ones(2)]).realize().tolist() == [
        [0, 0],
        [1, 1],
    ]


def test_tensors_on_the_host():  # S54
    tree = to_host({"a": torch.ones(2, requires_grad=True), "b": torch.ones(1, dtype=torch.complex64).conj()})
    assert tree["a"].tolist() == [1, 1]
    assert tree["b"].tolist() == [1]


def test_batches_of_tensors_compare_by_value():  # S4
    assert Batch.stack([torch.ones(2)]) == Batch.stack([torch.ones(2)])
    assert Batch.stack([torch.ones(2)]) != Batch.stack([torch.zeros(2)])


def test_functions_get_tensors_on_their_device():  # S53
    run = jit(lambda tree: (tree[0] * 2, tree[1]), compiler="torch", disable=True, device="cpu")
    frozen = np.ones((2, 2), np.float32)
    frozen.flags.writeable = False
    double, same = run(Batch.concatenate([(frozen, torch.ones(2))]))
    assert isinstance(double, torch.Tensor)
    assert (double.tolist(), same.tolist()) == ([[2, 2], [2, 2]], [1, 1])


def test_partitions(monkeypatch):  # S53
    compiler = find_compiler("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compiler.partitions({"max_concurrency": 2}) == [{"max_concurrency": 2, "device": "cpu"}] * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert compiler.partitions({"mode": "default"}) == [
        {"mode": "default", "device": "cuda:0"},
        {"mode": "default", "device": "cuda:1"},
    ]


@pytest.mark.slow
def test_hooks_of_a_compiled_function_reach_the_receiver_of_each_run():  # S58
    def fn(x):
        return hook("double", x * 2) + 1

    run = jit(fn, compiler="torch", backend="eager")
    frames = torch._dynamo.utils.counters["frames"]
    compiled = []
    for number in range(4):
        received = []
        with collecting(["double"], lambda name, value, to=received: to.append((name, value.tolist()))):
            assert run(Batch.stack([np.float32(number)])).tolist() == [number * 2 + 1]
        assert received == [("double", [number * 2])]
        compiled.append(frames["total"])
    assert compiled[1] == compiled[-1]  # the sink of a run is not part of the program
