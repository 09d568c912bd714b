"""Measurements: what a scheduler loop and an event cost, stock and patched, in turn (scripts/bench)."""

from __future__ import annotations
