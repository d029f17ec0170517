"""Makes `policies.py`, which holds what these tests share, importable: as a module, and as a reward's address."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
