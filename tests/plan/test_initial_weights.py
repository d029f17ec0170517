"""Runs that start from somebody's weights: every kind of source, and what does not fit."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTXPipeline, LTXVideoTransformer3DModel
from refusals import refused, refused_options
from safetensors.torch import load_file, save_file
from torch import Tensor

from finetrainers.config.errors import ConfigError
from finetrainers.config.load import load_config
from finetrainers.plan.initial_weights import find_initial_weights
from finetrainers.plan.preflight import preflight
from finetrainers.results.export_formats import export_formats, find_source
from finetrainers.runs.training import train
from finetrainers.utils.failures import Kind

LORA = "pytorch_lora_weights.safetensors"
FULL = {"training_type": "full-finetune"}


@pytest.fixture
def begun(options: Callable[..., dict], run: Callable[..., Any]) -> Callable[..., Any]:
    """`begun(**changes)`: a run that changes nothing."""

    def start(**changes: Any) -> Any:
        # With a learning rate of 0 and no decay, what a run writes is what it has begun with.
        return run(**options(**{"train_steps": 1, "lr": 0.0, "weight_decay": 0.0, "optimizer": "adamw", **changes}))

    return start


@pytest.fixture(scope="module")
def stages(tiny_repo: Callable[..., Path], make_clips: Callable[..., Path], tmp_path_factory: Any) -> dict[str, Path]:
    """Two runs to go on from, both with averages: their results are not what their checkpoints hold."""
    torch.manual_seed(0)
    roots = {name: tmp_path_factory.mktemp(name) for name in ("lora", "full")}
    for name, root in roots.items():
        common = {"train_steps": 2, "use_ema": True, "ema_decay": 0.5, "video_resolution_buckets": ["9x64x64"]}
        dtypes = dict.fromkeys(("transformer_dtype", "vae_dtype", "text_encoder_dtype"), "fp32")
        kind = {"rank": 4, "lora_alpha": 8, "lr": 1e-2} if name == "lora" else {**FULL, "lr": 1e-3}
        train(
            load_config(
                model_name="ltx_video", pretrained_model_name_or_path=str(tiny_repo("ltx_video")),
                data_root=str(make_clips(1)),
                output_dir=str(root), **common, **dtypes, **kind,
            )
        )  # fmt: skip
    return roots


def transformer(path: Path) -> dict[str, Tensor]:
    return load_file(path / "diffusion_pytorch_model.safetensors")


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


def test_a_lora_from_a_lora(stages: dict[str, Path], begun: Callable[..., Any], tmp_path: Path) -> None:
    """A run directory gives its results; a checkpoint, a file and a folder what they hold; all bit for bit."""
    root = stages["lora"]
    checkpoint = root / "checkpoints" / "step-2"
    shutil.copytree(checkpoint, tmp_path / "unfinished" / "checkpoints" / "step-2")
    (tmp_path / "renamed").mkdir()
    shutil.copy(root / LORA, tmp_path / "renamed" / "style.safetensors")
    places = {
        root: root,
        checkpoint: checkpoint,
        tmp_path / "unfinished": tmp_path / "unfinished" / "checkpoints" / "step-2",
        root / LORA: root,
    }
    assert {given: find_initial_weights(str(given)).path for given in places} == {
        k: v / LORA for k, v in places.items()
    }
    assert not torch.equal(*(next(iter(load_file(path / LORA).values())) for path in (root, checkpoint)))
    for name, (given, expected) in {"a": (checkpoint, checkpoint), "b": (tmp_path / "renamed", root)}.items():
        done = begun(init_from=str(given), output_dir=str(tmp_path / name))
        assert_same(done.weights, load_file(expected / LORA))
        assert [record["step"] for record in done.metrics] == [1]  # from step 0
    assert f"`{tmp_path / 'renamed'}`" in (done.root / "README.md").read_text()


@pytest.mark.rotating
@pytest.mark.parametrize("training_type", ["lora", "full-finetune"])
def test_from_a_whole_transformer(
    training_type: str, stages: dict[str, Path], options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It is what `--transformer_id` would give, and stays the base of a LoRA through every continuation."""
    given = stages["full"] / "checkpoints" / "step-2"
    assert find_initial_weights(str(stages["full"])).path == stages["full"] / "transformer"
    values = options(training_type=training_type, train_steps=4, lr=1e-3)
    same = {**values, "transformer_id": str(given / "transformer"), "output_dir": str(tmp_path / "same")}
    straight = run(
        **{**values, "init_from": str(given), "output_dir": str(tmp_path / "straight"), "checkpointing_steps": 2}
    )
    assert_same(straight.weights, run(**same).weights)
    started = tmp_path / "straight" / "checkpoints" / "step-2"

    # Continued by the same command, by the run's own settings, and by a command that forgets where it began.
    for name, command in {
        "auto": {**values, "init_from": str(given), "resume_from_checkpoint": "auto"},
        "forgotten": {**values, "resume_from_checkpoint": "latest"},
    }.items():
        directory = tmp_path / name
        shutil.copytree(started, directory / "checkpoints" / "step-2")
        capsys.readouterr()
        resumed = run(**{**command, "output_dir": str(directory)})
        assert resumed.steps_done == 2
        assert_same(resumed.weights, straight.weights)
        sources = capsys.readouterr().out.split("source of each component:")[1]
        assert (str(given / "transformer") in sources) == (training_type == "lora")
    again = load_config(resumed.root / "config.toml", resume_from_checkpoint="latest", train_steps=4)
    preflight(again)

    card = (straight.root / "README.md").read_text()
    if training_type == "lora":
        assert f"`{given / 'transformer'}`" in card
        code = card.split("```python")[1].split("```")[0].split("pipe.to")[0]
        names: dict[str, Any] = {}
        exec(code.replace("torch.bfloat16", "torch.float32"), names)
        assert_same(
            {k: v for k, v in names["pipe"].transformer.state_dict().items() if k == "proj_in.weight"},
            {k: v for k, v in transformer(given / "transformer").items() if k == "proj_in.weight"},
        )
        # Without the base that it was trained on, a LoRA is not continued.
        with refused_options(("--resume_from_checkpoint", "mismatch")) as caught:
            preflight(
                load_config(
                    **{**values, "resume_from_checkpoint": "latest", "output_dir": str(directory)},
                    transformer_id=str(values["pretrained_model_name_or_path"]),
                )
            )
        assert re.search(r": base: .*--transformer_id", str(caught.value))


