"""`finetrainers sample`: sample clips of a run, of checkpoints, of a LoRA or of a model, side by side."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from finetrainers.config.arguments import ArgumentParser
from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.sample import SampleSection
from finetrainers.utils import exit_codes
from finetrainers.utils.launch import launched_rank, print_refusal
from finetrainers.utils.logs import quiet_progress_bars
from finetrainers.utils.process_state import gc_paused
from finetrainers.utils.progress import working
from finetrainers.utils.text import file_size, plural

from .options import options_parser, read_arguments

if TYPE_CHECKING:
    from finetrainers.sampling.plan import SamplePlan

_ABOUT = """Sample clips of a trained model. A TARGET is a run directory
(its result, else its newest checkpoint), a checkpoint, a LoRA in safetensors, or
a model (directory, Hub id, demo://NAME). Several targets give several columns."""
_EPILOG = """Options that you omit default to the run's validation settings: prompts, size,
steps, guidance, dtypes. The same prompt and seed give the same clip, whatever
else is sampled. Existing clips are not sampled again.

Options of `finetrainers train` for the model and how it computes are also
valid: --model_name, --pretrained_model_name_or_path, --transformer_dtype,
--enable_tiling, --enable_model_cpu_offload, --quantize_frozen and others.
Behind `accelerate launch`, the clips are divided among the processes.

examples:
  finetrainers sample runs/mystyle
  finetrainers sample runs/mystyle --prompts "a boat on a lake" \\
      --lora_scale 0.25 0.5 0.75 1 --compare base
  finetrainers sample runs/mystyle/checkpoints/step-* --prompts prompts.txt
  finetrainers sample my.safetensors --prompts "a cat" --size 49x512x768 \\
      --pretrained_model_name_or_path BASE_MODEL

exit codes:
  0   every clip is sampled
  1   some clips could not be sampled; the others are complete
  2   invalid options or targets; nothing was loaded
"""


def own_options() -> ArgumentParser:
    """Return the parser of the command's own options."""
    return options_parser(
        SampleSection, prog="finetrainers sample",
        usage="finetrainers sample TARGET ... [--prompts FILE|TEXT] [options]", about=_ABOUT, epilog=_EPILOG,
    )  # fmt: skip


def sample_command(argv: Sequence[str]) -> int:
    """Sample as the flags say; return an exit code (`utils.exit_codes`)."""
    try:
        plan, dry_run = _read_plan(argv)
        return _dry_run(plan) if dry_run else _sample(plan)
    except ConfigError as error:
        print_refusal(error)
        return exit_codes.CONFIGURATION
    except KeyboardInterrupt:
        if launched_rank() == 0:
            print("stopped; the same command samples the missing clips", file=sys.stderr)
        return exit_codes.killed_by(signal.SIGINT)


def _read_plan(argv: Sequence[str]) -> tuple[SamplePlan, bool]:
    """Return the plan, and whether it is only to be printed.

    Raises:
        ConfigError: all problems, at once.
    """
    from finetrainers.sampling.plan import plan_samples

    arguments = read_arguments(own_options(), SampleSection, argv)
    problems = arguments.problems
    if arguments.targets and not arguments.unclear:
        try:
            with working("planning the samples"):
                plan = plan_samples(arguments.targets, arguments.options, arguments.flags)
        except ConfigError as error:
            problems += error.problems
    elif not arguments.unclear:
        example = "a run directory, a checkpoint, a LoRA in safetensors or a model: finetrainers sample runs/mystyle"
        problems.append(Problem("TARGET", f"is required: {example}", "required"))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), of="these samples")
    return plan, arguments.options.dry_run


def _dry_run(plan: SamplePlan) -> int:
    from finetrainers.sampling.memory import sampling_bytes
    from finetrainers.sampling.run import check_weights

    check_weights(plan)
    for line in _plan_lines(plan):
        print(line)
    spec = plan.family.load(plan.config.model)
    print(f"memory, estimated: {file_size(sampling_bytes(plan, spec))} at the peak of sampling")
    print(f"clips would be written to {plan.output_dir}")
    return exit_codes.DONE


def _plan_lines(plan: SamplePlan) -> list[str]:
    """Return the lines on the planned samples, and the warnings."""
    counts = [
        plural(len(plan.prompts), "prompt"),
        plural(len(plan.variants), "column"),
        plural(len(plan.seeds), "seed"),
    ]
    count = len(plan.prompts) * len(plan.variants) * len(plan.seeds)
    sizes = dict.fromkeys("x".join(map(str, prompt.size or ())) for prompt in plan.prompts)
    steps = plan.config.validation.validation_inference_steps
    columns = dict.fromkeys(variant.label for variant in plan.variants)
    return [
        f"{plural(count, 'clip')} of {plan.config.model.pretrained_model_name_or_path}: {' x '.join(counts)}, "
        f"{', '.join(sizes)}, {plural(steps, 'denoising step')}",
        f"columns: {' | '.join(columns)}",
        *(f"warning: {warning}" for warning in plan.warnings),
    ]


def _sample(plan: SamplePlan) -> int:
    is_main = launched_rank() == 0
    if is_main:
        print("\n".join(_plan_lines(plan)), flush=True)
    with gc_paused(), working("importing torch and diffusers"):
        from finetrainers.sampling.run import draw
    quiet_progress_bars()
    gc.freeze()  # as for training: the libraries' objects live to the end
    samples = draw(plan)
    if is_main:
        num_existing = len(samples.clips) - samples.new
        print(
            f"{plural(samples.new, 'clip')} sampled{(f', {num_existing} already there' if num_existing else '')}: "
            f"{plan.output_dir}"
        )
        if samples.sheet is not None:
            print(f"contact sheet: {samples.sheet}\npage:          {samples.page}")
        for problem in samples.problems.values():
            print(f"not sampled: {problem}", file=sys.stderr)
    return exit_codes.FAILED if samples.problems else exit_codes.DONE
