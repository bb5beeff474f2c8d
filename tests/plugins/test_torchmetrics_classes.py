"""Every class of the installed torchmetrics in `exact_metric`: equal on any number of ranks, or rejected by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchmetrics_cases import SAMPLES, classes
from torchmetrics_outcomes import compare, installed
from torchmetrics_table import PAGE, rows

# Of each kind of state: counts, sums, lists with and without a concatenation, statistics that a class combines itself,
# states that the first update adds, nested metrics, and those that one process rejects without samples.
SELECTION = [
    "BinaryAUROC",
    "BinaryTargetTransformer",
    "BootStrapper",
    "CHRFScore",
    "CatMetric",
    "ClasswiseWrapper",
    "CompositionalMetric",
    "ConcordanceCorrCoef",
    "DiceScore",
    "FrechetInceptionDistance",
    "GeneralizedIntersectionOverUnion",
    "MaxMetric",
    "MeanIoU",
    "MeanMetric",
    "MetricCollection",
    "MetricTracker",
    "MinMaxMetric",
    "MulticlassAUROC",
    "MulticlassConfusionMatrix",
    "MultilabelAccuracy",
    "MultioutputWrapper",
    "MultitaskWrapper",
    "PanopticQuality",
    "PearsonCorrCoef",
    "PeakSignalNoiseRatio",
    "R2Score",
    "RandScore",
    "RetrievalMAP",
    "RetrievalMRR",
    "RootMeanSquaredErrorUsingSlidingWindow",
    "RunningMean",
    "SQuAD",
    "ScaleInvariantSignalNoiseRatio",
    "SpearmanCorrCoef",
    "StructuralSimilarityIndexMeasure",
    "TheilsU",
    "TotalVariation",
    "WordErrorRate",
]


@pytest.mark.parametrize(
    ("world_size", "counts"), [(2, (0, SAMPLES)), pytest.param(3, (1,), marks=pytest.mark.slow)], ids=str
)
def test_metrics_of_each_kind_are_those_of_one_rank(tmp_path: Path, world_size: int, counts: tuple[int, ...]) -> None:
    """With 1 sample, two of three ranks have none, and some metrics raise the same exception on all ranks."""
    results = compare(SELECTION, tmp_path, (world_size,), counts)
    assert {name: result.different for name, result in results.items() if result.different} == {}
    assert {name for name, result in results.items() if result.values or result.rejected} == set(SELECTION)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_class_is_equal_or_rejected(tmp_path: Path) -> None:
    """With 0, 1 and 11 samples on 2 and 3 ranks, and as the table of the documentation says."""
    usable, missing = installed(list(classes()))
    assert len(usable) + len(missing) == len(classes()) > 200
    results = compare(usable, tmp_path, (2, 3))
    assert {name: result.different for name, result in results.items() if result.different} == {}
    assert [name for name, result in results.items() if not (result.values or result.rejected)] == []
    for name, result in results.items():
        assert all(name in message or name == "FeatureShare" for message in result.rejected), name
    page = PAGE.read_text()
    assert [row for name, row in rows(results, missing).items() if name in results and row not in page] == []
