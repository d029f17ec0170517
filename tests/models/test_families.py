"""What configs tell, against the published ones and against what tiny networks of every family really do."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
from diffusers import DiffusionPipeline
from every_family import CHECKPOINTS, FAMILIES

from finetrainers.config.geometry import Geometry
from finetrainers.config.sections import ModelSection
from finetrainers.models.families import cogvideox, ltx_video
from finetrainers.models.files.files import MODEL_INDEX
from finetrainers.models.registry import get_family

# The lines of the published `vae/config.json` and `transformer/config.json` that decide sizes.
LTX_VAE = {"patch_size": 4, "patch_size_t": 1, "spatio_temporal_scaling": [True, True, True, False]}
LTX_TRANSFORMER = {"patch_size": 1, "patch_size_t": 1}
HUNYUAN_VAE = {"spatial_compression_ratio": 8, "temporal_compression_ratio": 4}
HUNYUAN_TRANSFORMER = {"patch_size": 2, "patch_size_t": 1}
COGVIDEOX_VAE = {"block_out_channels": [128, 256, 256, 512], "temporal_compression_ratio": 4}
COGVIDEOX_5B = {"patch_size": 2}
COGVIDEOX_15 = {"patch_size": 2, "patch_size_t": 2}


@pytest.mark.parametrize(
    ("name", "vae", "transformer"),
    [
        ("ltx_video", LTX_VAE, LTX_TRANSFORMER),
        ("hunyuan_video", HUNYUAN_VAE, HUNYUAN_TRANSFORMER),
        ("cogvideox", COGVIDEOX_VAE, COGVIDEOX_5B),
    ],
)
def test_published_configs_give_what_is_known_without_them(name, vae, transformer):
    family = get_family(name)
    assert family.read({"vae": vae, "transformer": transformer}).geometry == family.facts.geometry


def test_cogvideox_15_pairs_latent_frames_and_runs_at_16_fps():
    geometry = cogvideox.read({"vae": COGVIDEOX_VAE, "transformer": COGVIDEOX_15}).geometry
    assert geometry == Geometry(temporal=4, spatial=8, patch=2, patch_t=2, fps=16.0)
    # 81 frames are 21 latent frames, hence 11 pairs.
    assert geometry.num_tokens(81, 768, 1360) == 11 * 48 * 85


def test_ltx_ratios_of_the_config_win_over_counting_stages():
    """From 0.9.5 on, stages scale time or space only and the config states the outcome."""
    vae = {
        "patch_size": 4,
        "spatio_temporal_scaling": [True, True, True, True],
        "spatial_compression_ratio": 32,
        "temporal_compression_ratio": 8,
    }
    geometry = ltx_video.read({"vae": vae, "transformer": LTX_TRANSFORMER}).geometry
    assert (geometry.spatial, geometry.temporal) == (32, 8)


@pytest.mark.rotating
@pytest.mark.parametrize(("name", "version"), CHECKPOINTS)
def test_the_networks_are_as_the_configs_tell(name, version, tiny_repo):
    config = ModelSection(
        model_name=name, pretrained_model_name_or_path=str(tiny_repo(name, version)), vae_dtype="fp32"
    )
    spec, geometry = get_family(name).load(config), get_family(name).facts_of(config).geometry
    assert spec.facts == get_family(name).facts_of(config)
    assert {*spec.facts.parts} <= {"scheduler", *spec.parts}
    assert {*spec.configs} <= {MODEL_INDEX, *spec.facts.parts}  # configs of parts that it does not have are not fetched
    assert spec.facts.trained in spec.parts
    assert pickle.loads(pickle.dumps(spec)).facts == spec.facts  # decoding workers get it
    network = spec.transformer_on_meta()
    assert len(spec.block_modules(network)) > 0
    assert any(spec.width(network) in parameter.shape for parameter in network.parameters())

    height, width = geometry.sides or (2 * geometry.size_multiple, geometry.size_multiple)
    frames = geometry.temporal + 1
    assert geometry.problems(frames, height, width) == []
    pixels = torch.zeros(1, 3, frames, height, width)
    clip = spec.encode_clip(spec.load_clip_encoders(), pixels, None, dict.fromkeys(spec.facts.media, pixels))
    assert spec.latent_shape(clip["moments"])[1:] == geometry.latent_shape(frames, height, width)
    further = {f"{name}_moments" for name in spec.facts.media}
    further |= {"first_frame_moments"} if spec.facts.first_frame == "channels" else set()
    assert {"moments", *further} <= set(clip)
    assert set(clip) == {"moments"} or spec.clip_version


def test_what_a_checkpoint_is_comes_from_its_own_config(tiny_repo):
    family = get_family("cogvideox")

    def at(path):
        return ModelSection(model_name="cogvideox", pretrained_model_name_or_path=str(path))

    assert family.facts_of(at(tiny_repo("cogvideox", version="i2v"))).first_frame == "channels"
    # CogVideoX-Fun's control network has the channels of an image-to-video one.
    control = family.facts_of(at(tiny_repo("cogvideox", version="control")))
    assert (control.first_frame, control.media) == ("none", ("control_video",))
    assert family.facts_of(at(tiny_repo("cogvideox", version="5b"))).first_frame == "none"
    assert family.facts_of(at(tiny_repo("cogvideox", version="1.5"))).geometry.fps == 16.0
    assert family.facts_of(at("someone/not-on-this-disk")) == family.facts
    assert family.facts.first_frame == "unknown"
    assert family.fetch_configs(at("someone/not-on-this-disk")).missing == ("someone/not-on-this-disk",)


def test_which_networks_take_guidance():
    read = get_family("hunyuan_video").read
    assert read({}).guidance == read({"transformer": {"guidance_embeds": True}}).guidance == 6.0
    assert read({"transformer": {"guidance_embeds": False}}).guidance is None


@pytest.mark.parametrize("name", FAMILIES)
def test_clips_are_sampled_with_the_pipelines_guidance(name, tiny_repo):
    """The default of the pipeline, where that is an input of the network and not a second call of it."""
    spec = get_family(name).load(ModelSection(model_name=name, pretrained_model_name_or_path=str(tiny_repo(name))))
    call = inspect.signature(spec.pipeline_class.__call__).parameters
    assert spec.facts.guidance is None or spec.facts.guidance == call["guidance_scale"].default
    takes_it = "guidance" in inspect.signature(spec.transformer_on_meta().forward).parameters
    assert (spec.facts.guidance is not None) == takes_it


@pytest.mark.parametrize(("name", "multiple"), [("ltx_video", 32), ("hunyuan_video", 16)])
def test_sizes_that_the_pipeline_refuses_are_refused_first(name, multiple, tiny_repo):
    """Whatever the VAE's compression, the families' pipelines check their own multiple before they sample."""
    vae = {"patch_size": 2, "spatio_temporal_scaling": [True, True], "spatial_compression_ratio": 8}
    geometry = get_family(name).read({"vae": vae}).geometry
    assert geometry.size_multiple == multiple
    (problem,) = geometry.problems(9, multiple, multiple // 2 * 3)
    assert f"width {multiple // 2 * 3} " in problem
    assert f" {multiple}" in problem
    pipeline = DiffusionPipeline.from_pretrained(tiny_repo(name))
    with pytest.raises(ValueError, match=f"divisible by {multiple}"):
        pipeline("a prompt", num_frames=9, height=multiple, width=multiple // 2 * 3, num_inference_steps=1)
