# SPDX-License-Identifier: Apache-2.0
"""What a batch costs in a worker that attached, next to one in a process of the server's own.

    python benchmarks/attached.py [--batches 2000] [--rounds 7]

Both kinds run the same runner, one worker each, batch after batch, in rounds that take turns; the figures are medians
over the rounds, in microseconds from `submit` to `done`. "hop" is half the way there and back of one 600 KB sample.
Started by hand; not part of `run.sh`.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from forebay.workers.runner import Runner

ROOT = Path(__file__).resolve().parents[1]
WORKER = """
import sys
sys.path.insert(0, {root!r})
from forebay.workers.wire.address import parse_address
from forebay.workers.processes.joining import JoiningWorker
from forebay.workers.runner import RunnerSpec
JoiningWorker(parse_address(sys.argv[1]), None, once=True).run(RunnerSpec("benchmarks.attached:Echo"))
"""
LARGE_BYTES = 600 * 1024


class Echo(Runner):
    """Gives back what it is given."""

    def run(self, items):
        return [item.body for item in items]


async def run_batches(pool, bodies, count):
    """Returns the mean time of a batch, in microseconds, and of the runner in it."""
    from forebay.types.batch import EntryBatch
    from forebay.types.call import Request

    loop = asyncio.get_running_loop()
    entries = [Request(body=body, reply=print) for body in bodies]
    in_model_s = 0.0
    started = time.perf_counter()
    for _ in range(count):
        answered = loop.create_future()
        batch = EntryBatch(entries=entries, key=None, rows=len(entries))
        pool.submit(batch, lambda _batch, outcomes, answered=answered: answered.set_result(outcomes))
        await answered
        in_model_s += batch.model_s
    return (time.perf_counter() - started) / count * 1e6, in_model_s / count * 1e6


async def measure(options, folder):
    from forebay.workers.pools.attached_pool import AttachedPool
    from forebay.workers.pools.process_pool import ProcessPool
    from forebay.workers.pools.worker_slot import WorkerSlot
    from forebay.workers.runner import RunnerSpec
    from forebay.workers.wire.address import UnixAddress
    from forebay.workers.wire.worker_listener import WorkerListener

    address = UnixAddress(f"{folder}/socket")
    door = WorkerListener(address, native=lambda _about: WorkerSlot(attached))
    attached = AttachedPool("echo", hang_s=15.0, shared=door.shared)
    await door.start()
    command = [sys.executable, "-c", WORKER.format(root=str(ROOT)), str(address)]
    worker = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
    process = ProcessPool(RunnerSpec("benchmarks.attached:Echo"), path=[str(ROOT)])
    await process.start()
    while not attached.idle:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    pools = {"process": process, "attached": attached}
    loads = {
        "1 x 8 B": ([b"12345678"], options.batches),
        "32 x 100 B": ([b"x" * 100] * 32, options.batches),
        "1 x 600 KB": ([bytes(LARGE_BYTES)], options.batches // 4),
    }
    for bodies, _ in loads.values():
        for pool in pools.values():
            await run_batches(pool, bodies, 200)  # warm
    print(f"{'batch':12} {'process us':>12} {'attached us':>12} {'ratio':>7}")
    for name, (bodies, count) in loads.items():
        found = {kind: [] for kind in pools}
        for round_number in range(options.rounds):
            order = list(pools.items())
            for kind, pool in order if round_number % 2 else reversed(order):
                found[kind].append((await run_batches(pool, bodies, count))[0])
        ratio = statistics.median(a / p for a, p in zip(found["attached"], found["process"], strict=True))
        medians = {kind: statistics.median(times) for kind, times in found.items()}
        hop = f"   {medians['attached'] / 2:.0f} us a hop" if "KB" in name else ""
        print(f"{name:12} {medians['process']:12.0f} {medians['attached']:12.0f} {ratio:7.2f}{hop}")
    await process.stop(1.0)
    await attached.stop(1.0)
    door.stop()
    await worker.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=2000, help="batches in a round (2000)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each kind (7)")
    options = parser.parse_args()
    import uvloop

    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(measure(options, folder))


if __name__ == "__main__":
    main()
