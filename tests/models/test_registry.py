"""Which family is meant, by its name or by the files of a model; and what its schedulers can do."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from packaging.version import Version
from safetensors.torch import save_file

from finetrainers.config.sections import ModelSection
from finetrainers.models import family
from finetrainers.models.lookalikes import LOOKALIKES, id_lookalike, name_lookalike
from finetrainers.models.registry import families, get_family, with_family
from finetrainers.utils.failures import InputError


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("ltx", ["ltx2", "ltx_video"]),
        ("LTXVideo", ["ltx_video"]),
        ("cogvideo", ["cogvideox"]),
        ("cogvideox-5b", ["cogvideox"]),
        ("hunyuan", ["hunyuan_video", "hunyuan_video_15"]),
        ("hunyuan_vdeo", ["hunyuan_video"]),
        ("allegro", list(families())),
        ("allegro_1", list(families())),
        ("Cosmos2.5", list(families())),
        ("ltx_video_2", ["ltx2"]),
        ("LTXV2", ["ltx2"]),
        ("hunyuan15", ["hunyuan_video_15"]),
        ("ltx-2.3", ["ltx2"]),
        ("LTX-2.5", list(families())),
        ("ltx_video_2.5", list(families())),
        ("hunyuan_video_1.5", ["hunyuan_video_15"]),
        ("hunyuan_video_2", ["hunyuan_video"]),
        ("foo", list(families())),
    ],
)
def test_families_that_do_not_exist(name, named):
    """The message names the nearest family; all of them, if the name is that of another model, or like none."""
    with pytest.raises(KeyError) as error:
        get_family(name)
    _, _, hint = error.value.args[0].partition(repr(name))
    assert [family for family in sorted(families()) if re.search(rf"\b{family}\b", hint)] == sorted(named)
    assert ("not supported" in hint) == (named == list(families()) and name != "foo")


def test_a_family_that_is_added_is_meant_by_names_like_its_own(monkeypatch):
    monkeypatch.setattr(family.FAMILIES, "registered", {"mochi": replace(get_family("ltx_video"), name="mochi")})
    with pytest.raises(KeyError, match=r"'mochi'\?"):
        get_family("mochi_1")


def test_families_may_share_the_class_of_their_transformer(monkeypatch, tiny_repo):
    """Which is which, their readers tell; the last one stands in for a checkpoint that none of them trains."""

    def refuse(configs):
        if configs:
            raise InputError("FOREIGN", "unsupported")
        return get_family("ltx_video").facts

    one = replace(get_family("ltx_video"), name="one", read=refuse)
    section = ModelSection(pretrained_model_name_or_path=str(tiny_repo("ltx_video")))
    monkeypatch.setattr(family.FAMILIES, "registered", {"one": one, **family.families()})
    assert with_family(section).model_name == "ltx_video"
    monkeypatch.setattr(family.FAMILIES, "registered", {"one": one})
    assert with_family(section).model_name == "one"  # whose reader then says why it is not trained
    [problem] = one.problems(section)
    assert (problem.where, problem.kind) == ("--pretrained_model_name_or_path", "unsupported")
    assert problem.message == "FOREIGN"


@pytest.mark.parametrize("name", list(families()))
def test_the_family_is_told_by_the_files_of_the_model_or_its_hub_id(name, tiny_repo, tmp_path):
    section = ModelSection(pretrained_model_name_or_path=str(tiny_repo(name)))
    assert section.model_name == "auto"
    assert with_family(section).model_name == name
    of_another = ModelSection(pretrained_model_name_or_path="nobody/knows", transformer_id=str(tiny_repo(name)))
    assert with_family(of_another).model_name == name
    for place in get_family(name).published:
        assert with_family(ModelSection(pretrained_model_name_or_path=place.lower())).model_name == name
    given = ModelSection(model_name="given", pretrained_model_name_or_path=str(tiny_repo(name)))
    assert with_family(given) is given


def test_the_family_is_asked_for_where_nothing_tells_it(tmp_path):
    for content, value in (
        ('{"_class_name": "AllegroTransformer3DModel"}', " AllegroTransformer3DModel,"),
        ("{", f"config of {tmp_path} "),
    ):
        (tmp_path / "transformer").mkdir(exist_ok=True)
        (tmp_path / "transformer" / "config.json").write_text(content)
        with pytest.raises(KeyError) as error:
            with_family(ModelSection(pretrained_model_name_or_path=str(tmp_path)))
        assert value in error.value.args[0]
        assert error.value.args[0].endswith(f": {', '.join(sorted(families()))}")


def configs_of(folder, transformer, pipeline):
    """A directory with the configs of a checkpoint, by the classes of its transformer and pipeline."""
    (folder / "transformer").mkdir(parents=True)
    (folder / "transformer" / "config.json").write_text(json.dumps({"_class_name": transformer}))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    return str(folder)


@pytest.mark.parametrize(
    ("transformer", "pipeline", "family", "advice"),
    [
        ("WanVACETransformer3DModel", "WanVACEPipeline", "wan", "Wan2.1-T2V-1.3B"),
        ("WanAnimateTransformer3DModel", "WanAnimatePipeline", "wan", "Animate"),
        ("HunyuanVideoFramepackTransformer3DModel", "HunyuanVideoFramepackPipeline", "hunyuan_video", "FramePack"),
        ("HunyuanImageTransformer2DModel", "HunyuanImagePipeline", "hunyuan_video", "image"),
        ("WanTransformer3DModel", "LucyEditPipeline", "wan", "Wan2.2-TI2V-5B"),
        ("Kandinsky5Transformer3DModel", "Kandinsky5T2IPipeline", "kandinsky5", "T2V-Lite-sft-5s"),
        ("Kandinsky6Transformer3DModel", "Kandinsky6TI2VAPipeline", "kandinsky5", "sound"),
        ("FluxTransformer2DModel", "FluxPipeline", "ltx_video", "image"),
    ],
)
def test_checkpoints_that_resemble_a_family_are_refused_with_what_to_use(
    transformer, pipeline, family, advice, tmp_path
):
    place = configs_of(tmp_path / "model", transformer, pipeline)
    section = ModelSection(pretrained_model_name_or_path=place, model_name=family)
    problems = [*get_family(family)._mismatches(section)]
    assert {problem.kind for problem in problems} <= {"mismatch", "unsupported"}
    assert any(advice in problem.message for problem in problems)
    if transformer not in {one.transformer for one in families().values()}:
        with pytest.raises(KeyError, match=advice):
            with_family(ModelSection(pretrained_model_name_or_path=place))


@pytest.mark.parametrize(
    ("hub_id", "family"),
    [("Lightricks/LTX-2-19b-distilled", "ltx2"),
     ("Lightricks/LTX-Video-0.9.8-13B-distilled", "ltx_video"),
     ("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v_distilled", "hunyuan_video_15"),
     ("kandinskylab/Kandinsky-5.0-T2V-Lite-distilled16steps-5s-Diffusers", "kandinsky5"),
     ("kandinskylab/Kandinsky-5.0-T2V-Lite-nocfg-10s-Diffusers", "kandinsky5"),
     ("kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers", "kandinsky5"),
     ("FastVideo/FastWan2.1-T2V-1.3B-Diffusers", "wan"),
     ("FastVideo/FastHunyuan-diffusers", "hunyuan_video")],
)  # fmt: skip
def test_distilled_checkpoints_are_refused_by_their_hub_id(hub_id, family):
    if hub_id not in get_family(family).published:
        with pytest.raises(KeyError, match=r"train |trainer"):
            with_family(ModelSection(pretrained_model_name_or_path=hub_id))
    for section in (
        ModelSection(pretrained_model_name_or_path=hub_id),
        ModelSection(pretrained_model_name_or_path=get_family(family).published[0], transformer_id=hub_id),
    ):
        assert [problem.kind for problem in get_family(family).problems(section)] == ["unsupported"]
        if family in ("ltx2", "ltx_video", "wan", "hunyuan_video"):  # their rollouts have its few steps
            assert get_family(family).problems(section, rewarded=True) == []
    published = [place for one in families().values() for place in one.published]
    similar = {place: id_lookalike(place) for place in published}
    assert all(model is None or model.can_be_rewarded for model in similar.values())
    if "distilled" in hub_id:
        assert id_lookalike(hub_id.replace("distilled", "undistilled")) is None


@pytest.mark.parametrize(
    ("place", "name"),
    [("lightx2v/Wan2.1-I2V-14B-480P-StepDistill-CfgDistill-Lightx2v", "a distilled Wan"),
     ("wan2.2_i2v_A14b_high_noise_lightx2v_4step.safetensors", "a distilled Wan"),
     ("TurboDiffusion/TurboWan2.1-T2V-1.3B-480P", "a distilled Wan"),
     ("x/Wan2.1-T2V-1.3B-Self-Forcing-DMD", "a causal Wan"),
     ("FastVideo/CausalWan2.2-I2V-A14B-Preview-Diffusers", "a causal Wan"),
     ("Wan21_CausVid_14B_T2V.safetensors", "a causal Wan"),
     ("aejion/AccVideo", "a distilled HunyuanVideo"), ("hy1.5_t2v_480p_lightx2v_4step", "a distilled HunyuanVideo-1.5"),
     ("hunyuan_video_720_cfgdistill_fp8_e4m3fn.safetensors", None), ("runs/wan_1024steps/fast-wander", None),
     ("runs/wan2.1-step4000", None), ("FastVideo/Wan2.1-VSA-T2V-14B-720P-Diffusers", None)],
)  # fmt: skip
def test_names_of_distilled_wan_and_hunyuan_video(place, name):
    """HunyuanVideo itself is distilled for guidance, and names of users' runs have other words."""
    similar = id_lookalike(place)
    assert (None if similar is None else similar.name) == name


