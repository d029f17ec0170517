"""`finetrainers estimate`: what it prints, for people and programs, with and without data and processes."""

from __future__ import annotations

import json
import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from refusals import refused_command

from finetrainers.cli.main import main
from finetrainers.utils.launch import launcher_environment

ROOT = Path(__file__).parents[2]


@pytest.fixture
def estimate(tiny_repo: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*flags: str, repo: Path | None = None) -> tuple[int, str, str]:
        place = repo or tiny_repo("ltx_video")
        capsys.readouterr()  # libraries may print while the model is built
        code = main(["estimate", "--pretrained_model_name_or_path", str(place), *flags])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


SIZE = ("--video_resolution_buckets", "49x512x768")


def test_it_fits_or_not(estimate: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = estimate(*SIZE, "--gpu", "24GB")
    assert code == 0
    assert "it fits 24 GB (23.5 GiB)" in out, "not 24 GiB, which no such card has"
    assert re.search("^the data .* cache ", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 100, out
    code, out, _ = estimate(*SIZE, "--gpu", "2GB", "--batch_size", "2")
    assert code == 0
    assert "it fits 2 GiB" not in out
    assert "fit 2 GiB" in out
    assert "saves" in out
    code, out, _ = estimate(*SIZE, "--gpu", "0.001")
    assert "it fits " not in out
    assert "saves" not in out


def test_json(estimate: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = estimate(*SIZE, "--gpu", "2", "--batch_size", "2", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["fits"] is False
    assert found["peak"]["allocated"] == max(phase["gpu"] for phase in found["phases"].values())
    assert found["advice"]["reserved"] <= 2 * 2**30
    assert all(one["saves"] > 0 or one["planned_slowdown_percent"] < 0 for one in found["advice"]["switches"])


def test_processes_of_a_launcher(
    estimate: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = (*SIZE, "--training_type", "full-finetune", "--json")
    before = dict(os.environ)
    alone = json.loads(estimate(*full)[1])
    assert alone["processes"] == 1
    file = ROOT / "accelerate_configs" / "fsdp2.yaml"
    shared = json.loads(estimate(*full, "--accelerate_config", str(file), "--num_processes", "4")[1])
    assert shared["processes"] == 4
    weights = [one["phases"]["checkpoint"]["parts"]["trainable weights"] for one in (alone, shared)]
    assert weights[1] == pytest.approx(weights[0] / 4, rel=1e-3)
    assert dict(os.environ) == before
    monkeypatch.chdir(tmp_path)  # packaged files are found by their name in a checkout
    zero = launcher_environment(Path("accelerate_configs/deepspeed_zero3_offload.yaml"))
    assert zero["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert zero["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "cpu"


def test_errors(estimate: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    for flags, place, value in (
        ((*SIZE, "--gpu", "much"), "--gpu", "'much'"),
        ((*SIZE, "--gpu", "9" * 5000 + "GB"), "--gpu", "(5004 "),
        ((*SIZE, "--accelerate_config", str(tmp_path / "absent.yaml")), "--accelerate_config", "absent.yaml"),
    ):
        code, out, err = estimate(*flags)
        assert (code, out) == (2, "")
        assert f"- {place}: " in err
        assert value in err
    model = ["--pretrained_model_name_or_path", "someone/ltx-model", "--model_name", "ltx_video"]
    place = "--pretrained_model_name_or_path"
    assert refused_command(["estimate", *SIZE, *model]) == (2, [(place, "not_found")])
    processes = ["--num_processes", "3", "--num_machines", "2"]
    assert refused_command(["estimate", *SIZE, *model, *processes]) == (2, [("--num_processes", "conflict")])
    assert refused_command(["estimate", "--list_models"]) == (2, [("--list_models", "unknown")])


def test_published_models_are_estimated_without_data_and_downloads(
    estimate: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A LoRA has the recommended settings and the largest size that a run chooses, unless options name others."""
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: pytest.fail("asks the Hub"))
    (tmp_path / "run.toml").write_text(f'data_root = "{tmp_path}/later"\noutput_dir = "{tmp_path}/run"\n')
    model, run = Path("Lightricks/LTX-Video"), ("--config", str(tmp_path / "run.toml"), "--host", "64GB")
    code, out, err = estimate(*run, "--gpu", "12GB", repo=model)
    assert code == 0, err
    assert (" rank 32 " in out, " 49x512x768\n" in out) == (True, True)
    lines = out.splitlines()
    flags, toml = lines[lines.index("as flags:") + 1].split(), lines[lines.index("in the config file:") + 1 : -1]
    assert ("--precompute_conditions" in flags, "  precompute_conditions = true" in toml) == (True, True)
    assert lines[-1].endswith(" --memory_budget 12GB")
    assert "it fits 12 GB" in estimate(*run, "--gpu", "12GB", *flags, repo=model)[1]
    with (tmp_path / "run.toml").open("a") as file:
        file.write("\n".join(toml))
    assert "it fits 12 GB" in estimate(*run, "--gpu", "12GB", repo=model)[1]
    areas = ("--resolutions", "256x256", "--num_ar_buckets", "0", "--frame_buckets", "17")
    assert " 17x256x256\n" in estimate(*run, *areas, repo=model)[1]
    both = [estimate("--json", repo=Path(f"{owner}/CogVideoX-5b")) for owner in ("THUDM", "zai-org")]
    assert both[0][1] == both[1][1] != ""
    other = ["estimate", "--pretrained_model_name_or_path", "Skywork/SkyReels-V1-Hunyuan-I2V"]
    assert refused_command(other) == (2, [("--pretrained_model_name_or_path", "not_found")])


def test_host_memory_is_compared_with_the_machine(estimate: Callable[..., tuple[int, str, str]]) -> None:
    """Options that the machine has too little memory for are not proposed, and a run that needs more gets a warning."""
    model = Path("hunyuanvideo-community/HunyuanVideo")
    options = ("--activation_memory", "checkpoint", "--precompute_conditions", "--gpu", "24GB", "--json")
    large, small = (json.loads(estimate(*options, "--host", host, repo=model)[1]) for host in ("64GB", "20GB"))
    assert [(found["fits"], found["fits_host"]) for found in (large, small)] == [(True, True), (True, False)]
    assert large["blocks_to_swap"]["blocks"] > 0
    assert small["advice"] is None, "the network alone takes 24 GiB"
    assert {phase["host"] > 0 for phase in small["phases"].values()} == {True}
    code, out, _ = estimate(*SIZE, "--host", "0.5")
    assert code == 0
    assert "\nwarning: " in out
    assert "warning: " not in estimate(*SIZE, "--host", "8")[1]


#: What only a CUDA GPU can do, and what the run is planned for.
NEEDS_CUDA = [
    (("--use_cpu_offload_optimizer", "--max_grad_norm", "0"), ("48GB", "h100")),
    (("--quantize_frozen", "nf4"), ("24GB", "t4")),
    (("--attn_backend", "flash", "--mixed_precision", "bf16"), ("80GB", "4090")),
    (("--attn_backend", "_native_cudnn", "--mixed_precision", "bf16"), ("39.4GiB", "a100-40gb")),
    (("--compile", "regional"), ("l40s",)),
]


def test_the_stated_gpu_is_judged_and_not_this_machine(
    estimate: Callable[..., tuple[int, str, str]], tiny_repo: Callable[..., Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The estimate and the dry run agree; a package that is not installed here is a warning."""
    monkeypatch.setattr("finetrainers.config.attention.find_spec", lambda name: None)
    monkeypatch.setattr("finetrainers.config.checks.options.find_spec", lambda name: None)
    monkeypatch.setattr("finetrainers.config.checks.kernels.find_spec", lambda name: None)
    (tmp_path / "clips").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "clips" / "a.png")
    (tmp_path / "clips" / "a.txt").write_text("a black square")
    train = [
        "train", "--model_name", "ltx_video", "--pretrained_model_name_or_path", str(tiny_repo("ltx_video")),
        "--dry_run",
        "--data_root", str(tmp_path / "clips"), "--output_dir", str(tmp_path / "run"), "--train_steps", "1", "--rank",
        "4",
        "--video_resolution_buckets", "1x64x64",
    ]  # fmt: skip
    for flags, gpus in NEEDS_CUDA:
        if flags[0] != "--compile":
            assert estimate(*SIZE, *flags)[0] == 2, "this machine has no GPU"
        for gpu in gpus:
            code, out, err = estimate(*SIZE, *flags, "--gpu", gpu)
            assert code == 0, (flags, gpu, err)
            assert re.search(r"^it fits .+ GiB", out, re.MULTILINE), out
            assert ("not installed" in err) == (flags[1] in ("nf4", "flash", "regional")), (flags, err)
        capsys.readouterr()
        assert main([*train, *flags, "--gpu", gpus[0]]) == 0
        assert "it fits " in capsys.readouterr().out
        if flags[0] != "--compile":
            assert main([*train, *flags]) == 2, "without a stated GPU a dry run judges this machine"
    code, _, err = estimate(*SIZE, "--attn_backend", "flash", "--mixed_precision", "bf16", "--gpu", "t4")
    assert (code, "--attn_backend: " in err, "8.0, got 7.5" in err) == (2, True, True)
    assert main([*train, "--gpu", "h1000"]) == 2
    assert "'h100'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_memory_budget_chooses_as_in_a_run(
    estimate: Callable[..., tuple[int, str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = (*SIZE, "--batch_size", "4", "--json")
    before, (code, out, err) = json.loads(estimate(*large)[1]), estimate(*large, "--memory_budget", "3GB")
    after = json.loads(out)
    assert code == 0
    assert after["peak"]["reserved"] <= 3 * 2**30 < before["peak"]["reserved"]
    assert "memory budget: " in err
    assert estimate(*large, "--memory_budget", "0.001")[0] == 2
    # The smaller of both limits decides what `auto` is.
    auto = (*large, "--activation_memory", "auto", "--gpu", "80GB")
    chosen = [json.loads(estimate(*auto, *more)[1]) for more in ((), ("--memory_budget", "3GB"))]
    assert chosen[0]["peak"]["reserved"] > 3 * 2**30 >= chosen[1]["peak"]["reserved"]
    assert {one["gpu_gib"] for one in chosen} == {79.1}


def test_the_published_memory_table_is_planned_on_a_machine_without_a_gpu(
    estimate: Callable[..., tuple[int, str, str]], tiny_repo: Callable[..., Path]
) -> None:
    """Every kind of run of the table, with the options that it has here."""
    optimizers = {
        "adamw": (), "8-bit": ("--optimizer", "adamw-bnb-8bit"),
        "offload": ("--use_cpu_offload_optimizer", "--offload_gradients", "--max_grad_norm", "0"),
        "deepspeed": ("--deepspeed", "--zero_stage", "2", "--zero_offload", "--num_processes", "2"),
    }  # fmt: skip
    script = runpy.run_path(str(ROOT / "benchmarks" / "memory_seed_table.py"))
    runs = {(row.kind, row.optimizer, row.checkpointing, row.batch) for row in script["rows"]()}
    assert len(runs) == 19
    for kind, optimizer, checkpointing, batch in sorted(runs):
        flags = ["--training_type", "full-finetune" if kind == "full" else "lora", "--batch_size", str(batch)]
        flags += ["--gradient_checkpointing"] if checkpointing else []
        size = ("--video_resolution_buckets", "9x64x64")
        repo = tiny_repo("cogvideox")
        code, out, err = estimate(*size, *flags, *optimizers[optimizer], "--gpu", "a100-80gb", "--json", repo=repo)
        assert code == 0, (kind, optimizer, err)
        assert json.loads(out)["gpu"] == "A100 80 GB"


def test_exact_options_are_chosen_for_the_gpu_and_others_are_proposed(
    estimate: Callable[..., tuple[int, str, str]],
) -> None:
    """Also in a command of another trainer; what the user has set stays."""

    def planned(*flags: str) -> dict[str, Any]:
        code, out, err = estimate(*SIZE, "--json", *flags)
        assert code == 0, err
        return json.loads(out)

    steps = ("--precompute_conditions", "--precompute_batch_size", "1")
    plain = planned(*steps, "--batch_size", "400")["peak"]["reserved"]
    gpu = ("--gpu", f"{0.9 * plain / 2**30:.3f}GiB")
    for batch in ("--batch_size", "--train_batch_size"):
        chosen = planned(*steps, *gpu, batch, "400")
        assert chosen["fits"]
        assert chosen["peak"]["reserved"] < 0.9 * plain
        assert chosen["activation_memory"]["blocks"] > 0
    for given in ("--no-fit_gpu", "--no-gradient_checkpointing"):
        assert not planned(*steps, *gpu, "--batch_size", "400", given)["fits"]
    proposed = planned("--batch_size", "4", "--gpu", "4GiB")
    assert not proposed["fits"]
    assert {"enable_slicing": True} in [switch["options"] for switch in proposed["advice"]["switches"]]
    assert planned("--batch_size", "4", "--gpu", "4GiB", "--memory_budget", "3GB")["fits"]
