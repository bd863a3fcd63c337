# SPDX-License-Identifier: Apache-2.0
"""Calls what a project wrote: each hook in the form of its own signature, with results brought into one shape.

The hooks of an op changed their parameters and their results from version to version. A signature is read once, and
what comes back is told apart by its shape, so that ops of every version, and ops that mix them, run side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, cast

import msgspec

from forebay.errors import ConfigError, ForebayError
from forebay.surfaces.pipeline.codes import OK, CustomException, CustomExceptionCode, error, value_of
from forebay.surfaces.pipeline.ops import packing
from forebay.surfaces.pipeline.ops.channel import is_texts
from forebay.types.call_signature import Arguments, signature_of
from forebay.types.did_you_mean import listed
from forebay.types.failures import failure_of, text_of, trace_of, words_of
from forebay.workers.user_calls.user_code import caught

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.ops.op import Op, RequestOp, ResponseOp

HookName = Literal["preprocess", "process", "postprocess", "unpack_request_package", "pack_response_package"]

_FORMS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "preprocess": (("input_dicts",), ("input_dicts", "log_id"), ("input_dicts", "data_id", "log_id")),
    "process": (("feed_batch",), ("feed_batch", "typical_logid")),
    "postprocess": (
        ("input_dicts", "fetch_data"),
        ("input_dicts", "fetch_data", "log_id"),
        ("input_dicts", "fetch_data", "data_id", "log_id"),
    ),
    "unpack_request_package": (("request",),),
    "pack_response_package": (("channeldata",),),
}
"""What each hook may take, shortest first."""

_ALSO: Final[Mapping[str, str]] = {"fetch_dict": "fetch_data", "feed_dict_list": "feed_batch", "logid": "log_id"}
"""Other names under which a parameter is known when it is given by name."""

_CODES: Final = "a number other than 0 that fits into 32 bits, a member of ProductErrCode or None"
_DEFAULTS: Final = "forebay.surfaces.pipeline.ops.op"
"""The module whose hooks are nobody's own."""


class Form(Arguments, frozen=True):
    """How one hook is called.

    Attributes:
        is_open: Whether it takes whatever it is given, so that its form says nothing about its version.
    """

    function: Callable[..., Any]
    is_open: bool


class Prepared(msgspec.Struct):
    """What `preprocess` made of one sample.

    Attributes:
        data: For `process`: a dict, or a list of dicts that it gets one after the other.
        skips: Whether the sample goes to `postprocess` as it is.
    """

    data: dict[str, Any] | list[dict[str, Any]]
    skips: bool = False


class Unpacked(msgspec.Struct):
    """What `unpack_request_package` made of a request."""

    inputs: dict[str, Any]
    log_id: int


