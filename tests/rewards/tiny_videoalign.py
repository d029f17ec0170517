"""A tiny random VideoAlign in the layouts of KwaiVGI/VideoReward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny_qwen2vl as tiny
import torch
from safetensors.torch import save_file
from torch import Tensor

from finetrainers.rewards.videoalign import MARKS, QUESTION, VideoAlign

RANK, ALPHA = 4, 6
PROMPTS = ["a dog runs", "a red ball that is far away from the small blue house and moves slowly to the left"]
SETTINGS = {
    "data_config": {
        "meta_data": "x.csv", "data_dir": "x", "max_frame_pixels": 200704, "num_frames": None, "fps": 2.0,
        "eval_dim": ["VQ", "MQ", "TA"], "prompt_template_type": "detailed_special", "sample_type": "uniform",
    },
    "model_config": {"output_dim": 3, "use_special_tokens": True, "reward_token": "special", "loss_type": "btt"},
    "peft_lora_config": {"lora_enable": True, "lora_r": RANK, "lora_alpha": ALPHA, "use_rslora": False},
    "inference_config": {
        "VQ_mean": 3.6757, "VQ_std": 2.2476, "MQ_mean": 1.1646, "MQ_std": 1.3811, "TA_mean": 2.8105, "TA_std": 2.5121,
    },
}  # fmt: skip


class Published:
    """A tiny checkpoint in the layouts of KwaiVGI/VideoReward, with its parts."""

    def __init__(self, root: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        self.base = root / "base"
        state = tiny.write_base(self.base, QUESTION + " ".join(PROMPTS), generator=generator, marks=len(MARKS))
        rows = len(tiny.tokenizer_of(QUESTION + " ".join(PROMPTS))) + len(MARKS)
        # Training changes the vision tower and the marks' embeddings, and cuts the embeddings.
        for name in state:
            if name.startswith("visual."):
                state[name] = state[name] + 0.1 * torch.randn(state[name].shape, generator=generator)
        embeddings = state["language_model.embed_tokens.weight"][:rows].clone()
        embeddings[-3:] += torch.randn(3, embeddings.shape[1], generator=generator)
        self.state = {**state, "language_model.embed_tokens.weight": embeddings}
        self.head = torch.randn(3, 32, generator=generator)
        self.lora = {}
        for name, weight in state.items():
            if name.startswith("language_model.layers.") and weight.ndim == 2:
                a = 0.2 * torch.randn(RANK, weight.shape[1], generator=generator)
                b = 0.2 * torch.randn(weight.shape[0], RANK, generator=generator)
                self.lora[name.removesuffix(".weight")] = (a, b, ALPHA / RANK)
        self.complete = self.write(root / "complete", complete=True)
        self.split = self.write(root / "split", complete=False)

    def peft_name(self, name: str, *, new: bool = False) -> str:
        """What PEFT's model calls a tensor; `new`: under transformers since 4.52."""
        return f"base_model.model.model.{name}" if new else f"base_model.model.{tiny.hub_name(name)}"

    def full_state(self, *, new: bool = False) -> dict[str, Tensor]:
        """The whole model as PEFT has it in memory."""
        state = {
            "base_model.model.rm_head.weight": self.head,
            "base_model.model.lm_head.weight": self.state["language_model.embed_tokens.weight"],
        }
        for name, tensor in self.state.items():
            module, _, kind = name.rpartition(".")
            inside = f"{module}.base_layer.{kind}" if module in self.lora else name
            state[self.peft_name(inside, new=new)] = tensor
        for module, (a, b, _) in self.lora.items():
            state[self.peft_name(f"{module}.lora_A.default.weight", new=new)] = a
            state[self.peft_name(f"{module}.lora_B.default.weight", new=new)] = b
        return state

    def write(self, root: Path, *, complete: bool, new: bool = False) -> Path:
        """A checkpoint in either layout, and an older one beside it that is not to be read."""
        folder = root / "checkpoint-112"
        folder.mkdir(parents=True)
        (root / "checkpoint-95").mkdir()
        (root / "model_config.json").write_text(json.dumps(SETTINGS))
        if complete:
            torch.save(self.full_state(new=new), folder / "model.pth")
            return root
        trained = {n: t for n, t in self.state.items() if n.startswith("visual.") or "embed_tokens" in n}
        rest = {self.peft_name(n): t for n, t in trained.items()}
        torch.save({**rest, "base_model.model.rm_head.weight": self.head}, folder / "non_lora_state_dict.pth")
        pairs = {
            self.peft_name(f"{n}.lora_{x}.weight"): t
            for n, p in self.lora.items()
            for x, t in zip("AB", p[:2], strict=True)
        }
        save_file(pairs, folder / "adapter_model.safetensors")
        return root

    def reward(self, **options: Any) -> VideoAlign:
        options = {"path": self.complete, "base": self.base, **options}
        return VideoAlign(
            path=str(options["path"]),
            base=str(options["base"]),
            device="cpu",
            dtype=options.get("dtype", "fp32"),
        )
