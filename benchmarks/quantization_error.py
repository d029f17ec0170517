"""How far quantized frozen weights are from the weights in bf16, for each layer of a transformer.

    python benchmarks/quantization_error.py demo://ltx
    python benchmarks/quantization_error.py hunyuanvideo-community/HunyuanVideo --layers

The error is the norm of the difference, divided by the norm of the weights. Beside the formats of `--quantize_frozen`
stands the plain cast of `--layerwise_upcasting_modules`, which has no scales.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from finetrainers.config.sections import ModelSection
from finetrainers.memory.quantization import Kind, dequantize, quantizable_layers, quantize
from finetrainers.models.registry import get_family, with_family
from finetrainers.utils.logs import quiet_libraries

_CASTS = {"plain e4m3": torch.float8_e4m3fn, "plain e5m2": torch.float8_e5m2}
FORMATS = (*get_args(Kind), *_CASTS)


def rounded(weight: Tensor, name: str) -> Tensor:
    """The weights as a format has them, in fp32."""
    if name in _CASTS:
        return weight.to(_CASTS[name]).float()
    kind: Any = name
    return dequantize(*quantize(weight, kind), kind, (weight.shape[0], weight.shape[1]), torch.float32)


def errors(model: str) -> Iterator[tuple[str, int, list[float]]]:
    """Name, number of weights and errors of each layer that would be quantized."""
    config = with_family(ModelSection(pretrained_model_name_or_path=model))
    with quiet_libraries():
        spec = get_family(config.model_name).load(config)
        transformer = spec.load_transformer(torch.bfloat16).requires_grad_(False)
    for name, layer in quantizable_layers(transformer, skip=spec.unquantized):
        weight = layer.weight.detach()
        norm = weight.float().norm().clamp(min=1e-30)
        found = [(rounded(weight, one) - weight.float()).norm() / norm for one in FORMATS]
        yield name, weight.numel(), [value.item() for value in found]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: the mean over all weights, the largest error, and with `--layers` each layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model in diffusers layout: a hub id, a folder, or demo://NAME")
    parser.add_argument("--layers", action="store_true", help="a row for each layer")
    options = parser.parse_args(arguments)
    rows = list(errors(options.model))
    total = sum(weights for _, weights, _ in rows)
    columns = list(zip(*(found for _, _, found in rows), strict=True))
    means = [sum(e * weights for e, (_, weights, _) in zip(column, rows, strict=True)) / total for column in columns]
    print(f"{len(rows)} layers, {total / 1e6:.4g} M weights of {options.model}")
    print(f"| layer | {' | '.join(FORMATS)} |\n|---{'|---' * len(FORMATS)}|")
    shown = [("mean", means), ("largest", [max(column) for column in columns])]
    shown += [(name, found) for name, _, found in rows] if options.layers else []
    for name, found in shown:
        print(f"| {name} | {' | '.join(f'{value:.2%}' for value in found)} |")


if __name__ == "__main__":
    main()