class OpHooks:
    """The three hooks of one op.

    What they raise leaves as a `ForebayError` with a number: that of the error itself, 10000 for an exception, 7000
    for a result of another shape, the project's own for a product error.
    """

    def __init__(self, op: Op, *, debug: bool = False) -> None:
        """Read the signatures.

        Args:
            debug: Whether messages name classes and kinds of exceptions.

        Raises:
            ConfigError: If one cannot be called.
        """
        self._op = op
        self._debug = debug
        self._preprocess = form_of(op, "preprocess")
        self._process = form_of(op, "process")
        self._postprocess = form_of(op, "postprocess")

    def preprocess(self, inputs: Mapping[str, Any], data_id: int, log_id: int) -> Prepared:
        """Prepare a sample."""
        values = {"input_dicts": inputs, "data_id": data_id, "log_id": log_id}
        found = self._call("preprocess", self._preprocess, values)
        skips = False
        fields = _fields(found, 4)
        if fields is not None:
            if len(fields) != 4:
                self._wrong_preprocess(_shown(fields))
            found, skips, code, info = fields
            self._require_no_product_error("preprocess", code, info)
        if isinstance(found, dict):
            return Prepared(cast("dict[str, Any]", found), bool(skips))
        if not isinstance(found, list):
            self._wrong_preprocess(_shown(found))
        for one in cast("list[Any]", found):
            if not isinstance(one, dict):
                self._wrong_preprocess(f"a list that holds {type(one).__name__}")
        return Prepared(cast("list[dict[str, Any]]", found), bool(skips))

    def process(self, feed_batch: Sequence[Any], typical_logid: int) -> Any:
        """Run a batch."""
        found = self._call("process", self._process, {"feed_batch": feed_batch, "typical_logid": typical_logid})
        fields = _fields(found, 3)
        if fields is not None:
            if len(fields) != 3:
                self._wrong("process", "dict or (dict, error code, error text)", _shown(fields))
            found, code, info = fields
            err_no = OK if code is None else value_of(code)
            if err_no is None:
                self._wrong("process", "a number as error code", _shown(code))
            if err_no != OK:
                raise error(err_no, info or self._text("process", f"error code {err_no}"), is_final=True)
        if found is None:
            raise error(
                CustomExceptionCode.CLIENT_ERROR.value, self._text("process", "the model client returned nothing")
            )
        return found

    def postprocess(self, inputs: Mapping[str, Any], fetched: Any, data_id: int, log_id: int) -> dict[str, Any]:
        """Finish a sample."""
        values = {"input_dicts": inputs, "fetch_data": fetched, "data_id": data_id, "log_id": log_id}
        found = self._call("postprocess", self._postprocess, values)
        expected = "dict or (dict, prod_errcode, prod_errinfo)"
        fields = _fields(found, 3)
        if fields is not None:
            if len(fields) != 3:
                self._wrong("postprocess", expected, _shown(fields))
            found, code, info = fields
            self._require_no_product_error("postprocess", code, info)
        if not isinstance(found, dict):
            self._wrong("postprocess", expected, _shown(found))
        return cast("dict[str, Any]", found)

    def _call(self, hook: HookName, form: Form, values: Mapping[str, Any]) -> Any:
        found, raised = caught(form.call, form.function, values)
        if raised is None:
            return found
        try:
            if isinstance(raised, ForebayError):
                raise failure_of(raised).error
            raise _raised(self._op, hook, raised, debug=self._debug)
        finally:
            del raised  # its frames hold this one, and with it the request: a circle

    def _require_no_product_error(self, hook: HookName, code: Any, info: Any) -> None:
        product = _product_error(code, info)
        if product is not None:
            raise product
        if code is not None:
            self._wrong(hook, f"{_CODES} as prod_errcode", _shown(code))

    def _wrong_preprocess(self, found: str) -> NoReturn:
        expected = "dict, a list of dicts or (data, is_skip_process, prod_errcode, prod_errinfo)"
        self._wrong("preprocess", expected, found)

    def _wrong(self, hook: HookName, expected: str, found: str) -> NoReturn:
        text = self._text(hook, f"{hook} should return {expected}, it returned {found}")
        raise error(CustomExceptionCode.TYPE_ERROR.value, text)

    def _text(self, hook: HookName, reason: str) -> str:
        return _text(self._op, hook, reason)


def unpack(op: RequestOp, request: Any, *, debug: bool = False) -> Unpacked:
    """Read a request with its op.

    Raises:
        ForebayError: With 8000 if it cannot be read, or the project's own number.
    """
    hook: HookName = "unpack_request_package"
    found = _at_the_edge(op, hook, {"request": request}, debug=debug)
    log_id: Any = getattr(request, "logid", 0)
    fields = _fields(found, 4)
    if fields is not None and len(fields) == 4:
        found, log_id, code, info = fields
        product = _product_error(code, info)
        if product is not None:
            raise product
        if code is not None:
            text = f"rpc package error: {hook} returned {_shown(code)} as prod_errcode; expected {_CODES}"
            raise error(CustomExceptionCode.RPC_PACKAGE_ERROR.value, text)
    if not isinstance(found, dict):
        expected = "dict or (dict, log_id, prod_errcode, prod_errinfo)"
        text = f"rpc package error: {hook} should return {expected}, it returned {_shown(found)}"
        raise error(CustomExceptionCode.RPC_PACKAGE_ERROR.value, text)
    return Unpacked(cast("dict[str, Any]", found), value_of(log_id, bits=64) or 0)


def pack(op: ResponseOp, channeldata: Any, *, debug: bool = False) -> Any:
    """Write an answer with its op; raises ForebayError with 8000 if the hook raises or returns nothing."""
    hook: HookName = "pack_response_package"
    found = _at_the_edge(op, hook, {"channeldata": channeldata}, debug=debug)
    if found is None:
        text = f"rpc package error: {hook} should return a Response, it returned nothing"
        raise error(CustomExceptionCode.RPC_PACKAGE_ERROR.value, text)
    return packing.message_of(found)


