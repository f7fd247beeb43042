"""The sections of a model card, each a function of the report, in the order of AMD's cards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from shlex import join
from typing import Any

from quantize.entry import Entry, entry_from_json
from quantize.sources.base import PLAIN

Json = Mapping[str, Any]

MEASURED_NOT = "not measured"
NAMES = {"mxfp4": "OCP MXFP4", "fp8_rowwise": "FP8 E4M3, row-wise"}
ARITHMETIC = {
    "mxfp4": "weights and activations FP4 (E2M1) in blocks of 32 with one E8M0 scale; weights "
    "static, activations dynamic",
    "fp8_rowwise": "weights FP8 E4M3 with one F32 scale a row, static; activations FP8 E4M3 with "
    "one scale a token, dynamic",
}


def schemes_used(report: Json) -> list[str]:
    """The schemes that the quantized tensors have, the plan's own first."""
    found = dict.fromkeys(tensor["scheme"] for tensor in report["plan"]["tensors"])
    first = report["plan"]["scheme"]
    return [scheme for scheme in dict.fromkeys((first, *found)) if scheme in found and scheme]


def _overview(report: Json) -> str:
    plan, published = report["plan"], report.get("published", {})
    schemes = " and ".join(NAMES.get(name, name) for name in schemes_used(report)) or "BF16"
    kind = "EAGLE-3 draft" if plan["kind"] == "draft" else "model"
    source = _link(published.get("base_model")) or f"`{report['source']['origin']}`"
    lines = [f"# {published.get('repo_id', '').rpartition('/')[2] or 'Model overview'}", ""]
    lines += [f"This is an {kind}" if kind[0] == "E" else f"This is a {kind}"]
    lines[-1] += f" quantized from {source} to {schemes} with AMD Quark."
    if target := published.get("target"):
        lines += ["", f"It drafts for the quantized target {_link(target)}."]
    if draft := published.get("draft"):
        lines += ["", f"Its EAGLE-3 draft for speculative decoding is {_link(draft)}."]
    lines += ["", f"Architecture family: {plan['family']}. Inference engine: vLLM."]
    return "\n".join(lines)


def _quantization(report: Json) -> str:
    made = report["provenance"]
    versions = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    schemes = [
        f"- {NAMES.get(name, name)} (`{name}`): {ARITHMETIC.get(name, '')}"
        for name in schemes_used(report)
    ]
    return "\n".join(
        (
            "## Quantization",
            "",
            *(schemes or ["Nothing was quantized."]),
            "- KV cache: not quantized",
            "- Calibration data: none; weights are rounded to nearest",
            "",
            "Command:",
            "",
            "```",
            join(made["command"]),
            "```",
            "",
            f"Made with {versions}.",
        )
    )


def _layers(report: Json) -> str:
    return "\n".join(
        (
            "## Quantized and preserved layers",
            "",
            "| tensors | count | scheme | why |",
            "|---|---|---|---|",
            *_folded(_entries(report)),
        )
    )


def _folded(entries: Iterable[Entry]) -> Iterable[str]:
    """Equal layers in one row: ``model.layers.*.mlp.up_proj.weight``."""
    groups: dict[tuple[str, str, str], int] = {}
    for entry in entries:
        name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", entry.source.name)
        fate = entry.scheme or ("preserved" if entry.stored else "dropped")
        key = (name, fate, entry.reason)
        groups[key] = groups.get(key, 0) + 1
    for (name, fate, reason), count in groups.items():
        yield f"| `{name}` | {count} | {fate} | {_cell(reason)} |"


def _tensors(report: Json) -> str:
    entries = _entries(report)
    before = _sums((_stored_as(entry), entry.source_bytes) for entry in entries)
    after = _sums((spec.dtype, spec.nbytes) for entry in entries for spec in entry.stored)
    rows = [
        f"| {dtype} | {before.get(dtype, 0):,} | {after.get(dtype, 0):,} |"
        for dtype in sorted(before | after)
    ]
    total = f"| total | {sum(before.values()):,} | {sum(after.values()):,} |"
    head = ("| dtype | bytes before | bytes after |", "|---|---|---|")
    return "\n".join(("## Tensor dtypes and bytes", "", *head, *rows, total))


def _stored_as(entry: Entry) -> str:
    return entry.source.dtype if entry.source_format == PLAIN else entry.source_format