def test_a_checkpoint_exports_its_averages(stages: dict[str, Path], tmp_path: Path) -> None:
    """Which the run's result is; or the trained weights."""
    for name, root in stages.items():
        checkpoint = root / "checkpoints" / "step-2"
        for use_ema, expected in ((True, root), (False, checkpoint)):
            source = find_source(str(checkpoint), options={}, use_ema=use_ema)
            assert source.folder == root / "export" / "step-2"
            assert source.name == f"{root.name}-step-2"
            (one,) = export_formats(source, ["diffusers"], tmp_path / f"{name} {use_ema}", dtype="fp32")
            if name == "lora":
                assert_same(load_file(one.path), load_file(expected / LORA))
                continue
            # The result is in `transformer_dtype`.
            found, known = transformer(one.path), transformer(expected / "transformer")
            assert_same({key: value.to(known[key].dtype) for key, value in found.items()}, known)


@pytest.mark.rotating
@pytest.mark.parametrize("use_dora", [False, True])
def test_all_weights_from_a_lora(
    use_dora: bool, options: Callable[..., dict], run: Callable[..., Any], begun: Callable[..., Any], tmp_path: Path
) -> None:
    """The LoRA is added to the weights for good, as diffusers adds it."""
    root = run(**options(train_steps=2, use_dora=use_dora, output_dir=str(tmp_path / "lora"))).root
    done = begun(**FULL, init_from=str(root), output_dir=str(tmp_path / "fused"))
    pipeline = LTXPipeline.from_pretrained(options()["pretrained_model_name_or_path"], torch_dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in pipeline.transformer.state_dict().items()}
    pipeline.load_lora_weights(root)
    pipeline.fuse_lora(components=["transformer"])
    pipeline.unload_lora_weights()
    expected, found = pipeline.transformer.state_dict(), transformer(done.root / "transformer")
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)
    assert sum(not torch.equal(value, before[name]) for name, value in found.items()) == 16


