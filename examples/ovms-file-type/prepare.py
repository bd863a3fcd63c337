# SPDX-License-Identifier: Apache-2.0
"""Copies the model and its labels out of the magika wheel, of which nothing else is used."""

import importlib.util
import json
import shutil
from pathlib import Path

OUT = Path(__file__).parent / "out"
MODEL_VERSION = "standard_v3_3"


def main(out=OUT):
    spec = importlib.util.find_spec("magika")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("this example needs the magika wheel: pip install --no-deps magika==1.0.3")
    source = Path(spec.submodule_search_locations[0]) / "models" / MODEL_VERSION
    target = out / "magika/1"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "model.onnx", target)
    settings = json.loads((source / "config.min.json").read_text())
    (out / "labels.json").write_text(json.dumps(settings["target_labels_space"]))


if __name__ == "__main__":
    main()
