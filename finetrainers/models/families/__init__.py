"""The model families of this package: how their checkpoints' configs are read. Imports no torch.

Each module has a reader, which is given the configs on disk, and the `FAMILY` that names it. Keys that configs leave
out mean the class's defaults, so that without any config a reader describes the published checkpoints.
"""

from __future__ import annotations

from . import cogvideox, hunyuan_video, hunyuan_video_15, kandinsky5, ltx2, ltx_video, mochi, skyreels_v2, wan

FAMILIES = (
    ltx_video.FAMILY, hunyuan_video.FAMILY, cogvideox.FAMILY, wan.FAMILY, ltx2.FAMILY, mochi.FAMILY,
    hunyuan_video_15.FAMILY, skyreels_v2.FAMILY, kandinsky5.FAMILY,
)  # fmt: skip
