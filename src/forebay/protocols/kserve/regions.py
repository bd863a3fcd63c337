# SPDX-License-Identifier: Apache-2.0
"""Requests whose tensors lie in shared memory made into ones that hold them, and responses the other way round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.errors import InvalidRequest
from forebay.protocols.kserve.messages import parsed
from forebay.protocols.kserve.wire import REGION, REGION_OFFSET, REGION_SIZE
from forebay.protocols.kserve.written import announced, put, put_parameter, titled, varint

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.protocols.kserve.wire import Layout, Place
    from forebay.types.tensor import Data


def inlined(message: Data, layout: Layout, read: Callable[[Place, memoryview], None]) -> bytearray:
    """Return a request whose inputs lie in shared memory as one that holds them itself.

    Args:
        message: The request.
        layout: Its own.
        read: Fills a buffer from a place.

    Raises:
        InvalidRequest: If typed contents are not what they should be.
        ForebayError: What `read` raises.
    """
    found = bytearray(titled(layout.model, layout.version))
    put(found, 3, layout.id_in(message).encode())
    for name, value in layout.parameters.items():
        put_parameter(found, 4, name, value)
    held = layout.request(message).inputs
    for one in held:
        found += announced(one.name, one.datatype, one.shape)
    for output in layout.outputs:
        about = bytearray()
        put(about, 1, output.name.encode())
        put(found, 6, about, always=True)
    for one, tensor in zip(layout.inputs, held, strict=True):
        size = len(tensor.data) if one.place is None else one.place.size
        found += b"\x3a" + varint(size)
        at = len(found)
        found += bytes(size)
        with memoryview(found) as whole, whole[at:] as hole:
            if one.place is None:
                hole[:] = tensor.data
            else:
                read(one.place, hole)
    return found


def placed(message: bytes, layout: Layout, write: Callable[[Place, bytes], None]) -> bytes:
    """Move outputs of a response to where in shared memory its request wants them.

    Args:
        message: The response, with raw contents.
        layout: That of the request.
        write: Writes to a place.

    Raises:
        InvalidRequest: If an output has no room there.
        ForebayError: What `write` raises.
    """
    whole: Any = parsed("ModelInferResponse", message)
    places = {one.name: one.place for one in layout.outputs if one.place is not None}
    for index, output in enumerate(whole.outputs):
        place = places.get(output.name)
        if place is None:
            continue
        data = whole.raw_output_contents[index]
        if len(data) > place.size:
            msg = f"output '{output.name}' has {len(data)} bytes, and {place.size} are there for it in '{place.region}'"
            raise InvalidRequest(msg)
        write(place, data)
        whole.raw_output_contents[index] = b""  # the others keep their places
        output.parameters[REGION].string_param = place.region
        output.parameters[REGION_SIZE].int64_param = len(data)
        if place.offset:
            output.parameters[REGION_OFFSET].int64_param = place.offset
    return whole.SerializeToString()
