"""A useful video VAE without training: block PCA written into the convolutions of the stock `AutoencoderKLLTXVideo`.

It exists because no pretrained visual VAE comes without a download, and training one on a CPU takes hours. A linear
code is fitted in seconds, reconstructs smooth clips well, and loads with plain `from_pretrained`.

**The code.** Patches of `p x p` pixels become `3 p^2` channels (exactly invertible). Then every stage halves time,
height and width: the 2x2x2 block of a cell, `b` in `R^(8 d)`, is replaced by its leading principal components
`z = V^T (b - mu)`; `V` has orthonormal columns, so `V z + mu` is the best linear reconstruction. Time is causal: cell t
holds frames 2t-1 and 2t, and the first frame is its own predecessor.

**Encoder.** `conv_in` is the identity (last temporal tap, since padding is causal). A strided causal 3x3x3 downsampler
reads exactly that block through its taps {1, 2}^3, so it holds `V^T` and `-V^T mu`.

**Decoder.** An upsampler is a convolution to 8 d channels followed by depth-to-space; its center tap holds `V`, its
bias `mu`. The first frame, decoded twice, is dropped by the class itself.

**The nonlinearity at each end.** Both halves end in `conv_out(silu(rmsnorm(h)))`. The last linear layer therefore emits
`h = [z, -z, K, 0...]` over N channels with a constant K much larger than |z|:

    rms(h) = sqrt((2 |z|^2 + K^2) / N) = K / sqrt(N) * (1 + |z|^2 / K^2 + ...)     so  rmsnorm(h) = h sqrt(N) / K
    silu(y) - silu(-y) = y sigmoid(y) + y sigmoid(-y) = y                          exactly

and `conv_out`, with gain K / sqrt(N) on the first channels and its negative on the second, returns z. With K = 300 |z|
the scale is wrong by at most 1e-5. The two terms have opposite signs before they are subtracted, so nothing cancels and
bf16 is fine. Gains are powers of two, exact in any float format.

The log-variance output is constant, so that encoding is deterministic. `latents_mean` and `latents_std` are measured on
the clips, which gives the transformer latents of zero mean and unit variance (less where a component hardly varies).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from diffusers import AutoencoderKLLTXVideo
from torch import Tensor, nn

from finetrainers.utils.failures import InputError

_CONSTANT = 300.0  # K in units of the largest |z|
_STD_FLOOR = 1e-4  # in units of the largest standard deviation
_LOGVAR = -30.0  # the class clamps here; a standard deviation of 3e-7


@dataclass(frozen=True)
class _Stage:
    mean: Tensor  # [8 d]
    basis: Tensor  # [8 d, k], orthonormal columns

    @property
    def taps(self) -> Tensor:
        """The basis by channel and place in the block: `[d, 8, k]`."""
        return self.basis.unflatten(0, (-1, 8))


@torch.no_grad()
def build_linear_vae(
    clips: Sequence[Tensor], *, patch_size: int = 2, keep: Sequence[int] = (64,), latent_channels: int = 32
) -> AutoencoderKLLTXVideo:
    """Fit the code to clips and write it into a VAE; the module's docstring has the method.

    Args:
        clips: videos in [-1, 1], `[3, F, H, W]` each, of any sizes that divide.
        patch_size: side of the pixel patches.
        keep: components kept after each stage but the last; there are `len(keep) + 1` stages.
        latent_channels: components kept after the last stage.

    Raises:
        ValueError: a clip's size does not divide, there are no clips, or more components are requested than exist.
    """
    dims = [3 * patch_size**2, *keep, latent_channels]
    stages = len(keep) + 1
    _check(clips, dims, temporal=2**stages, spatial=patch_size * 2**stages)

    cells = [_patchify(clip.float(), patch_size) for clip in clips]
    fitted: list[_Stage] = []
    for components in dims[1:]:
        blocks = [_blocks(x) for x in cells]
        stage = _principal_components(blocks, components)
        cells = [torch.einsum("nthw,nk->kthw", b - stage.mean[:, None, None, None], stage.basis) for b in blocks]
        fitted.append(stage)
    codes = torch.cat([x.flatten(1) for x in cells], dim=1)

    vae = _empty_vae(dims, patch_size)
    _write_encoder(vae.encoder, fitted, largest=codes.norm(dim=0).max().item())
    _write_decoder(vae.decoder, fitted)
    vae.latents_mean.copy_(codes.mean(dim=1))
    std = codes.std(dim=1)
    # A component that hardly varies would be rounding noise blown up to unit variance.
    vae.latents_std.copy_(std.clamp_min(max(_STD_FLOOR * std.max().item(), 1e-6)))
    return vae.eval()


# ---- the code --------------------------------------------------------------------------------------------------


def _patchify(clip: Tensor, p: int) -> Tensor:
    """Move pixels to channels in the class's order, (color, column, row): `[3, F, H, W]` to `[3 p p, F, H/p, W/p]`."""
    return clip.unflatten(3, (-1, p)).unflatten(2, (-1, p)).permute(0, 5, 3, 1, 2, 4).flatten(0, 2)


