"""Every place that refuses something is reached by a dry run, or says here why it cannot be known before loading.

A place is a function that raises an error of its own, or makes a `Problem`. A function that dry runs enter refuses
there what a run would refuse. A new refusal in another function turns this test red: move it to what a dry run calls
(`plan.ready.check_network`, `MethodSpec.check`, `MethodSpec.plan_problems`, ...), or add it to `AFTER` with the reason.
"""

from __future__ import annotations

import ast
import contextlib
import cProfile
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from every_family import FAMILIES
from PIL import Image

import finetrainers
from finetrainers import ConfigError, load_config, train
from finetrainers.models.spec import ModelSpec
from finetrainers.plan import dry_run

PACKAGE = Path(finetrainers.__file__).parent
#: What a run imports after its dry run would have ended, by path in the package. Other commands and tools are left out.
FOLDERS = (
    "rundir",
    "plan",
    "training",
    "sampling",
    "tools",
    "results",
    "runs",
    "methods",
    "models",
    "parallel",
    "optim",
    "rewards",
    "memory",
    "diffusion",
    "data/loading",
)
OTHER_COMMANDS = (
    "tools/batch_search", "plan/check.py", "plan/estimate.py", "tools/doctor", "tools/init/",
    "results/export_formats.py", "results/reports", "sampling/", "runs/stages", "tools/sync.py", "sampling/watch",
    "models/files/lora_formats.py", "models/tiny", "rewards/server.py", "rewards/limits.py",
)  # fmt: skip
#: Functions whose refusals no dry run reaches, by the reason; with a count, how many places of each, else one.
AFTER = {
    "The Hub, another process or machine, or the disk decides during the run; a dry run joins and locks nothing.": """
        data/loading/precompute.py: check_free_space
        data/loading/workers.py: Workers._next 3, Workers.batches
        plan/check_upload.py: _permission_problems 2
        rundir/publish.py: reserve
        training/checkpoints/restore.py: check_restorable
        results/export.py: upload
        plan/init_distributed.py: make_strategy
        training/load_inputs.py: _check_same_plan
        rundir/lock.py: exclusive 2, keep_unused
        plan/once_per_node.py: _read_answer 3
        plan/ready.py: check_rewards 2
        plan/room.py: check_room
        models/split/attention.py: check_backend 4
        models/family.py: _fetch 2
        models/files/hub_help.py: fetch_config 3
        parallel/fsdp.py: FSDP.__init__ 2
        parallel/pulse.py: Pulse.waiting
        parallel/ranks.py: _host_group
        parallel/strategy.py: Strategy.__init__ 3
        parallel/zero.py: ZeRO.__init__ 2
        rewards/served.py: ServedReward.score 3
    """,
    "Memory, numbers that training has made, and files that vanish or are damaged meanwhile.": """
        data/loading/bad_samples.py: BadSampleTracker.agree, load_clips
        memory/page_locked.py: page_locked_buffer
        plan/chosen.py: _read_sizes
        data/loading/precompute.py: CacheFetch._read 2, _refuse_non_finite
        training/checkpoints/save.py: Snapshot.check_finite
        training/guards/memory.py: Attempt.__exit__, MemoryGuard.attempts, advise_on_oom
        training/memory_failure.py: MemoryFailures.write_on_oom
        training/guards/nonfinite.py: NonFiniteGuard.choose_action 2
        training/rollback.py: _find_newest
        methods/dpo/pairs.py: PairFetch.__call__
        methods/grpo/advantage.py: _values
        methods/grpo/prompts/images.py: ImageConditioning.network_inputs
        methods/grpo/prompts/prompt_embeddings.py: _write
        methods/grpo/prompts/source.py: PromptSource._require
        methods/refl.py: RewardGradients._adjoint
        rewards/pixels.py: to_uint8
        rewards/reward_set.py: RewardSet._raise 2, _Scorer._row, _checked_pixels 5
    """,
    "The values of weights and of other large files, which are read when they are loaded.": """
        training/checkpoints/restore.py: _restore_optimizer
        plan/initial_weights.py: stored_lora
        training/trained_weights.py: _set_adapter 2, attach_lora, load_trainable_transformer,
            load_ema_weights, store_initial_lora
        methods/dpo/method.py: DPO.load_state_dict
        methods/grpo/noised_clips.py: OldPolicy.load
        methods/grpo/rollout_method.py: RolloutMethod.load_state_dict
        methods/grpo/prompts/source.py: _load_tensor
        methods/refl.py: RewardGradients.load_state_dict
        methods/sft.py: SFT.load_state_dict
        models/lora_files.py: _compare 2, cast, check_outputs, check_written
        models/files/original.py: original_layout
        models/files/single_file.py: check_buffers, save_single_file 2
        models/files/weights.py: _single_file_problems 2, check_loaded 2
        optim/ema.py: EMA.load_state_dict 2
        parallel/fsdp.py: modules_of_another_dtype.odd
        parallel/strategy.py: Strategy.load_own_files
        parallel/zero.py: ZeRO.load_own_files
        rewards/clip_models.py: Aesthetic.load
        rewards/videoalign.py: _newest, _read, _settings 3
        rewards/videoalign_input.py: added_tokens, placeholder_id, tokenise
        rewards/videoalign_model.py: Judge.load 3, base_config 2, merge_adapter
        rewards/weights.py: build, check_names, fetch, fetch_file, load_pretrained, load_settings, read_sharded,
            read_tensors 2
    """,
    "A check that dry runs make elsewhere, made once more where the value is used.": """
        data/loading/batch_sampler.py: BatchSampler.__init__ 2, BatchSampler._find,
            BatchSampler.steps_for_epochs
        data/loading/order.py: _datasets 2
        data/loading/training_data.py: _check_options 2
        training/sampling.py: prompt_request
        memory/casting.py: enable_layerwise_upcasting
        memory/checkpointing.py: set_activation_memory
        methods/grpo/advantage.py: best_of_n, compute_advantages 2
        methods/grpo/rollout/collect.py: RolloutCollector._jobs_by_rank
        methods/grpo/prompts/prompts.py: PromptOrder.__init__
        methods/grpo/rollout_method.py: RolloutMethod.steps
        models/cogvideox.py: CogVideoXSpec._check_positions, CogVideoXSpec.predict 2
        models/hunyuan_video.py: HunyuanVideoSpec.load_text_encoders, HunyuanVideoSpec.predict, _trim_text
        models/hunyuan_video_15.py: HunyuanVideo15Spec.predict, HunyuanVideo15Transformer3DModel._join_text
        models/kandinsky5.py: Kandinsky5Spec.predict
        models/wan.py: WanSpec.pipeline_call, WanSpec.predict
        models/split/sequence.py: SequenceGroup.part
        models/split/sequence_dropout.py: split_dropout 2
        models/spec.py: ModelSpec.given_text, ModelSpec.pipeline, ModelSpec.pipeline_call 2
        optim/ema.py: EMA.__init__
        rewards/calls.py: Columns.select
        rewards/frames.py: spread_indices
        rewards/movement.py: _frames
        rewards/pixels.py: Sharpness.clip
        rewards/reward_set.py: _Scorer._call, _Scorer._images, _Scorer.split
        rewards/videoalign_input.py: fitting_size, frame_indices
        rewards/weights.py: torch_device
    """,
    "A mistake of whoever calls the function, which no configuration makes; or a call from Python that is no run.": """
        data/loading/training_data.py: TrainingData._as_neighbors
        methods/model.py: Model._as_raw 3, Model.decode, Model.encode, Model.predict 2, Model.rollout, _encoded,
            _pixels, _refuse_text
        methods/grpo/rollout/policy.py: RolloutPolicy.__init__ 2, RolloutPolicy.log_probs 2
        runs/load_model.py: load_model, _check_model 4, batches 4, _encoded_steps
        runs/training.py: TrainResult._require_weights, TrainResult.load 3, TrainResult.pipeline
        optim/factory.py: custom_optimizer 2
        plan/parts.py: _lora_conflicts 2, _rate_at
        training/assemble.py: _make_schedule 2
        training/control.py: Requests.__setattr__ 2
        methods/base.py: micro_batch_loss
        methods/sft.py: SFT.sample_means
        rewards/functions.py: reward_function
        memory/checkpointing.py: _run_keeping_attention
        memory/quantization.py: QuantizedLinear.__getattr__
        methods/registry.py: register_method 2
        models/registry.py: tiny_builder 2
        models/split/sequence.py: SplitAttend.__call__
        models/spec.py: ModelSpec.encode_with_images, ModelSpec.text_shapes
        parallel/zero.py: ZeRO.load_optimizer
        rewards/base.py: Reward.differentiate
    """,
}


