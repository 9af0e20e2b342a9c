"""The scripts under test are no package; put their folders on the path."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in ("scripts", "native"):
    sys.path.insert(0, str(ROOT / folder))