def _blocks(x: Tensor) -> Tensor:
    """Cut 2x2x2 blocks in channel order (d, time, row, column): `[d, 2k+1, H, W]` to `[8 d, k+1, H/2, W/2]`."""
    x = torch.cat([x[:, :1], x], dim=1)
    x = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
    return x.permute(0, 2, 4, 6, 1, 3, 5).flatten(0, 3)


def _principal_components(blocks: Sequence[Tensor], k: int) -> _Stage:
    """Return the k leading components of all cells, computed in float64."""
    rows = [b.flatten(1).double() for b in blocks]
    count = sum(r.shape[1] for r in rows)
    mean = sum((r.sum(dim=1) for r in rows), start=torch.zeros(())) / count
    centered = [r - mean[:, None] for r in rows]
    _, vectors = torch.linalg.eigh(sum((r @ r.T for r in centered), start=torch.zeros(())) / count)  # ascending
    basis = vectors[:, -k:].flip(1)
    # An eigenvector's sign is arbitrary: fix it, so that every machine writes the same file.
    basis = basis * basis.gather(0, basis.abs().argmax(dim=0, keepdim=True)).sign()
    return _Stage(mean.float(), basis.float().contiguous())


# ---- writing it into the network -------------------------------------------------------------------------------


def _empty_vae(dims: Sequence[int], patch_size: int) -> AutoencoderKLLTXVideo:
    """Return the stock class without residual blocks, wide enough for `[z, -z, K]` at both ends, all weights zero."""
    stages = len(dims) - 1
    encoder_width = max(2 * dims[-1] + 1, *dims)
    decoder_width = max(2 * dims[0] + 1, *dims)
    with torch.device("meta"):
        vae = AutoencoderKLLTXVideo(
            latent_channels=dims[-1],
            patch_size=patch_size,
            block_out_channels=(encoder_width,) * stages,
            decoder_block_out_channels=(decoder_width,) * stages,
            down_block_types=("LTXVideoDownBlock3D",) * stages,
            downsample_type=("conv",) * stages,
            layers_per_block=(0,) * (stages + 1),
            decoder_layers_per_block=(0,) * (stages + 1),
            spatio_temporal_scaling=(True,) * stages,
            decoder_spatio_temporal_scaling=(True,) * stages,
            decoder_inject_noise=(False,) * (stages + 1),
            upsample_residual=(False,) * stages,
            upsample_factor=(1,) * stages,
        )
    vae.to_empty(device="cpu")
    for parameter in vae.parameters():
        parameter.zero_()
    return vae