def _sums(rows: Iterable[tuple[str, int]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, size in rows:
        sizes[name] = sizes.get(name, 0) + size
    return sizes


def _loading(report: Json) -> str:
    served = _served(report)
    k = served["settings"]["num_speculative_tokens"] if served else 3
    options = served["settings"]["vllm_options"] if served else []
    target, draft = _places(report)
    words = ["vllm", "serve", target]
    if draft:
        config = f'{{"method": "eagle3", "model": "{draft}", "num_speculative_tokens": {k}}}'
        words += ["--speculative-config", config]
    said = f"Loading in a server: {MEASURED_NOT}."
    if served:
        vllm = served["vllm"]
        said = f"Tested with vLLM {vllm['version']} (platform: {vllm['platform']})."
    hint = "`quantize serve TARGET --draft DRAFT --print` gives every setting with its reason."
    command = join([*words, *options])
    return "\n".join(("## Loading in vLLM", "", "```", command, "```", "", said, hint))


def _places(report: Json) -> tuple[str, str]:
    """What stands for the target and for the draft in a command; no draft where none is known."""
    published, kind = report.get("published", {}), report["plan"]["kind"]
    own = published.get("repo_id")
    if kind == "draft":
        return published.get("target") or "TARGET", own or "DRAFT"
    paired = "DRAFT" if report.get("pair") else ""
    return own or "TARGET", published.get("draft") or paired


def _evaluation(report: Json) -> str:
    rows = [
        f"| {check['name']} | {check['status'].replace('_', ' ')} | {_cell(check['measured'])} "
        f"| {_cell(check['required'])} |"
        for check in report["checks"]
    ]
    return "\n".join(
        (
            "## Evaluation",
            "",
            "Every figure is in `quantization_report.json`.",
            "",
            "### Numerics",
            "",
            *("| check | status | measured | required |", "|---|---|---|---|"),
            *rows,
            "",
            "### Acceptance length",
            "",
            *_acceptance(report),
            "",
            "### Language quality",
            "",
            f"{MEASURED_NOT.capitalize()}.",
        )
    )


def _acceptance(report: Json) -> Iterable[str]:
    served = _served(report)
    if served is None:
        yield f"{MEASURED_NOT.capitalize()}."
        return
    rule, prompts = served["settings"], served["prompts"]
    yield (
        f"{prompts['count']} prompts of {prompts['name']} (SHA-256 {prompts['sha256'][:12]}), "
        f"k = {rule['num_speculative_tokens']}, at most {rule['max_tokens']} tokens, temperature "
        f"{rule['temperature']}, seed {rule['seed']}; vLLM {served['vllm']['version']}. "
        "In brackets: 95 % interval over prompts."
    )
    yield from ("", "| served | AL, pooled | AL, mean of requests |", "|---|---|---|")
    for name, cell in served["cells"].items():
        lengths = (_interval(cell[key]) for key in ("length", "mean_of_requests"))
        yield f"| {name} | {' | '.join(lengths)} |"
    yield ""
    for row in served["retention"]:
        kept = _interval(row["ratio"])
        yield f"- retention of {row['cell']} against {row['baseline']}: {kept}"
    if served["verdict"]:
        yield f"- required retention {served['min_retention']}: {served['verdict']}"
    failed = [check["name"] for check in served["checks"] if check["status"] != "pass"]
    yield from (f"- not passed: {name}" for name in failed)
    yield from (f"- {line}" for line in served["conventions"])
    for name, caption in report["pair"].get("pictures", {}).items():
        yield from ("", f"![{caption}]({name})")


def _interval(value: Json) -> str:
    if value["low"] is None:
        return f"{value['value']:.3f}"
    return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _reproduction(report: Json) -> str:
    made = report["provenance"]
    own = report.get("published", {}).get("repo_id", "OUT").rpartition("/")[2]
    return "\n".join(
        (
            "## Reproduction",
            "",
            f"Source: `{report['source']['origin']}`. `quantization_report.json` lists every "
            "tensor's fate, every check, and the SHA-256 of every file.",
            "",
            "```",
            f"pip install pairquant=={made['version']}",
            join(made["command"]),
            f"quantize verify {own} --source SOURCE",
            "```",
        )
    )


def _limits(report: Json) -> str:
    plan = report["plan"]
    sizes = ", ".join(map(str, plan["tensor_parallel"]))
    lines = [f"- Tensor-parallel sizes that every quantized weight fits: {sizes}."]
    lines += [f"- {note}" for note in plan["notes"]]
    if "mxfp4" in schemes_used(report):
        lines.append("- vLLM 0.32 has no MXFP4 linear kernel of its own for CPU.")
    lines.append("- What is called not measured above was not evaluated.")
    return "\n".join(("## Limits", "", *lines))


def _license(report: Json) -> str:
    known = report["source"].get("card", {})
    files = [name for name in report.get("files", {}) if name.lower().startswith("license")]
    name = known.get("license_name") or known.get("license")
    said = f"As the source: {name}." if name else "Not stated by the source's card."
    if link := known.get("license_link"):
        said += f" {link}"
    links = [f"See [{file}]({file})." for file in files]
    return "\n".join(("## License", "", said, *links))


def _entries(report: Json) -> list[Entry]:
    return [entry_from_json(item) for item in report["plan"]["tensors"]]


def _served(report: Json) -> Json | None:
    """What a served session measured of this pair; None when nothing was."""
    found = report.get("pair", {}).get("served")
    return found if isinstance(found, Mapping) else None


def _link(repo_id: str | None) -> str:
    return f"[{repo_id}](https://huggingface.co/{repo_id})" if repo_id else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


SECTIONS: dict[str, Callable[[Json], str]] = {
    "overview": _overview,
    "quantization": _quantization,
    "layers": _layers,
    "tensors": _tensors,
    "loading": _loading,
    "evaluation": _evaluation,
    "reproduction": _reproduction,
    "limits": _limits,
    "license": _license,
}
