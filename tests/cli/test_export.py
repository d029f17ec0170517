"""`finetrainers export`: what it writes for every family, what is left after a failure, and what it refuses."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import FAMILIES
from peft import LoraConfig, get_peft_model_state_dict
from refusals import refused_command
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from finetrainers.cli.main import main
from finetrainers.config.errors import ConfigError
from finetrainers.config.load import dump_toml, load_config
from finetrainers.models import cogvideox
from finetrainers.models.files import lora_formats, saving
from finetrainers.models.registry import get_family
from finetrainers.plan.preflight import preflight
from finetrainers.results import export_formats as module
from finetrainers.sampling.weights import find_target
from finetrainers.utils.files import unfinished_path

LORA = "pytorch_lora_weights.safetensors"


@pytest.fixture
def a_run(tiny_repo: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """`a_run(family, **settings)`: what a run leaves, and the trained network."""

    def build(
        family: str = "ltx_video", *, full: bool = False, version: str | None = None, expert: str | None = None,
        **settings: Any,
    ) -> tuple[Path, Any]:  # fmt: skip
        root = tmp_path / (f"my {family}{version or ''}" if expert is None else f"pair/{expert}")
        kind: dict[str, Any] = {"expert": expert} if expert else {}
        kind |= {"training_type": "full-finetune"} if full else {}
        config = load_config(
            model_name=family, pretrained_model_name_or_path=str(tiny_repo(family, version=version)), data_root="clips",
            output_dir=str(root), id_token="MYSTYLE", **kind,
        )  # fmt: skip
        spec = get_family(family).load(config.model)
        network: Any = spec.load_transformer(torch.float32)
        root.mkdir(parents=True)
        if full:
            with torch.no_grad():
                next(iter(network.parameters())).add_(1.0)
            spec.save_full(root, network, network.state_dict())
        else:
            network.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=list(spec.facts.lora_targets), **settings))
            for name, parameter in network.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, generator=torch.Generator().manual_seed(int(expert == "low")))
            spec.save_lora(root, get_peft_model_state_dict(network), network.peft_config["default"].to_dict())
        (root / "config.toml").write_text(dump_toml(config))
        return root, network

    return build


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.mark.parametrize("family", FAMILIES)
def test_all_formats_of_a_run(
    family: str, a_run: Callable[..., tuple[Path, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, network = a_run(family)
    assert main(["export", str(root), "--format", "comfyui", "kohya", "peft", "diffusers", "merged", "--dtype", "fp32",
                 "--lora_scale", "0.5"]) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert said.count("  read back: ") == 5
    assert f"comfyui: {root}/export/comfyui/my-{family}.safetensors\n  for ComfyUI" in said
    found = metadata(root / "export" / "comfyui" / f"my-{family}.safetensors")
    assert (found["ss_network_dim"], found["ss_network_alpha"]) == ("4", "8")
    assert (found["modelspec.trigger_phrase"], found["modelspec.title"]) == ("MYSTYLE", f"my-{family}")
    assert found["modelspec.architecture"].endswith("/lora")
    # The hash is of the weights alone: of what follows the header.
    content = (root / "export" / "comfyui" / f"my-{family}.safetensors").read_bytes()
    import hashlib

    digest = hashlib.sha256(content[8 + int.from_bytes(content[:8], "little") :]).hexdigest()
    assert (found["sshs_model_hash"], found["modelspec.hash_sha256"]) == (digest, f"0x{digest}")
    # By PEFT itself, at half the strength.
    network.fuse_lora(lora_scale=0.5)
    network.unload_lora()
    expected = network.state_dict()
    merged = load_file(root / "export" / "merged" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
    again = type(network).from_pretrained(root / "export" / "merged", subfolder="transformer")
    assert {
        name: again.config[name] for name in vars(network.config) if name[0] != "_"
    }.items() <= network.config.items()
    elsewhere = ["--pretrained_model_name_or_path", root / "none", "--output_dir", root / "other"]
    assert refused_command(["export", root, "--format", "merged", *elsewhere]) == (2, [(elsewhere[0], "not_found")])


def test_two_experts_are_exported_as_a_pair(
    a_run: Callable[..., tuple[Path, Any]], tiny_repo: Callable[..., Path], tmp_path: Path
) -> None:
    """Each file is the LoRA of its run, under a name that tells them apart; a file alone is exported likewise."""
    runs = {expert: a_run("wan", version="a14b", expert=expert)[0] for expert in ("high", "low")}
    formats = ["comfyui", "kohya", "peft", "diffusers", "merged"]
    command = ["export", str(runs["low"]), "--other_expert", str(runs["high"]), "--dtype", "fp32", "--format", *formats]
    assert main(command) == 0
    exported = tmp_path / "pair" / "low" / "export"
    found = {str(path.relative_to(exported)) for path in exported.rglob("*.safetensors")}
    pair = {expert: f"pair_{expert}_noise" for expert in runs}
    assert found == {
        *(f"{name}/{file}.safetensors" for name in ("comfyui", "kohya", "diffusers") for file in pair.values()),
        *(f"peft/{expert}_noise/adapter_model.safetensors" for expert in pair),
        *(f"merged/{part}/diffusion_pytorch_model.safetensors" for part in ("transformer", "transformer_2")),
    }
    for expert, root in runs.items():
        spec = get_family("wan").load(load_config(root / "config.toml").model)
        trained = spec.lora_of(root / LORA)
        for name in ("kohya", "diffusers"):
            layers = spec.lora_of(exported / name / f"{pair[expert]}.safetensors").layers
            assert layers.keys() == trained.layers.keys()
            assert all(layers[n].up.equal(one.up) and layers[n].scale == one.scale for n, one in trained.layers.items())
        assert metadata(exported / "comfyui" / f"{pair[expert]}.safetensors")["modelspec.title"] == pair[expert]
    base = ["--pretrained_model_name_or_path", str(tiny_repo("wan", version="a14b"))]
    alone = [str(exported / "kohya" / "pair_low_noise.safetensors"), "--format", "comfyui", *base]
    alone += ["--output_dir", str(tmp_path / "alone")]
    assert refused_command(["export", *alone]) == (2, [("--expert", "required")])
    assert main(["export", *alone, "--expert", "low", "--dtype", "fp32"]) == 0
    (file,) = (tmp_path / "alone" / "comfyui").glob("*.safetensors")
    assert load_file(file).keys() == load_file(exported / "comfyui" / file.name).keys()
    same = ["export", runs["low"], "--other_expert", runs["low"], "--format", "kohya"]
    assert refused_command(same) == (2, [("--other_expert", "mismatch")])


def test_merged_weights_are_rounded_once(a_run: Callable[..., tuple[Path, Any]]) -> None:
    """In bf16, of a LoRA with DoRA: the sum is made in fp32."""
    root, network = a_run(use_dora=True)
    assert main(["export", str(root), "--format", "merged"]) == 0
    merged = load_file(root / "export" / "merged" / "transformer" / "diffusion_pytorch_model.safetensors")
    base = {name.replace(".base_layer", ""): tensor for name, tensor in network.state_dict().items()}
    layer = network.get_submodule("transformer_blocks.0.attn1.to_q")
    layer.base_layer.weight.data = layer.base_layer.weight.data.bfloat16().float()
    layer.merge()
    name = "transformer_blocks.0.attn1.to_q.weight"
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    assert merged[name].equal(layer.base_layer.weight.data.bfloat16())
    assert merged["proj_in.weight"].equal(base["proj_in.weight"].bfloat16())


def test_all_weights_of_a_full_finetuning(
    a_run: Callable[..., tuple[Path, Any]],
    tiny_repo: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for family, key in (
        ("ltx_video", "model.diffusion_model.patchify_proj.weight"),
        ("hunyuan_video", "single_blocks.0.linear1.weight"),
        ("wan", "model.diffusion_model.blocks.0.self_attn.q.weight"),
        ("cogvideox", "model.diffusion_model.blocks.0.q.weight"),
    ):
        root, network = a_run(family, full=True)
        assert main(["export", str(root), "--format", "diffusers", "comfyui", "--dtype", "fp32"]) == 0
        assert key in load_file(root / "export" / "comfyui" / f"my-{family}.safetensors")
        again = type(network).from_pretrained(root / "export" / "diffusers", subfolder="transformer")
        assert all(tensor.equal(network.state_dict()[name]) for name, tensor in again.state_dict().items())
    _check_single_files(root, network, tiny_repo("cogvideox"), tmp_path, capsys)
    monkeypatch.setattr(saving, "MAX_SHARD_SIZE", 20_000)
    export = ["export", str(root), "--dtype", "fp32", "--overwrite", "--format"]
    folder = root / "export" / "diffusers" / "transformer"
    for one_file in (False, True):
        assert main([*export, "diffusers", *(["--one_file"] if one_file else [])]) == 0
        assert (len(list(folder.glob("*.safetensors"))) == 1) == one_file
    assert all(
        tensor.equal(network.state_dict()[name])
        for name, tensor in load_file(folder / "diffusion_pytorch_model.safetensors").items()
    )
    capsys.readouterr()
    assert refused_command([*export, "comfyui", "--one_file"]) == (2, [("--one_file", "unsupported")])
    code, found = refused_command(["export", root, "--format", "kohya", "merged"])
    assert (code, [place for place, _ in found]) == (2, ["--format", "--format"])
    said = capsys.readouterr().err
    assert "--format: kohya: " in said
    assert "--format: merged: " in said


def comfyui_prediction(network: Any, file: dict[str, torch.Tensor], x_BTCHW: torch.Tensor) -> torch.Tensor:
    """Return what ComfyUI computes: with the positions that the file has, else with rotary ones."""
    table = file.get("model.diffusion_model.patch_embed.pos_embedding")
    embed, network = network.patch_embed, copy.deepcopy(network)

    def embed_patches(text: torch.Tensor, video: torch.Tensor) -> torch.Tensor:
        patches = embed.proj(video.flatten(0, 1)).flatten(2).transpose(1, 2).reshape(len(video), -1, text.shape[-1])
        positions = 0.0 if table is None else table[:, 226 : 226 + patches.shape[1]]
        return torch.cat([text, patches + positions], dim=1)

    network.patch_embed.forward = lambda text, video: embed_patches(embed.text_proj(text), video)
    rotary = {"use_rotary_positional_embeddings": table is None, "use_learned_positional_embeddings": False}
    config = type(network.config)(**{**network.config, **rotary})
    return predict(network, x_BTCHW, cogvideox._rotary(config, x_BTCHW.transpose(1, 2)))


@torch.no_grad()
def predict(network: Any, x_BTCHW: torch.Tensor, positions: Any = None) -> torch.Tensor:
    """Return the network's prediction for fixed prompt embeddings at timestep 500."""
    texts = torch.randn(1, 226, 32, generator=torch.Generator().manual_seed(1))
    prediction: torch.Tensor = network(
        hidden_states=x_BTCHW, encoder_hidden_states=texts, timestep=torch.tensor([500]), image_rotary_emb=positions,
        return_dict=False,
    )[0]  # fmt: skip
    return prediction


