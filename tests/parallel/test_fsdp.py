"""FSDP2 on two real processes: trains, samples, saves, exports and resumes as one process does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTXVideoTransformer3DModel
from rank_jobs import Jobs
from real_process import Python
from refusals import refused
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from finetrainers.config.load import load_config
from finetrainers.config.sections import ModelSection
from finetrainers.models.registry import get_family
from finetrainers.parallel.fsdp import modules_of_another_dtype, shard
from finetrainers.parallel.slices import read_whole
from finetrainers.rundir.find import read_state
from finetrainers.rundir.manifest import damage, read_manifest
from finetrainers.runs.training import train

pytestmark = pytest.mark.slow

SCRIPT, TIMEOUT_S = Path(__file__).with_name("rank.py"), 300
CONFIG = Path(__file__).parents[2] / "accelerate_configs" / "fsdp2.yaml"
LORA = {
    "train_steps": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": True, "max_grad_norm": 0.02,
    "eval_num_items": 1, "eval_steps": 2,
}  # fmt: skip
SAMPLES = {"validation_prompts": "one@@@9x64x64:::two@@@9x64x64:::three@@@9x64x64", "validation_inference_steps": 2}
WHOLE = {
    "family": "hunyuan_video",
    **LORA,
    "gradient_accumulation_steps": 1,
    **SAMPLES,
    "validation_prompts": "one@@@9x64x64",
}
FULL = {"train_steps": 2, "training_type": "full-finetune", "gradient_accumulation_steps": 2, "max_grad_norm": 0.02}
#: Groups of one: each process holds all weights, and gradients are averaged over the groups.
HYBRID = {"fsdp": "hybrid", "fsdp_group_size": 1, "sync_each_batch": True}
MIXED = {"training_type": "full-finetune", "mixed_precision": "bf16", "fsdp_cpu_offload": True, "train_steps": 2}
#: The reference model is a frozen copy of the network, which is sharded as well. A larger beta multiplies what rounds.
PAIRS = {
    "method": "dpo", "dpo": {"beta": 50.0}, **FULL, "gradient_accumulation_steps": 1, "eval_num_items": 1,
    "eval_steps": 2,
}  # fmt: skip
#: The reference model is the network with a frozen adapter, which is sharded as well.
SECOND_ROUND = {
    "method": "dpo", "dpo": {"beta": 50.0}, "train_steps": 2, "gradient_checkpointing": True, "max_grad_norm": 0.02,
    "init_from": "{root}/lora",
}  # fmt: skip
#: In files of another dtype; how they are loaded is what differs.
OF_BF16 = {"training_type": "full-finetune", "train_steps": 1, "pretrained_model_name_or_path": "{bf16}"}
#: Shards are of codes.
QUANTIZED = {**LORA, "quantize_frozen": "int8"}
JOBS: dict[str, dict[str, Any]] = {
    "lora": {**LORA, **SAMPLES},
    "full": {**FULL, "checkpointing_steps": 1, "async_checkpointing": True, "_least_file_bytes": 1000},
    "a part fails": {
        **FULL,
        "train_steps": 1,
        "checkpointing_steps": 1,
        "async_checkpointing": True,
        "_fail_saving_on": 1,
    },
    "gathered": {**FULL, "checkpointing_steps": 1, "sharded_checkpoints": False},
    "resumed": {
        **FULL,
        "resume_from_checkpoint": "1",
        "activation_memory": "keep_attention",
        "_least_file_bytes": 1000,
    },
    "regrouped": {**FULL, **HYBRID, "resume_from_checkpoint": "{root}/full/checkpoints/step-1"},
    "damaged": {
        **FULL,
        "sharded_checkpoints": False,
        "resume_from_checkpoint": "latest",
        "_damaged": "{root}/gathered/checkpoints/step-2/optimizer.pt",
    },
    "widened": OF_BF16,
    "copied": {**OF_BF16, "_copied": True},
    "hybrid": {**LORA, **HYBRID, "dry_batches": "on"},
    "offloaded": MIXED,
    "pairs": PAIRS,
    "second round": SECOND_ROUND,
    "quantized": {**QUANTIZED, "activation_memory": "auto", "memory_budget": 100, "_measured_on": 1},
    "whole": WHOLE,
    "swapped": {**WHOLE, "blocks_to_swap": 3, "activation_memory": "offload"},
    "refused": {"use_ema": True, "optimizer": "lion"},
    "uneven": {"fsdp": "hybrid", "fsdp_group_size": 3},
}
NEEDS = {"resumed": ["full"], "regrouped": ["full"], "damaged": ["gathered"], "second round": ["lora"]}


@pytest.fixture(scope="module")
def bf16_repo(tiny_repo: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose transformer is in bf16, as published ones are."""
    repo = tmp_path_factory.mktemp("bf16") / "repo"
    shutil.copytree(tiny_repo("ltx_video"), repo)
    LTXVideoTransformer3DModel.from_pretrained(
        repo, subfolder="transformer", torch_dtype=torch.bfloat16
    ).save_pretrained(repo / "transformer")
    return repo


