# SPDX-License-Identifier: Apache-2.0
"""A small program of PyTorch, the files that it is saved in, and what it answers."""

from __future__ import annotations

import json

from tests.later import torch

METADATA = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]}


def layer():
    """A layer of three classes by four numbers; always the same."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(1)).eval()


def answer(rows):
    """What the layer answers."""
    with torch.no_grad():
        return layer()(torch.from_numpy(rows)).numpy()


def export(path, net, *examples, free=(0,)):
    """Saves a program of torch.export in which these axes of all examples are free; returns the path."""
    dims = tuple(dict.fromkeys(free, torch.export.Dim.AUTO) for _ in examples)
    torch.export.save(torch.export.export(net, examples, dynamic_shapes=dims if free else None), path)
    return path


def script(path, net, metadata: object = METADATA):
    """Saves a program of TorchScript; returns the path."""
    files = {} if metadata is None else {"metadata.json": json.dumps(metadata)}
    torch.jit.save(torch.jit.script(net), path, _extra_files=files)
    return path


def save(path, net):
    """Saves a program as its suffix says; returns the path."""
    return export(path, net, torch.ones(2, 4)) if path.suffix == ".pt2" else script(path, net)


def layer_file(path):
    """Saves the layer."""
    return save(path, layer())