def stated() -> dict[str, int]:
    """How many places of each function `AFTER` has, by `module:function`."""
    found = {}
    for text in AFTER.values():
        for entry in re.findall(r"^ {8}(\S.*(?:\n {12}.*)*)", text, flags=re.MULTILINE):
            module, _, functions = " ".join(entry.split()).partition(": ")
            for function in functions.split(", "):
                name, _, count = function.partition(" ")
                found[f"{module}:{name}"] = int(count or 1)
    return found


def sites() -> dict[str, tuple[int, str, int]]:
    """Return each function's number of refusing places, with its file and first line, by `module:function`."""
    found: dict[str, tuple[int, str, int]] = {}
    for folder in FOLDERS:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            name = path.relative_to(PACKAGE).as_posix()
            if not name.startswith(OTHER_COMMANDS):
                _collect(ast.parse(path.read_text(encoding="utf-8")), name, "", 0, str(path), found)
    return found


def _collect(node: ast.AST, module: str, function: str, line: int, path: str, found: dict) -> None:
    for child in ast.iter_child_nodes(node):
        within, begins = function, line
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            within = f"{function}.{child.name}".lstrip(".")
            begins = min([child.lineno, *(one.lineno for one in child.decorator_list)])
        is_raise = isinstance(child, ast.Raise) and any(isinstance(part, ast.Call) for part in ast.walk(child))
        is_problem = isinstance(child, ast.Call) and ast.unparse(child.func) in ("Problem", "Problem.from_error")
        if is_raise or is_problem:
            name = f"{module}:{function}"
            count = found.get(name, (0, path, line))[0]
            found[name] = (count + 1, path, line)
        _collect(child, module, within, begins, path, found)


