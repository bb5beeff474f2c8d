"""Semantic segmentation with DeepLabV3: a user's project on the command of lit_mnist."""

from segmentation.data import SegmentationData
from segmentation.module import LitSegmentation

__all__ = ["LitSegmentation", "SegmentationData"]
