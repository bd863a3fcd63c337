# SPDX-License-Identifier: Apache-2.0
"""Whether models have the tensors that a project names, of types that can be served; files are read and not loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from forebay.errors import ForebayError
from forebay.runtimes.model_file import reason_of
from forebay.runtimes.openvino import read_signature
from forebay.runtimes.signature import Signature, Var
from forebay.serving.models.file_model import unserved
from forebay.surfaces.ovms.graph_pbtxt import meant
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.surfaces.ovms.config import OvmsConfig
    from forebay.surfaces.ovms.linked_graph import InferenceNode, TensorName
    from forebay.surfaces.ovms.model_versions import ModelEntry, StoredModels


class Ports(NamedTuple):
    """The tensors of a model by the ports of a node."""

    feeds: Mapping[str, Var]
    fetches: Mapping[str, Var]


def bound(node: InferenceNode, signature: Signature) -> tuple[Ports, list[str]]:
    """Return which tensors a node feeds and takes, and what of it the model has not, or has of another kind."""
    shown = f"node '{node.name}' (model '{node.servable}')"
    feeds, wrong = _side(node.inputs, signature.feeds, shown, "input")
    fetches, more = _side(node.outputs, signature.fetches, shown, "output")
    wrong += more
    fed = {var.name for var in feeds.values()}
    if not wrong:
        wrong = [
            f"{node.place}: {shown} does not feed the input '{var.name}' of the model"
            for var in signature.feeds
            if var.name not in fed
        ]
    if not wrong and (problem := unserved(Signature(tuple(feeds.values()), tuple(fetches.values())))):
        wrong = [f"{node.place}: {shown}: the {problem}"]
    return Ports(feeds, fetches), wrong


def misfits(
    config: OvmsConfig, sessions: Sequence[tuple[InferenceNode, ModelEntry]], stored: StoredModels
) -> list[str]:
    """Return what a project says of models that is not so, as far as their files are on this machine.

    Args:
        sessions: The nodes of all graphs that run a model, and which.
    """
    found: list[str] = []
    for entry in config.models:
        if not stored.has(entry):
            continue
        here = stored.fetch(entry)
        try:
            signature, problem = caught(read_signature, here.value.path)
        finally:
            here.release()
        if problem is not None:
            why = problem.message if isinstance(problem, ForebayError) else reason_of(problem)
            found.append(f"the model '{entry.name}' ({entry.place}) cannot be loaded: {why}")
            continue
        found += _shaped(config, entry, signature)
        if told := unserved(signature):
            found.append(f"the model '{entry.name}' ({entry.place}) cannot be served: its {told}")
        for node, model in sessions:
            if model == entry:
                found += bound(node, signature)[1]
    return list(dict.fromkeys(found))


def _side(
    names: Mapping[str, TensorName], side: Sequence[Var], shown: str, kind: str
) -> tuple[dict[str, Var], list[str]]:
    known = {name: var for var in side for name in (var.name, *var.synonyms)}
    only = side[0] if len(side) == len(names) == 1 else None
    found: dict[str, Var] = {}
    wrong: list[str] = []
    for port, told in names.items():
        name = told.name
        var = known.get(name) or (only if port == f"{name}:0" or not name else None)
        if var is None:
            lacks = f"the model has no {kind} '{name}'" if name else f"a tag has to name the {kind} of the model"
            wrong.append(f"{told.place}: {shown}: {lacks}{meant(name, known)}")
        else:
            found[port] = var
    return found, wrong


def _shaped(config: OvmsConfig, entry: ModelEntry, signature: Signature) -> Iterator[str]:
    """Return which inputs have a shape in the configuration and are none of the model's."""
    known = {name for var in signature.feeds for name in (var.name, *var.synonyms)}
    for name, _ in entry.options.shapes:
        if name and name not in known:
            place = config.shapes_at.get(entry.name, {}).get(name, "")
            yield f"{place}: the model '{entry.name}' has no input '{name}'{meant(name, known)}"