def predict(op: Op, feed_batch: Sequence[Any], typical_logid: int) -> dict[str, Any]:
    """Ask an op's client about a batch; what `Op.process` does.

    Raises:
        ForebayError: With 7000 for values that are not arrays, 5000 for other names than the model's, 9000 if the
            client gives nothing or cannot be reached, 6000 if it does not answer in time.
    """
    client = op.client
    if client is None:
        text = _text(op, "process", "the op has no model; override process, or give it one")
        raise error(CustomExceptionCode.NOT_IMPLEMENTED.value, text)
    fetch = op.fetch_names
    if not getattr(client, "takes_text", False):
        for feed in feed_batch:
            _require_arrays(op, feed)
    _require_names(op, client, feed_batch, fetch)
    values = {"feed": feed_batch[0], "fetch": fetch, "batch": True, "log_id": typical_logid}
    if op.feeds_list:
        values |= {"feed": list(feed_batch), "batch": False}
    try:
        found = client.predict(**{name: values[name] for name in _taken(client.predict, tuple(values))})
    except TimeoutError as raised:
        raise error(CustomExceptionCode.TIMEOUT.value, _text(op, "process", "the model did not answer")) from raised
    except OSError as raised:
        text = _text(op, "process", f"the model cannot be reached: {raised}")
        raise error(CustomExceptionCode.CLIENT_ERROR.value, text, trace=trace_of(raised)) from raised
    answer: Any = found
    if found is None or (isinstance(found, dict) and answer.pop("serving_status_code", 0) != 0):
        text = _text(op, "process", "the model client returned nothing")
        raise error(CustomExceptionCode.CLIENT_ERROR.value, text)
    return cast("dict[str, Any]", found)


def overrides(op: Op, hook: str) -> bool:
    """Tell whether a project brings this hook itself."""
    if hook in vars(op):
        return True
    owner = next(cls for cls in type(op).__mro__ if hook in vars(cls))
    return owner.__module__ != _DEFAULTS


def generation_of(op: Op) -> int | None:
    """Tell by its hooks which version of the original an op was written for.

    Returns:
        0 for v0.3, 1 for v0.4 to v0.6, 2 for later ones; None if its hooks do not say. The newest, if it mixes them.
    """
    found: list[int] = []
    if overrides(op, "preprocess"):
        form = form_of(op, "preprocess")
        if not form.is_open:
            found.append(0 if form.wanted == {"input_dicts"} else 2)
    if overrides(op, "postprocess"):
        form = form_of(op, "postprocess")
        if not form.is_open:
            found.append(2 if "data_id" in form.wanted else int("log_id" in form.wanted))
    if found == [2, 1]:  # the three parameters of preprocess are those of v0.4 as well
        return 1
    return max(found, default=None)


def parse_mode_of(ops: Iterable[Op]) -> Literal["literal", "raw"]:
    """Return how `request_parse: auto` reads the texts of a request: as v0.3 did if the ops are written for it."""
    known = {generation_of(op) for op in ops} - {None}
    return "literal" if known == {0} else "raw"


