# SPDX-License-Identifier: Apache-2.0
"""What only a walk of the collector frees, and whatever it refers to until then."""

import gc
import os
import types
from contextlib import contextmanager
from pathlib import Path

import forebay

# The package's own folder: a clone may be in one of the same name, or of any other.
_PACKAGE = f"{Path(forebay.__file__).parent}{os.sep}"


@contextmanager
def left_in_circles():
    """Gives a list that holds, after the block, names of what of ours it has left in circles, in whatever thread."""
    left = []
    gc.collect()
    gc.disable()
    try:
        yield left
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left += filter(None, map(_name_of, gc.garbage))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _name_of(one):
    """Names what belongs to forebay, and is empty for all else."""
    if isinstance(one, types.FrameType | types.FunctionType):
        code = one.f_code if isinstance(one, types.FrameType) else one.__code__
        return code.co_qualname if code.co_filename.startswith(_PACKAGE) else ""
    kind = type(one)
    return kind.__qualname__ if kind.__module__.startswith("forebay.") else ""
