"""Exceptions to HTTP statuses and OpenAI error objects.

Every error body is ``{"error": {"message", "type", "param", "code"}}``: the ``openai`` client
reads the nested object and shows worse messages for a flat one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from qtool.errors import EngineError, QtoolError, RequestError
from qtool.runtime.server.interfaces import JsonObject

# A client may send megabytes in the field at fault; a message that repeats them helps nobody.
MAX_MESSAGE_LENGTH = 1000
MAX_SHOWN_VALUE = 80

_SERVER_ERROR_TYPES = {500: "server_error", 503: "service_unavailable_error", 504: "timeout_error"}

# Depth to which a validation error's location names fields of the API. Deeper parts are list
# positions and the names pydantic gives to members of a union.
_NESTED_FIELDS = {"messages": 3, "stream_options": 2}


class HttpError(QtoolError):
    """An answer other than 200, with what its error object says."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> JsonObject:
        """The OpenAI error object."""
        return {
            "error": {
                "message": shorten(str(self), MAX_MESSAGE_LENGTH),
                "type": _SERVER_ERROR_TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The whole answer."""
        headers = None if self.headers is None else dict(self.headers)
        return JSONResponse(self.body(), self.status, headers)


def shorten(text: str, limit: int) -> str:
    """``text``, or its beginning with an ellipsis; at most ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def to_http_error(error: QtoolError) -> HttpError:
    """The HTTP answer to an error of ours."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestError):
        return HttpError(400, str(error), error.param)
    code = "engine_error" if isinstance(error, EngineError) else None
    return HttpError(500, str(error), code=code)


def from_validation(errors: Sequence[Mapping[str, Any]]) -> HttpError:
    """A 400 from pydantic's error list: the first field at fault, all that was said about it."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return HttpError(400, f"The body is not JSON: {first['ctx']['error']}.", code="bad_json")
    param = _param(first["loc"])
    if param is None:
        return HttpError(
            400,
            "The body must be a JSON object, sent with 'Content-Type: application/json'.",
        )
    if first["type"] == "missing":
        return HttpError(400, f"{param} is required; add it to the body.", param)
    said = dict.fromkeys(e["msg"] for e in errors if _param(e["loc"]) == param)
    value = shorten(repr(first["input"]), MAX_SHOWN_VALUE)
    return HttpError(400, f"{param}={value}: {' or: '.join(said)}", param)


def _param(location: Sequence[str | int]) -> str | None:
    """Field name of a validation error located at ("body", field, ...)."""
    path = location[1:]
    if not path:
        return None
    return ".".join(map(str, path[: _NESTED_FIELDS.get(str(path[0]), 1)]))