def form_of(op: Op, hook: HookName) -> Form:
    """Read how a hook is called off its signature.

    A parameter with a default is given a value only if it has a name that is known.

    Raises:
        ConfigError: If it cannot be called.
    """
    function = getattr(op, hook)
    forms = _FORMS[hook]
    longest = forms[-1]
    try:
        parameters = list(signature_of(function).parameters.values())
    except (TypeError, ValueError):  # something written in C
        return Form(longest, (), function, is_open=True)
    by_position = [one for one in parameters if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}]
    required = sum(one.default is one.empty for one in by_position)
    has_rest = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    has_names = any(one.kind is one.VAR_KEYWORD for one in parameters)
    count = (
        len(longest) if has_rest and required <= len(longest) else max(required, min(len(by_position), len(forms[0])))
    )
    positional = next((form for form in forms if len(form) == count), () if has_names and not by_position else None)
    named = {one.name: _ALSO.get(one.name, one.name) for one in by_position[count:]}
    named |= {one.name: _ALSO.get(one.name, one.name) for one in parameters if one.kind is one.KEYWORD_ONLY}
    needed = [one for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    missing = [one.name for one in needed if named[one.name] not in longest]
    if positional is None or missing:
        ways = " or ".join(f"{hook}(self, {', '.join(form)})" for form in forms)
        problem = f"needs '{missing[0]}', which is not known" if missing else f"takes {required} values"
        raise ConfigError(f"op '{op.name}': {hook} {problem}; write it as {ways}")
    keywords = {name: value for name, value in named.items() if value in longest and value not in positional}
    if has_names:
        given = {*positional, *keywords.values()}
        keywords |= {value: value for value in longest if value not in given}
    return Form(positional, tuple(keywords.items()), function, is_open=has_rest or has_names)


def _at_the_edge(op: RequestOp | ResponseOp, hook: HookName, values: Mapping[str, Any], *, debug: bool) -> Any:
    """Call a hook that reads requests or writes answers.

    Raises:
        ForebayError: With 8000 for an exception, or the project's own number.
    """
    form = _edge_form(op, hook)
    found, raised = caught(form.call, form.function, values)
    if raised is None:
        return found
    try:
        if isinstance(raised, ForebayError):
            raise failure_of(raised).error
        if isinstance(raised, CustomException):
            raise _raised(op, hook, raised, debug=debug) from raised
        raise _package_error(raised, debug=debug) from raised
    finally:
        del raised  # its frames hold this one, and with it the request: a circle


_edge_form: Final = functools.lru_cache(maxsize=16)(form_of)
"""Reads the form of a hook that runs for each request, once."""


def _taken(function: Callable[..., Any], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return which of the names a function takes as keywords; all of them if it does not say."""
    try:
        parameters = signature_of(function).parameters
    except (TypeError, ValueError):
        return names
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return names
    return tuple(name for name in names if name in parameters)


def _require_arrays(op: Op, feed: Any) -> None:
    import numpy as np

    for name, value in feed.items():
        if isinstance(value, np.ndarray) or (isinstance(value, list) and name.endswith(".lod")) or is_texts(value):
            continue
        kind = type(cast("object", value)).__name__
        text = f"the value of '{name}' is {kind}, a model takes ndarrays. Please override preprocess."
        raise error(CustomExceptionCode.TYPE_ERROR.value, _text(op, "process", text))


def _require_names(op: Op, client: Any, feed_batch: Sequence[Any], fetch: Sequence[str]) -> None:
    wanted = getattr(client, "feed_names_", None)
    if wanted is not None:
        for feed in feed_batch:
            found = {
                name for name in feed if name.removesuffix(".lod") == name or name.removesuffix(".lod") not in wanted
            }
            if found != set(wanted):
                reason = f"the feed has {_listed(found)}, the model takes {_listed(wanted)}"
                raise error(CustomExceptionCode.INPUT_PARAMS_ERROR.value, _text(op, "process", reason))
    offered = getattr(client, "fetch_names_", None)
    if offered is not None and not set(fetch) <= set(offered):
        unknown = [name for name in fetch if name not in offered]
        reason = f"fetch_list names {_listed(unknown)}, the model gives {_listed(offered)}"
        raise error(CustomExceptionCode.INPUT_PARAMS_ERROR.value, _text(op, "process", reason))


def _listed(names: Iterable[str]) -> str:
    return listed(sorted(names)) or "nothing"


def _fields(found: Any, count: int) -> Sequence[Any] | None:
    """Return what a hook returned as its parts: a tuple, or a list of data and what belongs to it; None for data alone.

    A list with data in another place than the first is a list of data.
    """
    if isinstance(found, tuple):
        return cast("tuple[Any, ...]", found)
    if not isinstance(found, list) or len(cast("list[Any]", found)) != count:
        return None
    parts = cast("list[Any]", found)
    is_first_only = parts[0] is None or isinstance(parts[0], (dict, list))
    return parts if is_first_only and not any(isinstance(part, (dict, list)) for part in parts[1:]) else None


def _product_error(code: Any, info: Any) -> ForebayError | None:
    """Return the error a project decided on; None if there is none, or if its code is not one."""
    number = value_of(code)
    if not number:
        return None
    return error(number, "" if info is None else info, product=True)


def _raised(op: Op, hook: HookName, raised: BaseException, *, debug: bool) -> ForebayError:
    """Return what becomes of an exception in a hook."""
    trace = trace_of(raised)
    if isinstance(raised, CustomException):
        number = value_of(raised.exceptionCode)
        if raised.isSendToUser and number:
            return error(number, raised.error_msg, is_final=True, trace=trace)
        if not raised.isSendToUser:
            text = _text(op, hook, "the reason is in the server's log")
            return error(CustomExceptionCode.UNKNOW.value, text, trace=trace)
    reason = f"{type(op).__name__}.{hook}: {text_of(raised)}" if debug else _reason(raised)
    return error(CustomExceptionCode.UNKNOW.value, _text(op, hook, reason), trace=trace)


def _reason(raised: BaseException) -> str:
    if isinstance(raised, CustomException):
        return raised.error_msg
    return words_of(raised) or type(raised).__name__


def _package_error(raised: BaseException, *, debug: bool) -> ForebayError:
    reason = text_of(raised) if debug else _reason(raised)
    return error(CustomExceptionCode.RPC_PACKAGE_ERROR.value, f"rpc package error: {reason}", trace=trace_of(raised))


def _text(op: Op, hook: HookName, reason: str) -> str:
    return f"[{op.name}] Failed to {hook}: {reason}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(cast('tuple[Any, ...]', value))}"
    return repr(value) if isinstance(value, (int, float)) or value is None else type(value).__name__
