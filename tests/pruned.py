"""The second layout of the demo's draft: a pruned head, as larger drafts have it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quantize.demo import draft_path

IDS = Path(__file__).parent / "data" / "draft-8k-ids.json"


def write_pruned(folder: Path, target: Path) -> Path:
    """The demo draft with a head of its own: the target's rows for the 8192 commonest ids."""
    ids = torch.tensor(json.loads(IDS.read_text()))
    tensors = load_file(draft_path() / "model.safetensors")
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding[ids].contiguous()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(len(embedding), dtype=torch.bool).index_fill(0, ids, True)
    config = json.loads((draft_path() / "config.json").read_text())
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": len(ids)}))
    return folder
