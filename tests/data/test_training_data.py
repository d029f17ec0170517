"""The whole data side of a run with a real model's encoders."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from one_of import OneOf

from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import DataloaderSection, DataSection, ModelSection, RunSection, TrainingSection
from finetrainers.data.inspect.survey import survey_dataset
from finetrainers.data.loading.position import DataPosition
from finetrainers.data.loading.text_conditioning import TextCache
from finetrainers.data.loading.training_data import TrainingData
from finetrainers.models.registry import get_family


@pytest.fixture
def root(tmp_path: Path, make_video) -> Path:
    for k in range(6):
        make_video(tmp_path / f"{k}.mp4", frames=20, fps=25, height=64, width=64, seed=k)
        (tmp_path / f"{k}.txt").write_text(f"a clip {k}")
    return tmp_path


def opened(
    root: Path,
    repo: Path,
    *,
    ranks: OneOf,
    precompute: bool,
    output: Path,
    dropout: float = 0.3,
    keep: bool = False,
    caption_lines: bool = False,
) -> TrainingData:
    config = TrainConfig(
        model=ModelSection(
            model_name="ltx_video", pretrained_model_name_or_path=str(repo), vae_dtype="fp32", text_encoder_dtype="fp32"
        ),
        data=DataSection(
            data_root=root,
            caption_lines=caption_lines,
            video_resolution_buckets=["9x64x64", "9x32x32"] if keep else ["9x64x64"],
            bucket_keep_prob=["9x64x64=0.4", "9x32x32=0.7"] if keep else [],
            caption_dropout_p=dropout,
            precompute_conditions=precompute,
            eval_num_items=3,
        ),
        dataloader=DataloaderSection(batch_size=2, bucket_batch_sizes=["9x32x32=1"] if keep else []),
        training=TrainingSection(gradient_accumulation_steps=2, seed=3),
        run=RunSection(output_dir=output),
    )
    family = get_family("ltx_video")
    spec = family.load(config.model)
    plan = survey_dataset(config, family.facts_of(config.model).geometry).checked()
    encoders, clip_encoders = spec.load_text_encoders(), spec.load_clip_encoders()
    texts = TextCache(plan.all_captions(), plan.texts, config, spec=spec, parallel=ranks)
    source = TrainingData(
        plan,
        config,
        spec=spec,
        parallel=ranks,
        texts=texts.encode(encoders) if precompute else texts.encode_on_demand(encoders),
        clip_encoders=clip_encoders,
        data_position=DataPosition.begin(config, data_size=ranks.data_size),
    )
    assert source.vae is (None if precompute else clip_encoders["vae"])
    return source


def test_precomputed_and_fresh_runs_see_the_same_batches(root: Path, tiny_repo, tmp_path: Path) -> None:
    repo = tiny_repo("ltx_video")
    fresh, cached = (
        opened(root, repo, ranks=OneOf(), precompute=precompute, output=tmp_path / "run")
        for precompute in (False, True)
    )
    assert fresh.steps_for_epochs(1) == 1
    for ours, theirs in itertools.islice(zip(fresh.steps(1), cached.steps(1), strict=False), 2):
        assert len(ours) == 2
        for a, b in zip(ours, theirs, strict=True):
            assert a.sample_keys == b.sample_keys
            torch.testing.assert_close(a.moments, b.moments)
            for name in a.conditions.tensors:
                torch.testing.assert_close(a.conditions[name], b.conditions[name])
    assert (tmp_path / "run" / "precomputed").is_dir()


def test_drawn_captions_are_the_same_with_precomputation(root: Path, tiny_repo, tmp_path: Path) -> None:
    for k in range(6):
        (root / f"{k}.txt").write_text(f"a clip {k}\nnumber {k}\nanother {k}\n")
    repo = tiny_repo("ltx_video")
    options = {"ranks": OneOf(), "output": tmp_path / "run", "dropout": 0.0, "caption_lines": True}
    fresh, cached = (opened(root, repo, precompute=precompute, **options) for precompute in (False, True))
    seen: dict[int, set[bytes]] = {}
    for ours, theirs in itertools.islice(zip(fresh.steps(0), cached.steps(0), strict=False), 12):
        for a, b in zip(ours, theirs, strict=True):
            for name in a.conditions.tensors:
                torch.testing.assert_close(a.conditions[name], b.conditions[name])
            for (_, item), row in zip(b.sample_keys, b.conditions["prompt_embeds"], strict=True):
                seen.setdefault(item, set()).add(row[:4].numpy().tobytes())
    assert max(map(len, seen.values())) == 3  # every one of a clip's captions, and no other
    # Held-out clips keep their first caption: the same at every evaluation.
    assert all(clip.captions == () for clip in fresh.plan.eval_clips)


def test_held_out_batches_are_equally_many_on_every_rank(root: Path, tiny_repo, tmp_path: Path) -> None:
    repo = tiny_repo("ltx_video")
    sources = [
        opened(root, repo, ranks=OneOf(rank, 4), precompute=True, output=tmp_path / "run") for rank in (3, 2, 1, 0)
    ]
    shares = [source.eval_batches() for source in reversed(sources)]
    assert [len(share) for share in shares] == [1] * 4
    assert [counts for share in shares for _, counts in share] == [True, True, False, False]
    seen = [key for share in shares for batch, counts in share if counts for key in batch.sample_keys]
    assert len(seen) == len(set(seen)) == 3
    assert sources[0].eval_batches() is sources[0].eval_batches()


def test_ranks_that_share_their_samples_are_one_to_the_data(root: Path, tiny_repo, tmp_path: Path) -> None:
    """Batches, weights of means, epochs and held-out clips follow the data ranks."""
    repo = tiny_repo("ltx_video")

    def of(rank: int, size: int, sharing: int) -> tuple:
        ranks = OneOf(rank, size, sharing=sharing)
        source = opened(root, repo, ranks=ranks, precompute=False, output=tmp_path / "run")
        batches = [batch for step in itertools.islice(source.steps(0), 3) for batch in step]
        held_out = [(batch.sample_keys, counts) for batch, counts in source.eval_batches()]
        return [(b.sample_keys, b.weight) for b in batches], held_out, source.steps_for_epochs(7)

    alone = [of(rank, 2, 1) for rank in (0, 1)]
    assert alone[0] != alone[1]
    assert [of(rank, 4, 2) for rank in (0, 1, 2, 3)] == [alone[0], alone[0], alone[1], alone[1]]


def test_evaluation_keeps_its_captions(root: Path, tiny_repo, tmp_path: Path) -> None:
    source = opened(root, tiny_repo("ltx_video"), ranks=OneOf(), precompute=True, output=tmp_path / "run", dropout=1.0)
    training = next(source.steps(0))[0].conditions["prompt_embeds"]
    evaluation = source.eval_batches()[0][0].conditions["prompt_embeds"]
    assert torch.equal(training[0], training[1])  # all captions dropped
    assert not torch.equal(evaluation[0], evaluation[1])


def test_clips_that_are_not_kept_come_smaller_or_are_counted(root: Path, tiny_repo, tmp_path: Path) -> None:
    """Every bucket that a clip may fall to is encoded beforehand, and dry batches know of all."""
    repo = tiny_repo("ltx_video")
    fresh, cached = (
        opened(root, repo, ranks=OneOf(), precompute=precompute, output=tmp_path / "run", keep=True)
        for precompute in (False, True)
    )
    assert [(name, len(batch.sample_keys)) for name, batch in cached.dry_batches()] == [("9x64x64", 2), ("9x32x32", 1)]
    sizes = set()
    for ours, theirs in itertools.islice(zip(fresh.steps(0), cached.steps(0), strict=False), 5):
        for a, b in zip(ours, theirs, strict=True):
            assert a.sample_keys == b.sample_keys
            torch.testing.assert_close(a.moments, b.moments)
            sizes.add((a.moments.shape[-1], len(a.sample_keys)))
    assert sizes <= {(2, 1), (2, 2), (1, 1)}
    assert {width for width, _ in sizes} == {1, 2}
    events = fresh.drain_events()[1]
    assert events
    assert events == cached.drain_events()[1]
    for event in events:
        assert event["clips"] == fresh.sampler.left_out(event["epoch"]) > 0
    assert len({event["epoch"] for event in events}) == len(events)
