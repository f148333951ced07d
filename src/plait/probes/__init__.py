"""Looking inside: capture and patch on named points, and measurements built on them."""

from plait.probes.points import capture, patch, points
from plait.probes.retrieval import layer_retrieval_scores, retrieval_records

__all__ = ["capture", "layer_retrieval_scores", "patch", "points", "retrieval_records"]
