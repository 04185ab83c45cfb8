"""Models of transformers in the loop of its documentation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.frameworks import imported
from tests.helpers import bits
from tests.own_loops.harness import BF16, EXACT, assert_alike


@pytest.fixture
def transformers() -> Any:
    return imported("transformers")


def tokens(n: int = 32, length: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (n, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Rows(torch.utils.data.Dataset[Any]):
    """Dataset of dicts, as ``datasets`` yields them."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {name: column[i] for name, column in self.columns.items()}


def hugging_face_loop(model: nn.Module, loader: Any) -> list[float]:
    """Train by the loop of "Fine-tune a pretrained model in native PyTorch"."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
    losses = []
    model.train()
    for _ in range(2):
        for batch in loader:
            batch = {k: v.to("cpu") for k, v in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            assert outputs[0] is loss
            assert outputs.logits.dtype is torch.float32
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("techniques", [EXACT, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_hugging_face_models(transformers: Any, kind: str, techniques: dict[str, Any], tmp_path: Any) -> None:
    sizes = {
        "bert": {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        "gpt2": {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
    }[kind]

    def make_hf() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        if kind == "bert":
            config = transformers.BertConfig(**sizes, intermediate_size=32, max_position_embeddings=16)
            model, labels = transformers.BertForSequenceClassification(config), torch.arange(32) % 2
        else:
            config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
            model, labels = transformers.GPT2LMHeadModel(config), tokens()["input_ids"]
        return model, DataLoader(Rows(**tokens(), labels=labels), batch_size=8, shuffle=True)

    def loop(model: nn.Module, loader: Any) -> list[float]:
        losses = hugging_face_loop(model, loader)
        model.eval()
        model.save_pretrained(tmp_path / "saved")
        again = type(model).from_pretrained(tmp_path / "saved").eval()
        for ours, theirs in zip(again.state_dict().values(), model.state_dict().values(), strict=True):
            assert bits(ours) == bits(theirs)
        if kind == "gpt2":
            assert model.lm_head.weight is model.transformer.wte.weight
            made = model.generate(tokens(2, 4)["input_ids"], max_new_tokens=3, do_sample=False)
            assert made.shape == (2, 7)
        return losses

    assert_alike(make_hf, loop, techniques, rel=1e-3 if techniques is EXACT else 0.05)
