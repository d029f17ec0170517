"""Runs that begin with a LoRA and are compared with it: the reference model is where the run began, and stays it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused_options
from safetensors.torch import load_file
from torch import Tensor, nn

from finetrainers.cli.main import main
from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig
from finetrainers.memory.count import StepShape, count_step
from finetrainers.methods.dpo.method import DPO, Pairs
from finetrainers.models.registry import get_family
from finetrainers.plan.memory_plan import RunMemory
from finetrainers.plan.preflight import preflight
from finetrainers.plan.room import disk_needs
from finetrainers.plan.trainable import attach_reference_adapter, make_trainable, network_without_weights
from finetrainers.results.export_formats import export_formats, find_source
from finetrainers.rundir.manifest import write_manifest
from finetrainers.tools.sync import Sync
from finetrainers.training.trained_weights import start_from_lora
from finetrainers.utils.failures import Kind

LORA = "pytorch_lora_weights.safetensors"
STORED = f"initial_lora/{LORA}"
NAMES = ("loss", "margin", "gain_chosen", "grad_norm")


def write_lora(config: TrainConfig, folder: Path) -> Path:
    """A LoRA of the configured rank and targets, of which no factor is zero."""
    spec = get_family(config.model.model_name).load(config.model)
    network: Any = spec.load_transformer(torch.float32)
    lora = config.training.model_copy(update={"training_type": "lora"})
    make_trainable(network, lora)
    generator = torch.Generator().manual_seed(1)
    for name, weight in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.3, generator=generator)
    folder.mkdir()
    state = {
        name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector"): weight.detach()
        for name, weight in network.named_parameters() if ".lora_" in name
    }  # fmt: skip
    spec.save_lora(folder, state, network.peft_config["default"].to_dict())
    return folder


@pytest.fixture
def pairs_run(options: Callable[..., dict], tmp_path: Path) -> Callable[..., dict]:
    """`pairs_run(family, **changes)`: options of a run on preference pairs that begins with a LoRA."""

    def build(family: str = "ltx_video", **changes: Any) -> dict:
        pairs = tmp_path / "pairs.jsonl"
        rows = [{"prompt": f"pattern {k}", "chosen": f"{k}.mp4", "rejected": f"{k + 1}.mp4"} for k in range(3)]
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
        common = {"method": "dpo", "dataset_file": str(pairs), "lr": 1e-3, "checkpointing_steps": 1}
        values = options(family, clips=4, **{**common, **changes})
        if not (tmp_path / "given").exists():
            write_lora(load_config(**{"rank": 4, "lora_alpha": 8, **values}), tmp_path / "given")
        return {**values, "init_from": str(tmp_path / "given")}

    return build


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("ltx_video",
         {"use_dora": True, "use_ema": True, "eval_num_items": 1, "target_modules": [r".*attn1\.to_(k|out\.0)"]}),
        ("hunyuan_video", {"quantize_frozen": "int8", "gradient_checkpointing": True, "async_checkpointing": True}),
        ("cogvideox",
         {"layerwise_upcasting_modules": ["transformer"], "gradient_checkpointing": True, "transformer_dtype": "bf16"}),
        ("ltx_video", {"training_type": "full-finetune", "lr": 1e-4}),
    ],
)  # fmt: skip
def test_a_second_round_begins_at_its_reference(
    family: str, changes: dict[str, Any], pairs_run: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    """Its first loss is exactly log 2, and it goes on exactly without the file that it began with."""
    lora = {name: changes[name] for name in ("use_dora", "target_modules") if name in changes}
    values = pairs_run(family, train_steps=2, **lora)
    given = load_file(tmp_path / "given" / LORA)
    straight = run(**{**values, **changes, "output_dir": str(tmp_path / "straight")})
    ((_, loss, margin, gain, _), *later) = straight.curve(*NAMES)
    assert (loss, margin, gain) == (torch.tensor(2.0).log().item(), 0.0, 0.0)
    assert all(record[2] != 0.0 for record in later)
    assert (
        next(r["eval_accuracy"] for r in straight.metrics if "eval_accuracy" in r) == 0.5
        if "use_ema" in changes
        else True
    )
    stored = load_file(straight.root / STORED)
    assert stored.keys() == given.keys()
    assert all(torch.equal(stored[name], weight) for name, weight in given.items())
    assert changes.get("training_type") or straight.weights.keys() == given.keys()

    shutil.rmtree(tmp_path / "given")
    del values["init_from"]
    place = str(straight.root / "checkpoints" / "step-1")
    resumed = run(**{**values, **changes, "output_dir": str(tmp_path / "resumed")}, resume_from_checkpoint=place)
    assert resumed.curve(*NAMES) == later
    assert all(torch.equal(weight, straight.weights[name]) for name, weight in resumed.weights.items())
    assert (resumed.root / STORED).read_bytes() == (straight.root / STORED).read_bytes()


@pytest.mark.rotating
@pytest.mark.parametrize("method", ["grpo", "nft", "awm", "refl"])
def test_the_distance_from_the_reference_begins_at_zero(
    method: str, pairs_run: Callable[..., dict], run: Callable[..., Any], tmp_path: Path
) -> None:
    """Reward finetuning; the stored LoRA also serves a run that measures no distance before it is resumed."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\na dog\n")
    generations = 1 if method == "refl" else 2
    rewarded = {
        "method": method, "prompts": str(prompts), "reward": ["brightness"], "rollout_size": "9x64x64",
        "prompts_per_step": 1, "num_generations": generations, "sampling_steps": 4, "lr": 1e-2,
        "updates_per_rollout": 1, "train_steps": 2,
    }  # fmt: skip
    weight = {} if method == "nft" else {"kl_coef": 0.1}
    if method in ("nft", "awm"):
        rewarded |= {"noise_levels": 2, "init_same_noise": False}
    given = {**pairs_run(), **rewarded, "dataset_file": None, "data_root": None, "video_resolution_buckets": None}
    given = {name: value for name, value in given.items() if value is not None}
    done = run(**given, **weight)
    assert done.curve("kl")[0][1] == 0.0
    assert done.curve("kl")[1][1] > 0.0
    if method == "grpo":
        begun = run(**{**given, "train_steps": 1, "output_dir": str(tmp_path / "plain")})
        late = run(**given | {"output_dir": str(begun.root), "kl_coef": 0.1}, resume_from_checkpoint="latest")
        assert late.metrics[-1]["kl"] == pytest.approx(done.metrics[-1]["kl"], rel=1e-4)


