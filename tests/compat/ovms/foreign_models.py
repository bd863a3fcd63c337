# SPDX-License-Identifier: Apache-2.0
"""Model files of other libraries that OpenVINO reads, written without those libraries: all of them double a vector."""

import struct


def varint(value):
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def field(number, value):
    """A field of a message: a whole number, or bytes, texts and messages."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value & (1 << 64) - 1)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def graph_def():
    """TensorFlow's graph of `result = given + given`, frozen."""
    any_length = field(2, field(1, -1))
    float_type = field(6, 1)

    def node(name, op, inputs, **attributes):
        told = [field(5, field(1, key) + field(2, value)) for key, value in attributes.items()]
        return field(1, b"".join([field(1, name), field(2, op), *(field(3, one) for one in inputs), *told]))

    given = node("given", "Placeholder", [], dtype=float_type, shape=field(7, any_length))
    return given + node("result", "AddV2", ["given", "given"], T=float_type)


def saved_model():
    """The same as a SavedModel with a signature."""

    def tensor(key, name):
        info = field(1, name) + field(2, 1) + field(3, field(2, field(1, -1)))
        return field(1, key) + field(2, info)

    signature = field(1, tensor("given", "given:0")) + field(2, tensor("result", "result:0"))
    signature += field(3, "tensorflow/serving/predict")
    meta = field(1, field(4, "serve")) + field(2, graph_def())
    meta += field(5, field(1, "serving_default") + field(2, signature))
    return field(1, 1) + field(2, meta)


class _Flat:
    """Writes a FlatBuffer from its end to its beginning, so that all offsets are known."""

    def __init__(self):
        self.data = b""

    def _align(self, size, following=0):
        self.data = bytes(-(len(self.data) + following) % size) + self.data

    def put(self, data):
        self.data = data + self.data
        return len(self.data)

    def vector(self, form, values):
        self._align(4, struct.calcsize(f"<{len(values)}{form}"))
        return self.put(struct.pack(f"<I{len(values)}{form}", len(values), *values))

    def text(self, value):
        data = value.encode() + b"\0"
        self._align(4, len(data))
        return self.put(struct.pack("<I", len(value)) + data)

    def offsets(self, places):
        self._align(4)
        for place in reversed(places):
            self.put(struct.pack("<I", len(self.data) + 4 - place))
        return self.put(struct.pack("<I", len(places)))

    def table(self, **slots):
        """Puts a table; slots are `_0=("b", value)`, or `_1=place` of what is referred to."""
        self._align(4)
        end = len(self.data)
        where = {}
        for slot, value in slots.items():
            if isinstance(value, int):
                self._align(4)
                where[int(slot[1:])] = self.put(struct.pack("<I", len(self.data) + 4 - value))
            else:
                self._align(struct.calcsize(value[0]))
                where[int(slot[1:])] = self.put(struct.pack(f"<{value[0]}", value[1]))
        self._align(4)
        count = max(where) + 1
        size = 4 + 2 * count
        start = self.put(struct.pack("<i", size + size % 4))
        entries = [start - where[slot] if slot in where else 0 for slot in range(count)]
        self.put(struct.pack(f"<HH{count}H{size % 4}x", size, start - end, *entries))
        return start


def tflite(length=3):
    """The same as a file of TensorFlow Lite, of one length."""
    flat = _Flat()
    buffers = flat.offsets([flat.table(_0=flat.vector("B", []))])
    tensors = flat.offsets(
        [
            flat.table(_0=flat.vector("i", [length]), _1=("b", 0), _2=("I", 0), _3=flat.text(name))
            for name in ("given", "result")
        ]
    )
    add = flat.table(
        _0=("I", 0), _1=flat.vector("i", [0, 0]), _2=flat.vector("i", [1]), _3=("B", 11), _4=flat.table(_0=("b", 0))
    )
    graph = flat.table(_0=tensors, _1=flat.vector("i", [0]), _2=flat.vector("i", [1]), _3=flat.offsets([add]))
    code = flat.table(_0=("b", 0), _2=("i", 1), _3=("i", 0))
    model = flat.table(_0=("I", 3), _1=flat.offsets([code]), _2=flat.offsets([graph]), _4=buffers)
    flat._align(8, 8)
    flat.put(b"TFL3")
    flat.put(struct.pack("<I", len(flat.data) + 4 - model))
    return flat.data
