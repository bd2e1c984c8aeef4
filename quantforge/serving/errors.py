"""`ApiError`: what a client did wrong, in the shape that OpenAI's clients understand.

::

    {"error": {"message": ..., "type": "invalid_request_error", "param": "top_p", "code": ...}}
"""

from collections.abc import Mapping, Sequence
from typing import Any

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

_UNION_TAGS = frozenset({"str", "int"})
_SHOWN_CHARACTERS = 80


class ApiError(Exception):
    """A request that is answered with `status` and an error document."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    def document(self) -> dict[str, Any]:
        """The JSON body; characters that UTF-8 cannot carry are escaped."""
        return {
            "error": {
                "message": _encodable(str(self)),
                "type": self.kind,
                "param": None if self.param is None else _encodable(self.param),
                "code": self.code,
            }
        }


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The `ApiError` for pydantic's `errors` of one request: the first parameter at fault.

    A value may be refused once for each form that it could have had; the closest form counts.
    """
    same = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    first = max(same, key=lambda error: (_param(error["loc"]) or "").count("."))
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "malformed")
        return ApiError(400, f"the request body is not valid JSON: {reason}")
    param = _param(first["loc"])
    if param is None:
        return ApiError(
            400, "the request body must be a JSON object, sent with content-type application/json"
        )
    if first["type"] == "missing":
        return ApiError(400, f"{param} is required", param=param, code="missing_parameter")
    messages = dict.fromkeys(str(e["msg"]) for e in errors if _param(e["loc"]) == param)
    seen = "" if first["type"] == "extra_forbidden" else f", got {_shown(first.get('input'))}"
    return ApiError(400, f"{param}: {'; or '.join(messages)}{seen}", param=param)


def _param(location: Sequence[str | int]) -> str | None:
    """``messages.0.role`` from pydantic's location, without its names of union members."""
    parts = [
        str(part)
        for part in location[1:]
        if isinstance(part, int) or (part.isidentifier() and part not in _UNION_TAGS)
    ]
    return ".".join(parts) or None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