def _write_encoder(encoder: Any, stages: Sequence[_Stage], *, largest: float) -> None:
    """Fill the encoder; `largest` is the largest |z| of the fitted clips."""
    current = (2, 1, 1)  # the tap of a causal 3x3x3 convolution that reads the cell itself
    _write_identity(encoder.conv_in.conv, stages[0].taps.shape[0], tap=current)
    for stage, block in zip(stages, encoder.down_blocks, strict=True):
        conv = block.downsamplers[0].conv
        d, _, k = stage.taps.shape
        conv.weight[:k, :d, 1:, 1:, 1:] = stage.taps.permute(2, 0, 1).unflatten(2, (2, 2, 2))
        conv.bias[:k] = -(stage.mean @ stage.basis)
    # The last stage also emits -z and K.
    conv.weight[k : 2 * k] = -conv.weight[:k]
    conv.bias[k : 2 * k] = -conv.bias[:k]
    out = encoder.conv_out.conv
    conv.bias[2 * k] = _write_difference(out, k, tap=current, largest=largest)
    out.bias[k] = _LOGVAR


def _write_decoder(decoder: Any, stages: Sequence[_Stage]) -> None:
    """Fill the decoder, whose convolutions are not causal: the center tap reads the cell itself."""
    center = (1, 1, 1)
    _write_identity(decoder.conv_in.conv, stages[-1].taps.shape[2], tap=center)
    for stage, block in zip(reversed(stages), decoder.up_blocks, strict=True):
        conv = block.upsamplers[0].conv.conv
        d, _, k = stage.taps.shape
        # Depth-to-space reads channel 8 c + place, which is the order of the basis.
        conv.weight[: 8 * d, :k, 1, 1, 1] = stage.basis
        conv.bias[: 8 * d] = stage.mean
    # The last stage also emits the negated pixels and K, eight times: once for each place in the block.
    conv.weight[8 * d : 16 * d] = -conv.weight[: 8 * d]
    conv.bias[8 * d : 16 * d] = -conv.bias[: 8 * d]
    # Pixels lie in [-1, 1], so d of them have a norm of sqrt(d) at most.
    constant = _write_difference(decoder.conv_out.conv, d, tap=center, largest=math.sqrt(d))
    conv.bias[16 * d : 16 * d + 8] = constant


def _write_identity(conv: nn.Conv3d, channels: int, *, tap: tuple[int, int, int]) -> None:
    """Pass the first channels through."""
    index = torch.arange(channels)
    cells = (index, index, *tap)
    conv.weight[cells] = 1.0


def _write_difference(conv: nn.Conv3d, channels: int, *, tap: tuple[int, int, int], largest: float) -> float:
    """Make `conv` undo `silu(rmsnorm([z, -z, K]))`; return the K that this needs."""
    width = conv.in_channels
    gain = 2.0 ** math.ceil(math.log2(_CONSTANT * max(largest, 1e-3) / math.sqrt(width)))
    index = torch.arange(channels)
    plus, minus = (index, index, *tap), (index, index + channels, *tap)
    conv.weight[plus] = gain
    conv.weight[minus] = -gain
    return gain * math.sqrt(width)


def _check(clips: Sequence[Tensor], dims: Sequence[int], *, temporal: int, spatial: int) -> None:
    if not clips:
        raise InputError("fitting a linear VAE requires at least one clip", "required")
    for i, clip in enumerate(clips):
        if clip.ndim != 4 or clip.shape[0] != 3:
            raise ValueError(f"clip {i} has shape {tuple(clip.shape)}; expected [3, frames, height, width]")
        frames, height, width = clip.shape[1:]
        if (frames - 1) % temporal or height % spatial or width % spatial:
            raise ValueError(
                f"clip {i} has {frames} frames of {height} x {width}; frames must be {temporal}*k+1, "
                f"height and width multiples of {spatial}"
            )
    for before, after in pairwise(dims):
        if after > 8 * before:
            raise InputError(f"a stage of {8 * before} values cannot keep {after} components", "too_large")
