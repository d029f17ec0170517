"""CLIP rewards on tiny random networks: against transformers' own processor, and against CLIP written by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from finetrainers.config.load import load_config
from finetrainers.config.rewards import RewardEntry, parse_reward
from finetrainers.models.tiny_tokenizers import clip_tokenizer
from finetrainers.plan.preflight import preflight
from finetrainers.rewards.base import Reward
from finetrainers.rewards.clip_models import Aesthetic, CLIPScore, HPSv2, PickScore, cropped, padded
from finetrainers.rewards.frames import spread_indices
from finetrainers.rewards.registry import reward_problems
from finetrainers.runs.run import run
from finetrainers.utils.failures import error_kind

PROMPTS = ["a red ball moves right", "the small blue square is still", "dog"]
WIDTH, TEXT, VISION, LAYERS, HEADS, PATCH, SIZE = 12, 16, 24, 2, 2, 8, 32


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny CLIP with its tokenizer."""
    folder = tmp_path_factory.mktemp("clip")
    tokenizer = clip_tokenizer()
    tokenizer.save_pretrained(folder)
    shared = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_act": "gelu", "projection_dim": WIDTH}
    config = CLIPConfig(
        text_config={
            **shared, "hidden_size": TEXT, "intermediate_size": 2 * TEXT, "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            **shared, "hidden_size": VISION, "intermediate_size": 2 * VISION, "image_size": SIZE, "patch_size": PATCH,
        },
        projection_dim=WIDTH,
    )  # fmt: skip
    model = CLIPModel(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name == "logit_scale":
            assert float(parameter.detach()) == pytest.approx(2.6592)
        else:
            parameter.data = weight(parameter.shape, generator)
    model.save_pretrained(folder)
    return folder


def weight(shape: Any, generator: torch.Generator) -> Tensor:
    """Matrices that keep the size of what goes through them; vectors around 1."""
    if len(shape) == 1:
        return 1 + 0.3 * torch.randn(shape, generator=generator)
    return torch.randn(shape, generator=generator) / math.sqrt(math.prod(shape[1:]))


@pytest.fixture(scope="module")
def videos() -> Tensor:
    """`[3, 5, 3, 48, 80]`: smooth, a red, a green and a blue clip, every frame different."""
    small = torch.rand(15, 3, 6, 10, generator=torch.Generator().manual_seed(1))
    tinted = small * (0.1 + torch.eye(3).repeat_interleave(5, 0).view(15, 3, 1, 1)).clamp(max=1)
    return F.interpolate(tinted, (48, 80), mode="bilinear").view(3, 5, 3, 48, 80)


@pytest.fixture(scope="module")
def rewards(clip: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reward]:
    folder = tmp_path_factory.mktemp("heads")
    generator = torch.Generator().manual_seed(2)
    torch.save({"epoch": 3, "name": "x", "state_dict": open_clip(generator)}, folder / "HPS_v2.1_compressed.pt")
    torch.save(aesthetic_file(generator), folder / "sac+logos+ava1-l14-linearMSE.pth")
    here = {"device": "cpu"}
    return {
        "clipscore": CLIPScore(path=str(clip), **here),
        "pickscore": PickScore(path=str(clip), tokenizer=str(clip), **here),
        "hpsv2": HPSv2(path=str(folder), clip=str(clip), frames=2, **here),
        "aesthetic": Aesthetic(path=str(folder), clip=str(clip), frames=3, **here),
    }


def aesthetic_file(generator: torch.Generator) -> dict[str, Tensor]:
    """The published layers by name: 0, 2, 4, 6 and 7, with dropout between; here on embeddings of WIDTH numbers."""
    sizes = [WIDTH, 1024, 128, 64, 16, 1]
    state = {}
    for name, n, m in zip((0, 2, 4, 6, 7), sizes[:-1], sizes[1:], strict=True):
        state[f"layers.{name}.weight"] = weight((m, n), generator)
        state[f"layers.{name}.bias"] = torch.randn(m, generator=generator)
    return state


def open_clip(generator: torch.Generator) -> dict[str, Tensor]:
    """Weights of a tiny open_clip `CLIP`, named and shaped as there."""
    shapes: dict[str, tuple[int, ...]] = {
        "positional_embedding": (77, TEXT),
        "text_projection": (TEXT, WIDTH),
        "token_embedding.weight": (len(clip_tokenizer()), TEXT),
        "ln_final.weight": (TEXT,),
        "ln_final.bias": (TEXT,),
        "visual.class_embedding": (VISION,),
        "visual.positional_embedding": (1 + (SIZE // PATCH) ** 2, VISION),
        "visual.proj": (VISION, WIDTH),
        "visual.conv1.weight": (VISION, 3, PATCH, PATCH),
        "visual.ln_pre.weight": (VISION,),
        "visual.ln_pre.bias": (VISION,),
        "visual.ln_post.weight": (VISION,),
        "visual.ln_post.bias": (VISION,),
    }
    for tower, width in (("", TEXT), ("visual.", VISION)):
        for i in range(LAYERS):
            block = f"{tower}transformer.resblocks.{i}"
            shapes |= {
                f"{block}.attn.in_proj_weight": (3 * width, width),
                f"{block}.attn.in_proj_bias": (3 * width,),
                f"{block}.attn.out_proj.weight": (width, width),
                f"{block}.attn.out_proj.bias": (width,),
                f"{block}.mlp.c_fc.weight": (2 * width, width),
                f"{block}.mlp.c_fc.bias": (2 * width,),
                f"{block}.mlp.c_proj.weight": (width, 2 * width),
                f"{block}.mlp.c_proj.bias": (width,),
            }
            shapes |= {f"{block}.ln_{n}.{kind}": (width,) for n in (1, 2) for kind in ("weight", "bias")}
    state = {name: weight(shape, generator) for name, shape in shapes.items()}
    return {**state, "logit_scale": torch.tensor(4.6), "attn_mask": torch.zeros(77, 77)}


def open_clip_similarity(state: dict[str, Tensor], image: Tensor, ids: Tensor) -> float:
    """open_clip's cosine of an image `[3, S, S]` and padded token ids `[77]`, in float64."""
    state = {name: tensor.double() for name, tensor in state.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    def transformer(x: Tensor, prefix: str, mask: Tensor | None) -> Tensor:
        for i in range(LAYERS):
            block = f"{prefix}transformer.resblocks.{i}"
            x = x + F.multi_head_attention_forward(
                *(norm(x, f"{block}.ln_1"),) * 3, x.shape[1], HEADS,
                state[f"{block}.attn.in_proj_weight"], state[f"{block}.attn.in_proj_bias"], None, None, False, 0.0,
                state[f"{block}.attn.out_proj.weight"], state[f"{block}.attn.out_proj.bias"],
                training=False, need_weights=False, attn_mask=mask,
            )[0]  # fmt: skip
            y = F.linear(norm(x, f"{block}.ln_2"), state[f"{block}.mlp.c_fc.weight"], state[f"{block}.mlp.c_fc.bias"])
            x = x + F.linear(F.gelu(y), state[f"{block}.mlp.c_proj.weight"], state[f"{block}.mlp.c_proj.bias"])
        return x

    patches = F.conv2d(image[None].double(), state["visual.conv1.weight"], stride=PATCH)[0].flatten(1).T
    x = torch.cat([state["visual.class_embedding"][None], patches]) + state["visual.positional_embedding"]
    x = transformer(norm(x, "visual.ln_pre"), "visual.", None)
    image_features = norm(x[0], "visual.ln_post") @ state["visual.proj"]

    x = state["token_embedding.weight"][ids] + state["positional_embedding"]
    mask = torch.full((77, 77), -math.inf, dtype=torch.float64).triu(1)
    x = norm(transformer(x, "", mask), "ln_final")
    text_features = x[int(ids.argmax())] @ state["text_projection"]  # the end-of-text token has the highest id
    return float(F.cosine_similarity(image_features, text_features, dim=0))


def pictures(videos: Tensor, frames: list[int]) -> list[list[Image.Image]]:
    """Those frames of every clip as PIL images."""
    data = (videos[:, frames] * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2).numpy()
    return [[Image.fromarray(frame) for frame in clip] for clip in data]


@pytest.fixture(scope="module")
def network(clip: Path) -> CLIPModel:
    return CLIPModel.from_pretrained(clip).eval()


def embeddings(model: CLIPModel, images: list[Image.Image]) -> Tensor:
    """transformers' CLIP on transformers' pixels: unit vectors `[N, WIDTH]`."""
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    with torch.no_grad():
        pooled = model.vision_model(**processor(images, return_tensors="pt")).pooler_output
        return F.normalize(model.visual_projection(pooled), dim=1)


def texts(model: CLIPModel) -> Tensor:
    """Unit vectors of the prompts, one at a time and without padding."""
    tokenizer = clip_tokenizer()
    with torch.no_grad():
        pooled = [model.text_model(**tokenizer(prompt, return_tensors="pt")).pooler_output for prompt in PROMPTS]
        return F.normalize(model.text_projection(torch.cat(pooled)), dim=1)


# ---- preprocessing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width"), [(480, 720), (97, 61), (224, 224), (33, 200), (225, 224)])
def test_crop_is_that_of_transformers(height: int, width: int) -> None:
    """Few pixels differ, by at most one of 255: PIL rounds between its two passes.

    The same holds with a gradient.
    """
    image = torch.randint(0, 256, (3, height // 4 + 1, width // 4 + 1), generator=torch.Generator().manual_seed(3))
    image = F.interpolate(image[None].float(), (height, width), mode="bilinear").round().to(torch.uint8)
    wanted = CLIPImageProcessorPil()(Image.fromarray(image[0].permute(1, 2, 0).numpy()), return_tensors="pt")
    difference = (cropped(image, 224) - wanted["pixel_values"]).abs() * 0.27 * 255
    assert difference.max() < 2.1
    assert (difference > 0.5).float().mean() < 0.02
    smooth = cropped(image.float().requires_grad_(), 224)
    assert smooth.requires_grad
    assert ((smooth - wanted["pixel_values"]).abs() * 0.27 * 255).max() < 2.1


@pytest.mark.parametrize(("height", "width"), [(48, 80), (80, 47), (50, 50), (32, 20)])
def test_padding_is_hpsv2s(height: int, width: int) -> None:
    """Long side to the network's size, the rest black, odd rests on the right and below; nothing is cut off."""
    image = torch.full((1, 3, height, width), 255, dtype=torch.uint8)
    found = padded(image, 32)[0]
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in (CLIPImageProcessorPil.image_mean, CLIPImageProcessorPil.image_std)
    )
    rows, columns = round(32 * height / max(height, width)), round(32 * width / max(height, width))
    wanted = torch.zeros(3, 32, 32)
    top, left = (32 - rows) // 2, (32 - columns) // 2
    wanted[:, top : top + rows, left : left + columns] = 1
    assert torch.allclose(found, (wanted - mean) / std, atol=1e-5)


def test_frames_are_spread_over_the_clip() -> None:
    assert spread_indices(9, 1).tolist() == [0]
    assert spread_indices(9, 2).tolist() == [0, 8]
    assert spread_indices(9, 5).tolist() == [0, 2, 4, 6, 8]
    assert spread_indices(3, 8).tolist() == [0, 1, 2]
    with refused("invalid", "0 frames"):
        spread_indices(9, 0)


# ---- the numbers ---------------------------------------------------------------------------------------------------


def test_clipscore_is_the_mean_cosine_over_frames(
    network: CLIPModel, rewards: dict[str, Reward], videos: Tensor
) -> None:
    """Four of five frames: 0, 1.33, 2.67 and 4, rounded."""
    wanted = torch.stack(
        [
            (embeddings(network, images) @ text).mean()
            for images, text in zip(pictures(videos, [0, 1, 3, 4]), texts(network), strict=True)
        ]
    )
    found = rewards["clipscore"].score(videos, PROMPTS, fps=8)["score"]
    assert torch.allclose(found, wanted, atol=5e-4)
    assert wanted.std() > 0.01
    assert found.abs().max() <= 1


def test_pickscore_is_the_first_frames_logit(network: CLIPModel, rewards: dict[str, Reward], videos: Tensor) -> None:
    wanted = torch.stack(
        [
            math.exp(2.6592) * (embeddings(network, images) @ text).mean()
            for images, text in zip(pictures(videos, [0]), texts(network), strict=True)
        ]
    )
    found = rewards["pickscore"].score(videos, PROMPTS, fps=8)["score"]
    assert torch.allclose(found, wanted, atol=5e-3)
    assert wanted.std() > 0.3
    assert torch.equal(found, rewards["pickscore"].score(videos[:, :1], PROMPTS, fps=8)["score"])
    assert float(PickScore.heads["score"].normalize(torch.tensor(26.0))) == 1.0


def test_hpsv2_is_open_clips_cosine(rewards: dict[str, Reward], videos: Tensor) -> None:
    """Against open_clip's network by hand, with its names; two frames, the first and the last."""
    state = open_clip(torch.Generator().manual_seed(2))
    tokenizer = clip_tokenizer()
    wanted = []
    for clip, prompt in zip(videos, PROMPTS, strict=True):
        ids = torch.tensor(tokenizer(prompt)["input_ids"])
        ids = F.pad(ids, (0, 77 - len(ids)))  # open_clip pads with 0
        frames = (clip[[0, 4]] * 255).round().to(torch.uint8)
        wanted.append(np.mean([open_clip_similarity(state, image, ids) for image in padded(frames, SIZE)]))
    found = rewards["hpsv2"].score(videos, PROMPTS, fps=8)["score"]
    assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float32), atol=2e-6)
    assert np.std(wanted) > 0.02


def test_aesthetic_is_linear_in_the_embedding(network: CLIPModel, rewards: dict[str, Reward], videos: Tensor) -> None:
    """The layers have no activation, so they are one matrix; three of five frames."""
    generator = torch.Generator().manual_seed(2)
    open_clip(generator)
    state = {name: tensor.double() for name, tensor in aesthetic_file(generator).items()}

    def rate(x: Tensor) -> Tensor:
        for i in (0, 2, 4, 6, 7):
            x = x @ state[f"layers.{i}.weight"].T + state[f"layers.{i}.bias"]
        return x.mean()

    wanted = torch.stack([rate(embeddings(network, images).double()) for images in pictures(videos, [0, 2, 4])])
    found = rewards["aesthetic"].score(videos, PROMPTS, fps=8)["score"]
    assert torch.allclose(found.double(), wanted, atol=2e-3)
    assert wanted.std() > 0.01


# ---- what every reward keeps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clipscore", "pickscore", "hpsv2", "aesthetic"])
def test_a_score_depends_on_its_own_clip_alone(rewards: dict[str, Reward], videos: Tensor, name: str) -> None:
    kept = videos.clone()
    reward = rewards[name]
    together = reward.score(videos, PROMPTS, fps=8)["score"]
    assert together.shape == (3,)
    assert together.dtype == torch.float32
    assert torch.equal(together, reward.score(videos, PROMPTS, fps=30)["score"])
    apart = torch.cat([reward.score(videos[i : i + 1], PROMPTS[i : i + 1], fps=8)["score"] for i in range(3)])
    assert torch.allclose(together, apart, atol=1e-5)
    assert torch.equal(videos, kept)
    assert together.unique().numel() == 3


@pytest.mark.parametrize(
    ("name", "matter"), [("clipscore", True), ("pickscore", True), ("hpsv2", True), ("aesthetic", False)]
)
def test_whether_prompts_matter(rewards: dict[str, Reward], videos: Tensor, name: str, matter: bool) -> None:
    one, other = (rewards[name].score(videos[:1], [prompt], fps=8)["score"] for prompt in PROMPTS[:2])
    assert bool((one - other).abs() > 1e-3) is matter


def test_other_dtypes_are_near(clip: Path, rewards: dict[str, Reward], videos: Tensor) -> None:
    half = CLIPScore(path=str(clip), device="cpu", dtype="bf16").score(videos, PROMPTS, fps=8)["score"]
    assert half.dtype == torch.float32
    assert torch.allclose(half, rewards["clipscore"].score(videos, PROMPTS, fps=8)["score"], atol=0.03)


def test_loading_leaves_the_random_numbers_alone(clip: Path, tmp_path: Path) -> None:
    heads, network = write(tmp_path / "a", aesthetic_file), write(tmp_path / "b", open_clip)
    before = torch.get_rng_state()
    Aesthetic(path=str(heads), clip=str(clip), device="cpu")
    HPSv2(path=str(network), clip=str(clip), device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_long_prompts_are_cut(rewards: dict[str, Reward], videos: Tensor) -> None:
    """CLIP reads 77 tokens."""
    long = ["red " * 75 + "blue", "red " * 75 + "green dog"]
    for name in ("clipscore", "hpsv2"):
        found = rewards[name].score(videos[[0, 0]], long, fps=8)["score"]
        assert found[0] == found[1]


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_missing_weights(clip: Path, tmp_path: Path) -> None:
    with refused("not_found", "'./missing'"):
        CLIPScore(path="./missing", device="cpu")
    with refused("not_found", "'/missing'"):
        PickScore(path=str(clip), tokenizer="/missing", device="cpu")
    with refused("not_found", clip, "HPS_v2"):
        HPSv2(path=str(clip), clip=str(clip), device="cpu")
    whole = CLIPModel.from_pretrained(clip)
    part = {name: tensor for name, tensor in whole.state_dict().items() if name != "visual_projection.weight"}
    whole.save_pretrained(tmp_path / "part", state_dict=part)
    with refused("mismatch", tmp_path / "part", "lacks visual_projection.weight"):
        Aesthetic(path=str(write(tmp_path, aesthetic_file)), clip=str(tmp_path / "part"), device="cpu")


def write(folder: Path, make: Any, **changes: Any) -> Path:
    """A file of weights, some of them changed, those changed to None left out."""
    folder.mkdir(exist_ok=True)
    state = {**make(torch.Generator().manual_seed(0)), **changes}
    torch.save({name: tensor for name, tensor in state.items() if tensor is not None}, folder / "weights.pt")
    return folder / "weights.pt"


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"visual.proj": None}, ["lacks visual_projection.weight"]),
        ({"score_predictor.weight": torch.zeros(1)}, ["has score_predictor.weight"]),
        ({"visual.proj": torch.zeros(VISION, 7)}, ["visual_projection.weight", "(7, 24)"]),
    ],
)
def test_weights_of_another_network(clip: Path, tmp_path: Path, changes: dict[str, Any], values: list[str]) -> None:
    with refused("mismatch", tmp_path, *values):
        HPSv2(path=str(write(tmp_path, open_clip, **changes)), clip=str(clip), device="cpu")