def entered(work: Callable[[], None]) -> set[tuple[str, int]]:
    """File and first line of each function of the package that is called meanwhile."""
    profile = cProfile.Profile(subcalls=False, builtins=False)
    profile.runcall(work)
    codes = [entry.code for entry in profile.getstats() if not isinstance(entry.code, str)]
    return {(code.co_filename, code.co_firstlineno) for code in codes if code.co_filename.startswith(str(PACKAGE))}


def configurations(folder: Path) -> Iterator[dict[str, Any]]:
    """Options of runs whose checks differ; some are refused, which is as good."""
    (folder / "p.txt").write_text("a red ball\na blue ball\n")
    (folder / "e.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "v.json").write_text("[]")
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "0.mp4", "rejected": "1.mp4"}\n')
    Image.new("RGB", (64, 64)).save(folder / "a.png")
    rewarded = {
        "method": "grpo", "data_root": None, "video_resolution_buckets": None, "prompts": str(folder / "p.txt"),
        "rollout_size": "9x64x64", "reward": ["brightness", "color,target=teal"],
    }  # fmt: skip
    yield {"flow_resolution_shifting": True, "validation_prompts": "a", "validation_images": str(folder / "a.png")}
    yield {"training_type": "full-finetune", "use_ema": True}
    yield {"push_to_hub": True}
    yield {"prior_preservation_weight": 0.5, "class_prompt": "a"}
    yield {"method": "dpo", "dataset_file": str(folder / "pairs.jsonl"), "clips": 2}
    yield {"eval_reward": ["clipscore,device=cpu,path=."], "eval_prompts": str(folder / "e.jsonl")}
    yield {**rewarded, "prompt_embeddings_dir": str(folder / "embeddings"), "hub_token": "x"}
    yield {**rewarded, "prompts": str(folder / "v.json")}
    yield {**rewarded, "reward": ["http://127.0.0.1:9"]}
    yield {**rewarded, "method": "refl"}
    yield {**rewarded, "method": "nft", "init_same_noise": False}
    yield {**rewarded, "method": "awm", "init_same_noise": False}
    yield {"fsdp": "full"}
    yield {"deepspeed": True}
    yield {"sp_size": 2, "lora_dropout": 0.1}
    yield {"quantize_frozen": "int8"}
    yield {"memory_budget": 0.001}
    yield {"blocks_to_swap": 3}
    yield rewarded
    yield {**rewarded, "reward": ["color"]}
    yield {"family": "cogvideox"}
    yield {"family": "cogvideox", "version": "i2v", "validation_prompts": "a"}
    yield {"family": "hunyuan_video", "version": "token_replace"}
    published, networks = "hunyuanvideo-community/HunyuanVideo", str(folder / "networks")  # tokenizers are elsewhere
    yield {
        "family": "hunyuan_video",
        "pretrained_model_name_or_path": published,
        "vae_id": networks,
        "transformer_id": networks,
    }
    low: dict[str, Any] = {"family": "wan", "version": "a14b", "expert": "low"}
    yield {**low, "other_expert": str(folder / "of_ltx_video.safetensors")}
    for family in FAMILIES:
        yield {"family": family}
    yield {"init_from": str(folder)}
    for path in ("finished/checkpoints/step-1", "finished/pytorch_lora_weights.safetensors"):
        yield {"init_from": str(folder / path)}
    for checkpoint in ("latest", "9"):
        yield {"resume_from_checkpoint": checkpoint, "output_dir": str(folder / "finished")}


