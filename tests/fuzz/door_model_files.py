# SPDX-License-Identifier: Apache-2.0
"""Model files that are cut, changed or something else: each is loaded, or refused with a sentence, within a time.

A process loads one after the other, as the one does that tries a file before a server loads it. Some libraries end
their process on a damaged file; the server then refuses that file, so it is counted and no difference.

    .venv/bin/python -m tests.fuzz.door_model_files SECONDS SEED
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.patience import HANG_S, awake
from tests.fuzz.serving import ENOUGH, Findings
from tests.models import boosted, encoders, sklearn_files

from forebay.errors import ConfigError
from forebay.runtimes.library import RunOptions
from forebay.runtimes.model_file import load_with
from forebay.runtimes.sharing import sharing_of

PIECES = (b"[", b"{", b'"', b"\xff\xff\xff\xff", bytes(8), b"[]", b"null,")
NUMBERS = (b"-1", b"0", b"99999999", b"1e9", b"9" * 30, b"null", b'"x"', b"[]", b"{}", b"nan", b"-2147483648")
_NUMBER = re.compile(rb"-?\d+(\.\d+)?")


class Damaged(NamedTuple):
    """A model, and the file of it that is damaged."""

    model: str
    file: str


STEADY = (
    Damaged("a.skops", ""),
    Damaged("pooled", "tokenizer.json"),
    Damaged("pooled", "config.json"),
    Damaged("pooled", "modules.json"),
    Damaged("pooled", "1_Pooling/config.json"),
    Damaged("labels", "tokenizer_config.json"),
    Damaged("labels", "config.json"),
)
"""Files that end no process."""
OTHERS = (Damaged("pooled", "model.onnx"), Damaged("a.ubj", ""), Damaged("a.json", ""), Damaged("model.txt", ""))


def save(folder: Path, *, boosters: bool) -> None:
    """Save the models, those of XGBoost and LightGBM if asked to and where these are installed."""
    sklearn_files.save(sklearn_files.classifier(), folder / "a.skops")
    encoders.pooled(encoders.folder(folder / "pooled"))
    encoders.folder(folder / "labels", "TinyForSequenceClassification", 3)
    if boosters and all(map(find_spec, ("xgboost", "lightgbm"))):
        rows = boosted.rows()
        labels = [number % 2 for number in range(len(rows))]
        model: Any = boosted.xgboost.train({"nthread": 1}, boosted.xgboost.DMatrix(rows, labels), 3)
        model.save_model(folder / "a.ubj")
        model.save_model(folder / "a.json")
        settings = {"verbose": -1, "num_threads": 1, "min_data_in_leaf": 1}
        model = boosted.lightgbm.train(settings, boosted.lightgbm.Dataset(rows, labels), 3)
        model.save_model(folder / "model.txt")


def spoiled(dice: random.Random, data: bytes) -> bytes:
    """Bytes of a file that are cut, changed, left out, or others."""
    roll, at = dice.random(), dice.randrange(len(data))
    if roll < 0.25:
        return data[:at]
    if roll < 0.3:
        return dice.randbytes(dice.randrange(1, 2000))
    if roll < 0.6:
        found = bytearray(data)
        for _ in range(dice.choice([1, 1, 2, 8])):
            found[dice.randrange(len(found))] = dice.randrange(256)
        return bytes(found)
    numbers = [*_NUMBER.finditer(data)]
    if roll < 0.8 and numbers:
        number = dice.choice(numbers)
        return data[: number.start()] + dice.choice(NUMBERS) + data[number.end() :]
    if roll < 0.9:
        return data[:at] + data[at + dice.randrange(1, 60) :]
    return data[:at] + dice.choice(PIECES) + data[at:]


def outcome(saved: Path, one: Damaged, into: Path, dice: random.Random) -> str:
    """Load a damaged copy of a model and run it on what is made up; returns what came of it."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    source, copy = saved / one.model, into / one.model
    shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    file = copy / one.file if one.file else copy
    file.write_bytes(spoiled(dice, file.read_bytes()))
    try:
        sharing_of(load_with(copy, RunOptions(threads=1)))
    except ConfigError as error:
        return "refused" if len(error.message) < 3000 else f"refused at length: {error.message[:300]}"
    return "loaded"


def _load_all(saved: Path, seed: str) -> None:
    dice = random.Random(seed)
    there = [one for one in STEADY + OTHERS if (saved / one.model).exists()]
    while True:
        one = dice.choice(there)
        print("begun", one.model, one.file, flush=True)
        print(outcome(saved, one, saved / "damaged", dice), flush=True)


def _lines(saved: Path, seed: str, end: float) -> Iterator[str]:
    """What a process says that loads files, until it ends or the time is over; then a line on how it ended."""
    command = [sys.executable, "-m", "tests.fuzz.door_model_files", str(saved), seed]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            yield line.strip()
            if awake() > end:
                process.kill()
                return
        yield f"ended {process.wait()} {process.stderr.read()[-1500:]}"


def main(seconds: float, seed: int) -> int:
    """Fuzz for a time; returns how many differences there were."""
    findings, end, number = Findings("model files"), awake() + seconds, 0
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), boosters=True)
        while awake() < end and findings.differences < ENOUGH:
            number, last, begun = number + 1, "", time.monotonic()
            for line in _lines(Path(folder), f"{seed} {number}", end):
                if line.startswith("begun"):
                    last, begun = line, time.monotonic()
                elif line in {"refused", "loaded"}:
                    findings.counts[line] += 1
                    if time.monotonic() - begun > HANG_S:
                        findings.differ(f"loaded for more than {HANG_S:g} seconds", last)
                elif line.startswith("ended -"):
                    findings.counts[f"the library ended its process, {last.split()[1]}"] += 1
                elif line.startswith(("ended", "refused")):  # some libraries print
                    findings.differ(last, line)
    print(f"model files: {dict(findings.counts)}, {findings.differences} differences", flush=True)
    return findings.differences


if __name__ == "__main__":
    if Path(sys.argv[1]).is_dir():
        _load_all(Path(sys.argv[1]), sys.argv[2])
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])) > 0)