def test_the_loss_is_that_against_the_merged_network(
    pairs_run: Callable[..., dict], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its value and gradient, in float64 from the predictions of a network into which the LoRA was merged."""
    values, compute, errors = pairs_run(train_steps=3, dpo={"beta": 50.0}, first_frame_conditioning_p=0.0), DPO.loss, []

    def watched(method: DPO, transformer: nn.Module, batch: Pairs) -> Any:
        sft, spec = method.sft, method.sft.spec
        loss, metrics = compute(method, transformer, batch)
        merged: Any = spec.load_transformer(torch.float32)
        merged.load_lora_adapter(str(tmp_path / "given"), weight_name=LORA, prefix="transformer")
        merged.fuse_lora()
        noised = sft.noise_batch(batch.clips)
        target = noised.target
        inputs = noised.x_t, noised.frame_t, batch.clips.conditions, noised.meta
        with torch.no_grad():
            known = (spec.predict(merged, *inputs).double() - target).square().flatten(1).mean(1)
        gains = known - (spec.predict(transformer, *inputs).double() - target).square().flatten(1).mean(1)
        expected = -nn.functional.logsigmoid(25.0 * (gains[0::2] - gains[1::2])).mean()
        weights = [weight for weight in transformer.parameters() if weight.requires_grad]
        pair: list[Tensor] = []
        for value in (loss, expected):
            found = torch.autograd.grad(value, weights, retain_graph=True)
            pair.append(torch.cat([one.flatten().double() for one in found]))
        errors.append(
            (float(loss.detach()), float(expected.detach()), float((pair[0] - pair[1]).norm() / pair[1].norm()))
        )
        return loss, metrics

    monkeypatch.setattr(DPO, "loss", watched)
    run(**values)
    assert errors[2][1] != pytest.approx(errors[0][1], rel=1e-2)
    for loss, expected, error in errors:
        assert loss == pytest.approx(expected, rel=1e-5)
        assert error <= 1e-4


@pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")
def test_the_stored_lora_is_part_of_the_run(
    pairs_run: Callable[..., dict], run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copied with it, left out of what others get, compared with its digest before anything is loaded."""
    values = pairs_run(train_steps=1)
    started = preflight(load_config(**values))
    assert (
        disk_needs(started, network_without_weights(started)).initial_lora == (tmp_path / "given" / LORA).stat().st_size
    )
    root = run(**values).root
    Sync(root, str(tmp_path / "copy")).transfer()
    assert (tmp_path / "copy" / STORED).read_bytes() == (root / STORED).read_bytes()
    (exported,) = export_formats(find_source(str(root), options={}), ["diffusers"], tmp_path / "export", dtype="fp32")
    assert load_file(exported.path).keys() == load_file(root / LORA).keys()

    again = {**values, "train_steps": 2, "resume_from_checkpoint": "latest"}
    assert main(["ckpt", "verify", str(root)]) == 0
    content = bytearray((root / STORED).read_bytes())
    content[-1] ^= 1
    for damaged in (bytes(content), None):
        (root / STORED).unlink()
        if damaged is not None:
            (root / STORED).write_bytes(damaged)
        assert main(["ckpt", "verify", str(root)]) == 1
        assert STORED in capsys.readouterr().out
        kind: Kind = "not_found" if damaged is None else "unreadable"
        with refused_options(("--resume_from_checkpoint", kind)) as caught:
            preflight(load_config(**{**again, "rank": 5}))
        assert STORED in str(caught.value)
        assert "rank: 4 then, 5 now" in str(caught.value)  # whatever else is wrong
    shutil.copytree(tmp_path / "copy" / "initial_lora", root / "initial_lora", dirs_exist_ok=True)
    assert run(**again).steps_done == 1


def test_what_keeps_the_base_as_its_reference(
    pairs_run: Callable[..., dict], run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prior preservation, identified by its first loss; and runs that an earlier version began, which report that."""
    values = pairs_run(train_steps=2)
    prior = {"method": "sft", "dataset_file": None, "prior_preservation_weight": 1.0, "class_prompt": "a pattern"}
    preserved = run(
        **{k: v for k, v in {**values, **prior, "output_dir": str(tmp_path / "prior")}.items() if v is not None}
    )
    assert preserved.curve("prior_loss")[0][1] > 0
    assert not (preserved.root / "initial_lora").exists()

    root = run(**{**values, "train_steps": 1}).root
    state = root / "checkpoints" / "step-1" / "state.json"
    fields = json.loads(state.read_text())
    del fields["initial"]["sha256"]
    state.write_text(json.dumps(fields))
    (state.parent / "manifest.json").unlink()
    write_manifest(state.parent, facts={})
    shutil.rmtree(root / "initial_lora")
    resumed = run(**values, resume_from_checkpoint="latest")
    assert abs(resumed.curve("margin")[-1][1]) > 1.0  # as far as the LoRA is from the base
    assert re.search(f"warning: .* LoRA {tmp_path / 'given'}.*--init_from", capsys.readouterr().out)
    assert not (root / "initial_lora").exists()


def test_memory_counts_the_frozen_adapter(pairs_run: Callable[..., dict]) -> None:
    values = pairs_run(transformer_dtype="bf16")
    counted, planned = [], []
    for given in (values, {**values, "init_from": None}):
        checked = preflight(load_config(**{name: value for name, value in given.items() if value is not None}))
        network = network_without_weights(checked)
        spec = checked.family.load(checked.config.model)
        counted.append(count_step(spec, network, StepShape((128, 2, 2, 2))))
        planned.append(RunMemory(checked).plan())
    trained = 4 * sum(weight.numel() for weight in network.parameters() if weight.requires_grad)
    assert counted[0].weights - counted[1].weights == trained
    assert counted[0].gradients == counted[1].gradients
    assert planned[0].peaks["training_step"] - planned[1].peaks["training_step"] == pytest.approx(trained)


def test_the_frozen_adapter_is_a_copy_that_nothing_changes(pairs_run: Callable[..., dict], tmp_path: Path) -> None:
    config = load_config(**pairs_run())
    spec = get_family("ltx_video").load(config.model)
    network = spec.load_transformer(torch.float32)
    make_trainable(network, config.training)
    start_from_lora(tmp_path / "given" / LORA, network, spec=spec, training=config.training)
    before = {name for name, weight in network.named_parameters() if weight.requires_grad}
    attach_reference_adapter(network)
    assert {name for name, weight in network.named_parameters() if weight.requires_grad} == before
    copies = dict(network.named_parameters())
    assert all(torch.equal(copies[name.replace("default", "reference_model")], copies[name]) for name in before)
