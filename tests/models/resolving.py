# SPDX-License-Identifier: Apache-2.0
"""A model whose server finds names of hosts in the file that `HOSTS_OF_TEST` names: a mapping in JSON, to lists."""

import json
import os
import socket
from pathlib import Path

import forebay

usual = socket.getaddrinfo


def getaddrinfo(host, port, *options, **more):
    """Return what the file says of a host, and of others what is so."""
    hosts = json.loads(Path(os.environ["HOSTS_OF_TEST"]).read_text())
    if host not in hosts:
        return usual(host, port, *options, **more)
    if not hosts[host]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [found for one in hosts[host] for found in usual(one, port, *options, **more)]


socket.getaddrinfo = getaddrinfo


class Resolving(forebay.Model):
    """Answers what came."""

    def predict(self, batch: list[float]) -> list[float]:
        return batch
