# SPDX-License-Identifier: Apache-2.0
"""What the small files in the folder of an encoder say, as libraries of Hugging Face write them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from forebay.errors import ConfigError
from forebay.types.first_use import known

TOKENIZER: Final = "tokenizer.json"
_CONFIG: Final = "config.json"
FILES: Final = (_CONFIG, "tokenizer_config.json", "sentence_bert_config.json", "config_sentence_transformers.json")
_POOLED: Final = ["Transformer", "Pooling"]
_FLAG: Final = "pooling_mode_"  # before each pooling in older files, which say of each whether it is meant


class EncoderConfig(msgspec.Struct):
    """What is read of a file; each says some of it."""

    architectures: list[str] | None = None
    id2label: dict[str, str] = {}
    problem_type: str | None = None
    pad_token_id: int | None = None
    max_position_embeddings: int | None = None
    model_max_length: float | None = None
    max_seq_length: int | None = None
    truncation_side: Literal["left", "right"] = "right"
    do_lower_case: bool | None = None
    prompts: dict[str, str | None] = {}
    default_prompt_name: str | None = None
    activation_fn: str | None = None
    sbert_ce_default_activation_function: str | None = None
    sentence_transformers: dict[str, Any] = {}


class Task(NamedTuple):
    """Whether a model tells labels or vectors, of which output of its ONNX file, and how tokens become one vector."""

    classifies: bool
    output: str
    pooling: str = ""
    normalizes: bool = False


def is_encoder(has: Callable[[str], bool]) -> bool:
    """Tell whether files are those of an encoder, by whether there is one of a name."""
    return has(_CONFIG) and any(map(has, (TOKENIZER, "tokenizer_config.json", "modules.json")))


def is_encoder_folder(path: Path) -> bool:
    """Tell whether a folder is that of an encoder."""
    return is_encoder(lambda name: (path / name).is_file())


def network_of(folder: Path) -> Path:
    """Return the ONNX file of an encoder; raises a `ConfigError` if that or the tokenizer is not there."""
    if not (folder / TOKENIZER).is_file():
        save = "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise ConfigError(f"there is no {TOKENIZER} in it; write it: {save}")
    found = sorted([*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")])
    named = [file for file in found if file.name == "model.onnx"]
    if not found:
        raise ConfigError("there is no ONNX file in it; make one: optimum-cli export onnx --model FOLDER NEW_FOLDER")
    if not named and len(found) > 1:
        raise ConfigError(f"it holds several models: {', '.join(file.name for file in found)}; call one model.onnx")
    return (named or found)[0]


def task_of(folder: Path, model: EncoderConfig, outputs: Collection[str]) -> Task:
    """Return what an encoder does; raises a `ConfigError` if it is nothing that is served."""
    kind = (model.architectures or ["unknown"])[0]
    modules = read(folder / "modules.json", list[dict[str, Any]])
    task = Task(classifies=False, output="sentence_embedding")
    if kind.endswith("ForSequenceClassification"):
        task = Task(classifies=True, output="logits")
    elif task.output not in outputs:  # which comes after all modules
        if not modules and not kind.endswith("Model"):
            raise ConfigError(f"its architecture is {kind}; expected ...Model or ...ForSequenceClassification")
        output = "token_embeddings" if "token_embeddings" in outputs else "last_hidden_state"
        task = Task(False, output, *_pooling(folder, modules))
    if task.output not in outputs:
        export = f"optimum-cli export onnx --task {'text-classification' if task.classifies else 'feature-extraction'}"
        raise ConfigError(f"its ONNX file gives {', '.join(outputs)}, and no {task.output}; {export} makes one")
    return task


def _pooling(folder: Path, modules: list[dict[str, Any]]) -> tuple[str, bool]:
    """Return how the vectors of tokens become one, and whether that gets the length 1; without modules it is a mean."""
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules] or _POOLED
    if kinds[:2] != _POOLED or kinds[2:] not in ([], ["Normalize"]):
        others = "others can be in the ONNX file: optimum-cli export onnx --library sentence_transformers"
        raise ConfigError(
            f"its modules.json names {', '.join(kinds)}; expected {', '.join(_POOLED)}, Normalize; {others}"
        )
    # Only the last part of the path: nothing outside of the folder is read.
    place = folder / Path(str(modules[1].get("path"))).name if modules else folder / "1_Pooling"
    said = read(place / _CONFIG, dict[str, Any])
    found: Any = said.get("pooling_mode") or [name for name in said if name.startswith(_FLAG) and said[name] is True]
    named = [found] if isinstance(found, str) else found or ["mean"]
    modes = [str(one).removeprefix(_FLAG).partition("_token")[0] for one in named]
    if modes not in (["cls"], ["mean"]):
        raise ConfigError(f"its pooling is {' and '.join(modes)}; expected cls or mean")
    return modes[0], len(kinds) > len(_POOLED)


def read(file: Path, kind: Any) -> Any:
    """Read a file; one that is missing says nothing."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=known(kind)) if file.is_file() else kind()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"its {file.name} cannot be read: {error}") from None
