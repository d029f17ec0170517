"""What prior preservation holds back: a LoRA of a new concept is trained on clips of that concept alone, then other
captions are sampled.

The embedded model learns the quickstart's new word from 24 clips that all show it, without and with
`--prior_preservation_weight`, and is sampled with the new word and with held-out captions without it. What the samples
show is read back from their pixels. The prior prompts are captions of the world, of combinations that no held-out
caption has; there are no clips of them.

    python benchmarks/prior_preservation.py [--steps 150] [--weights 0 1 4] [--prior captions|blank] [--out FILE.json]

A row takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from finetrainers.config.load import load_config
from finetrainers.config.root import TrainConfig, changed_options
from finetrainers.demo.data import scene_captions, training_scenes, write_clips
from finetrainers.demo.measure import around_training
from finetrainers.demo.quickstart import (
    COLOR,
    LOOK,
    NEW,
    Score,
    new_captions,
    other_captions,
    quickstart_config,
)
from finetrainers.demo.world import with_new_word

_PRIOR = 256  # captions


def prior_config(directory: Path, *, steps: int, weight: float, prior: str = "captions") -> TrainConfig:
    """A run on clips of the new concept alone, after writing them and the prior prompts into the directory."""
    write_clips(directory / "clips", training_scenes(NEW, look=LOOK, colors=(COLOR,)), reword=with_new_word)
    (directory / "prior.txt").write_text("\n".join(scene_captions(training_scenes(_PRIOR, seed=1))) + "\n")
    options = changed_options(quickstart_config(directory, steps=steps))
    options |= {"eval_num_items": 0, "eval_steps": None, "validation_steps": None, "validation_prompts": None}
    if weight:
        prompts = {"prior_prompts": str(directory / "prior.txt")} if prior == "captions" else {"class_prompt": ""}
        options |= {"prior_preservation_weight": weight, **prompts}
    return load_config(**options)


Row = dict[str, float | str]


def compare(weights: list[float], *, steps: int, asked: int, prior: str) -> Iterator[Row]:
    """For the model before training, and after training with each weight, what samples show."""
    for number, weight in enumerate(weights):
        with tempfile.TemporaryDirectory() as directory:
            before, after = around_training(
                prior_config(Path(directory), steps=steps, weight=weight, prior=prior),
                new_captions(asked),
                other_captions(asked),
                announcements=("sampling before", f"training with weight {weight:g}", "sampling after"),
            )
        if number == 0:
            yield {"prior_preservation_weight": "before training", **vars(Score.from_samples(*before))}
        yield {"prior_preservation_weight": weight, **vars(Score.from_samples(*after))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--weights", type=float, nargs="+", default=[0.0, 1.0, 4.0])
    parser.add_argument("--prior", choices=["captions", "blank"], default="captions")
    parser.add_argument("--asked", type=int, default=32, help="captions of each kind that are sampled")
    parser.add_argument("--out", type=Path, help="write the table as JSON, too")
    options = parser.parse_args()
    rows: list[Row] = []
    for row in compare(options.weights, steps=options.steps, asked=options.asked, prior=options.prior):
        rows.append(row)
        print(
            f"weight {row['prior_preservation_weight']}: new concept {row['concept']:.0%}, everything that captions "
            f"with it "
            f"say {row['asked']:.0%}, other captions {row['others']:.0%}",
            flush=True,
        )
    if options.out is not None:
        options.out.write_text(json.dumps({"steps": options.steps, "prior": options.prior, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