def test_comfyui_computes_the_network_that_was_exported(
    a_run: Callable[..., tuple[Path, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CogVideoX-2b leaves its positions out of its weights, and ComfyUI finds them in the file only."""
    root, network = a_run("cogvideox", full=True, version="2b")
    path = root / "export" / "comfyui" / "my-cogvideox2b.safetensors"
    export = ["export", str(root), "--format", "comfyui", "--overwrite"]
    x = torch.randn(1, 2, 16, 60, 90, generator=torch.Generator().manual_seed(0))
    for dtype in ("bf16", "fp32"):
        assert main([*export, "--dtype", dtype]) == 0
        assert "480x720" in capsys.readouterr().out
        weights = load_file(path)
        table = weights["model.diffusion_model.patch_embed.pos_embedding"]
        assert table.equal(network.patch_embed.pos_embedding.float())
    torch.testing.assert_close(comfyui_prediction(network, weights, x), predict(network, x), rtol=0, atol=1e-5)

    # The file is read as a model again, unless its positions are those of another network.
    on = ["--pretrained_model_name_or_path", load_config(root / "config.toml").model.pretrained_model_name_or_path]
    back = [
        "export",
        str(tmp_path / "other.safetensors"),
        "--format",
        "diffusers",
        "--overwrite",
        "--output_dir",
        str(tmp_path / "back"),
        *on,
    ]
    for changed, status in ((table, 0), (table + 1, 2), (table[:, 1:].contiguous(), 2)):
        save_file(
            {**weights, "model.diffusion_model.patch_embed.pos_embedding": changed}, tmp_path / "other.safetensors"
        )
        capsys.readouterr()
        assert main(back) == status
        said = capsys.readouterr()
        assert ("pos_embedding" in said.out + said.err) == (status == 2)

    # A file without them would be read as another network: it is found when it is read back.
    before = path.read_bytes()
    monkeypatch.setattr(lora_formats, "computed_buffers", lambda network: {})
    assert main(export) != 0
    assert "pos_embedding" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_networks_that_comfyui_takes_for_others_are_refused(
    a_run: Callable[..., tuple[Path, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """It ignores the rotary positions of a file with learned ones; LoRAs and other formats do not depend on that."""
    root, _ = a_run("cogvideox", full=True, version="i2v")
    before = sorted(root.rglob("*"))
    assert main(["export", str(root), "--format", "comfyui", "diffusers"]) == 2
    assert "--format: comfyui" in capsys.readouterr().err
    assert sorted(root.rglob("*")) == before
    assert main(["export", str(root), "--format", "diffusers"]) == 0
    config = load_config(root / "config.toml", export_formats=["comfyui"], data_root=str(root))
    with pytest.raises(ConfigError, match="--export_formats"):
        preflight(config)


def _check_single_files(
    root: Path, network: Any, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A single file of a whole network can be exported and sampled from, unless it is quantized or lacks tensors."""
    file = root / "export" / "comfyui" / "my-cogvideox.safetensors"
    on = ["--pretrained_model_name_or_path", str(model)]
    assert (
        main(
            ["export", str(file), "--format", "diffusers", "--dtype", "fp32", "--output_dir", str(folder / "back"), *on]
        )
        == 0
    )
    again = type(network).from_pretrained(folder / "back" / "diffusers", subfolder="transformer").state_dict()
    assert all(tensor.equal(again[name]) for name, tensor in network.state_dict().items())
    target = find_target(str(file)).weights
    assert (target.kind, target.label) == ("full", "my-cogvideox")
    assert target.digest  # or its clips would count as those of the base model

    weights = load_file(file)
    name = "model.diffusion_model.blocks.0.q.weight"
    wrong = {
        "lacking": ({one: tensor for one, tensor in weights.items() if one != name}, " 1 tensor"),
        "quantized": ({**weights, f"{name}.absmax": torch.zeros(1)}, "bitsandbytes"),
    }
    for what, (tensors, value) in wrong.items():
        save_file(tensors, folder / f"{what}.safetensors")
        for command in (
            ["export", "--format", "diffusers"],
            ["sample", "--prompts", "a", "--size", "9x32x32", "--dry_run"],
        ):
            arguments = [
                command[0],
                str(folder / f"{what}.safetensors"),
                *command[1:],
                *on,
                "--output_dir",
                str(folder / what),
            ]
            assert main(arguments) == 2
            where = "SOURCE" if command[0] == "export" else "TARGET"
            said = capsys.readouterr().err
            assert f"{where}: {folder / what}.safetensors " in said
            assert value in said
            assert not (folder / what).exists()


def test_a_checkpoint_and_a_file(
    a_run: Callable[..., tuple[Path, Any]], tiny_repo: Callable[..., Path], tmp_path: Path, capsys: Any
) -> None:
    """A file of another program, too: ComfyUI's becomes musubi-tuner's."""
    root, _ = a_run("hunyuan_video")
    assert main(["export", str(root), "--format", "comfyui"]) == 0
    file = str(
        shutil.copy(root / "export" / "comfyui" / "my-hunyuan_video.safetensors", tmp_path / "style.safetensors")
    )
    save_file(load_file(file), file)  # without the header, which names the model
    capsys.readouterr()
    code, [(place, _)] = refused_command(["export", file, "--format", "kohya"])
    assert (code, place) == (2, "--pretrained_model_name_or_path")
    model = ["--pretrained_model_name_or_path", str(tiny_repo("hunyuan_video"))]
    assert main(["export", file, "--format", "kohya", "--output_dir", str(tmp_path / "out"), *model]) == 0
    said = capsys.readouterr().out
    assert ": context_embedder.token_refiner" in said
    found = load_file(tmp_path / "out" / "kohya" / "style.safetensors")
    assert "lora_unet_single_blocks_0_linear1.lora_down.weight" in found
    # Of another model: said before anything is written.
    other = ["--pretrained_model_name_or_path", str(tiny_repo("ltx_video")), "--output_dir", str(tmp_path / "b")]
    assert main(["export", file, "--format", "kohya", *other]) == 2
    assert re.search(r" ltx_video .* comfyui ", capsys.readouterr().err)
    assert not (tmp_path / "b").exists()


def test_nothing_is_replaced_unasked_and_nothing_half_written_stays(
    a_run: Callable[..., tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = a_run()
    command = ["export", str(root), "--format", "comfyui"]
    assert main(command) == 0
    file = root / "export" / "comfyui" / "my-ltx_video.safetensors"
    first = file.read_bytes()
    assert main([*command, "--dtype", "bf16"]) == 2
    said = capsys.readouterr().err
    assert f"{file.parent} " in said
    assert "--overwrite" in said
    assert file.read_bytes() == first
    assert main([*command, "--dtype", "bf16", "--overwrite"]) == 0
    second = file.read_bytes()
    assert len(second) < len(first)
    with monkeypatch.context() as patch:  # a converter that forgets a layer
        import finetrainers.models.lora_files as files

        whole = files.to_stored
        patch.setattr(files, "to_stored", lambda *given: dict([*whole(*given).items()][2:]))
        with pytest.raises(ValueError, match=r" 1 layer: transformer_blocks\.0\.attn1\.to_q"):
            list(
                module.export_formats(
                    module.find_source(str(root), options={}), ["comfyui"], root / "export", overwrite=True
                )
            )
    assert file.read_bytes() == second
    assert [path.name for path in (root / "export").iterdir()] == ["comfyui"]


def test_an_export_goes_on_after_a_kill(
    a_run: Callable[..., tuple[Path, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Formats of the same weights and settings are not written again, and what a killed process left is removed."""
    root, _ = a_run()
    command = ["export", str(root), "--format", "comfyui"]
    assert main(command) == 0
    folder = root / "export"
    first = (folder / "comfyui" / "my-ltx_video.safetensors").stat().st_mtime_ns
    living = unfinished_path(folder / "peft").name
    (folder / re.sub(r"-\d+", "-999999999", living)).mkdir()
    assert refused_command([*command, "peft", "--dtype", "bf16"]) == (2, [("--format", "occupied")])
    capsys.readouterr()
    assert main([*command, "peft"]) == 0
    assert f"before: {folder / 'comfyui'}\n" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["comfyui", "peft"]
    assert (folder / "comfyui" / "my-ltx_video.safetensors").stat().st_mtime_ns == first
    assert refused_command([*command, "peft"]) == (2, [("--format", "occupied")] * 2)


def test_refusals(a_run: Callable[..., tuple[Path, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, _ = a_run(use_dora=True)

    def refusal(*arguments: str) -> str:
        assert main(["export", *arguments]) == 2
        return capsys.readouterr().err

    said = refusal(str(root), "--format", "comfyui", "kohya", "peft")
    assert re.search(r"--format: comfyui: .*DoRA", said)
    assert re.search(r"--format: kohya: .*DoRA", said)
    assert "peft: " not in said
    assert not (root / "export").exists()
    scaled = ["export", root, "--lora_scale"]
    assert refused_command([*scaled, "0.5", "--format", "peft"]) == (2, [("--lora_scale", "unsupported")])
    assert refused_command([*scaled, "nan", "--format", "merged"]) == (2, [("--lora_scale", "invalid")])
    capsys.readouterr()
    (tmp_path / "notes.toml").write_text("")
    for source, name in (
        (tmp_path / "none", "'none'"),
        ("demo://ltx", "demo://ltx"),
        (tmp_path / "notes.toml", "toml"),
    ):
        assert re.search(f"- SOURCE: .*{name}", refusal(str(source), "--format", "peft"))
    for wrong, place, values in (
        (["--format", "comfy"], "--format: ", ["'comfy'", "'comfyui'", "diffusers"]),
        (["--format", "gguf"], "--format: ", ["'gguf'", "diffusers, comfyui"]),
        (["--format", "peft", "--overwirte"], "--overwirte: ", ["--overwrite"]),
        (["--format", "merged", "--lora_scale", "abc"], "--lora_scale: ", ["'abc'"]),
        (["b", "--format", "peft"], "", ["'b'"]),
    ):
        _, line, hint = refusal(str(root), *wrong).splitlines()
        assert line.startswith(f"  - {place}"), line
        assert [value for value in values if value not in line] == [], line
        assert "finetrainers export --help" in hint


def test_an_exported_file_names_its_base_model(
    a_run: Callable[..., tuple[Path, Any]],
    tiny_repo: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, _ = a_run()
    assert main(["export", str(root), "--format", "comfyui"]) == 0
    file = shutil.copy(root / "export" / "comfyui" / "my-ltx_video.safetensors", tmp_path / "style.safetensors")
    assert main(["export", str(file), "--format", "peft", "--output_dir", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    model = ["--pretrained_model_name_or_path", str(tiny_repo("hunyuan_video"))]
    assert (
        main(
            [
                "export",
                str(file),
                "--format",
                "peft",
                "--output_dir",
                str(tmp_path / "other"),
                *model,
                "--model_name",
                "ltx_video",
            ]
        )
        == 2
    )
    assert re.search(
        r"LTXVideoTransformer3DModel for ltx_video, .*HunyuanVideoTransformer3DModel", capsys.readouterr().err
    )
    tensors = load_file(file)
    # Other programs write the name of a file, which nothing can be loaded by.
    for name in ("hunyuan/mp_rank_00.pt", "ltx-video-2b.safetensors", ""):
        save_file(tensors, file, metadata={"ss_sd_model_name": name})
        code, [(place, _)] = refused_command(["export", file, "--format", "peft", "--output_dir", tmp_path / "other"])
        assert (code, place) == (2, "--pretrained_model_name_or_path")
