# SPDX-License-Identifier: Apache-2.0
"""A bucket of S3, Google Cloud Storage or Azure Blob Storage as a source, through obstore (extra `buckets`).

A store must not be used before a fork and after it; the processes of workers are started anew and never have one.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

from forebay.errors import ConfigError, ForebayError
from forebay.repository.bucket_listing import USUAL, BucketListing, ListingLimits, is_etag, tag_of
from forebay.repository.listing import StoredFile, as_one_line
from forebay.repository.source import SourceChanged, SourceFailed, SourceRefused
from forebay.types.plurals import counted
from forebay.types.user_exceptions import answered

SILENT_S: Final = 30.0
"""How long a store may say nothing before a request is given up."""
REQUEST_S: Final = 3600.0
"""Longest time of one request, with its body: a part of a file over a slow line that it shares with other parts."""
CONNECT_S: Final = 5.0
TRIES: Final = 3
"""How often a part is asked for whose answer does not come whole; requests that fail are repeated below that."""

_SIGNERS: Final = {
    "s3": "ACCESS_KEY_ID WEB_IDENTITY_TOKEN_FILE CONTAINER_CREDENTIALS_RELATIVE_URI CONTAINER_CREDENTIALS_FULL_URI",
    "gs": "APPLICATION_CREDENTIALS SERVICE_ACCOUNT SERVICE_ACCOUNT_PATH SERVICE_ACCOUNT_KEY",
    "az": "STORAGE_ACCOUNT_KEY STORAGE_ACCESS_KEY STORAGE_SAS_TOKEN STORAGE_SAS_KEY STORAGE_TOKEN CLIENT_ID "
    "STORAGE_CLIENT_ID FEDERATED_TOKEN_FILE USE_AZURE_CLI STORAGE_USE_EMULATOR",
}
"""What of the environment says who signs requests, after the prefix of its store."""
_PREFIXES: Final = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": (),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL"),
}
"""Where the environment says which server is asked."""
_METADATA: Final = ("169.254.169.254", 80)
_METADATA_S: Final = 0.3
_CREDENTIALS: Final = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_REGION, or AWS_ENDPOINT_URL of another store); "
    "with boto3 installed, profiles of ~/.aws and roles are found as well",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_SAS_TOKEN",
}
_STATUS: Final = re.compile(r"status code: (\d{3})")
_REASON: Final = re.compile(r'message: "([^"]+)"')
_BROKEN: Final = {"kind: Timeout": "it was silent for too long", "IncompleteBody": "the connection was cut"}
"""What the library knows of a body that did not come, and keeps to itself."""
_MAX_WORDS: Final = 2000
"""Letters of an error that are looked at; a store may send any number."""
_TIMES: Final = re.compile(r" in [0-9.]+\w+?(, after \d+ retries, max_retries: \d+, retry_timeout: \w+)?\s+(?=- )")
_REFUSED: Final = frozenset({400, 401, 403, 404})


class Bucket:
    """A bucket, or what has a prefix in it; see `forebay.repository.source.ModelSource`."""

    def __init__(self, address: str, *, silent_s: float = SILENT_S, limits: ListingLimits = USUAL) -> None:
        """Prepare to ask; nobody is asked yet.

        Args:
            address: `s3://BUCKET/PREFIX`, `gs://` or `az://`.
            silent_s: How long the store may say nothing; an answer that comes slowly is waited for.
            limits: What a listing may have.

        Raises:
            ConfigError: If obstore is not installed, or takes no such address.
        """
        try:
            obstore: Any = importlib.import_module("obstore")
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as error:
            raise ConfigError(f"reading {address} needs the extra `buckets`: pip install 'forebay[buckets]'") from error
        self._obstore = obstore
        self.place = address
        self.problems: Sequence[str] = ()
        self._limits = limits
        self._listed: Sequence[StoredFile] = ()
        self._scheme, _, rest = address.partition("://")
        _check_endpoints(self._scheme)
        bucket, _, prefix = rest.partition("/")
        self._prefix = prefix.strip("/")  # as the store reads it
        more = _aws() if self._scheme == "s3" else _other(self._scheme)
        self._is_signed = not more.get("config", {}).get("skip_signature")

        def opened(request_s: float) -> Any:
            return from_url(
                f"{self._scheme}://{bucket}",
                client_options={
                    "timeout": f"{request_s:g}s",
                    "read_timeout": f"{silent_s:g}s",
                    "connect_timeout": f"{min(CONNECT_S, silent_s):g}s",
                    "allow_http": True,  # where the address of a store says http, it is meant
                },
                retry_config={
                    "max_retries": 3,
                    "retry_timeout": timedelta(seconds=silent_s),
                    "backoff": {
                        "init_backoff": timedelta(milliseconds=100),
                        "max_backoff": timedelta(seconds=2),
                        "base": 2.0,
                    },
                },
                **more,
            )

        try:
            self._store: Any = opened(REQUEST_S)
            self._listing_store: Any = opened(min(limits.time_s, REQUEST_S))
        except (BaseError, OSError, ValueError) as error:
            raise SourceRefused(f"{address} cannot be opened: {_words(error)}; {_CREDENTIALS[self._scheme]}") from error

    def list(self) -> list[StoredFile]:
        """Return all objects, page by page.

        Raises:
            SourceFailed: If the store cannot be asked now, or has suddenly none.
            SourceRefused: If it does not let us in, or has no such bucket.
        """
        listing = BucketListing(self._obstore, self._listing_store, self._prefix, self._limits, self._listed)
        files = answered(listing.run, functools.partial(self._refuse, "be listed"))
        if self._listed and not files:
            # A page of HTML with status 200 reads as a listing without objects; a store that lost its disk has none.
            msg = f"{self.place} is listed as empty, and had {counted(len(self._listed), 'object')}"
            raise SourceFailed(f"{msg}; unload its models by hand or restart to serve none of it")
        self._listed = files
        self.problems = listing.problems
        return files

    def has(self, path: str) -> bool:
        """Tell whether an object is there, asked by its key.

        Raises:
            SourceFailed: If the store cannot be asked now.
            SourceRefused: If it does not let us in.
        """

        def refuse(error: BaseException) -> bool:
            if isinstance(error, FileNotFoundError):
                return False
            raise self._told(f"be asked for {as_one_line(path)}", error) from error

        key = self._key(path)
        return answered(lambda: bool(self._obstore.head(self._store, key)), refuse)

    def read(self, path: str, file: StoredFile, start: int, end: int) -> memoryview:
        """Return a part of an object, if it is still the one that was listed.

        Raises:
            SourceChanged: If it is another one by now, or gone.
            SourceFailed: If it cannot be read now.
            SourceRefused: If it may not be read.
        """
        key = self._key(path)
        attempt = functools.partial(self._part, key, file, start, end)
        for left in reversed(range(TRIES)):
            found: memoryview | ForebayError = answered(attempt, functools.partial(self._read_error, key))
            if not isinstance(found, ForebayError):
                return found
            if isinstance(found, SourceRefused | SourceChanged) or not left:
                raise found
        raise AssertionError

    def folder(self) -> Path | None:
        """Return None: an object is not a file."""
        return None

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path

    def _part(self, key: str, file: StoredFile, start: int, end: int) -> memoryview:
        options: dict[str, Any] = {"range": (start, end)}
        if is_etag(file.tag):
            options["if_match"] = f'"{file.tag}"'
        found = self._obstore.get(self._store, key, options=options)
        # Some stores do not know the condition.
        if (found.meta["size"], tag_of(found.meta)) != (file.size, file.tag):
            raise SourceChanged(f"{key} has changed since it was listed")
        data = bytearray()
        for chunk in found.stream():
            data += chunk
            if len(data) > end - start:  # what a store sends has no end of its own
                raise SourceFailed(f"{key} came with more than the {end - start} bytes that were asked for")
        if len(data) != end - start:
            raise SourceFailed(f"{key} came with {len(data)} bytes instead of {end - start}")
        return memoryview(data)

    def _read_error(self, key: str, error: BaseException) -> ForebayError:
        from obstore.exceptions import PreconditionError

        if isinstance(error, ForebayError):
            return error
        if isinstance(error, PreconditionError | FileNotFoundError):
            told: ForebayError = SourceChanged(f"{key} has changed since it was listed, or is gone")
        else:
            told = self._told(f"be read at {key}", error)
        told.__cause__ = error
        return told

    def _refuse(self, what: str, error: BaseException) -> NoReturn:
        if isinstance(error, SourceFailed):
            raise SourceFailed(f"{self.place} cannot {what}: {error.message}") from None
        raise self._told(what, error) from error

    def _told(self, what: str, error: BaseException) -> ForebayError:
        """Return an error of a store as one of ours, in its own words and with the place to mend it."""
        from obstore.exceptions import InvalidPathError

        words = _words(error)
        found = _STATUS.search(str(error))
        status = int(found[1]) if found else 403 if isinstance(error, PermissionError) else 0
        text = f"{self.place} cannot {what}: {words}"
        if isinstance(error, InvalidPathError):
            return SourceFailed(f"{text}; nothing here can be listed until that object has another name or is removed")
        if status not in _REFUSED:
            return SourceFailed(text)
        if status == 404:
            return SourceRefused(f"{text}; is it called so, and does it lie where the endpoint says?")
        found_none = "" if self._is_signed else "; no credentials were found here"
        return SourceRefused(f"{text}{found_none}; {_CREDENTIALS[self._scheme]}")


def _aws() -> dict[str, Any]:
    """Return what obstore does not find out by itself: endpoints by another name, profiles, and that nobody signs."""
    told = os.environ
    config: dict[str, Any] = {}
    endpoint = told.get("AWS_ENDPOINT_URL_S3") or told.get("AWS_ENDPOINT_URL") or told.get("AWS_ENDPOINT")
    if endpoint:
        config["endpoint"] = endpoint
    if _says_who_signs("s3"):
        return {"config": config}
    if importlib.util.find_spec("boto3") is not None:
        boto3: Any = importlib.import_module("boto3")
        from obstore.auth.boto3 import Boto3CredentialProvider

        session = boto3.Session()
        if session.get_credentials() is not None:
            if session.region_name:
                config["region"] = session.region_name
            return {"config": config, "credential_provider": Boto3CredentialProvider(session)}
    elif told.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true" and _has_metadata():
        return {"config": config}
    return {"config": {**config, "skip_signature": True}}


def _other(scheme: str) -> dict[str, Any]:
    """Return that nobody signs, where nobody is named and no machine of the cloud could be asked for a role."""
    is_signed = _says_who_signs(scheme) or (scheme == "gs" and _is_known_to_gcloud()) or _has_metadata()
    return {} if is_signed else {"config": {"skip_signature": True}}


def _is_known_to_gcloud() -> bool:
    """Tell whether gcloud has left credentials of this user, who may have no home, or none that they can look into."""
    try:
        return os.access(Path("~/.config/gcloud/application_default_credentials.json").expanduser(), os.R_OK)
    except RuntimeError:
        return False


def _says_who_signs(scheme: str) -> bool:
    """Tell whether the environment says who signs, or that nobody does."""
    return any(os.environ.get(_PREFIXES[scheme] + name) for name in (*_SIGNERS[scheme].split(), "SKIP_SIGNATURE"))


def _has_metadata() -> bool:
    """Tell whether this is a machine of the cloud that may have a role."""
    try:
        socket.create_connection(_METADATA, _METADATA_S).close()
    except OSError:
        return False
    return True


def _words(error: BaseException) -> str:
    """Return what a store has said, without the state of the library that follows it."""
    text, _, state = str(error).partition("\n\nDebug source")
    text, state = text[:_MAX_WORDS], state[:_MAX_WORDS]
    code, message = _element(text, "Code"), _element(text, "Message")
    if code and message:
        return as_one_line(f"{code}: {message.partition(chr(10))[0]}")  # some add lines with the id of the request
    reason = _REASON.search(state)  # of the network: the text ends before it
    why = reason[1] if reason else next((words for sign, words in _BROKEN.items() if sign in state), "")
    return as_one_line(_TIMES.sub("", text)) + (f": {as_one_line(why)}" if why else "")


def _element(text: str, name: str) -> str:
    """Return what the first element of this name holds; empty if there is none."""
    _, _, rest = text.partition(f"<{name}>")
    inner, end, _ = rest.partition(f"</{name}>")
    return inner.strip() if end else ""


def _check_endpoints(scheme: str) -> None:
    """Check where the environment says which server is asked: obstore panics over a text that is not an address.

    Raises:
        ConfigError: If one of them is none.
    """
    for name in _ENDPOINTS[scheme]:
        value = os.environ.get(name, "")
        if value and not _is_endpoint(value):
            raise ConfigError(f"expected http://HOST:PORT or https://HOST:PORT, got {as_one_line(value)!r} ({name})")


def _is_endpoint(value: str) -> bool:
    try:
        found = urlsplit(value)
        is_whole = found.scheme in {"http", "https"} and bool(found.hostname) and found.port != 0
    except ValueError:  # its port is not a number, or its address not an address
        return False
    return is_whole and value.isascii() and value.isprintable() and not set(value) & set(' "<>\\^`{|}')