def test_a_diffusers_folder_and_another_programs_lora(
    stages: dict[str, Path], options: Callable[..., dict], begun: Callable[..., Any], tmp_path: Path
) -> None:
    repository = options()["pretrained_model_name_or_path"]
    model = LTXVideoTransformer3DModel.from_pretrained(repository, subfolder="transformer")
    with torch.no_grad():
        model.proj_in.weight.add_(1.0)
    shutil.copytree(repository, tmp_path / "pipeline")
    model.save_pretrained(tmp_path / "pipeline" / "transformer")
    model.save_pretrained(tmp_path / "alone")
    for name in ("pipeline", "alone"):
        done = begun(**FULL, init_from=str(tmp_path / name), output_dir=str(tmp_path / f"from {name}"))
        assert_same(transformer(done.root / "transformer"), transformer(tmp_path / "alone"))

    # Names as ComfyUI writes them, which diffusers translates, and no alpha: then it is the rank.
    ours = load_file(stages["lora"] / LORA)
    theirs = {name.replace("transformer.", "diffusion_model.", 1): tensor for name, tensor in ours.items()}
    save_file(theirs, tmp_path / "comfy.safetensors")
    with refused_options(("--init_from", "mismatch")) as caught:
        begun(init_from=str(tmp_path / "comfy.safetensors"), output_dir=str(tmp_path / "a"))
    assert re.search(r"lora_alpha: 4 .*rank, 8 ", str(caught.value))
    done = begun(init_from=str(tmp_path / "comfy.safetensors"), lora_alpha=4, output_dir=str(tmp_path / "b"))
    assert_same(done.weights, ours)


