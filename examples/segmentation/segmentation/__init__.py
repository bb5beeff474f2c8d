"""A user's project: semantic segmentation with DeepLabV3 on Pascal VOC, or on generated shapes."""

from segmentation.datamodule import SegmentationData
from segmentation.module import LitSegmenter

__all__ = ["LitSegmenter", "SegmentationData"]
