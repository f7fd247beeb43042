"""The model card of an output: only what its report says was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOT_SERVED = "not measured"


def render_card(report: Mapping[str, Any]) -> str:
    """``README.md`` from the content of ``quantization_report.json``."""
    plan = report["plan"]
    made = report["provenance"]
    return "\n".join(
        (
            "---",
            f"tags: [amd-quark, {plan['scheme']}{', eagle3' if plan['kind'] == 'draft' else ''}]",
            "---",
            f"# {plan['kind'].capitalize()} quantized to {plan['scheme']}",
            "",
            f"Source: `{report['source']['origin']}`.",
            "",
            f"Made with `{' '.join(made['command'])}` ({_versions(made['versions'])}).",
            "",
            "## Tensors",
            "",
            f"{plan['bytes_before']} bytes before, {plan['bytes_after']} after.",
            "",
            "| role | scheme | tensors |",
            "|---|---|---|",
            *_roles(plan["tensors"]),
            "",
            "## Checks",
            "",
            "| check | status | measured | required |",
            "|---|---|---|---|",
            *(
                f"| {check['name']} | {check['status']} | {check['measured']} "
                f"| {check['required']} |"
                for check in report["checks"]
            ),
            "",
            "Language quality: not measured.",
            f"Served acceptance: {report.get('pair', {}).get('served', NOT_SERVED)}.",
            "",
            *(
                f"![{caption}]({name})\n"
                for name, caption in report.get("pair", {}).get("pictures", {}).items()
            ),
        )
    )


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def _roles(tensors: list[Mapping[str, Any]]) -> list[str]:
    counts: dict[tuple[str, str], int] = {}
    for tensor in tensors:
        fate = tensor["scheme"] or ("preserved" if tensor["stored"] else "dropped")
        key = (tensor["role"], fate)
        counts[key] = counts.get(key, 0) + 1
    return [f"| {role} | {fate} | {count} |" for (role, fate), count in counts.items()]
