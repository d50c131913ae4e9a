"""What tests of zbuffer, and of what is built on it, can lean on."""

from __future__ import annotations

from zbuffer.testing.model import ModelBuffer, ModelEpisode, ModelWindow
from zbuffer.testing.samplers import check_sampler, row_sets

__all__ = ["ModelBuffer", "ModelEpisode", "ModelWindow", "check_sampler", "row_sets"]
