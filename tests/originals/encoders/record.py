# SPDX-License-Identifier: Apache-2.0
"""Writes the folders and `answers.json` with sentence-transformers, transformers and torch; run with these installed.

`python -m tests.originals.encoders.record` overwrites what is here. The weights are random and small; of what the
libraries write, the weights of PyTorch are left out.
"""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.later import Later
from tests.models.encoders import TOKENS, WORDS, texts, tokenizer

torch: Any = Later("torch")
transformers: Any = Later("transformers")
st: Any = Later("sentence_transformers")
modules: Any = Later("sentence_transformers.sentence_transformer.modules")
base: Any = Later("sentence_transformers.base.modules")
HERE = Path(__file__).parent
LEFT_OUT = ("*.safetensors", "README.md", "*.npz")


def model(kind, **config):
    """A small BERT with random weights."""
    torch.manual_seed(7)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    told = transformers.BertConfig(vocab_size=len(WORDS) + 4, max_position_embeddings=TOKENS, **sizes, **config)
    made = getattr(transformers, kind)(told).eval()
    with torch.no_grad():
        for weights in made.parameters():
            if weights.ndim > 1:
                weights.copy_(torch.randn_like(weights) / 2)
    return made


def saved(folder, made):
    """Saves a model with its tokenizer, and its ONNX file with the names that Optimum gives."""
    shutil.rmtree(folder, ignore_errors=True)
    made.save_pretrained(folder)
    tokenizer(folder / "words.json")
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "words.json"),
        model_max_length=TOKENS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **special,
    )
    (folder / "words.json").unlink()
    words.save_pretrained(folder)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    answer = "logits" if made.config.architectures[0].endswith("Classification") else "last_hidden_state"
    given = words(["a cold day", "sun"], padding=True, return_tensors="pt")
    axes = {name: {0: "batch", 1: "sequence"} for name in (*names, answer)}
    if answer == "logits":
        axes[answer] = {0: "batch"}

    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.made = made

        def forward(self, *inputs):
            return self.made(**dict(zip(names, inputs, strict=True)))[0]

    arguments = tuple(given[name] for name in names)
    torch.onnx.export(
        Named().eval(), arguments, folder / "model.onnx", input_names=names, output_names=[answer], dynamic_axes=axes,
        dynamo=False, opset_version=17,
    )  # fmt: skip
    return folder


def vectors(folder, mode, *after):
    """Saves an encoder of sentences; returns what it answers."""
    plain = saved(folder.with_name("plain"), model("BertModel", attn_implementation="eager"))
    made = st.SentenceTransformer(
        modules=[
            base.Transformer(str(plain)),
            modules.Pooling(8, pooling_mode=mode),
            *after,
        ],
        device="cpu",
    )
    shutil.rmtree(folder, ignore_errors=True)
    made.save_pretrained(str(folder))
    shutil.move(plain / "model.onnx", folder / "model.onnx")
    shutil.rmtree(plain)
    return made.encode(texts()).tolist()


def scores(folder):
    """Saves a cross encoder; returns what it answers."""
    saved(folder, model("BertForSequenceClassification", num_labels=1, attn_implementation="eager"))
    network = (folder / "model.onnx").read_bytes()
    made = st.CrossEncoder(str(folder), device="cpu")
    shutil.rmtree(folder)
    made.save_pretrained(str(folder))
    (folder / "model.onnx").write_bytes(network)
    return made.predict([*zip(texts(), texts()[::-1], strict=True)]).tolist()


def labels(folder, **config):
    """Saves a classifier; returns what its pipeline answers."""
    names = dict(enumerate(["bad", "good", "none"]))
    made = model("BertForSequenceClassification", id2label=names, attn_implementation="eager", **config)
    saved(folder, made)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    asked = transformers.pipeline("text-classification", model=made, tokenizer=words, device="cpu")
    best = [asked(text, truncation=True)[0] for text in texts()]
    return best, [asked(text, truncation=True, top_k=None) for text in texts()]


def main():
    """Records everything."""
    best, every = labels(HERE / "labels")
    several, _ = labels(HERE / "several", problem_type="multi_label_classification")
    found = {
        "source": ", ".join(f"{name} {version(name)}" for name in ("sentence-transformers", "transformers", "torch"))
        + ": python -m tests.originals.encoders.record",
        "mean": vectors(HERE / "mean", "mean", base.Normalize()),
        "cls": vectors(HERE / "cls", "cls"),
        "ranks": scores(HERE / "ranks"),
        "labels": best,
        "every": every,
        "several": several,
    }
    (HERE / "answers.json").write_text(json.dumps(found, indent=1) + "\n")
    for pattern in LEFT_OUT:
        for file in HERE.rglob(pattern):
            file.unlink()


if __name__ == "__main__":
    main()
