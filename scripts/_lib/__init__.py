"""What the scripts share. `paths`, `environment` and `services` need the standard library only."""

from __future__ import annotations
