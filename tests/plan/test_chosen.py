"""Values that a run chooses where options are open: from the family's recommended settings, or as its run had them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetrainers.config.checks.findings import Findings
from finetrainers.config.given import RawOptions
from finetrainers.config.load import build_config, dump_toml, load_config
from finetrainers.config.root import TrainConfig, fields
from finetrainers.config.sample import VALIDATION_NAMES, SampleSection, options_of_runs
from finetrainers.config.watch import WatchSection
from finetrainers.models.family import Family
from finetrainers.models.registry import families
from finetrainers.plan import chosen
from finetrainers.plan.dry_run import dry_run_report
from finetrainers.plan.preflight import preflight
from finetrainers.plan.ready import get_ready
from finetrainers.plan.start_report import print_first_line
from finetrainers.sampling.plan import plan_samples
from finetrainers.sampling.watch.plan import plan_watch
from finetrainers.sampling.weights import run_source
from finetrainers.utils.video import write_mp4

LORA = ("rank", "lora_alpha", "lr", "train_steps")


@pytest.fixture
def open_options(options: Callable[..., dict]) -> Callable[..., dict[str, Any]]:
    """`open_options(**changes)`: options that leave the settings of the LoRA open."""

    def build(family: str = "ltx_video", **changes: Any) -> dict[str, Any]:
        values = options(family, clips=changes.pop("clips", 1))
        return {**{name: value for name, value in values.items() if name not in LORA}, **changes}

    return build


def resolve(**values: Any) -> TrainConfig:
    return preflight(load_config(**values)).config


def settings(config: TrainConfig) -> tuple[Any, ...]:
    return tuple(config.get(name) for name in LORA)


def default_sample_size(run: Path) -> tuple[int, int, int]:
    """Return the size by `sample`, and by `watch`, which must agree."""
    [sampled] = plan_samples([str(run)], SampleSection(prompts="a"), RawOptions()).sizes
    watched = plan_watch(run, WatchSection(prompts="a", presets="run"), RawOptions()).presets["run"].sizes
    assert watched == [sampled]
    return sampled


@pytest.mark.parametrize("family", sorted(families()))
def test_a_lora_on_clips_takes_the_recommended_settings(family: str, open_options: Callable[..., dict]) -> None:
    checked = preflight(load_config(**open_options(family)))
    lora = checked.facts.lora
    assert lora is not None
    assert settings(checked.config) == (lora.rank, lora.rank, lora.lr, lora.steps)
    assert dict(checked.config.chosen) == dict.fromkeys((*checked.facts.defaults, *LORA), "family")


def test_what_is_given_wins(open_options: Callable[..., dict]) -> None:
    assert settings(resolve(**open_options(rank=8)))[:2] == (8, 8)  # the scale of the recommended ones
    assert settings(resolve(**open_options(rank=8, lora_alpha=4, lr=1e-3)))[:3] == (8, 4, 1e-3)
    recommended = settings(resolve(**open_options()))[:3]
    assert settings(resolve(**open_options(train_epochs=1))) == (*recommended, None)  # whatever the length
    assert settings(resolve(**open_options(train_steps=7))) == (*recommended, 7)
    assert settings(resolve(**open_options(training_type="full-finetune")))[2:] == (1e-4, None)


def _changed(value: Any) -> Any:
    """Return another value of an option."""
    if isinstance(value, str):
        return "mode" if "logit_normal" in value else f"not {value}"
    return not value if isinstance(value, bool) else value + 1


@pytest.mark.parametrize("family", sorted(families()))
def test_every_default_of_a_checkpoint_yields_to_what_is_given(
    family: str, open_options: Callable[..., dict], tmp_path: Path
) -> None:
    values = open_options(family)
    chosen = resolve(**values)
    given = {name: _changed(chosen.get(name)) for name in preflight(load_config(**values)).facts.defaults}
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(chosen))  # a run of before, which has chosen them
    for config in (resolve(**values, **given), resolve(path=path, **given)):
        assert {name: config.get(name) for name in given} == given
        assert not given.keys() & config.chosen.keys()


def test_every_setting_of_samples_yields_to_what_is_given(
    open_options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a run has chosen and a checkpoint recommends: the flags of each command win, one by one."""
    trained = run(**open_options(train_steps=1, rank=2))
    own: dict[str, Any] = {
        "validation_inference_steps": 7, "validation_guidance_scale": 3.0, "validation_guidance_scale_2": 2.0,
        "validation_negative_prompt": "ugly", "validation_frame_rate": 9.0,
    }  # fmt: skip
    defaults = {name for family in families().values() for name in family.facts.defaults if name.startswith("valid")}
    assert defaults <= own.keys() <= VALIDATION_NAMES.keys()
    facts_of = Family.facts_of
    monkeypatch.setattr(Family, "facts_of", lambda self, model: replace(facts_of(self, model), defaults=own))
    monkeypatch.setattr("finetrainers.sampling.plan.check_sampling", lambda *_, **__: Findings())
    (trained.root / "config.toml").write_text(dump_toml(trained.state.config.with_chosen(own, "family")))
    size = {"prompts": "a@@@9x32x32"}
    for name, value in own.items():
        flag, other = VALIDATION_NAMES[name], _changed(value)
        configs = [plan_samples([str(trained.root)], SampleSection(**size, **{flag: other}), RawOptions()).config]
        if flag in WatchSection.model_fields:
            configs.append(plan_watch(trained.root, WatchSection(**size, **{flag: other}), RawOptions()).config)
        elif (key := {"num_inference_steps": "steps", "guidance_scale": "guidance"}.get(flag)) is not None:
            preset = [f"mine=9x32x32,{key}={other}"]
            configs.append(plan_watch(trained.root, WatchSection(**size, preset=preset), RawOptions()).config)
        rest = {key: own[key] for key in own if key != name}
        if name == "validation_guidance_scale":  # of both experts, unless the second one has another
            rest["validation_guidance_scale_2"] = None
        for config in configs:
            assert {key: config.get(key) for key in own} == {**rest, name: other}
    assert plan_samples([str(trained.root)], SampleSection(**size), RawOptions()).config.chosen.keys() >= own.keys()


