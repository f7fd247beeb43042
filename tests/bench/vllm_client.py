"""Compares ``accept`` with vLLM's own benchmark client: ``make vllm-client``; about ten minutes.

One server of the BF16 pair answers every other held-out prompt twice: ``vllm.benchmarks.serve``
(custom dataset) asks, which reads the same counters in its own way, and ``quantize accept --url``.
Both go to ``results/vllm-client.json``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from al_table import ENVIRONMENT, QUANTIZE, ROOT, VLLM_ARGS, bring_draft, bring_target

from quantize.serving.client import fetch, find_model
from quantize.serving.process import Launch, serve
from quantize.serving.prompts import default_prompts

RESULTS = ROOT / "results" / "vllm-client.json"
CLIENT = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
TOKENS, CONCURRENCY = "160", "16"
STRIDE = 2


def main() -> int:
    """Ask both ways, write and print both lengths."""
    target, draft = bring_target("bf16"), bring_draft("bf16")
    speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3}
    options = (
        *("--speculative-config", json.dumps(speculative)),
        *("--per-request-spec-decode-metrics", "summary", "--max-num-seqs", CONCURRENCY),
        *VLLM_ARGS.split(),
    )
    os.environ |= ENVIRONMENT
    words = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target))
    with TemporaryDirectory() as scratch:
        work = Path(scratch)
        prompts = work / "prompts.jsonl"
        lines = default_prompts().read_text().splitlines()[::STRIDE]
        prompts.write_text("\n".join(lines) + "\n")
        with serve(Launch(words, options, work / "server.log"), lambda _: None) as url:
            results = {
                "prompts": len(lines),
                "vllm client": ask_with_vllm(url, target, prompts, work),
                "accept": accept(url, prompts, work),
            }
            results["server"] = json.loads(fetch(f"{url}/version"))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    return 0


def ask_with_vllm(url: str, target: Path, prompts: Path, work: Path) -> dict[str, Any]:
    """What vLLM's client reports."""
    options = {
        "--backend": "openai-chat",
        "--endpoint": "/v1/chat/completions",
        "--base-url": url,
        "--model": find_model(url),
        "--tokenizer": str(target),
        "--dataset-name": "custom",
        "--dataset-path": str(prompts),
        "--custom-output-len": TOKENS,
        "--num-prompts": str(len(prompts.read_text().splitlines())),
        "--max-concurrency": CONCURRENCY,
        "--temperature": "0",
        "--result-dir": str(work),
        "--result-filename": "client.json",
    }
    flags = ("--skip-chat-template", "--disable-shuffle", "--save-result")
    pairs = [word for option in options.items() for word in option]
    subprocess.run([sys.executable, "-c", CLIENT, *pairs, *flags], check=True)
    said = json.loads((work / "client.json").read_text())
    kept = ("completed", "failed", "total_output_tokens", "duration")
    return {
        "length": said["spec_decode_acceptance_length"],
        "steps": said["spec_decode_num_drafts"],
        "accepted": said["spec_decode_accepted_tokens"],
        **{key: said[key] for key in kept},
    }


def accept(url: str, prompts: Path, work: Path) -> dict[str, Any]:
    """What ``quantize accept`` reports of the same server."""
    out = work / "report"
    options = ["--url", url, "--prompts", str(prompts), "--max-tokens", TOKENS]
    options += ["--concurrency", CONCURRENCY, "-o", str(out)]
    subprocess.run([*QUANTIZE, "accept", *options], check=True)
    (cell,) = json.loads((out / "acceptance.json").read_text())["cells"].values()
    return {
        "length": cell["length"],
        "steps": cell["steps"],
        "accepted": cell["accepted"],
        "runs": cell["runs"],
    }


if __name__ == "__main__":
    sys.exit(main())
