"""Every error a user or an operator can meet, and nothing else.

PDServeError
|-- RequestError          the caller's fault: an HTTP 4xx that names the field
|   `-- NotFoundError     an unknown model
|-- OverloadedError       not now: 429 or 503 with Retry-After
|-- ModelError            the model folder or file cannot be served: one line, exit 2
|-- ConfigError           flags or files that contradict: one line, exit 2
`-- TransferError         KV could not be read; the request is placed again
"""

from __future__ import annotations


class PDServeError(Exception):
    """Base of everything raised on purpose."""


class RequestError(PDServeError):
    """Bad input from a client; `param` names the offending field, `status` is the HTTP status."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class NotFoundError(RequestError):
    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, code=code, status=404)


class OverloadedError(PDServeError):
    """The server refuses work it could not finish; `retry_after_s` goes into Retry-After."""

    def __init__(self, message: str, *, status: int, retry_after_s: float) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s


class ModelError(PDServeError):
    """The model cannot be served, in one line that says what is missing or wrong."""


class ConfigError(PDServeError):
    """Flags, files or the machine contradict; one line that says what would be right."""


class TransferError(PDServeError):
    """Blocks of another worker could not be read and validated; `reason` is a short metric label."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