@pytest.mark.rotating
@pytest.mark.parametrize(("family", "kind", "rank_is_alpha"), [
    ("ltx_video", "peft", False), ("hunyuan_video", "kohya", False), ("hunyuan_video", "comfyui", True),
])  # fmt: skip
def test_formats_of_other_programs(
    family: str, kind: str, rank_is_alpha: bool, options: Callable[..., dict], run: Callable[..., Any],
    begun: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A run writes them at its end, and a second one begins with them, bit for bit; joined layers are split again."""
    alpha = {"lora_alpha": 4} if rank_is_alpha else {}
    first = run(**options(family, train_steps=1, export_formats=[kind], output_dir=str(tmp_path / "first"), **alpha))
    assert f"{kind}: {first.root / 'export' / kind}" in capsys.readouterr().out
    given = first.root / "export" / kind
    (file,) = given.glob("*.safetensors")
    values = {**options(family), "train_steps": 1, "lr": 0.0, "weight_decay": 0.0, "optimizer": "adamw", **alpha}
    done = run(**{**values, "init_from": str(given), "output_dir": str(tmp_path / "second")})
    assert_same(done.weights, first.weights)
    assert f"{file}, in {kind} format" in capsys.readouterr().out
    if kind == "peft":  # whose settings are known before anything is loaded
        with refused_options(("--init_from", "mismatch")) as caught:
            preflight(
                load_config(**{**values, "init_from": str(given), "lora_alpha": 2, "output_dir": str(tmp_path / "n")})
            )
        assert re.search(r"adapter: lora_alpha: 8 .*, 2 ", str(caught.value))
    elif kind == "kohya":  # the others before the network is
        with refused_options(("--init_from", "mismatch")) as caught:
            run(**{**values, "init_from": str(given), "rank": 8, "lora_alpha": 16, "output_dir": str(tmp_path / "n")})
        assert re.search(r"adapter: rank: 4 .*, 8 .*; lora_alpha: 8 .*, 16 ", str(caught.value))


def test_a_lora_that_does_not_fit_is_refused_from_its_header(
    stages: dict[str, Path], options: Callable[..., dict], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refusal(**changes: Any) -> str:
        with refused_options(("--init_from", "mismatch")) as caught:
            preflight(load_config(**options(**changes, init_from=str(stages["lora"]), output_dir=str(tmp_path / "n"))))
        return str(caught.value)

    monkeypatch.setattr("finetrainers.training.trained_weights.load_tensors", None)  # nothing is loaded
    message = refusal(rank=8, lora_alpha=2, use_rslora=True, use_dora=True, target_modules=["to_k", "proj_in"])
    differences = message.partition("adapter: ")[2].split("; ")
    for difference, pattern in zip(
        differences,
        (
            r"rank: 4 .*, 8 ",
            r"lora_alpha: 8 .*, 2 ",
            r"use_rslora: False .*, True ",
            r"use_dora: False .*, True ",
            r"target_modules: .* 12 modules .*to_k proj_in .* transformer_blocks.0.attn1.to_out.0",
            r"target_modules: proj_in ",
        ),
        strict=True,
    ):
        assert re.match(pattern, difference)
    assert "target_modules" in refusal(target_modules=[r".*attn1\.to_k"])
    with refused_options(("--init_from", "mismatch")) as caught:
        preflight(load_config(**options("cogvideox", init_from=str(stages["lora"] / "checkpoints" / "step-2"))))
    assert re.search("step-2 .*ltx_video,.* cogvideox", str(caught.value))


def test_the_adapter_of_a_lora_is_taken_where_it_is_not_set(
    options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    """Also when that run resumes; a file by other programs' names has rank and alpha."""
    adapter = {"rank": 3, "lora_alpha": 6, "use_rslora": True, "use_dora": True, "target_modules": ["to_k", "to_q"]}
    first = run(**options(**adapter, train_steps=1, output_dir=str(tmp_path / "first")))
    open_values = {n: value for n, value in options(train_steps=2).items() if n not in adapter}
    values = {**open_values, "init_from": str(first.root), "output_dir": str(tmp_path / "second")}

    def adopted(**changes: Any) -> dict[str, Any]:
        config = preflight(load_config(**{**values, **changes})).config
        assert {config.chosen[name] for name in adapter if name in config.chosen} <= {"init_from"}
        return {name: config.get(name) for name in adapter}

    assert adopted() == adapter
    second = run(**values, checkpointing_steps=1)
    assert adopted(resume_from_checkpoint="1") == adopted(resume_from_checkpoint="latest") == adapter
    assert run(**{**values, "resume_from_checkpoint": "1", "output_dir": str(second.root)}).state.step == 2
    third = load_config(second.root / "config.toml", init_from=str(first.root), output_dir=str(tmp_path / "third"))
    assert {name: preflight(third).config.get(name) for name in adapter} == adapter
    with refused_options(("--init_from", "mismatch")):
        adopted(rank=4, output_dir=str(tmp_path / "third"))
    file = load_file(first.root / LORA)
    plain = {name.replace("transformer.", "diffusion_model.", 1): t for name, t in file.items() if "lora_A" in name}
    save_file(plain, tmp_path / "comfy.safetensors")
    foreign = adopted(init_from=str(tmp_path / "comfy.safetensors"), output_dir=str(tmp_path / "fourth"))
    assert (foreign["rank"], foreign["lora_alpha"]) == (3, 3)


def test_a_lora_of_another_model_is_refused_before_it_is_trained(
    stages: dict[str, Path], options: Callable[..., dict], tmp_path: Path
) -> None:
    """Names that fit, and sizes that do not; layers of another family, in the format of another program."""
    wide = {
        name: torch.cat([t, t], dim=-1) if "lora_A" in name else t
        for name, t in load_file(stages["lora"] / LORA).items()
    }
    save_file(wide, tmp_path / "wide.safetensors")
    other = {f"lora_unet_single_blocks_0_linear1.{n}": torch.ones(4, 4) for n in ("lora_down.weight", "lora_up.weight")}
    save_file(other, tmp_path / "other.safetensors")
    for name, values in (("wide", r"to_k .*64 .* 32;"), ("other", " ltx_video .* kohya ")):
        given = options(init_from=str(tmp_path / f"{name}.safetensors"), lora_alpha=4)
        for is_dry in (True, False):
            with pytest.raises(ConfigError, match=rf"--init_from: .*{name}\.safetensors .*{values}"):
                train(load_config(**given, dry_run=is_dry))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_what_is_none_is_said(tmp_path: Path, stages: dict[str, Path]) -> None:
    def refuse(given: Path, kind: Kind, *values: object) -> None:
        with refused(kind, given, *values):
            find_initial_weights(str(given))

    refuse(tmp_path / "none", "not_found", "--transformer_id")
    (tmp_path / "old.pth").write_bytes(b"\x80\x04")
    refuse(tmp_path / "old.pth", "unsupported")
    (tmp_path / "old.txt").write_bytes(b"\x80\x04")
    refuse(tmp_path / "old.txt", "unreadable", "safetensors")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "diffusion_pytorch_model.bin").write_bytes(b"\x80\x04")
    refuse(pickled, "not_found", ".bin")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "not_found", LORA, "checkpoints/")
    save_file({"weight": torch.zeros(1)}, tmp_path / "weights.safetensors")
    assert (
        find_initial_weights(str(tmp_path / "weights.safetensors")).kind == "full"
    )  # until a network is compared with it
    (tmp_path / "text.safetensors").write_text("not one")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "text.safetensors"))):
        find_initial_weights(str(tmp_path / "text.safetensors"))
    for name in ("a", "b"):
        save_file({f"{name}.lora_A.weight": torch.zeros(1)}, tmp_path / "empty" / f"{name}.safetensors")
    refuse(tmp_path / "empty", "required", " 2 ")
    checkpoint = shutil.copytree(stages["lora"] / "checkpoints" / "step-2", tmp_path / "step-2")
    (checkpoint / LORA).write_bytes(b"x" + (checkpoint / LORA).read_bytes()[1:])
    refuse(checkpoint, "unreadable", LORA)