#: Variables of launchers under which configurations are checked once more.
LAUNCHED: tuple[dict[str, str], ...] = (
    {"ACCELERATE_USE_DEEPSPEED": "true", "WORLD_SIZE": "2", "RANK": "0"},
    {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "WORLD_SIZE": "2", "RANK": "0"},
)


def test_every_refusal_is_reached_by_a_dry_run_or_says_why_not(
    options: Callable[..., dict], tiny_repo: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "networks").symlink_to(tiny_repo("hunyuan_video"))
    train(load_config(**options(output_dir=str(tmp_path / "finished"), train_steps=1)))
    shutil.copy(tmp_path / "finished" / "pytorch_lora_weights.safetensors", tmp_path / "of_ltx_video.safetensors")

    def check(changes: dict[str, Any], **parts: Any) -> None:
        given = {name: value for name, value in changes.items() if value is not None}
        values = {name: value for name, value in options(**given).items() if changes.get(name, 0) is not None}
        with contextlib.suppress(ConfigError):
            train(load_config(**values, dry_run=True), **parts)

    def check_all() -> None:
        for changes in configurations(tmp_path):
            check(changes)
        for changes in ({}, {"data_root": None}):
            check(changes, data=[])
        for variables in LAUNCHED:
            with monkeypatch.context() as launched:
                for name, value in variables.items():
                    launched.setenv(name, value)
                check({"resume_from_checkpoint": "latest", "output_dir": str(tmp_path / "finished")})

    monkeypatch.setattr(ModelSpec, "load_transformer", lambda *_: pytest.fail("a dry run loads weights"))
    monkeypatch.setattr(dry_run, "_print_memory", lambda checked, _: checked)  # it refuses nothing
    seen = entered(check_all)
    unreached = {name: count for name, (count, path, line) in sites().items() if (path, line) not in seen}
    missing = {name: count for name, count in unreached.items() if stated().get(name) != count}
    assert missing == {}, "refused after loading: let a dry run reach it, or state in AFTER why it cannot"
    assert stated().keys() <= sites().keys()
