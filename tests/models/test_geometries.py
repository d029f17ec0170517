"""Size rules against the published configs and against what tiny networks of every family really do."""

from __future__ import annotations

import inspect

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline

from finetrainers.config.geometry import Geometry
from finetrainers.config.sections import ModelSection
from finetrainers.models import geometries
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
def test_published_configs_give_the_registered_geometry(name, vae, transformer):
    family = get_family(name)
    assert family.read_geometry(vae, transformer) == family.geometry


@pytest.mark.parametrize("name", ["ltx_video", "hunyuan_video", "cogvideox"])
def test_missing_keys_mean_the_class_defaults(name):
    family = get_family(name)
    assert family.read_geometry({}, {}) == family.geometry


def test_cogvideox_15_pairs_latent_frames_and_runs_at_16_fps():
    geometry = geometries.cogvideox(COGVIDEOX_VAE, COGVIDEOX_15)
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
    geometry = geometries.ltx_video(vae, LTX_TRANSFORMER)
    assert (geometry.spatial, geometry.temporal) == (32, 8)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ltx_video", {}),
        ("hunyuan_video", {}),
        ("cogvideox", {"version": "5b"}),
        ("cogvideox", {"version": "1.5"}),
    ],
)
def test_the_vae_compresses_as_the_geometry_says(tiny_repo, name, options):
    config = ModelSection(
        model_name=name, pretrained_model_name_or_path=str(tiny_repo(name, **options)), vae_dtype="fp32"
    )
    family = get_family(name)
    spec = family.load(config)
    geometry = family.geometry_of(config)
    vae = spec.load_vae()
    assert spec.geometry(vae, spec.transformer_on_meta()) == geometry

    frames, height, width = geometry.temporal + 1, 2 * geometry.size_multiple, geometry.size_multiple
    assert geometry.problems(frames, height, width) == []
    moments = spec.encode_video(vae, torch.zeros(1, 3, frames, height, width))
    assert tuple(moments.shape[2:]) == geometry.latent_shape(frames, height, width)


def test_what_a_checkpoint_is_comes_from_its_own_config(tiny_repo):
    family = get_family("cogvideox")

    def at(path):
        return ModelSection(model_name="cogvideox", pretrained_model_name_or_path=str(path))

    assert family.first_frame_of(at(tiny_repo("cogvideox", version="i2v"))) == "channels"
    assert family.first_frame_of(at(tiny_repo("cogvideox", version="5b"))) == "none"
    assert family.geometry_of(at(tiny_repo("cogvideox", version="1.5"))).fps == 16.0
    assert family.first_frame_of(at("someone/not-on-this-disk")) == "unknown"
    assert family.fetch_configs(at("someone/not-on-this-disk")).missing == ("someone/not-on-this-disk",)
    assert family.geometry_of(at("someone/not-on-this-disk")) == family.geometry


def test_which_networks_take_guidance(tiny_repo):
    def takes_guidance(name, path):
        return get_family(name).takes_guidance(ModelSection(model_name=name, pretrained_model_name_or_path=str(path)))

    assert takes_guidance("hunyuan_video", tiny_repo("hunyuan_video"))
    assert takes_guidance("hunyuan_video", "someone/not-on-this-disk")
    assert not get_family("hunyuan_video").read_takes_guidance({"guidance_embeds": False})
    assert not takes_guidance("ltx_video", tiny_repo("ltx_video"))
    assert not takes_guidance("cogvideox", "someone/not-on-this-disk")


@pytest.mark.parametrize("name", ["ltx_video", "hunyuan_video", "cogvideox"])
def test_clips_are_sampled_with_the_pipelines_guidance(name, tiny_repo):
    """The default of the pipeline, where that is an input of the network and not a second call of it."""
    family, config = get_family(name), ModelSection(model_name=name, pretrained_model_name_or_path=str(tiny_repo(name)))
    pipeline = getattr(diffusers, family.load(config).pipeline_class)
    default = inspect.signature(pipeline.__call__).parameters["guidance_scale"].default
    assert family.load(config).sampling_guidance == (default if family.takes_guidance(config) else None)


@pytest.mark.parametrize(("name", "multiple"), [("ltx_video", 32), ("hunyuan_video", 16)])
def test_sizes_that_the_pipeline_refuses_are_refused_first(name, multiple, tiny_repo):
    """Whatever the VAE's compression, the families' pipelines check their own multiple before they sample."""
    geometry = get_family(name).read_geometry(
        {"patch_size": 2, "spatio_temporal_scaling": [True, True], "spatial_compression_ratio": 8}, {}
    )
    assert geometry.size_multiple == multiple
    (problem,) = geometry.problems(9, multiple, multiple // 2 * 3)
    assert f"width {multiple // 2 * 3} is not a multiple of {multiple}" in problem
    pipeline = DiffusionPipeline.from_pretrained(tiny_repo(name))
    with pytest.raises(ValueError, match=f"divisible by {multiple}"):
        pipeline("a prompt", num_frames=9, height=multiple, width=multiple // 2 * 3, num_inference_steps=1)
