# SPDX-License-Identifier: Apache-2.0
"""What HTTP itself refuses: errors with a status and a code of their own, beside those every protocol has."""

from __future__ import annotations

from forebay.protocols.native import Refusal, UnsupportedMedia


class Unauthorized(Refusal, status=401, word="unauthenticated"):
    """No API key, or one that is not known."""


class ForeignPage(Refusal, status=403, word="foreign_page"):
    """A web page of another origin calls in a way that its browser does not ask about beforehand."""


class NothingThere(Refusal, status=404, word="not_found"):
    """The path leads nowhere."""


class NotManaged(Refusal, status=403, word="not_managed"):
    """Versions are not managed over HTTP here."""


class MethodNotAllowed(Refusal, status=405, word="method_not_allowed"):
    """The path is known, the method is not possible there."""

    allow: bytes = b""


class UnsupportedEncoding(UnsupportedMedia):
    """The body is packed with something else than what is taken."""

    takes: bytes = b"identity"


class TooSlow(Refusal, status=408, word="request_timeout"):
    """The rest of the request did not come in time."""


class WrongHost(Refusal, status=421, word="wrong_host"):
    """The server is not called so."""


class HeadTooLarge(Refusal, status=431, word="head_too_large"):
    """Request line and headers, or what frames a body, are too long."""


class NotHttp(Refusal):
    """The bytes are not a request."""


class NotImplementedHere(Refusal, status=501, word="not_implemented"):
    """The request asks for a part of HTTP that is not spoken here."""