def test_damaged_weights_are_their_files_fault(
    stages: dict[str, Path], options: Callable[..., dict], tmp_path: Path
) -> None:
    def refusal(given: Path, **changes: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            train(load_config(**options(init_from=str(given), **changes)))
        [problem] = caught.value.problems
        assert problem.where == "--init_from"
        return problem.message

    def spoilt(source: Path, target: Path) -> str:
        state = load_file(source)
        name = sorted(state)[1]
        state[name].view(-1)[0] = float("inf")
        save_file(state, target)
        return name.removeprefix("transformer.")

    lora = tmp_path / "spoilt.safetensors"
    name = spoilt(stages["lora"] / LORA, lora)
    for kind in ({"lora_alpha": 4}, FULL):
        assert re.search(f"{re.escape(str(lora))} .*NaN .* 1 tensor: {re.escape(name)}", refusal(lora, **kind))
    full = shutil.copytree(stages["full"] / "transformer", tmp_path / "full")
    file = full / "diffusion_pytorch_model.safetensors"
    name = spoilt(file, file)
    assert re.search(f"{re.escape(str(full))} .*NaN .* 1 tensor: {re.escape(name)}", refusal(full, **FULL))
    file.write_bytes(file.read_bytes()[:-9])
    assert re.search(rf"{re.escape(str(file))} .*\b9 B\b", refusal(full, **FULL))


def test_two_places_of_weights_are_a_conflict(
    stages: dict[str, Path], options: Callable[..., dict], tmp_path: Path
) -> None:
    lora, full = (str(stages[name]) for name in ("lora", "full"))

    def refusal(**changes: Any) -> str:
        with refused_options(("--init_from", "conflict")) as caught:
            preflight(load_config(**options(**changes)))
        return str(caught.value)

    message = refusal(output_dir=lora, use_ema=True, resume_from_checkpoint="latest", init_from=full)
    assert re.search(f"{full} .*{lora}/checkpoints/.* --resume_from_checkpoint auto", message)
    base = options()["pretrained_model_name_or_path"]
    message = refusal(init_from=full, transformer_id=base, output_dir=str(tmp_path / "n"))
    assert f"--transformer_id {base};" in message
    # A command that is repeated: the checkpoint has more in it than what it began with.
    checked = preflight(
        load_config(**options(output_dir=lora, use_ema=True, resume_from_checkpoint="auto", init_from=lora))
    )
    assert checked.start.step == 2
    assert checked.start.initial is None


def test_auto_starts_where_there_is_nothing_and_goes_on_where_there_is(
    options: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    command = options(resume_from_checkpoint="auto", checkpointing_steps=1, checkpointing_limit=2)
    first = run(**command)
    assert first.steps_done == 3
    again = run(**{**command, "train_steps": 4})
    assert again.steps_done == 1
    newest = tmp_path / "run" / "checkpoints" / "step-4" / "optimizer.pt"
    newest.write_bytes(b"")
    assert run(**{**command, "train_steps": 4}).steps_done == 1
    for path in (tmp_path / "run" / "checkpoints").glob("step-*/optimizer.pt"):
        path.write_bytes(b"")
    # Not quietly from the start.
    with pytest.raises(ConfigError, match=rf"--resume_from_checkpoint: .*{tmp_path}.*optimizer\.pt"):
        run(**command)
