"""Makes the pages of the gallery from real runs: `make gallery`. It takes about five minutes, and needs Chromium.

Each program runs in a temporary folder. The name of that folder is removed from the pages.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PICTURES = ROOT / "docs" / "pictures"
TRAIN = (sys.executable, str(ROOT / "train.py"))
# On a telephone, 500 pixels are shown as 358.
WIDTH, HEIGHT, SCALE, COLORS = 500, 760, 2, 48
KILLED = ("--devices", "2", "--save-every", "20", "--inject", "kill:rank=1,step=50", "--run-dir", "runs/killed")


def run(folder: Path, *words: str, expected: int = 0) -> str:
    """Runs a command in a folder, and returns what it prints.

    Raises:
        SystemExit: Its exit code is another one.
    """
    print("$", " ".join(words).replace(f"{ROOT}/", ""), flush=True)
    done = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != expected:
        raise SystemExit(f"exit code {done.returncode} instead of {expected}\n{done.stdout}")
    return done.stdout


def publish(page: Path, name: str, folder: Path) -> None:
    """Copies a page into the gallery, without the name of the folder of its run, and makes an image of its top."""
    text = page.read_text(encoding="utf-8").replace(f"{folder}/", "").replace(f"{ROOT}/", "")
    (HERE / f"{name}.html").write_text(text, encoding="utf-8")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("This needs Chromium: apt-get install chromium")
    image = folder / f"{name}.png"
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--force-device-scale-factor={SCALE}",
    )
    where = (f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={image}", (HERE / f"{name}.html").as_uri())
    run(folder, browser, *options, *where)
    small = Image.open(image).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    small.save(HERE / f"{name}.png", optimize=True)


def report(folder: Path) -> None:
    """The report of a training run, of one epoch on two ranks."""
    run(folder, *TRAIN, "--devices", "2", "--run-dir", "runs/first")
    publish(folder / "runs" / "first" / "report.html", "report", folder)


def comparison(folder: Path) -> None:
    """Four engines side by side."""
    engines = "raw_ddp,lightning,fabric,with_accelerate"
    flags = (
        "--devices",
        "2",
        "--max-steps",
        "100",
        "--repeats",
        "1",
        "--timed-steps",
        "60",
        "--run-dir",
        "runs/compared",
    )
    run(folder, *TRAIN, "compare", "--engines", engines, *flags)
    publish(folder / "runs" / "compared" / "comparison.html", "comparison", folder)


def doctor(folder: Path) -> None:
    """The doctor on a program with two faults, and on the same one without them."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    for name, program, code in (("doctor-faulty", "train.py", 1), ("doctor-mended", "mended.py", 0)):
        shutil.copy(ROOT / "examples" / "doctor" / program, folder)
        command = (torchrun, "--standalone", "--nproc-per-node", "2", program)
        page = folder / f"{name}.html"
        run(folder, sys.executable, "-m", "ddp_doctor", "--html", str(page), "--", *command, expected=code)
        page.write_text(page.read_text(encoding="utf-8").replace(torchrun, "torchrun"), encoding="utf-8")
        publish(page, name, folder)


def failure(folder: Path) -> None:
    """What a run prints if a rank is killed, which docs/pictures/failure.py draws."""
    told = run(folder, *TRAIN, *KILLED, expected=3)
    text = f"$ python train.py {' '.join(KILLED)}\n{told.replace(f'{ROOT}/', '')}"
    (PICTURES / "failure.txt").write_text(text, encoding="utf-8")
    run(folder, sys.executable, str(PICTURES / "failure.py"))


PARTS = (report, comparison, doctor, failure)


def main() -> None:
    """Makes all parts of the gallery, or those that are named."""
    names = [part.__name__ for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(names)}; all by default")
    chosen = parser.parse_args().parts
    if unknown := set(chosen) - set(names):
        parser.error(f"no part {', '.join(sorted(unknown))}")
    for part in PARTS:
        if not chosen or part.__name__ in chosen:
            with tempfile.TemporaryDirectory(prefix="gallery-") as folder:
                part(Path(folder).resolve())


if __name__ == "__main__":
    main()
