"""The published archive of Pascal VOC: downloaded once, and extracted completely or not at all."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import forked, wait_for
from mirror import Mirror
from torchvision.datasets import voc as published
from voc_folder import write_voc

from lit_mnist.data.dataset import Dataset, load_dataset
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings

NAME = "VOCtrainval_11-May-2012.tar"
FOLDER = Path("VOCdevkit/VOC2012")


def tar_of(folder: Path, *, hostile: bool = False) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, "VOCdevkit")
        unused = tarfile.TarInfo("VOCdevkit/VOC2012/Annotations/2007_000000.xml")
        archive.addfile(unused, io.BytesIO(b""))
        if hostile:
            link = tarfile.TarInfo("VOCdevkit/VOC2012/JPEGImages/link")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc"
            archive.addfile(link)
    return buffer.getvalue()


@pytest.fixture
def archive(tmp_path: Path) -> bytes:
    write_voc(tmp_path / "made")
    return tar_of(tmp_path / "made" / "VOCdevkit")


@pytest.fixture
def mirror(archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """The address of a small archive, the only one that torchvision knows of; half of it is sent at once."""
    server = Mirror({NAME: archive})
    publish(monkeypatch, server.address, archive)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.resume.set()
    server.shutdown()
    thread.join(60)
    server.server_close()
    assert not thread.is_alive()


def publish(monkeypatch: pytest.MonkeyPatch, address: str, archive: bytes) -> None:
    md5 = hashlib.md5(archive, usedforsecurity=False).hexdigest()
    known = {**published.DATASET_YEAR_DICT["2012"], "url": f"{address}{NAME}", "md5": md5}
    monkeypatch.setitem(published.DATASET_YEAR_DICT, "2012", known)


def load(root: Path, *, download: bool = True) -> Dataset:
    return load_dataset(DataSettings(name="voc2012", root=str(root), download=download))


def test_it_is_downloaded_only_on_request_and_only_once(tmp_path: Path, mirror: Mirror) -> None:
    root = tmp_path / "root"
    mirror.resume.set()
    with pytest.raises(InputError, match=r"--data\.download true"):
        load(root, download=False)
    found = load(root)
    assert (len(found.train), len(found.test)) == (16, 6)
    assert found.sha256 == load(tmp_path / "made", download=False).sha256
    assert load(root).sha256 == found.sha256
    assert mirror.requested == [NAME]
    assert sorted(path.name for path in root.iterdir()) == [".download.lock", "VOCdevkit"]
    assert sorted(path.name for path in (root / FOLDER).iterdir()) == ["ImageSets", "JPEGImages", "SegmentationClass"]


def test_partial_files_of_a_killed_download_are_not_used(tmp_path: Path, mirror: Mirror) -> None:
    root = tmp_path / "root"
    with forked(lambda: len(load(root).train), tmp_path) as child:
        wait_for(mirror.started.is_set, 60)
        os.kill(child, signal.SIGKILL)
    assert sorted(path.name for path in root.iterdir()) == [".download.lock", ".partial"]
    mirror.resume.set()
    assert len(load(root).train) == 16
    assert not (root / ".partial").exists()


def test_a_manually_downloaded_archive_is_extracted_and_kept(tmp_path: Path, mirror: Mirror, archive: bytes) -> None:
    (tmp_path / NAME).write_bytes(archive)
    assert len(load(tmp_path).train) == 16
    assert mirror.requested == []
    assert (tmp_path / NAME).exists()


def test_a_damaged_archive_is_rejected(tmp_path: Path, mirror: Mirror, archive: bytes) -> None:
    (tmp_path / NAME).write_bytes(archive[:-1])
    with pytest.raises(InputError, match=f"{NAME} is damaged: expected the MD5"):
        load(tmp_path)
    assert not (tmp_path / "VOCdevkit").exists()


def test_an_archive_cannot_write_outside_of_its_folder(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = tar_of(tmp_path / "made" / "VOCdevkit", hostile=True)
    publish(monkeypatch, mirror.address, hostile)
    (tmp_path / NAME).write_bytes(hostile)
    with pytest.raises(InputError, match=f"{NAME} cannot be unpacked"):
        load(tmp_path)
    assert not (tmp_path / "VOCdevkit").exists()


def test_message_without_network_explains_the_manual_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # RFC 6761: no name below .invalid is ever resolved.
    publish(monkeypatch, "http://voc.invalid/", b"")
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{NAME} could not be fetched (http://voc.invalid/{NAME}")
    assert message.endswith(f"put them, unchanged, into {tmp_path}:\n  http://voc.invalid/{NAME}")
