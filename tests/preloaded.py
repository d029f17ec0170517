"""What the server of `real_process` imports before it forks: what a run would import, and no operation on any
tensor."""

from __future__ import annotations

import contextlib
import gc
import os

# Libraries read these when they are imported, which for a forked process is here.
os.environ.update(
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    TRANSFORMERS_VERBOSITY="error",
    DIFFUSERS_VERBOSITY="error",
)

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from torch.distributed import fsdp
from transformers import AutoTokenizer, T5EncoderModel

import finetrainers.cli.main
import finetrainers.config.flags
import finetrainers.data.loading.training_data
import finetrainers.methods.grpo.method
import finetrainers.methods.sft
import finetrainers.models.ltx_video
import finetrainers.rewards.pixels
import finetrainers.rewards.reward_set
import finetrainers.runs.run
from finetrainers.results import model_card

#: Lazily loaded by their packages, so naming them is what imports them.
LOADED = (
    AutoTokenizer, AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXPipeline, LTXVideoTransformer3DModel,
    T5EncoderModel, finetrainers, fsdp,
)  # fmt: skip
# What each run would compute first: a compiled template, and a thousand expressions of transformers.
model_card._template()
with contextlib.suppress(ImportError):  # only newer versions have them
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("t5")
with contextlib.suppress(ImportError):  # accelerate imports it where it is installed
    import deepspeed  # noqa: F401

torch.set_num_threads(1)
gc.collect()
gc.freeze()  # a child's collections would copy every page that they touch
