"""Builds the tiny data sets and configurations that the public programs want; all values are random.

Each recipe is a public function of a folder and of the arguments that programs.yaml gives it.
"""

import json
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

WORDS = ["the", "a", "one", "of", "in", "to", "and", "is", "on", "by", "it", "as", "at", "be", "this", "have", "from"]


def image_folder(
    root: Path, splits: Sequence[str] = ("train", "val"), classes: int = 4, each: int = 24, size: int = 64
) -> None:
    """Writes images in the form of ImageFolder: SPLIT/CLASS/*.jpg; no split for splits=[""]."""
    numbers = np.random.default_rng(0)
    for split in splits:
        for label in range(classes):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True, exist_ok=True)
            for place in range(each):
                Image.fromarray(_image(numbers, size, label)).save(folder / f"{place:03d}.jpg", quality=90)


def mnist(root: Path, train: int = 512, test: int = 128) -> None:
    """Writes data in the form of MNIST, as torchvision keeps it."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(0)
    for prefix, count in (("train", train), ("t10k", test)):
        images = numbers.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = numbers.integers(0, 10, count, dtype=np.uint8)
        for name, magic, values in (("images-idx3", 2051, images), ("labels-idx1", 2049, labels)):
            head = b"".join(number.to_bytes(4, "big") for number in (magic, *values.shape))
            (folder / f"{prefix}-{name}-ubyte").write_bytes(head + values.tobytes())


def cifar(root: Path, classes: int = 10, train: int = 512, test: int = 128) -> None:
    """Writes data in the form of CIFAR-10 or CIFAR-100; stand_ins/ accepts their digests."""
    folder = root / ("cifar-10-batches-py" if classes == 10 else "cifar-100-python")
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(0)
    key = "labels" if classes == 10 else "fine_labels"
    batches = {f"data_batch_{n}": train // 5 for n in range(1, 6)} | {"test_batch": test}
    for name, count in (batches if classes == 10 else {"train": train, "test": test}).items():
        data = numbers.integers(0, 256, (count, 3072), dtype=np.uint8)
        labels = numbers.integers(0, classes, count).tolist()
        (folder / name).write_bytes(pickle.dumps({"data": data, key: labels}))
    names = {"label_names" if classes == 10 else "fine_label_names": [f"class{n}" for n in range(classes)]}
    (folder / ("batches.meta" if classes == 10 else "meta")).write_bytes(pickle.dumps(names))


def text(root: Path, lines: int = 400) -> None:
    """Writes sentences of frequent words."""
    root.parent.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(0)
    rows = (" ".join(numbers.choice(WORDS, numbers.integers(4, 12))) for _ in range(lines))
    root.write_text("\n".join(rows) + "\n")


def tokens(root: Path, names: Sequence[str] = ("train.bin", "val.bin"), count: int = 20000, most: int = 64) -> None:
    """Writes files of 16-bit tokens."""
    root.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(0)
    for name in names:
        numbers.integers(0, most, count, dtype=np.uint16).tofile(root / name)


def written(root: Path, text: str) -> None:
    """Writes a text, such as a configuration."""
    root.parent.mkdir(parents=True, exist_ok=True)
    root.write_text(text)


def sentence_pairs(root: Path, config: str, train: int = 256, validation: int = 64) -> None:
    """Writes labelled pairs of sentences as a local folder that `datasets` loads with a configuration's name."""
    numbers = np.random.default_rng(0)
    root.mkdir(parents=True, exist_ok=True)
    head = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, count in (("train", train), ("validation", validation)):
        lines = ["idx,sentence1,sentence2,label"]
        for place in range(count):
            pair = [" ".join(numbers.choice(WORDS, numbers.integers(4, 12))) for _ in range(2)]
            lines.append(f"{place},{pair[0]},{pair[1]},{numbers.integers(2)}")
        (root / f"{split}.csv").write_text("\n".join(lines) + "\n")
        head += [f"  - split: {split}", f"    path: {split}.csv"]
    (root / "README.md").write_text("\n".join([*head, "---", ""]))


def metric(root: Path) -> None:
    """Writes a metric with the interface of GLUE's, as a local folder of evaluate."""
    root.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).parent / "stand_ins" / "glue_metric.py", root / f"{root.name}.py")


def bert(root: Path, labels: int = 2, layers: int = 2) -> None:
    """Writes a tiny BERT with random weights, and its tokenizer, as a local folder of transformers."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    root.mkdir(parents=True, exist_ok=True)
    letters = [chr(code) for code in range(33, 127)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *letters, *(f"##{one}" for one in letters)]
    (root / "vocab.txt").write_text("\n".join(dict.fromkeys(words)) + "\n")
    BertTokenizerFast(vocab_file=str(root / "vocab.txt"), do_lower_case=True, model_max_length=32).save_pretrained(root)
    sizes = {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(set(words)), num_labels=labels, **sizes)
    BertForSequenceClassification(config).save_pretrained(root)


def causal_lm(root: Path) -> None:
    """Writes a tiny GPT-2 with random weights, and its tokenizer, as a local folder of transformers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = ["[UNK]", "[PAD]", "[EOS]", *dict.fromkeys(WORDS)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[EOS]", "bos_token": "[EOS]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(root)
    numbers = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    config = GPT2Config(vocab_size=len(words), n_positions=64, n_embd=32, n_layer=2, n_head=2, **numbers)
    GPT2LMHeadModel(config).save_pretrained(root)


def json_lines(root: Path, train: int = 96, test: int = 24) -> None:
    """Writes sentences of unequal lengths as a local folder that `datasets` loads."""
    numbers = np.random.default_rng(0)
    root.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("test", test)):
        lines = [" ".join(numbers.choice(WORDS, numbers.integers(4, 24))) for _ in range(count)]
        (root / f"{split}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def autoencoder(root: Path) -> None:
    """Writes a tiny AutoencoderKL with random weights, as a local folder of diffusers."""
    from diffusers.models import AutoencoderKL

    sizes = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    AutoencoderKL(**sizes, **blocks).save_pretrained(root)


def _image(numbers: np.random.Generator, size: int, label: int) -> np.ndarray[Any, Any]:
    noise = numbers.integers(0, 128, (size, size, 3))
    return (noise + 30 * label).astype(np.uint8)