def test_layers_of_another_predictor(clip: Path, tmp_path: Path) -> None:
    file = write(tmp_path, aesthetic_file, **{"layers.7.weight": None})
    with refused("mismatch", file, clip, "Missing key", "7.weight"):
        Aesthetic(path=str(file), clip=str(clip), device="cpu")


def test_a_file_that_could_run_code_is_not_loaded(clip: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "sprung",)

    file = write(tmp_path, open_clip, trap=Trap())
    for reward in (HPSv2, Aesthetic):
        with refused("unsupported", file):
            reward(path=str(file), clip=str(clip), device="cpu")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["clipscore", "pickscore", "hpsv2", "aesthetic"])
def test_options_in_a_configuration(name: str) -> None:
    assert reward_problems(RewardEntry(**parse_reward(f"{name}=0.5,path=some/x,frames=2,dtype=bf16,device=cpu"))) == []
    [error] = reward_problems(RewardEntry(**parse_reward(f"{name},frame=2")))
    assert error_kind(error) == "unknown"
    assert "'frames'" in str(error)


@pytest.mark.parametrize("name", ["clipscore", "pickscore", "hpsv2", "aesthetic"])
def test_gradients_are_of_the_scores_without_rounding_to_bytes(
    name: str, rewards: dict[str, Any], videos: Tensor
) -> None:
    """Of all frames, though each goes backward by itself."""
    reward, bytes_only = rewards[name], (videos * 255).round() / 255
    x = bytes_only.clone().requires_grad_()
    found = reward.differentiate(x, PROMPTS, fps=8.0)["score"]
    plain = reward.score(bytes_only, PROMPTS, fps=8.0)["score"]
    torch.testing.assert_close(found.detach(), plain, rtol=0.02, atol=0.02 * float(plain.abs().max()))
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert gradient.flatten(1).norm(dim=1).min() > 0
    at_once = reward.factor * reward._scores(reward._select_frames(x) * 255, reward.text(PROMPTS)).mean(1)
    torch.testing.assert_close(found, at_once)
    torch.testing.assert_close(gradient, torch.autograd.grad(at_once.sum(), x)[0], rtol=1e-3, atol=1e-6)
    step = 0.02 * gradient / gradient.abs().amax((1, 2, 3, 4), keepdim=True)
    with torch.no_grad():
        higher = reward.differentiate((x + step).clamp(0, 1), PROMPTS, fps=8.0)["score"]
    assert (higher > found).all()


def test_a_run_backpropagates_the_score_of_a_local_folder(
    clip: Path, tiny_repo: Callable[..., Path], tmp_path: Path
) -> None:
    """From the text's and the frames' towers through the decoder into a LoRA."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS[:2]))
    run(preflight(load_config(
        method="refl", model_name="ltx_video", pretrained_model_name_or_path=str(tiny_repo("ltx_video")), rank=4,
        lora_alpha=4, prompts=str(tmp_path / "prompts.txt"), reward=[f"clipscore,path={clip},frames=2"],
        rollout_size="9x64x64", prompts_per_step=2, num_generations=1, batch_size=2, sampling_steps=2, train_steps=1,
        transformer_dtype="fp32", vae_dtype="fp32", text_encoder_dtype="fp32", output_dir=str(tmp_path / "run"),
    )))  # fmt: skip
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert record["loss"] == pytest.approx(-record["reward/clipscore"], rel=1e-5)
    assert record["reward_gradient"] > 0
    assert record["grad_norm"] > 0