@pytest.fixture(scope="module")
def jobs(
    options: Callable[..., dict],
    do_jobs: Callable[..., Jobs],
    bf16_repo: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Jobs:
    root = tmp_path_factory.mktemp("fsdp")
    todo = {
        name: options(root / {"resumed": "full", "damaged": "gathered"}.get(name, name), **changes)
        for name, changes in JOBS.items()
    }
    todo = json.loads(json.dumps(todo).replace("{root}", str(root)).replace("{bf16}", str(bf16_repo)))
    launcher = ["accelerate.commands.launch", "--config_file", str(CONFIG), "--num_processes", "2"]
    return do_jobs(root, todo, launcher=[*launcher, "--mixed_precision", "no"], needs=NEEDS, TORCHDYNAMO_DISABLE="1")


@pytest.fixture(scope="module")
def single(options: Callable[..., dict], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`single(job)`: directory of the same run on one process, with twice the batch."""
    root = tmp_path_factory.mktemp("single")
    larger = {
        "lora": {**LORA, "batch_size": 2},
        "full": {**FULL, "gradient_accumulation_steps": 4},
        "offloaded": {**MIXED, "fsdp_cpu_offload": False, "batch_size": 2},
        "pairs": {**PAIRS, "batch_size": 2},
        "quantized": {**QUANTIZED, "batch_size": 2},
    }

    def run(name: str) -> Path:
        name = "lora" if name == "hybrid" else name
        if not (root / name).exists():
            train(load_config(**options(root / name, **larger[name])))
        return root / name

    return run


def read(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def curve(records: list[dict[str, Any]], *names: str) -> torch.Tensor:
    return torch.tensor([[record[name] for name in names] for record in records if names[0] in record])


def weights(directory: Path) -> dict[str, torch.Tensor]:
    lora = directory / "pytorch_lora_weights.safetensors"
    files = [lora] if lora.is_file() else sorted((directory / "transformer").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def close(ours: dict[str, Any], theirs: dict[str, Any], *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "name",
    ["full", *(pytest.param(name, marks=pytest.mark.rotating) for name in ("lora", "hybrid", "pairs", "quantized"))],
)
def test_same_training_as_one_process(name: str, jobs: Jobs, single: Callable[[str], Path]) -> None:
    rank, other = jobs[name]
    kind = "fsdp2 in groups of 1" if name == "hybrid" else "fsdp2"
    assert f"2 processes ({kind})" in rank["kind"]
    assert rank["digest"] == other["digest"]
    if name == "full":  # where there is nothing else that both ranks look at
        assert not set(rank["inputs"]) & set(other["inputs"])
    columns = ("loss", "grad_norm", "lr")
    found, expected = rank["metrics"], read(single(name))
    torch.testing.assert_close(curve(found, *columns), curve(expected, *columns), rtol=1e-5, atol=0)
    torch.testing.assert_close(curve(found, "eval_loss"), curve(expected, "eval_loss"), rtol=1e-5, atol=0)
    close(weights(jobs.directory(name)), weights(single(name)))


@pytest.mark.rotating
def test_a_second_round_begins_at_its_reference(jobs: Jobs, options: Callable[..., dict], tmp_path: Path) -> None:
    rank, other = jobs["second round"]
    train(
        load_config(**options(tmp_path, **{**SECOND_ROUND, "init_from": str(jobs.directory("lora")), "batch_size": 2}))
    )
    assert rank["digest"] == other["digest"]
    found, expected, columns = rank["metrics"], read(tmp_path), ("loss", "margin", "grad_norm")
    assert curve(found, "margin")[0] == 0
    torch.testing.assert_close(curve(found, *columns), curve(expected, *columns), rtol=1e-4, atol=1e-6)
    close(weights(jobs.directory("second round")), weights(tmp_path), rtol=1e-4, atol=1e-5)


@pytest.mark.rotating
def test_swapped_blocks_change_nothing(jobs: Jobs) -> None:
    """Their weights are whole on each process, and nobody gathers them; a block that stays is split as before."""
    for swapped, whole in zip(jobs["swapped"], jobs["whole"], strict=True):
        assert swapped["digest"] == whole["digest"]
        ours, theirs = swapped["metrics"], whole["metrics"]
        assert torch.equal(curve(ours, "loss", "grad_norm"), curve(theirs, "loss", "grad_norm"))
        assert torch.equal(curve(ours, "eval_loss"), curve(theirs, "eval_loss"))
    [sample] = jobs.directory("whole").rglob("*.mp4")
    same = jobs.directory("swapped") / sample.relative_to(jobs.directory("whole"))
    assert same.read_bytes() == sample.read_bytes()


@pytest.mark.rotating
def test_weights_are_computed_with_in_bf16_and_kept_in_fp32(jobs: Jobs, single: Callable[[str], Path]) -> None:
    """Norm layers see rounded weights here and none under autocast alone, so that the two agree to bf16's precision."""
    rank, _ = jobs["offloaded"]
    assert "(fsdp2, on the host) on cpu:0, bf16 " in rank["kind"]
    found, expected = rank["metrics"], read(single("offloaded"))
    torch.testing.assert_close(
        curve(found, "loss", "grad_norm"), curve(expected, "loss", "grad_norm"), rtol=2e-3, atol=0
    )
    ours, theirs = weights(jobs.directory("offloaded")), weights(single("offloaded"))
    close(ours, theirs, rtol=0, atol=5e-3)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in ours.values())


@pytest.mark.rotating
def test_weights_of_files_become_fp32_part_by_part(
    jobs: Jobs, options: Callable[..., dict], bf16_repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped and widened in shards, or on the device, they are those that each process loaded in fp32 at its turn."""
    for widened, copied in zip(jobs["widened"], jobs["copied"], strict=True):
        assert widened["digest"] == copied["digest"]
        assert widened["results"] == copied["results"]
    found = {}
    for name in ("widened", "copied"):
        if name == "copied":
            monkeypatch.setattr("finetrainers.training.assemble.mapped_dtype", lambda *_: None)
        values = options(tmp_path / name, **{**OF_BF16, "pretrained_model_name_or_path": str(bf16_repo)})
        train(load_config(**values))
        found[name] = weights(tmp_path / name)
    close(found["widened"], found["copied"], rtol=0, atol=0)


@pytest.mark.rotating
def test_all_samples_of_an_odd_number_are_written(jobs: Jobs) -> None:
    found = sorted(path.name for path in (jobs.directory("lora") / "samples" / "step-000002").glob("*.mp4"))
    assert found == ["00-one-0.mp4", "01-two-0.mp4", "02-three-0.mp4"]


@pytest.mark.rotating
def test_what_shards_store_changes_between_steps(jobs: Jobs) -> None:
    """Rank 1 alone has measured that it does not fit; the weights are those of one process (see above)."""
    events = map(json.loads, (jobs.directory("quantized") / "events.jsonl").read_text().splitlines())
    assert [event["setting"] for event in events if event["event"] == "activation_memory"] != []


def test_the_export_names_the_stock_class(jobs: Jobs) -> None:
    config = json.loads((jobs.directory("full") / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "LTXVideoTransformer3DModel"


@pytest.mark.rotating
def test_resuming_changes_nothing(jobs: Jobs) -> None:
    """Nor does what blocks store for backward: everything in the one run, attention in the other."""
    straight, resumed = jobs["full"][0], jobs["resumed"][0]
    assert len(resumed["inputs"]) < len(straight["inputs"])
    columns = ("loss", "grad_norm", "step")
    assert torch.equal(curve(straight["metrics"], *columns), curve(resumed["metrics"], *columns))
    assert straight["results"] == resumed["results"] != {}


def test_a_checkpoint_is_what_one_process_would_have_saved(jobs: Jobs, single: Callable[[str], Path]) -> None:
    """Gathered weights and optimizer are whole and named as by one process: any strategy but DeepSpeed continues from
    them."""
    ours, theirs = jobs.directory("gathered") / "checkpoints" / "step-2", single("full") / "checkpoints" / "step-2"
    close(weights(ours), weights(theirs))
    found, expected = (torch.load(path / "optimizer.pt", weights_only=True) for path in (ours, theirs))
    assert found["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
    assert found["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        close(found["state"][number], values, rtol=1e-4)


def test_each_process_writes_its_part(jobs: Jobs) -> None:
    """Put together, the parts are what rank 0 gathers, bit for bit; torch's own reader puts them together."""
    parts, gathered = (jobs.directory(name) / "checkpoints" / "step-2" for name in ("full", "gathered"))
    files = read_manifest(parts)["files"]
    assert sum(name.startswith("transformer/diffusion_pytorch_model-") for name in files) > 2
    assert {f"optimizer/shard-0000{rank}-of-00002.safetensors" for rank in (1, 2)} < files.keys()
    assert "optimizer.pt" not in files
    assert damage(parts, contents=True) is None
    close(weights(parts), weights(gathered), rtol=0, atol=0)
    stock = LTXVideoTransformer3DModel.from_pretrained(parts / "transformer")
    close(dict(stock.state_dict()), weights(gathered), rtol=0, atol=0)
    values = read_state(parts)["optimizer"]
    found = read_whole(parts / "optimizer", values)
    expected = torch.load(gathered / "optimizer.pt", weights_only=True)
    names = values["param_groups"][0]["params"]
    assert len(names) == len(expected["state"]) == len(found["state"])
    for number, name in enumerate(names):
        close(found["state"][name], expected["state"][number], rtol=0, atol=0)


@pytest.mark.rotating
def test_parts_are_continued_in_other_groups(jobs: Jobs) -> None:
    """Two parts are read by processes that hold everything each, and one of them writes: the others have copies."""
    whole, regrouped = (jobs[name][0]["metrics"] for name in ("full", "regrouped"))
    assert torch.equal(curve(whole, "loss")[1:], curve(regrouped, "loss"))
    torch.testing.assert_close(curve(whole, "grad_norm")[1:], curve(regrouped, "grad_norm"))  # summed in another order
    found, expected = (jobs.directory(name) / "checkpoints" / "step-2" for name in ("regrouped", "gathered"))
    assert [path.name for path in (found / "optimizer").iterdir()] == ["shard-00001-of-00002.safetensors"]
    close(weights(found), weights(expected))
    values = read_state(found)["optimizer"]
    names, state = values["param_groups"][0]["params"], read_whole(found / "optimizer", values)["state"]
    for number, one in torch.load(expected / "optimizer.pt", weights_only=True)["state"].items():
        close(state[names[number]], one, rtol=1e-4)


@pytest.mark.rotating
def test_every_byte_of_a_checkpoint_is_read_by_one_process(jobs: Jobs) -> None:
    """The newest one is damaged, which one process sees, and both fall back to the one before."""
    damaged, gathered = jobs["damaged"], jobs["gathered"]
    shares = [rank["hashed"] for rank in damaged]
    large = [name for share in shares for name in share if not name.endswith(".json")]
    assert sorted(large) == ["diffusion_pytorch_model.safetensors"] * 2 + ["optimizer.pt"] * 2
    assert all(shares)
    assert torch.equal(curve(damaged[0]["metrics"], "step", "loss"), curve(gathered[0]["metrics"], "step", "loss"))
    assert len(damaged[0]["inputs"]) < len(gathered[0]["inputs"])


def test_a_part_that_cannot_be_written_ends_the_run_on_all_ranks(jobs: Jobs) -> None:
    first, second = jobs["a part fails"]
    assert second["error"] == "OSError('disk full')"
    assert first["error"].startswith("RemoteRankError(")
    assert " rank 1: disk full" in first["error"]
    assert list((jobs.directory("a part fails") / "checkpoints").iterdir()) == []


@pytest.mark.rotating
def test_parts_are_continued_by_one_process(
    jobs: Jobs, single: Callable[[str], Path], options: Callable[..., dict], tmp_path: Path
) -> None:
    shutil.copytree(jobs.directory("full") / "checkpoints" / "step-1", tmp_path / "checkpoints" / "step-1")
    changes = {**FULL, "gradient_accumulation_steps": 4, "resume_from_checkpoint": "latest"}
    train(load_config(**options(tmp_path, **changes)))
    close(weights(tmp_path), weights(single("full")))
    found, expected = (
        torch.load(root / "checkpoints" / "step-2" / "optimizer.pt", weights_only=True)["state"]
        for root in (tmp_path, single("full"))
    )
    for number, values in expected.items():
        close(found[number], values, rtol=1e-4)


def test_what_parts_cannot_do_is_refused(jobs: Jobs) -> None:
    for refusal, uneven in zip(jobs["refused"], jobs["uneven"], strict=True):
        assert {"--use_ema", "--optimizer"} <= {*refusal["places"]}
        assert "optimizer: lion " in refusal["error"]
        assert uneven["places"] == ["--fsdp_group_size"]
        assert " 2 processes" in uneven["error"]
        assert " got 3;" in uneven["error"]


@pytest.mark.rotating
def test_sizes_that_do_not_divide_and_two_dtypes(
    options: Callable[..., dict], tiny_repo: Callable[..., Path], python: Python, tmp_path: Path
) -> None:
    """Three processes, of a network that keeps modules in fp32 among bf16 weights: what it saves is what it was."""
    changes = {
        **FULL, "train_steps": 1, "fsdp": "full", "optimizer": "adamw", "lr": 0.0, "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "gradient_accumulation_steps": 1, "master_weights": "stochastic_rounding", "transformer_dtype": "bf16",
        "mixed_precision": "bf16",
    }  # fmt: skip
    (tmp_path / "jobs.json").write_text(json.dumps({"three": options(tmp_path / "run", **changes)}))
    code = (
        "import runpy, sys\nfrom diffusers import LTXVideoTransformer3DModel as Network\n"
        "Network._keep_in_fp32_modules = ['time_embed', 'norm_q']\n"
        f"sys.argv = {[str(SCRIPT), str(tmp_path / 'jobs.json'), str(tmp_path)]!r}\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    for process in python.ranks(3, "-c", code, TORCHDYNAMO_DISABLE="1"):
        assert process.wait(TIMEOUT_S) == 0, process.stderr
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text())["three"] for rank in range(3)]
    assert "3 processes (fsdp2)" in ranks[0]["kind"]
    assert len({rank["digest"] for rank in ranks}) == 1
    base = load_file(tiny_repo("ltx_video") / "transformer" / "diffusion_pytorch_model.safetensors")
    exported, saved = weights(tmp_path / "run"), weights(tmp_path / "run" / "checkpoints" / "step-1")
    assert exported.keys() == saved.keys() == base.keys()
    for name, value in base.items():
        kept = "time_embed" in name or "norm_q" in name
        assert torch.equal(saved[name], value if kept else value.bfloat16()), name
        assert torch.equal(exported[name], value.bfloat16()), name
    # Torchao's rounded weights have a state that is not sliced: rank 0 writes it.
    optimizer = torch.load(tmp_path / "run" / "checkpoints" / "step-1" / "optimizer.pt", weights_only=True)
    assert all(
        value.untyped_storage().nbytes() == value.nbytes
        for values in optimizer["state"].values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    )


def test_a_module_of_two_dtypes_is_refused() -> None:
    block = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4))
    assert modules_of_another_dtype(block) == [block[1]]
    assert modules_of_another_dtype(block.float()) == []
    block[0].weight.data = block[0].weight.data.bfloat16()
    with refused("unsupported", " 0.bias,", "torch.float32 ", "torch.bfloat16 ", "--master_weights fp32"):
        modules_of_another_dtype(block)


def test_calls_without_backward_see_the_same_inputs(tiny_repo: Callable[..., Path]) -> None:
    """Weights outside of layers stay gathered, in bf16, after such a call; guidance must not be rounded to it then."""
    spec = get_family("hunyuan_video").load(
        ModelSection(model_name="hunyuan_video", pretrained_model_name_or_path=str(tiny_repo("hunyuan_video")))
    )
    network = spec.load_transformer(torch.float32)
    texts, meta = spec.empty_inputs(1)
    for name, tensor in texts.tensors.items():
        tensor.fill_(True) if name.endswith("_mask") else tensor.normal_()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        shard(network, spec.block_modules(network), mesh=init_device_mesh("cpu", (1,)), computed=torch.bfloat16)
        arguments = (torch.randn(1, 16, 3, 8, 8), torch.tensor([0.7]), texts, replace(meta, guidance=6.018))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            first, second = (spec.predict(network, *arguments) for _ in range(2))
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(first, second)
