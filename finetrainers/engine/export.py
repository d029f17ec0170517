"""What a run leaves for others: the weights in diffusers layout, a model card, and optionally a hub repository."""

from __future__ import annotations

import torch
from huggingface_hub import HfApi

from finetrainers.models.spec import DTYPES, remove_full
from finetrainers.utils.faults import fault_point
from finetrainers.utils.versions import __version__

from .card_facts import write_grid
from .export_formats import FOLDER, export_formats, print_exported, result_source
from .initial_weights import LORA_FILE
from .model_card import model_card
from .preflight import Preflight
from .start_report import print_line
from .state import TrainState
from .trainable import save_weights, shared_files, wanted_of


def export(state: TrainState, checked: Preflight) -> None:
    """Write weights and model card into the run directory, and upload them if asked; every rank must call it."""
    parallel, config, what = state.parallel, state.config, "writing the results"
    is_lora = config.training.training_type == "lora"
    dtype = torch.float32 if is_lora else DTYPES[config.model.transformer_dtype]
    with state.ema_applied():
        files = shared_files(state, dtype)
        with parallel.raise_on_all_ranks(what):
            fault_point("export")
            if parallel.is_main and files is not None:
                remove_full(state.run_dir.root / state.spec.facts.trained)
        weights = parallel.full_state(state.transformer, wanted=wanted_of(files, parallel))
        # Within the block: they refer to the network's weights, which change back at its end.
        with parallel.raise_on_all_ranks(what):
            if parallel.is_main or files is not None:
                save_weights(state.run_dir.root, state=state, tensors=weights, dtype=dtype, files=files)
    with parallel.raise_on_all_ranks(what):
        if parallel.is_main:
            _write_about(state, checked)


def _write_about(state: TrainState, checked: Preflight) -> None:
    """What is made of the results: the card, other formats, the upload."""
    config = state.config
    write_grid(state.run_dir.root)
    (state.run_dir.root / "README.md").write_text(model_card(state, checked), encoding="utf-8")
    if config.run.export_formats:
        source = result_source(config, state.run_dir.root)
        for one in export_formats(source, config.run.export_formats, source.folder, overwrite=True):
            print_exported(one, source, say=print_line)
    if config.run.push_to_hub:
        state.watchdog.enter("uploading")
        push(state)
        state.watchdog.enter("exporting")


def push(state: TrainState) -> None:
    """Upload weights, card, configuration and samples to the hub (not checkpoints, caches or logs)."""
    config = state.config
    token = config.run.hub_token.get_secret_value() if config.run.hub_token else None
    api = HfApi(token=token)
    repository = api.create_repo(config.run.hub_model_id or config.run.output_dir.resolve().name, exist_ok=True)
    api.upload_folder(
        repo_id=repository.repo_id,
        folder_path=state.run_dir.root,
        allow_patterns=[
            LORA_FILE,
            f"{state.spec.facts.trained}/*",
            f"{FOLDER}/**",
            "README.md",
            "config.toml",
            "samples/**",
        ],
        commit_message=f"Trained with finetrainers {__version__}",
    )
