"""The files of DanceGRPO's trainer: scores by rollout, also of a run that resumes, and a clip of each prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from one_of import OneOf

from finetrainers.config.load import load_config
from finetrainers.methods.grpo.keep.dancegrpo_files import DanceGRPOFiles
from finetrainers.methods.grpo.prompts.prompts import Prompt, RolloutSample
from finetrainers.utils.video import read_comment, read_mp4

VQ, MQ = "reward_normalized/videoalign.vq,path=x", "reward_normalized/videoalign.mq"


def files(root: Path, rank: int = 0, sharing: int = 1) -> DanceGRPOFiles:
    config = load_config(
        method="grpo", model_name="hunyuan_video", pretrained_model_name_or_path="x", output_dir=str(root)
    )
    return DanceGRPOFiles(config, OneOf(rank, 2 * sharing, sharing=sharing), fps=8.0)


def test_a_line_for_each_rollout_of_the_normalized_scores(tmp_path: Path) -> None:
    for rollout, score in enumerate((0.1, 0.2, 0.3)):
        files(tmp_path).scores(rollout, {VQ: score, MQ: -score, "reward/videoalign.mq": 4.0})
    files(tmp_path, rank=1).scores(3, {VQ: 9.0})
    assert (tmp_path / "vq_reward.txt").read_text() == "0.1\n0.2\n0.3\n"
    assert (tmp_path / "mq_reward.txt").read_text() == "-0.1\n-0.2\n-0.3\n"
    # A run that resumes after the first rollout samples the second one again; another run begins anew.
    files(tmp_path).scores(1, {VQ: 0.5})
    assert (tmp_path / "vq_reward.txt").read_text() == "0.1\n0.5\n"
    assert (tmp_path / "mq_reward.txt").read_text() == "-0.1\nnan\n"
    files(tmp_path).scores(0, {VQ: 0.7})
    assert (tmp_path / "vq_reward.txt").read_text() == "0.7\n"
    files(tmp_path / "late").scores(2, {VQ: 0.7})
    assert [path.name for path in (tmp_path / "late").iterdir()] == ["vq_reward.txt"]
    assert (tmp_path / "late" / "vq_reward.txt").read_text() == "nan\nnan\n0.7\n"


@pytest.mark.parametrize(("ranks", "sharing", "name"), [((1, 1), 1, 1), ((2, 3), 2, 2)])
def test_the_first_clip_of_each_prompt_of_a_process(
    ranks: tuple[int, int], sharing: int, name: int, tmp_path: Path
) -> None:
    """The second half of a group and a further group, in batches of three, are written in turn by two processes."""
    slots = (1, 1, 2, 2, 2, 2)
    jobs = [RolloutSample(0, slot, Prompt(f"prompt {slot}", ""), n) for n, slot in enumerate(slots)]
    clips = torch.stack([torch.full((5, 3, 32, 32), n / 5) for n in range(6)])
    for first, rank in zip((0, 3), ranks, strict=True):
        files(tmp_path, rank, sharing).clips(jobs, first, clips[first : first + 3])
    found = sorted((tmp_path / "videos").iterdir())
    assert [path.name for path in found] == [f"hunyuan_{name}_0.mp4", f"hunyuan_{name}_1.mp4"]
    for path, clip, prompt in zip(found, (0, 2), ("prompt 1", "prompt 2"), strict=True):
        frames, _ = read_mp4(path, columns=1)
        assert abs(float(np.median(frames)) - 51 * clip) < 4
        assert read_comment(path) == prompt
