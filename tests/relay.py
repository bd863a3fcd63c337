# SPDX-License-Identifier: Apache-2.0
"""A relay between a worker and its server that delays, is slow, or forwards nothing and closes nothing.

As a program it is given the port of the server, prints its own, and does as each line of its input says from then on:
`delay SECONDS`, `rate BYTES` (a second, of each connection in each direction), `freeze`, `thaw`.
"""

import asyncio
import contextlib
import subprocess
import sys

CHUNK = 1 << 16


class Relay:
    """The process, as a test sees it: `address` is where workers dial, and `say("freeze")` has it change."""

    def __init__(self, address):
        port = address.rpartition(":")[2]
        command = [sys.executable, __file__, port]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.address = f"tcp:127.0.0.1:{self.output.readline().strip()}"

    def say(self, line):
        """Have it change, and wait until it has."""
        self.input.write(line + "\n")
        self.input.flush()
        assert self.output.readline() == line + "\n"

    def stop(self):
        self.process.kill()
        self.process.communicate()


class Way:
    """How it forwards by now."""

    def __init__(self):
        self.delay_s = self.rate = 0.0
        self.is_open = asyncio.Event()
        self.is_open.set()

    def change(self, line):
        match line.split():
            case ["delay", seconds]:
                self.delay_s = float(seconds)
            case ["rate", size]:
                self.rate = float(size)
            case ["freeze"]:
                self.is_open.clear()
            case ["thaw"]:
                self.is_open.set()


async def pump(way, reader, writer):
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(int(way.rate / 20) or CHUNK):
            await asyncio.sleep(len(data) / way.rate if way.rate else way.delay_s)
            await way.is_open.wait()
            writer.write(data)
            await writer.drain()
    await way.is_open.wait()
    writer.close()


async def main(port):
    way = Way()

    async def forward(reader, writer):
        await way.is_open.wait()
        there, to_there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(way, reader, to_there), pump(way, there, writer))

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        way.change(line)
        print(line, end="", flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
