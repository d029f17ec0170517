"""Loading phases 1 and 2, text encoders and VAE, and the method's source of batches."""

from __future__ import annotations

import torch

from finetrainers.data.loading.text_conditioning import TextCache, TextConditioning
from finetrainers.memory.quantized_encoders import load_text_encoders
from finetrainers.methods.registry import load_source, method_spec
from finetrainers.methods.spec import BatchSource, TrainingSet
from finetrainers.models.spec import ModelComponents, ModelSpec, VAEStats, are_mapped
from finetrainers.parallel.ranks import DistributedContext
from finetrainers.plan.preflight import ResolvedRun
from finetrainers.plan.start_report import print_line, report_loading
from finetrainers.utils.phases import ENCODING_CLIPS, ENCODING_TEXT, LOADING, phase
from finetrainers.utils.process_state import free_memory
from finetrainers.utils.progress import working

from .sampling import EncodedPrompts, encode_prompts
from .watchdog import Watchdog


def load_text_conditioning(
    checked: ResolvedRun,
    spec: ModelSpec,
    parallel: DistributedContext,
    watchdog: Watchdog,
    *,
    sampling_dtype: torch.dtype | None = None,
) -> tuple[TextConditioning, EncodedPrompts | None]:
    """Return the conditioning of all captions (phase 1), and the encoded prompts of samples, or None without samples.

    Encoders are not loaded if the cache has every caption; encoders that encode beforehand are freed.

    Args:
        checked, spec: the run and its model.
        parallel, watchdog: of the run.
        sampling_dtype: dtype that prompts are sampled in.
    """
    config, plan = checked.config, checked.plan
    _check_same_plan(plan, parallel)
    captions_with_images = plan.shown_texts() if spec.facts.text_sees_image else None
    texts = TextCache(
        plan.all_captions(), plan.texts, config, spec=spec, parallel=parallel, shown=captions_with_images,
        needs_empty=plan.needs_empty_text,
    )  # fmt: skip
    write = method_spec(config).text_writer(plan, config, spec=spec, parallel=parallel)
    conditioning, prompts = _load_or_encode(
        checked, spec, parallel, watchdog, texts=texts, sampling_dtype=sampling_dtype
    )
    if write is not None:
        write(conditioning)
    return conditioning, prompts


def _load_or_encode(
    checked: ResolvedRun,
    spec: ModelSpec,
    parallel: DistributedContext,
    watchdog: Watchdog,
    *,
    texts: TextCache,
    sampling_dtype: torch.dtype | None,
) -> tuple[TextConditioning, EncodedPrompts | None]:
    """Return the conditioning of captions and the encoded prompts, from the cache or the text encoders."""
    config = checked.config
    cached = method_spec(config).caches_texts(config)
    sampling = sampling_dtype if checked.sampled else None
    if cached and sampling is None and (recalled := texts.find_cached()) is not None:
        reason = "is in the cache" if checked.needs_text else "is already encoded"
        print_line(f"text encoders are not loaded: every caption {reason}")
        return recalled, None
    with report_loading(checked, "text encoder"):
        encoders = parallel.one_at_a_time(
            "loading the text encoders",
            lambda: load_text_encoders(spec, parallel.device),
            together=are_mapped(config.model, spec.facts.text_parts),
        )
    watchdog.enter("encoding")
    with phase(ENCODING_TEXT):
        with parallel.raise_on_all_ranks("encoding the prompts"), working("encoding the prompts of samples"):
            prompts = None if sampling is None else encode_prompts(
                spec, encoders, checked.sampled, sampling,
                negative=checked.config.validation.validation_negative_prompt or "",
            )  # fmt: skip
        conditioning = texts.encode(encoders) if cached else texts.encode_on_demand(encoders)
    del encoders
    free_memory()
    return conditioning, prompts


def load_batch_source(
    checked: ResolvedRun, spec: ModelSpec, parallel: DistributedContext, watchdog: Watchdog, texts: TextConditioning
) -> tuple[BatchSource, VAEStats]:
    """Return the method's batch source (phase 2), which may encode its clips by the VAE, and the VAE's statistics.

    Raises:
        ConfigError: the loaded model refuses a size.
    """
    config, plan = checked.config, checked.plan
    watchdog.enter("loading")
    with report_loading(checked, "VAE"):
        encodes = plan.encodes_clips or bool(plan.images)  # else clips are only decoded
        clip_encoders = parallel.one_at_a_time(
            "loading the VAE",
            lambda: (spec.load_clip_encoders() if encodes else ModelComponents({"vae": spec.load_vae()})).to(
                parallel.device
            ),
            together=are_mapped(config.model, spec.facts.clip_parts if encodes else ["vae"]),
        )
    vae_stats = spec.vae_stats(clip_encoders["vae"])
    watchdog.enter("encoding")
    with phase(ENCODING_CLIPS if encodes and config.data.precompute_conditions else LOADING):
        source = load_source(config)(
            plan, config, spec=spec, parallel=parallel, texts=texts, clip_encoders=clip_encoders,
            data_position=checked.start.data_position,
        )  # fmt: skip
    del clip_encoders
    free_memory()
    return source, vae_stats


def _check_same_plan(plan: TrainingSet, parallel: DistributedContext) -> None:
    """Check that all ranks have planned with the same data; each would else wait for batches that another lacks.

    Raises:
        RuntimeError: the data of two ranks differ.
    """
    plans = parallel.gather_objects([plan.fingerprint])
    others = [rank for rank, fingerprint in enumerate(plans) if fingerprint != plans[0]]
    if others:
        raise RuntimeError(
            f"dataset mismatch: rank {', '.join(map(str, others))} differs from rank 0 in {plan.fingerprint_of}, or "
            "in stored facts of files; compare `finetrainers check` on these machines, or share --probe_dir"
        )
