# SPDX-License-Identifier: Apache-2.0
import zlib

import pytest
from tests.buckets import Faults, running_buckets


@pytest.fixture(scope="session")
def buckets(tmp_path_factory):
    with running_buckets(tmp_path_factory.mktemp("store")) as found:
        yield found


@pytest.fixture
def bucket(buckets, request, monkeypatch):
    """A bucket of the test's own, that this process finds."""
    for name, value in buckets.environment().items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{zlib.crc32(request.node.nodeid.encode()):08x}"
    buckets.make(name)
    return name


@pytest.fixture
def faults(buckets, bucket, monkeypatch):
    """A proxy before the store, that this process asks instead."""
    found = Faults(buckets.port)
    for name, value in buckets.environment(found.port).items():
        monkeypatch.setenv(name, value)
    yield found
    found.close()
