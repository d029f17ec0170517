"""Results of a run: weights in diffusers layout, a model card, and optionally a Hub repository."""

from __future__ import annotations

import torch
from huggingface_hub import HfApi

from finetrainers.config.root import TrainConfig
from finetrainers.models.registry import get_family
from finetrainers.models.spec import DTYPES, remove_full
from finetrainers.plan.check_upload import hub_token, repository_name
from finetrainers.plan.initial_weights import LORA_FILE
from finetrainers.plan.preflight import ResolvedRun
from finetrainers.plan.start_report import print_line
from finetrainers.training.state import TrainState
from finetrainers.training.trained_weights import save_weights, select_rank_weights, shared_files
from finetrainers.utils.failures import ExpectedError
from finetrainers.utils.faults import fault_point
from finetrainers.utils.versions import __version__

from .card_facts import write_grid
from .export_formats import FOLDER, export_formats, print_exported, rename_foreign_exports, result_source
from .model_card import model_card


class UploadError(ExpectedError, RuntimeError):
    """Results are on this disk, but not on the Hub."""


def export(state: TrainState, checked: ResolvedRun) -> None:
    """Write weights, model card and further formats into the run directory; every rank must call it."""
    parallel, config, activity = state.parallel, state.config, "writing the results"
    is_lora = config.training.training_type == "lora"
    dtype = torch.float32 if is_lora else DTYPES[config.model.transformer_dtype]
    with state.ema_applied():
        files = shared_files(state, dtype)
        with parallel.raise_on_all_ranks(activity):
            fault_point("export")
            if parallel.is_main and files is not None:
                remove_full(state.run_dir.root / state.spec.facts.trained)
        weights = parallel.full_state(state.transformer, wanted=select_rank_weights(files, parallel))
        # Within `ema_applied`: these tensors refer to the network's weights, which change back at its end.
        with parallel.raise_on_all_ranks(activity):
            if parallel.is_main or files is not None:
                save_weights(state.run_dir.root, state=state, tensors=weights, dtype=dtype, files=files)
    with parallel.raise_on_all_ranks(activity):
        if parallel.is_main:
            _write_about(state, checked)


def _write_about(state: TrainState, checked: ResolvedRun) -> None:
    """Write the model card and the other formats of the results."""
    root, formats = state.run_dir.root, state.config.run.export_formats
    write_grid(root)
    (root / "README.md").write_text(model_card(state, checked), encoding="utf-8")
    if formats:
        source = result_source(state.config, root)
        for renamed in rename_foreign_exports(source, formats):  # they appeared during training
            print_line(f"renamed existing files of another origin: {renamed}")
        for exported in export_formats(source, formats, source.folder, overwrite=True):
            print_exported(exported, source, say=print_line)


def upload(state: TrainState) -> None:
    """Upload the results to the Hub if requested.

    Every rank must call it, when everything else of the run is on disk.

    Raises:
        UploadError: the upload fails; the message has the command to upload later. Other ranks than 0 raise
            `RemoteRankError`.
    """
    if not state.config.run.push_to_hub:
        return
    state.watchdog.enter("uploading")
    with state.parallel.raise_on_all_ranks("uploading"):
        if state.parallel.is_main:
            try:
                push(state.config)
            except Exception as error:  # from the Hub's library, its HTTP library, or the network
                raise UploadError(_upload_later(state, error)) from error


def _upload_later(state: TrainState, error: Exception) -> str:
    """Return the reason of the failure, and the command that uploads the same files."""
    root, name = state.run_dir.root, repository_name(state.config)
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    files = " ".join(f"--include '{pattern}'" for pattern in _patterns(state.config))
    return (
        f"the run is finished and its results are in {root}, but they could not be uploaded to {name}: {reason}. "
        f"Upload them later: hf upload {name} {root} . {files}"
    )


def push(config: TrainConfig, repository: str | None = None) -> str:
    """Upload weights, card, configuration and samples to the Hub, but not checkpoints, caches or logs.

    Args:
        config: configuration of the run, whose results are in its `output_dir`.
        repository: Hub repository; default: that of the configuration.

    Returns:
        The id of the repository, which is created if it does not exist.
    """
    api = HfApi(token=hub_token(config))
    repo_id: str = api.create_repo(repository or repository_name(config), exist_ok=True).repo_id
    api.upload_folder(
        repo_id=repo_id,
        folder_path=config.run.output_dir,
        allow_patterns=_patterns(config),
        commit_message=f"Trained with finetrainers {__version__}",
    )
    return repo_id


def _patterns(config: TrainConfig) -> list[str]:
    trained = get_family(config.model.model_name).facts_of(config.model).trained
    return [LORA_FILE, f"{trained}/*", f"{FOLDER}/**", "README.md", "config.toml", "samples/**"]
