"""Measures what MXFP4 costs SmolLM2 by layer group: ``make recipes``; half an hour on two cores.

Every third held-out prompt, each followed by the BF16 model's own greedy answer, goes through the
model in float32 with some linears in another scheme: weights alone, and activations too. Over the
answers' tokens: the mean KL divergence (nats) of the next-token distribution from the BF16 model's,
and how often both find the same token likeliest. Results go to ``results/recipes.json``; rows that
are there are not measured again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from quantize.checkpoint import open_checkpoint  # noqa: E402
from quantize.demo import build_target  # noqa: E402
from quantize.patterns import BF16_SCHEME  # noqa: E402
from quantize.plan import Options, make_plan  # noqa: E402
from quantize.serving.prompts import default_prompts, read_prompts  # noqa: E402
from schemes import fp8_rowwise, mxfp4  # noqa: E402

WORK = ROOT / "bench-results" / "al"
RESULTS = ROOT / "results" / "recipes.json"
STRIDE = 3
ANSWER = 160
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "What is the capital of France?",
)
ATTENTION, GATE_UP, DOWN = "*.self_attn.*", "*.mlp.[gu]*_proj", "*.down_proj"
GROUPS = {"attention": ATTENTION, "gate and up": GATE_UP, "down": DOWN}
MX, FP8 = "mxfp4", "fp8_rowwise"

Layers = tuple[tuple[str, str], ...]


def only(group: str) -> Options:
    """MXFP4 in one layer group, BF16 elsewhere."""
    others = tuple((glob, BF16_SCHEME) for name, glob in GROUPS.items() if name != group)
    return Options(MX, layer_schemes=others)


def except_for(*groups: str) -> Options:
    """Some layer groups in FP8, MXFP4 elsewhere."""
    return Options(MX, layer_schemes=tuple((GROUPS[group], FP8) for group in groups))


RECIPES: dict[str, Options] = {
    "FP8 everywhere": Options(FP8),
    "MXFP4 everywhere": Options(MX),
    **{f"MXFP4 in {group} only, the rest BF16": only(group) for group in GROUPS},
    **{f"MXFP4, {group} in FP8": except_for(group) for group in GROUPS},
    "MXFP4, attention and down in FP8": except_for("attention", "down"),
    "MXFP4, attention and gate and up in FP8": except_for("attention", "gate and up"),
    "MXFP4, gate and up and down in FP8": except_for("gate and up", "down"),
}


@dataclass(frozen=True)
class Reference:
    """One prompt with its answer: token ids, where the answer begins, the BF16 model's logits."""

    ids: Tensor
    start: int
    logits: Tensor


def main(names: Sequence[str]) -> int:
    """Measure recipes; without names, all."""
    source = build_target(WORK / "target-bf16")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    todo = [name for name in names or RECIPES if name not in results]
    if todo:
        model, tokenizer = load(source)
        references = [refer(model, ids, start) for ids, start in answer(model, tokenizer)]
        for name in todo:
            results[name] = measure(source, model, tokenizer, RECIPES[name], references)
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
            print(name, json.dumps(results[name]), flush=True)
    print(table(results))
    return 0


def load(source: Path) -> tuple[Any, Any]:
    """The model in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(source)


@torch.inference_mode()
def answer(model: Any, tokenizer: Any) -> Iterator[tuple[Tensor, int]]:
    """Token ids ``[T]`` of every third prompt with its greedy answer, and where that begins."""
    for prompt in read_prompts(default_prompts()).prompts[::STRIDE]:
        yield generate(model, tokenizer, prompt.messages[0].content, ANSWER)


def generate(model: Any, tokenizer: Any, text: str, tokens: int) -> tuple[Tensor, int]:
    """Token ids of a question with its greedy answer, and where the answer begins."""
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**asked, max_new_tokens=tokens, do_sample=False)[0]
    return ids, asked["input_ids"].shape[1]


@torch.inference_mode()
def refer(model: Any, ids: Tensor, start: int) -> Reference:
    """The BF16 model's logits ``[T - start, V]`` for every token of the answer."""
    return Reference(ids, start, model(ids[None]).logits[0, start - 1 : -1].clone())


@torch.inference_mode()
def measure(
    source: Path, model: Any, tokenizer: Any, options: Options, references: Sequence[Reference]
) -> dict[str, Any]:
    """Bytes, and KL and agreement with weights alone and with activations quantized too."""
    checkpoint = open_checkpoint(str(source))
    plan = make_plan(checkpoint.specs, checkpoint.config, options)
    schemes = {entry.source.module: entry.scheme for entry in plan.entries if entry.scheme}
    result: dict[str, Any] = {
        "layer_schemes": [options.scheme, *map(list, options.layer_schemes)],
        "bytes": plan.to_json()["bytes_after"],
    }
    with quantized(model, schemes, activations=False):
        result["weights"] = compare(model, references)
    with quantized(model, schemes, activations=True):
        result["weights and activations"] = compare(model, references)
        result["answers"] = {
            question: tokenizer.decode(ids[start:], skip_special_tokens=True)
            for question in QUESTIONS
            for ids, start in [generate(model, tokenizer, question, 48)]
        }
    return result


def compare(model: Any, references: Sequence[Reference]) -> dict[str, float]:
    """Mean KL (nats) and share of equal likeliest tokens over all answers' tokens."""
    divergence, same, count = 0.0, 0, 0
    for reference in references:
        logits = model(reference.ids[None]).logits[0, reference.start - 1 : -1]
        ours, theirs = logits.log_softmax(-1), reference.logits.log_softmax(-1)
        divergence += float((theirs.exp() * (theirs - ours)).sum(dtype=torch.float64))
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        count += len(logits)
    return {"kl": divergence / count, "agreement": same / count, "tokens": count}


@contextmanager
def quantized(model: Any, schemes: Mapping[str, str], *, activations: bool) -> Iterator[None]:
    """Let modules compute as in their schemes; the BF16 weights come back at the end."""
    before: dict[nn.Linear, Tensor] = {}
    hooks = []
    for name, scheme in schemes.items():
        module = model.get_submodule(name)
        before[module] = module.weight.data
        definition = {MX: mxfp4, FP8: fp8_rowwise}[scheme]
        weight = module.weight.data.to(torch.bfloat16)
        module.weight.data = definition.dequantize(*definition.define(weight))
        if activations:
            hooks.append(module.register_forward_pre_hook(ROUND[scheme]))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, weight in before.items():
            module.weight.data = weight


def _round_mxfp4(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    x = inputs[0].to(torch.bfloat16)
    return mxfp4.dequantize(*mxfp4.define(x.flatten(0, -2).contiguous())).view(x.shape)


def _round_fp8(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    x = inputs[0].to(torch.bfloat16).float()
    scale = (x.abs().amax(dim=-1, keepdim=True) / fp8_rowwise.LARGEST).clamp(min=2.0**-126)
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


ROUND = {MX: _round_mxfp4, FP8: _round_fp8}


def table(results: Mapping[str, Any]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| what is quantized | MB | KL, weights | agreement | KL, activations too | agreement |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        figures = [
            f"{row[kind][figure]:.3f}"
            for kind in ("weights", "weights and activations")
            for figure in ("kl", "agreement")
        ]
        megabytes = f"{row['bytes'] / 1e6:.0f}"
        lines.append(f"| {' | '.join((name, megabytes, *figures))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