def test_pipelines_schedulers_and_titles_show_distilled_weights(tmp_path, tiny_repo):
    family, base = get_family("wan"), tiny_repo("wan", "t2v")

    def kinds(place, **options):
        section = ModelSection(pretrained_model_name_or_path=str(place), **options)
        return [[problem.kind for problem in family._mismatches(section, rewarded=on)] for on in (False, True)]

    for number, (file, name) in enumerate(
        (("model_index.json", "WanDMDPipeline"), ("scheduler/scheduler_config.json", "FlowMatchLCMScheduler"))
    ):
        copy = tmp_path / str(number)
        shutil.copytree(base, copy)
        settings = json.loads((copy / file).read_text()) | {"_class_name": name}
        (copy / file).write_text(json.dumps(settings))
        assert kinds(copy) == [["unsupported"], []], name
    titled = tmp_path / "x.safetensors"
    save_file({"w": torch.zeros(1)}, titled, metadata={"modelspec.title": "Wan2.1 StepDistill"})
    assert kinds(base, transformer_id=str(titled)) == [["unsupported"], []]
    assert kinds(base) == kinds(copy, transformer_id=str(base / "transformer")) == [[], []]


def test_distilled_checkpoints_are_refused_by_names_and_metadata_of_their_files(tmp_path, tiny_repo):
    family, base = get_family("ltx2"), str(tiny_repo("ltx2"))
    plain, named, noted = (
        tmp_path / name for name in ("ltx-2.safetensors", "LTX-2-19B-distilled.safetensors", "x.safetensors")
    )
    for path, config in ((plain, {}), (named, {}), (noted, {"allowed_inference_steps": [1.0, 0.5]})):
        save_file({"w": torch.zeros(1)}, path, metadata={"config": json.dumps(config)})

    def kinds(section):
        return [problem.kind for problem in family._mismatches(section)]

    for path, expected in ((plain, []), (named, ["unsupported"]), (noted, ["unsupported"])):
        assert kinds(ModelSection(pretrained_model_name_or_path=base, transformer_id=str(path))) == expected, path
    saved = tmp_path / "copy"
    shutil.copytree(base, saved)
    assert kinds(ModelSection(pretrained_model_name_or_path=str(saved))) == []
    settings = json.loads((saved / "transformer" / "config.json").read_text())
    settings["_name_or_path"] = "hub/models--x--LTX-2-distilled/snapshots/0/transformer"
    (saved / "transformer" / "config.json").write_text(json.dumps(settings))
    assert kinds(ModelSection(pretrained_model_name_or_path=str(saved))) == ["unsupported"]
    named_directory = saved.rename(tmp_path / "ltx2_distilled")
    assert kinds(ModelSection(pretrained_model_name_or_path=str(named_directory))) == ["unsupported"]


def test_lookalikes_name_classes_of_diffusers_that_no_family_trains():
    trained = {name for one in families().values() for name in (one.transformer, *one.pipelines)}
    names = [name for one in LOOKALIKES for name in one.classes]
    assert not trained & {*names}
    assert len(names) == len({*names})
    assert name_lookalike("STDiT3-XL-2") is not None  # of Open-Sora
    if Version(diffusers.__version__) >= Version("0.42"):  # some are newer than the oldest version that works
        assert [name for name in names if not hasattr(diffusers, name)] == []


def test_the_fewest_sampling_steps_are_those_of_the_scheduler(tiny_repo):
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(tiny_repo("ltx_video"), subfolder="scheduler")
    for steps in (1, 2, 3):
        with np.errstate(invalid="ignore"):
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=1.0)
        assert bool(scheduler.sigmas.isfinite().all()) == (steps >= get_family("ltx_video").facts.least_steps)
