"""Generated inputs for each class of torchmetrics: a factory, and the arguments of `update` for 11 samples."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, regression
from torchmetrics import classification as c
from torchmetrics import wrappers as w
from torchmetrics.aggregation import MeanMetric
from torchmetrics.functional.audio import scale_invariant_signal_noise_ratio
from torchmetrics.image.inception import InceptionScore

SAMPLES = 11
CLASSES = 3
# Their networks would be downloaded.
PRETRAINED = {
    "ARNIQA",
    "BERTScore",
    "CLIPImageQualityAssessment",
    "CLIPScore",
    "DeepImageStructureAndTextureSimilarity",
    "DeepNoiseSuppressionMeanOpinionScore",
    "InfoLM",
    "LearnedPerceptualImagePatchSimilarity",
    "NonIntrusiveSpeechQualityAssessment",
}
# Base classes, which have no value.
ABSTRACT = {"BaseAggregator", "Metric", "MetricInputTransformer", "RetrievalMetric", "WrapperMetric"}


@dataclass(frozen=True)
class Case:
    """A metric and its samples.

    Attributes:
        make: Returns the metric.
        calls: Returns the arguments of each `update` for the samples from `start` up to `stop`.
    """

    make: Callable[[], Any]
    calls: Callable[[int, int], list[tuple[Any, ...]]]


def classes() -> dict[str, type[Any]]:
    """Returns the classes of the installed torchmetrics that are metrics or hold metrics, by name."""
    found = {}
    for info in pkgutil.walk_packages(torchmetrics.__path__, "torchmetrics."):
        if re.search(r"\.(functional|utilities)\b|_deprecated", info.name):
            continue
        for name, kind in vars(importlib.import_module(info.name)).items():
            is_metric = inspect.isclass(kind) and issubclass(kind, Metric | MetricCollection | w.MetricTracker)
            if is_metric and kind.__module__.startswith("torchmetrics.") and not name.startswith("_"):
                found[kind.__name__] = kind
    return {name: kind for name, kind in sorted(found.items()) if name not in ABSTRACT}


def _random(*shape: int) -> Tensor:
    return torch.rand(SAMPLES, *shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def _integers(high: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(high, (SAMPLES, *shape), generator=torch.Generator().manual_seed(seed))


def _of(make: Callable[[], Any], *arguments: Any) -> Case:
    def calls(start: int, stop: int) -> list[tuple[Any, ...]]:
        return [tuple(_rows(argument, start, stop) for argument in arguments)]

    return Case(make, calls)


def _rows(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, dict):
        return {key: _rows(item, start, stop) for key, item in value.items()}
    return value[start:stop] if isinstance(value, Tensor | list) else value


BINARY = (_random(), _integers(2))
MULTICLASS = (_random(CLASSES).softmax(1), _integers(CLASSES))
MULTILABEL = (_random(CLASSES), _integers(2, CLASSES))
# Each image has a range of its own.
RANGES = torch.linspace(0.3, 1, SAMPLES)[:, None, None, None]
IMAGES = (_random(3, 32, 32) * RANGES, _random(3, 32, 32).flip(0) * RANGES)
LARGE_IMAGES = (_random(3, 180, 180) * RANGES, _random(3, 180, 180).flip(0) * RANGES)
SOUNDS = (_random(1, 400) - 0.5, _random(1, 400).flip(0) - 0.5)
VALUES = (_random(), _random().flip(0))
LABELS = (_integers(4), _integers(4, seed=2))
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "slept", "well"]


def _sentences(seed: int) -> list[str]:
    picks = torch.randint(len(WORDS), (SAMPLES, 6), generator=torch.Generator().manual_seed(seed)).tolist()
    return [" ".join(WORDS[word] for word in row) for row in picks]


TEXT = (_sentences(1), _sentences(2))
REFERENCES = (_sentences(1), [[one, other] for one, other in zip(_sentences(2), _sentences(3), strict=True)])


def _boxes(seed: int, **more: Tensor) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(SAMPLES):
        # One image has no box, and they have different numbers of boxes.
        corners = torch.rand(number % 4, 2, generator=generator) * 50
        sizes = torch.rand(number % 4, 2, generator=generator) * 30 + 5
        boxes = torch.cat([corners, corners + sizes], dim=1)
        labels = torch.randint(2, (len(boxes),), generator=generator)
        found.append({"boxes": boxes, "labels": labels, **({"scores": torch.rand(len(boxes))} if more else {})})
    return found


class Features(nn.Module):
    """A small feature network in the place of a pretrained one."""

    num_features = 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(12, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, images: Tensor) -> Tensor:
        return images.float()[:, :, :2, :2].flatten(1) @ self.weight / 255


def _special(name: str, kind: type[Any]) -> list[Case] | None:  # noqa: PLR0912
    """Returns the cases of a class that is unlike the others of its domain."""
    images8 = (_random(3, 8, 8) * 255).to(torch.uint8)
    match name:
        case "BinaryFairness" | "BinaryGroupStatRates":
            return [_of(lambda: kind(2), *BINARY, _integers(2, seed=5))]
        case "MulticlassExactMatch" | "MultilabelExactMatch":
            spatial = (_integers(CLASSES, 2), _integers(CLASSES, 2, seed=3))
            return [_of(lambda: kind(CLASSES), *(spatial if "class" in name else MULTILABEL))]
        case "ExactMatch":
            return [_of(lambda: kind("multilabel", num_labels=CLASSES), *MULTILABEL)]
        case "FrechetInceptionDistance" | "KernelInceptionDistance" | "MemorizationInformedFrechetInceptionDistance":
            more = {"subsets": 2, "subset_size": 2} if name.startswith("Kernel") else {}
            return [_real_and_other(lambda: kind(Features(), **more), images8)]
        case "InceptionScore":
            return [_of(lambda: kind(Features(), splits=2), images8)]
        case "QualityWithNoReference" | "SpatialDistortionIndex":
            target = {"ms": _random(3, 16, 16), "pan": _random(3, 32, 32).flip(0)}
            return [_of(kind, _random(3, 32, 32), target)]
        case "MultiScaleStructuralSimilarityIndexMeasure":
            return [_of(lambda more=more: kind(data_range=more), *LARGE_IMAGES) for more in (1.0, None)]
        case "VisualInformationFidelity":
            return [_of(kind, _random(3, 48, 48), _random(3, 48, 48).flip(0))]
        case "PeakSignalNoiseRatioWithBlockedEffect":
            return [_of(lambda: kind(1.0), _random(1, 32, 32), _random(1, 32, 32).flip(0))]
        case "PeakSignalNoiseRatio":
            return [
                _of(lambda: kind(1.0), *IMAGES),
                _of(lambda: kind((0.2, 0.8), reduction="none", dim=(1, 2, 3)), *IMAGES),
            ]
        case "TotalVariation":
            return [_of(lambda each=each: kind(reduction=each), IMAGES[0]) for each in ("sum", "mean", "none")]
        case "StructuralSimilarityIndexMeasure" | "UniversalImageQualityIndex" | "SpectralDistortionIndex":
            return [_of(lambda each=each: kind(reduction=each), *IMAGES) for each in ("elementwise_mean", "none")] + (
                [_of(lambda: kind(data_range=1.0), *IMAGES)] if name.startswith("Structural") else []
            )
        case "PerceptualPathLength":
            return [Case(lambda: kind(num_samples=4, sim_net=nn.Identity()), lambda start, stop: [(Features(),)])]
        case "ComplexScaleInvariantSignalNoiseRatio":
            return [_of(kind, _random(1, 20, 10, 2), _random(1, 20, 10, 2).flip(0))]
        case "SourceAggregatedSignalDistortionRatio":
            return [_of(kind, _random(2, 400), _random(2, 400).flip(0))]
        case "PermutationInvariantTraining":
            return [_of(lambda: kind(scale_invariant_signal_noise_ratio), _random(2, 50), _random(2, 50).flip(0))]
        case "PerceptualEvaluationSpeechQuality":
            return [_of(lambda: kind(8000, "nb"), _random(8000), _random(8000).flip(0))]
        case "ShortTimeObjectiveIntelligibility":
            return [_of(lambda: kind(8000), _random(8000), _random(8000).flip(0))]
        case "DeepNoiseSuppressionMeanOpinionScore":
            return [_of(lambda: kind(16000, False), _random(8000))]
        case "NonIntrusiveSpeechQualityAssessment" | "SpeechReverberationModulationEnergyRatio":
            return [_of(lambda: kind(16000), _random(8000))]
        case "MeanAveragePrecision":
            return [_of(kind, _boxes(1, scores=BINARY[0]), _boxes(2))]
        case "PanopticQuality" | "ModifiedPanopticQuality":
            points = (_integers(2, 4, 4, 2), _integers(2, 4, 4, 2, seed=4))
            return [_of(lambda: kind(things={0}, stuffs={1}), *points)]
        case "FleissKappa":
            return [_of(kind, _integers(4, 5))]
        case "CalinskiHarabaszScore" | "DaviesBouldinScore" | "DunnIndex":
            return [_of(kind, _random(4), _integers(3))]
        case "ClusterAccuracy":
            return [_of(lambda: kind(4), *LABELS)]
        case "DiceScore" | "GeneralizedDiceScore" | "MeanIoU" | "HausdorffDistance":
            return _segmentation(name, kind)
        case "ProcrustesDisparity":
            return [_of(kind, _random(6, 3), _random(6, 3).flip(0))]
        case "CriticalSuccessIndex":
            sequences = (_random(4), _random(4).flip(0))
            return [_of(lambda: kind(0.5), *VALUES), _of(lambda: kind(0.5, keep_sequence_dim=1), *sequences)]
        case "MinkowskiDistance":
            return [_of(lambda: kind(3), *VALUES)]
        case "CosineSimilarity":
            pairs = (_random(4), _random(4).flip(0))
            return [_of(lambda each=each: kind(reduction=each), *pairs) for each in ("sum", "mean", "none")]
        case "KLDivergence" | "JensenShannonDivergence":
            pairs = (_random(4).softmax(1), _random(4).flip(0).softmax(1))
            return [_of(lambda each=each: kind(reduction=each), *pairs) for each in ("mean", "sum", "none")]
        case "ContinuousRankedProbabilityScore":
            return [_of(kind, _random(5), _random())]
        case "NormalizedRootMeanSquaredError":
            pairs = (_random(2), _random(2).flip(0))
            kinds = ("mean", "range", "std", "l2")
            return [_of(lambda each=each: kind(each), *VALUES) for each in kinds] + [
                _of(lambda each=each: kind(each, num_outputs=2), *pairs) for each in kinds
            ]
        case "R2Score" | "ExplainedVariance" | "TweedieDevianceScore":
            return [_of(kind, *VALUES)]
        case "Perplexity":
            return [_of(kind, _random(4, 5), _integers(5, 4))]
        case "SQuAD":
            texts = [[{"id": str(n), **row} for n, row in enumerate(rows)] for rows in _answers()]
            return [_of(kind, *texts)]
        case "BLEUScore" | "SacreBLEUScore" | "CHRFScore" | "TranslationEditRate" | "ExtendedEditDistance":
            return [_of(kind, *REFERENCES)] + (
                [_of(lambda: kind(return_sentence_level_score=True), *REFERENCES)]
                if "return_sentence_level_score" in inspect.signature(kind).parameters
                else []
            )
        case "EditDistance":
            return [_of(lambda each=each: kind(reduction=each), *TEXT) for each in ("mean", "none")]
        case "CatMetric" | "MaxMetric" | "MeanMetric" | "MinMetric" | "SumMetric" | "RunningMean" | "RunningSum":
            return [_of(kind, VALUES[0])]
        case "LipVertexError":
            return [_of(lambda: kind(mouth_map=[0, 1]), _random(4, 3), _random(4, 3).flip(0))]
        case "VideoMultiMethodAssessmentFusion":
            return [_of(kind, _random(3, 2, 32, 32), _random(3, 2, 32, 32).flip(0))]
    return _nested(name, kind)


def _real_and_other(make: Callable[[], Any], images: Tensor) -> Case:
    """Returns a case whose `update` takes images that are either real, here the first five, or not."""

    def calls(start: int, stop: int) -> list[tuple[Any, ...]]:
        parts = [(images[start : min(stop, 5)], True), (images[max(start, 5) : stop], False)]
        return [part for part in parts if len(part[0])]

    return Case(make, calls)


def _answers() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    predicted = [{"prediction_text": text} for text in _sentences(1)]
    return predicted, [{"answers": {"answer_start": [0], "text": [text]}} for text in _sentences(2)]


def _segmentation(name: str, kind: type[Any]) -> list[Case]:
    masks = (_integers(CLASSES, 8, 8), _integers(CLASSES, 8, 8, seed=6))
    options: list[dict[str, Any]] = [{"num_classes": CLASSES, "input_format": "index"}]
    if name == "DiceScore":
        options += [{**options[0], "aggregation_level": "global"}, {**options[0], "average": "none"}]
    cases = [_of(lambda more=more: kind(**more), *masks) for more in options]
    if name == "MeanIoU":
        # Its states are added in the first update.
        one_hot = [nn.functional.one_hot(mask, CLASSES).movedim(-1, 1) for mask in masks]
        cases.append(_of(kind, *one_hot))
    return cases


def _nested(name: str, kind: type[Any]) -> list[Case] | None:
    accuracy: Callable[..., Metric] = c.MulticlassAccuracy
    match name:
        case "MetricCollection":
            many = lambda: kind(  # noqa: E731
                [accuracy(CLASSES), c.MulticlassRecall(CLASSES), c.MulticlassAUROC(CLASSES)], prefix="val_"
            )
            nested = lambda: kind({"one": kind([accuracy(CLASSES)]), "two": c.MulticlassF1Score(CLASSES)})  # noqa: E731
            return [_of(many, *MULTICLASS), _of(nested, *MULTICLASS)]
        case "CompositionalMetric":
            return [
                _of(lambda: accuracy(CLASSES) + c.MulticlassF1Score(CLASSES), *MULTICLASS),
                _of(lambda: 2 * MeanMetric() - torch.tensor(1.0), VALUES[0]),
            ]
        case "MinMaxMetric":
            return [_of(lambda: kind(accuracy(CLASSES)), *MULTICLASS)]
        case "ClasswiseWrapper":
            return [_of(lambda: kind(accuracy(CLASSES, average=None)), *MULTICLASS)]
        case "MultioutputWrapper":
            pairs = (_random(2), _random(2).flip(0))
            return [_of(lambda: kind(regression.PearsonCorrCoef(), 2), *pairs)]
        case "MultitaskWrapper":
            make = lambda: kind({"a": c.BinaryAccuracy(), "b": regression.SpearmanCorrCoef()})  # noqa: E731
            predicted, targets = {"a": BINARY[0], "b": VALUES[0]}, {"a": BINARY[1], "b": VALUES[1]}
            return [_of(make, predicted, targets)]
        case "BootStrapper":
            return [_of(lambda: kind(accuracy(CLASSES)), *MULTICLASS)]
        case "Running" | "MetricTracker":
            return [_of(lambda: kind(accuracy(CLASSES)), *MULTICLASS)]
        case "LambdaInputTransformer":
            return [_of(lambda: kind(c.BinaryAUROC(), transform_pred=lambda p: 1 - p), *BINARY)]
        case "BinaryTargetTransformer":
            return [_of(lambda: kind(c.BinaryAUROC()), *BINARY)]
        case "FeatureShare":
            images = (_random(3, 8, 8) * 255).to(torch.uint8)
            return [_of(lambda: kind([InceptionScore(Features(), splits=2)]), images)]
    return None


def cases_of(name: str, kind: type[Any]) -> list[Case]:
    """Returns the cases of a class.

    Raises:
        KeyError: There is no case for a class of this domain.
    """
    if (special := _special(name, kind)) is not None:
        return special
    domain = kind.__module__.split(".")[1]
    if domain == "classification":
        return _classification(name, kind)
    if domain == "retrieval":
        queries = _integers(3, seed=9)
        limits = {"max_k": 4} if "Curve" in name else {}
        variants = [{}, {"empty_target_action": "skip"}]
        return [_of(lambda more=more: kind(**limits, **more), *BINARY, queries) for more in variants]
    if domain == "detection":
        return [_of(lambda more=more: kind(**more), _boxes(1), _boxes(2)) for more in ({}, {"class_metrics": True})]
    arguments: dict[str, tuple[Any, ...]] = {
        "regression": VALUES,
        "image": IMAGES,
        "audio": SOUNDS,
        "text": TEXT,
        "clustering": LABELS,
        "nominal": LABELS,
    }
    options = {"num_classes": 4} if "num_classes" in inspect.signature(kind).parameters else {}
    cases = [_of(lambda: kind(**options), *arguments[domain])]
    if "num_outputs" in inspect.signature(kind).parameters:
        cases.append(_of(lambda: kind(num_outputs=2), _random(2), _random(2).flip(0)))
    return cases


def _classification(name: str, kind: type[Any]) -> list[Case]:
    options: dict[str, Any] = {}
    for pattern, more in (
        ("AtFixedPrecision", {"min_precision": 0.3}),
        ("AtFixedRecall", {"min_recall": 0.3}),
        ("SensitivityAtSpecificity", {"min_specificity": 0.3}),
        ("SpecificityAtSensitivity", {"min_sensitivity": 0.3}),
        ("FBeta", {"beta": 2.0}),
    ):
        options |= more if pattern in name else {}
    variants: list[dict[str, Any]] = [options]
    parameters = inspect.signature(kind).parameters
    if name.startswith(("Binary", "Multiclass", "Multilabel")):
        samples = BINARY if name.startswith("Binary") else MULTICLASS if "class" in name else MULTILABEL
        options |= {key: CLASSES for key in ("num_classes", "num_labels") if key in parameters}
        if "thresholds" in parameters:
            variants.append({**options, "thresholds": 5})
        if "average" in parameters and "thresholds" not in parameters:
            variants.append({**options, "average": "none"})
        if "multidim_average" in parameters:
            variants.append({**options, "multidim_average": "samplewise"})
            spatial = samples if name.startswith("Multilabel") else (samples[1], samples[1].flip(0))
            sequence = tuple(part.unsqueeze(-1).expand(*part.shape, 2) for part in spatial)
            return [
                _of(lambda more=more: kind(**more), *(sequence if "multidim_average" in more else samples))
                for more in variants
            ]
        return [_of(lambda more=more: kind(**more), *samples) for more in variants]
    return [_of(lambda: kind("multiclass", num_classes=CLASSES, **options), *MULTICLASS)]
