"""Segmentation data sets: Pascal VOC and generated shapes."""
