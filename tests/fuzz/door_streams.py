# SPDX-License-Identifier: Apache-2.0
"""Fuzz of streamed answers: many clients over SSE and gRPC, who read slowly, leave, and ask for what goes wrong.

Their streams are of random lengths, wait for seats (some in a worker of which they are told that it has none free), and
share their steps with others, inline, in threads and in processes, of which some end in the middle.

The oracle is each stream alone: the same model, called by hand. What a client reads is that, in order, or the beginning
of it if it left, or if its worker ended. Nobody is left in a model, no state in a worker, and nothing in the log.

    .venv/bin/python -m tests.fuzz.door_streams SECONDS SEED
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import grpc
import httpx
from tests.fuzz.patience import HANG_S, awake
from tests.fuzz.serving import ENOUGH, Findings, running
from tests.models import told_streams

from forebay import Last, RequestError
from forebay.protocols.kserve.messages import SERVICE, messages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

M = messages()
END: Any = cast("Any", grpc.aio).EOF
TARGET = Path(__file__).parents[1] / "models" / "told_streams.yaml"
CLIENTS = 24
STEPPED = ("ahead", "stepped", "threads", "inline", "inline-async", "processes", "mortal")
YIELDED = ("yielded", "yielded-async")
CROWD = 150
"""Requests for which most clients go to the same model, so that there are more than it has seats for."""


class Asked(NamedTuple):
    """One stream."""

    model: str
    name: str
    sample: str

    @property
    def may_die(self) -> bool:
        return self.model == "mortal"


class Alone(NamedTuple):
    """What comes of a stream that nobody else is beside."""

    parts: list[str]
    is_wrong: bool


def alone(asked: Asked) -> Alone:
    """Call the model as nobody else does."""
    if json.loads(asked.sample)["how"] == "exit":
        length = json.loads(asked.sample)["length"]
        return Alone(alone(_how(asked, "plain")).parts[: length - 1], is_wrong=True)
    parts: list[str] = []
    try:
        stream = told_streams.Told(asked.sample)
    except RequestError:
        return Alone([], is_wrong=True)
    told_streams.Told.alive.discard(stream)
    while True:
        part: Any = stream.part()
        if isinstance(part, RequestError):
            return Alone(parts, is_wrong=True)
        is_last = isinstance(part, Last)
        if (said := part.part if is_last else part) is not None:
            parts.append(said)
        if is_last:
            return Alone(parts, is_wrong=False)


def _how(asked: Asked, how: str) -> Asked:
    return asked._replace(sample=json.dumps(json.loads(asked.sample) | {"how": how}))


class Crowd:
    """Where most clients go, one model after the other."""

    def __init__(self) -> None:
        self._count = 0

    def model(self, dice: random.Random) -> str:
        """The model of the next request."""
        self._count += 1
        models = *STEPPED, *YIELDED
        return models[self._count // CROWD % len(models)] if dice.random() < 0.8 else dice.choice(models)


class Client:
    """One after the other, asks and compares."""

    def __init__(self, findings: Findings, ports: dict[str, int], crowd: Crowd, seed: str) -> None:
        self._findings, self._ports, self._crowd = findings, ports, crowd
        self._dice = random.Random(seed)
        self._name = seed.replace(" ", "-")
        self._count = 0
        self.since = awake()

    def asked(self, model: str) -> Asked:
        dice = self._dice
        self._count += 1
        name = f"{self._name}-{self._count}"
        hows = ["plain", "plain", "last"]
        if model not in YIELDED:
            hows += ["pauses", "error", "no start"] + (["exit"] if model == "mortal" and dice.random() < 0.1 else [])
        how = dice.choice(hows)
        lengths = (1, 2, 3, 9, 30, 200) if how in {"error", "exit"} else (0, 1, 5, 40, 300)
        length = dice.choice(lengths)
        sample = {
            "name": name,
            "length": length,
            "how": how,
            # A long stream of slow steps would only be waited for.
            "seconds": dice.choice((0, 0, 0, 0.0005, 0.005 if length <= 40 else 0.0005)),
            # Who takes long over more than a window holds (256 KiB) is cut off where a generator's others wait for it.
            "wide": dice.choice((0, 0, 0, 500, 500 if model in YIELDED else 20_000)),
        }
        return Asked(model, name, json.dumps(sample))

    async def run(self, end: float) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._ports['grpc']}") as channel:
            method = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
            while awake() < end and self._findings.differences < ENOUGH:
                model = self._crowd.model(self._dice)
                if self._dice.random() < 0.5:
                    await self._over_sse(self.asked(model))
                else:
                    await self._over_grpc(method, model)
                self.since = awake()

    async def _rest(self) -> None:
        """Take a moment, or none."""
        if self._dice.random() < 0.1:
            await asyncio.sleep(self._dice.choice((0, 0.001, 0.02, 0.1)))

    def _compare(self, door: str, asked: Asked, found: list[str], *, is_wrong: bool, has_left: bool = False) -> None:
        expected = alone(asked)
        self._findings.counts["left" if has_left else f"{door} {'errors' if is_wrong else 'whole'}"] += 1
        self._findings.counts["parts"] += len(found)
        is_beginning = found == expected.parts[: len(found)]
        is_whole = len(found) == len(expected.parts) and is_wrong == expected.is_wrong
        if not is_beginning or not (is_whole or has_left or (asked.may_die and is_wrong)):
            shown = [part[:60] for part in found[-3:]]
            self._findings.differ(
                f"{door}: {len(found)} parts of {len(expected.parts)}, {is_wrong=}",
                asked,
                shown,
                found == expected.parts,
            )

    async def _over_sse(self, asked: Asked) -> None:
        leaves_at = self._dice.choice((None, None, None, 0, 1, 20))
        reader, writer = await asyncio.open_connection("127.0.0.1", self._ports["http"])
        body = json.dumps(asked.sample).encode()
        head = f"POST /models/{asked.model} HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        found: list[str] = []
        try:
            if leaves_at == 0:
                await self._rest()
                self._compare("SSE", asked, found, is_wrong=False, has_left=True)
                return
            answer = await reader.readuntil(b"\r\n\r\n")
            if b"text/event-stream" not in answer.lower():
                status = int(answer.split()[1])
                told = await reader.read()
                if status not in {400, 500, 503} or (status != 400 and not asked.may_die):
                    self._findings.differ(f"SSE: status {status}", asked, told)
                self._compare("SSE", asked, found, is_wrong=True)
                return
            async for kind, data in _events(reader):
                if kind == "error":
                    self._compare("SSE", asked, found, is_wrong=True)
                    return
                found.append(data)
                if len(found) == leaves_at:
                    self._compare("SSE", asked, found, is_wrong=False, has_left=True)
                    return
                await self._rest()
            self._compare("SSE", asked, found, is_wrong=False)
        finally:
            writer.transport.abort()

    async def _over_grpc(self, method: Any, model: str) -> None:
        """Several requests of one call: each of them is a stream of its own."""
        dice = self._dice
        asked = {one.name: one for one in (self.asked(model) for _ in range(dice.choice((1, 1, 2, 6))))}
        found: dict[str, list[str]] = {name: [] for name in asked}
        wrong: set[str] = set()
        leaves_at = dice.choice((None, None, None, 0, 1, 20))
        call = method()
        writing = asyncio.ensure_future(self._write(call, list(asked.values())))
        count = 0
        try:
            while leaves_at != count:
                await self._rest()
                answer = await call.read()
                if answer is END:
                    break
                count += 1
                told = M.ModelStreamInferResponse.FromString(answer)
                name = told.infer_response.id
                if name not in asked or name in wrong:
                    self._findings.differ(f"gRPC: an answer to {name!r}", asked, told.error_message)
                    return
                if told.error_message:
                    wrong.add(name)
                else:
                    (data,) = told.infer_response.raw_output_contents
                    text = data[4:].decode()  # JSON where a part may be none
                    found[name].append(json.loads(text) if text.startswith('"') else text)
            else:
                call.cancel()
            for name, one in asked.items():
                self._compare("gRPC", one, found[name], is_wrong=name in wrong, has_left=leaves_at == count)
        except grpc.RpcError as error:
            self._findings.differ("gRPC: a call that failed", asked, error)
        finally:
            writing.cancel()
            call.cancel()

    async def _write(self, call: Any, asked: list[Asked]) -> None:
        for one in asked:
            made = M.ModelInferRequest(model_name=one.model, id=one.name)
            made.inputs.add(name="input", datatype="BYTES", shape=[1])
            data = one.sample.encode()
            made.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
            await call.write(made.SerializeToString())
            await self._rest()
        await call.done_writing()


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[tuple[str, Any]]:
    """The events of a stream: their kind, and what they say."""
    while True:
        try:
            event = await reader.readuntil(b"\n\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return
        kind, _, data = event.decode().strip().rpartition("data: ")
        yield kind.strip().removeprefix("event: "), json.loads(data)


async def fuzz(findings: Findings, ports: dict[str, int], seconds: float, seed: int) -> None:
    """Have all clients go on until the time is over; who gets no answer for long is told."""
    end = awake() + seconds
    crowd = Crowd()
    clients = [Client(findings, ports, crowd, f"{seed} {number}") for number in range(CLIENTS)]
    tasks = [asyncio.ensure_future(client.run(end)) for client in clients]
    while not all(task.done() for task in tasks):
        await asyncio.wait(tasks, timeout=1.0)
        late = [client for client, task in zip(clients, tasks, strict=True) if not task.done()]
        if late and awake() - min(client.since for client in late) > HANG_S:
            findings.differ(f"no end of a stream for {HANG_S:g} seconds")
            break
    for task in tasks:
        if task.done() and (error := task.exception()) is not None:
            findings.differ("a client broke down", repr(error))
        task.cancel()


def left_in(client: httpx.Client) -> dict[str, Any]:
    """Who is left in models, seats that are taken, and states in workers, of which one is asked each time."""
    models = client.get("/models").json()["models"]
    found = {one["name"]: one["in_flight"] + one["waiting"] for one in models}
    found |= {f"seats of {one['name']}": one["workers"]["slots"] - one["workers"]["idle"] for one in models}
    for model in {*STEPPED, "yielded"} - {"inline-async"}:
        for _ in range(4):
            found[f"states of {model}"] = (
                found.get(f"states of {model}", 0) or client.get(f"/models/{model}/alive").json()
            )
    return {name: count for name, count in found.items() if count}


def main(seconds: float, seed: int) -> int:
    """Fuzz for a time; returns how many differences there were."""
    findings = Findings("streams")
    with running(options=("--config", str(TARGET), "--grpc-port", "0")) as server:
        asyncio.run(fuzz(findings, server.ports, seconds, seed))
        with httpx.Client(base_url=f"http://127.0.0.1:{server.ports['http']}", timeout=None) as client:
            findings.wait_for(lambda: left_in(client))
    return findings.end(server)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])) > 0)