def test_every_option_that_a_run_has_chosen_yields_to_flags(open_options: Callable[..., dict], tmp_path: Path) -> None:
    """As `sample`, `watch` and `export` read a run's options, and then the flags of a run that they take."""
    config = load_config(**open_options())
    assert set(options_of_runs()) <= fields().keys()
    (tmp_path / "config.toml").write_text(dump_toml(config.with_chosen(config.flat(), "family")))
    for name in options_of_runs():
        if fields()[name].dumped:
            flags = RawOptions({name: config.plain()[name]}, {name: f"--{name}"})
            assert build_config([run_source(tmp_path), flags]).is_given(name)


def test_steps_follow_the_number_of_clips_within_bounds(open_options: Callable[..., dict]) -> None:
    lora = preflight(load_config(**open_options())).facts.lora
    assert lora is not None
    assert lora.steps_for(1, 1) == lora.steps_for(lora.steps // 40, 1) == lora.steps
    assert lora.steps_for(lora.steps // 20, 1) == lora.steps_for(lora.steps // 10, 2) == 2 * lora.steps
    assert lora.steps_for(10**6, 1) == 4 * lora.steps
    values = open_options(clips=3)
    assert resolve(**values, batch_size=3).training.train_steps == lora.steps


def test_a_copy_of_the_resolved_file_chooses_again(open_options: Callable[..., dict], tmp_path: Path) -> None:
    values = open_options()
    first = resolve(**values)
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(first).replace(f"train_steps = {first.training.train_steps}", "train_steps = 5"))
    copy = load_config(path)
    assert (copy.training.train_steps, copy.chosen) == (5, first.chosen)
    assert not any(copy.is_given(name) for name in (*LORA, "train_epochs"))
    assert resolve(path=path) == first
    assert settings(resolve(path=path, train_epochs=2)) == (*settings(first)[:3], None)
    assert settings(resolve(path=path, rank=2))[:2] == (2, 2)


NOISE = ("flow_weighting_scheme", "flow_resolution_shifting", "flow_shift", "sample_posterior")


def noise(config: TrainConfig) -> tuple[Any, ...]:
    return tuple(config.get(name) for name in NOISE)


def test_noise_levels_are_those_of_the_familys_trainer_unless_they_are_given(
    open_options: Callable[..., dict], tiny_repo: Callable[..., Path], tmp_path: Path
) -> None:
    values = open_options("hunyuan_video")
    first = resolve(**values)
    assert noise(first) == ("logit_normal", False, 7.0, False)
    (tmp_path / "prompts.txt").write_text("a ball\n")
    rewarded = {name: value for name, value in values.items() if name not in ("data_root", "video_resolution_buckets")}
    rewarded |= {"prompts": str(tmp_path / "prompts.txt"), "reward": ["brightness"], "rollout_size": "9x64x64"}
    assert noise(resolve(**rewarded, method="grpo", train_steps=1)) == ("none", False, 1.0, True)
    assert noise(resolve(**values, flow_weighting_scheme="none", sample_posterior=True)) == ("none", False, 7.0, True)
    assert noise(resolve(**values, flow_resolution_shifting=True)) == ("logit_normal", True, 1.0, False)
    ltx = open_options(pretrained_model_name_or_path=str(tiny_repo("ltx_video", layers=8)))  # fewer: the demo model
    assert noise(resolve(**ltx)) == ("logit_normal", True, 1.0, True)
    assert noise(resolve(**ltx, flow_shift=3.0)) == ("logit_normal", False, 3.0, True)
    path = tmp_path / "config.toml"
    for config in (first, resolve(**ltx)):
        path.write_text(dump_toml(config))
        assert resolve(path=path) == config
    given = {name: first.get(name) for name in first.flat() if name.startswith("flow_") and first.get(name) is not None}
    assert resolve(**values, **given, loss_weight_max=10.0).diffusion.sample_posterior  # a file of before this option


def test_a_run_of_before_keeps_its_noise_levels(
    open_options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = open_options("hunyuan_video", rank=2, train_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr("finetrainers.models.families.hunyuan_video._NOISE", {})
        run(**values)
    again = {**values, "resume_from_checkpoint": "latest", "train_steps": 2}
    assert noise(resolve(**again)) == ("none", False, 1.0, True)
    assert run(**again).state.step == 2


def test_dry_runs_print_what_is_chosen_and_its_source(
    open_options: Callable[..., dict], capsys: pytest.CaptureFixture[str]
) -> None:
    dry_run_report(get_ready(load_config(**open_options(rank=4), dry_run=True, verbose=True)))
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if line.startswith("chosen (")]
    assert all(value in line for value in ("train_steps 600", "lora_alpha 4", "lr 0.002"))
    assert ", rank" not in line
    assert "[chosen.family]" in printed
    print_first_line(preflight(load_config(**open_options("hunyuan_video"))))
    [line] = [line for line in capsys.readouterr().out.splitlines() if "HunyuanVideo-I2V" in line]
    assert all(value in line for value in ("flow_shift 7.0", "sample_posterior False"))


def test_a_resumed_run_keeps_what_its_run_had(
    open_options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As runs of versions that had rank 64, alpha 64 and a rate of 1e-4 where the length was set."""
    values = open_options(clips=2)
    with monkeypatch.context() as patch:
        patch.setattr("finetrainers.plan.preflight.choose_recommended", lambda config, _: config)
        trained = run(**values, rank=2, lr=3e-3, train_steps=2)
    checkpoint = trained.root / "checkpoints" / "step-2"
    resumed = resolve(**values, resume_from_checkpoint="latest")
    assert settings(resumed) == (2, 64, 3e-3, 2)
    assert dict(resumed.chosen) == dict.fromkeys(("rank", "lr", "train_steps"), "run")
    assert settings(resolve(**values, resume_from_checkpoint="latest", train_steps=3, lr=1e-4)) == (2, 64, 1e-4, 3)
    assert settings(resolve(**values, resume_from_checkpoint="latest", train_epochs=3))[3] is None
    assert json.loads((checkpoint / "manifest.json").read_text())["chosen"] == {}


def test_a_resumed_run_of_before_keeps_its_captions(
    open_options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has put the trigger word before captions that contain it, and its manifest does not say so."""
    values = open_options(id_token="pattern", rank=2, train_steps=1, validation_prompts="a cube", validation_steps=9)

    def captions(**changes: Any) -> tuple[str, bool]:
        checked = preflight(load_config(**{**values, **changes}))
        [caption] = checked.plan.all_captions()
        assert [warning for warning in checked.warnings if "pattern (id_token)" in warning]
        return caption, checked.config.data.repeat_id_token

    caption, repeats = captions()
    assert (caption.split()[:2], repeats) == (["pattern", "number"], False)
    trained = run(**values, repeat_id_token=True)
    before = chosen.read_manifest(trained.root / "checkpoints" / "step-1")
    del before["config"]["repeat_id_token"]
    monkeypatch.setattr(chosen, "read_manifest", lambda _: before)
    assert captions(resume_from_checkpoint="latest") == (f"pattern {caption}", True)
    resumed = preflight(load_config(**values, resume_from_checkpoint="latest")).config
    (tmp_path / "again.toml").write_text(dump_toml(resumed.with_values({"output_dir": tmp_path / "again"})))
    assert load_config(tmp_path / "again.toml").data.repeat_id_token
    assert captions(resume_from_checkpoint="latest", repeat_id_token=False, reset=["data"])[1] is False


def test_chosen_values_are_stored_with_the_run(open_options: Callable[..., dict], run: Callable[..., Any]) -> None:
    values = open_options(lr=1e-2)
    lora = preflight(load_config(**values)).facts.lora
    assert lora is not None
    small = type(lora)(rank=3, lr=lora.lr, steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("finetrainers.config.facts.LoRASettings.steps_for", lambda self, clips, per_step: 2)
        patch.setattr("finetrainers.models.families.ltx_video._DEMO_LORA", small)
        trained = run(**values)
    stored = json.loads((trained.root / "checkpoints" / "step-2" / "manifest.json").read_text())
    assert stored["chosen"] == dict.fromkeys(("rank", "lora_alpha", "train_steps"), "family")
    resumed = resolve(**values, resume_from_checkpoint="latest")
    assert settings(resumed) == (3, 3, 1e-2, 2)
    assert resumed.chosen["rank"] == "family"


def test_buckets_are_chosen_once_for_a_run(
    open_options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    """A resumed run keeps them although its clips have become others; a new run chooses again."""
    clips = tmp_path / "clips"
    values = {**open_options(rank=2, train_steps=1, data_root=str(clips)), "video_resolution_buckets": []}
    for name, height, width in (("a", 64, 64), ("b", 64, 64), ("c", 64, 128)):
        write_mp4(clips / f"{name}.mp4", np.full((9, height, width, 3), 90, dtype=np.uint8), fps=25)
        (clips / f"{name}.txt").write_text(name)
    first = run(**values)
    chosen = first.state.config
    assert chosen.data.video_resolution_buckets == [(9, 64, 128), (9, 64, 64)]
    assert chosen.chosen["video_resolution_buckets"] == "data"
    assert preflight(load_config(**{**values, "output_dir": str(tmp_path / "new")})).plan.size == (9, 64, 64)
    assert default_sample_size(first.root) == (9, 64, 64)  # of most clips, as in the validation
    resuming = {**values, "resume_from_checkpoint": "latest", "train_steps": 2}
    assert preflight(load_config(**resuming)).plan.size == (9, 64, 64)
    assert run(**resuming).state.step == 2
    assert default_sample_size(first.root) == (9, 64, 64)
    write_mp4(clips / "d.mp4", np.full((9, 128, 64, 3), 90, dtype=np.uint8), fps=25)
    (clips / "d.txt").write_text("d")
    resumed = resolve(**resuming, reset=["data"])
    assert resumed.data.video_resolution_buckets == chosen.data.video_resolution_buckets
    path = first.root / "config.toml"
    assert (9, 128, 64) in resolve(path=path, output_dir=str(tmp_path / "new")).data.video_resolution_buckets


def test_samples_of_given_buckets_have_the_largest_one(
    open_options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    values = open_options(rank=2, train_steps=1, data_root=str(tmp_path / "clips"))
    for name, width in (("a", 64), ("b", 64), ("c", 128)):
        write_mp4(tmp_path / "clips" / f"{name}.mp4", np.full((9, 64, width, 3), 90, dtype=np.uint8), fps=25)
        (tmp_path / "clips" / f"{name}.txt").write_text(name)
    values["video_resolution_buckets"] = ["9x64x64", "9x64x128"]
    trained = run(**values)
    assert not trained.state.config.has_chosen_sizes
    assert preflight(load_config(**{**values, "output_dir": str(tmp_path / "new")})).plan.size == (9, 64, 128)
    assert default_sample_size(trained.root) == (9, 64, 128)


def test_buckets_of_a_run_of_before_are_those_of_its_data(
    open_options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = {**open_options(rank=2, train_steps=1), "video_resolution_buckets": []}
    with monkeypatch.context() as patch:  # one size for all clips, and no record of it
        patch.setattr("finetrainers.data.buckets.bucket_choice.default_buckets", lambda *_: [(9, 32, 64)])
        patch.setattr("finetrainers.data.inspect.survey._chosen_options", lambda *_: {})
        run(**values)
    resumed = resolve(**values, resume_from_checkpoint="latest")
    assert resumed.data.video_resolution_buckets == [(9, 32, 64)]
    assert resolve(**{**values, "output_dir": str(tmp_path / "new")}).data.video_resolution_buckets == [(9, 64, 64)]


def test_lengths_beside_resolutions_are_those_of_a_run_of_before(
    open_options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = {**open_options(rank=2, train_steps=1), "video_resolution_buckets": [], "resolutions": [64]}
    choose = "finetrainers.data.buckets.bucket_choice.default_lengths"
    with monkeypatch.context() as patch:
        patch.setattr(choose, lambda *_: [9])
        run(**values)
    with monkeypatch.context() as patch:  # clips of 9 frames give no other length of 8k + 1
        patch.setattr(choose, lambda *_: pytest.fail("lengths are chosen again"))
        resumed = preflight(load_config(**values, resume_from_checkpoint="latest"))
    assert resumed.config.data.frame_buckets == [9]
    assert resumed.plan.buckets


def test_each_dataset_keeps_the_buckets_that_its_run_has_chosen(
    open_options: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the run's manifest: one of before, or one whose clips have become others since."""
    for folder, shapes in (("one", ((64, 64), (64, 128))), ("two", ((64, 64), (128, 64)))):
        for number, (height, width) in enumerate(shapes):
            path = tmp_path / folder / f"{number}.mp4"
            write_mp4(path, np.full((9, height, width, 3), 90, dtype=np.uint8), fps=25)
            path.with_suffix(".txt").write_text(folder)
    tables = ['[[dataset]]\ndata_root = "one"\n', '[[dataset]]\ndata_root = "two"\nvideo_resolution_buckets = []\n']
    (tmp_path / "two.toml").write_text("\n".join(tables))
    values = {**open_options(rank=2, train_steps=1, dataset=str(tmp_path / "two.toml")), "video_resolution_buckets": []}
    del values["data_root"]
    with monkeypatch.context() as patch:  # one size for all clips of a dataset
        patch.setattr("finetrainers.data.buckets.bucket_choice.default_buckets", lambda clips, *_: [max(clips)])
        trained = run(**values)
    resuming = {**values, "resume_from_checkpoint": "latest", "train_steps": 2}
    buckets = {(clip.dataset, clip.bucket) for clip in preflight(load_config(**resuming)).plan.clips}
    assert buckets == {(0, (9, 64, 128)), (1, (9, 128, 64))}
    assert run(**resuming).state.step == 2
    new = {**values, "output_dir": str(tmp_path / "new")}
    assert set(preflight(load_config(**new)).plan.buckets) == {(9, 64, 64), (9, 64, 128), (9, 128, 64)}
    (tmp_path / "two.toml").write_text(tables[0] + tables[1].replace("[]", '["9x128x64"]'))
    checked = preflight(load_config(**resuming, reset=["data"]))
    assert {clip.bucket for clip in checked.plan.clips if clip.dataset == 1} == {(9, 128, 64)}
    (trained.root / "manifest.jsonl").unlink()
    assert (9, 64, 128) in preflight(load_config(**resuming, reset=["data"])).plan.buckets
