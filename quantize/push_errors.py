"""What went wrong between the Hub's client and the Hub, in words a publisher can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quantize.errors import ToolError


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what the Hub's client raises into a `ToolError`."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        yield
    except (OSError, HTTPError, RuntimeError, ValueError) as error:
        raise _explain(error, what) from error


def _explain(error: Exception, what: str) -> ToolError:
    from huggingface_hub import constants, errors

    cause: BaseException = error
    while isinstance(cause, RuntimeError) and cause.__cause__:  # the client's wrapper of uploads
        cause = cause.__cause__
    lines = [line for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
    said = lines[0].strip()
    response = getattr(cause, "response", None)
    status = response.status_code if isinstance(cause, errors.HfHubHTTPError) and response else 0
    missing = isinstance(cause, errors.RepositoryNotFoundError)  # also for a 401, as the Hub does
    if status == 401 and not missing:
        return ToolError(f"{what}: the token is not valid any more: {said}", "hf auth login")
    if status == 403 or missing:
        return ToolError(
            f"{what}: this login may not write there: {said}",
            "ask the owner for the right to write, or: hf auth login with another token",
        )
    if status in (409, 412):
        return ToolError(
            f"{what}: somebody else changed it meanwhile: {said}",
            "look at it, then repeat the command: content that is there is not sent again",
        )
    kept = "the branch is as it was, and content that is there is not sent again"
    return ToolError(
        f"{what}: {constants.ENDPOINT} did not do it: {said}; {kept}",
        "check the network and HF_ENDPOINT, and continue with the same command",
    )
