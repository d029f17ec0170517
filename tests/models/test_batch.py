"""What models and methods exchange."""

from __future__ import annotations

import torch

from finetrainers.models.batch import Batch, PromptEmbeds, VAEStats, VideoMeta


def test_latents_are_normalized_per_channel_or_per_channel_and_frame() -> None:
    z = torch.randn(2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    mean, scale = torch.randn(3, 8), torch.rand(3, 8) + 0.5
    by_channel, by_frame = (
        VAEStats(mean[:, 0], scale[:, 0]),
        VAEStats(mean, scale),
    )  # statistics of more frames than a clip has
    for stats in (by_channel, by_frame):
        torch.testing.assert_close(stats.denormalize(stats.normalize(z)), z)
    for frame in range(4):
        expected = VAEStats(mean[:, frame], scale[:, frame]).normalize(z)[:, :, frame]
        torch.testing.assert_close(by_frame.normalize(z)[:, :, frame], expected)


def test_rows_of_a_batch_keep_every_tensor_of_theirs() -> None:
    batch = Batch(
        moments=torch.arange(3.0).view(3, 1, 1, 1, 1),
        conditions=PromptEmbeds({"prompt_embeds": torch.arange(3.0).view(3, 1, 1)}),
        meta=VideoMeta(fps=torch.tensor([8.0, 9.0, 10.0]), extra={"mask": torch.arange(3)}, guidance=6.0),
        sample_keys=[(0, 0), (0, 1), (0, 2)],
        clip={"image_embeds": torch.arange(3)},
    )
    first, rest = batch.split(2)
    assert (first.weight, rest.weight) == (1 / 3, 2 / 3)
    assert rest.clip["image_embeds"].tolist() == rest.meta.extra["mask"].tolist() == [1, 2]
    assert (rest.meta.guidance, rest.meta.fps.tolist(), rest.sample_keys) == (6.0, [9.0, 10.0], [(0, 1), (0, 2)])
