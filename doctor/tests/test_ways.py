"""Programs that start their ranks, and make their batches, in many ways are compared with one process."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from compared_command import compared, forked_and_usual
from doctor_support import CHILD_ENV
from projects.cases import PROJECTS, cases, changed

import ddp_doctor
from ddp_doctor.evidence.rank_comparison import BATCHES, MICRO_BATCHES
from ddp_doctor.launch.world_constants import change, changed_arguments
from ddp_doctor.records.run import RankRecord, Run
from ddp_doctor.records.spec import Spec, Target

TORCHRUN = "torchrun --nproc_per_node=2 {}"
# The ranks of these call `main(rank, world_size)`.
CALLED = """
-def main():
+def main(rank, world_size):
~rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")) =>
"""
FORKED = f"""{CALLED}
-    main()
+    processes = [torch.multiprocessing.get_context(None).Process(target=main, args=(rank, 2)) for rank in range(2)]
+    for process in processes:
+        process.start()
+    for process in processes:
+        process.join()
"""
# By name: the command, a program of bases/, and its changes.
STARTS = {
    "torchrun as a module": ("python -m torch.distributed.run --nproc_per_node=2 {}", "loop.py", ""),
    "a rank per GPU": (
        "python {}",
        "loop.py",
        f"""{CALLED}
~    main() =>     torch.multiprocessing.spawn(main, (torch.cuda.device_count(),), torch.cuda.device_count())
""",
    ),
    "an argument of its own": (
        "python {} --world-size 2",
        "loop.py",
        """
~def main(): => def main(rank, args):
~rank, world_size = int(os.environ.get("RANK", "0")), int( => world_size, _ = args.world_size, int(
-    main()
+    import argparse
+    parser = argparse.ArgumentParser()
+    parser.add_argument("--world-size", type=int)
+    args = parser.parse_args()
+    torch.multiprocessing.spawn(main, (args,), args.world_size)
""",
    ),
    "a constant": (
        "python {}",
        "loop.py",
        f"""{CALLED}
+RANKS = 2
 def make_dataset(size, seed=1):
~DDP(net) => net
 loss.backward()
+for parameter in model.parameters():
+    dist.all_reduce(parameter.grad)
+    parameter.grad /= RANKS
~    main() =>     torch.multiprocessing.spawn(main, (RANKS,), RANKS)
""",
    ),
    "forked by hand": ("python {}", "loop.py", FORKED),
    "spawned by hand": ("python {}", "loop.py", FORKED.replace("None", '"spawn"')),
    "a script that starts itself": (
        "python {}",
        "loop.py",
        """
-    main()
+    import subprocess
+    import sys
+    if "RANK" in os.environ:
+        main()
+    else:
+        names = [{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} for rank in range(2)]
+        children = [subprocess.Popen([sys.executable, __file__], env={**os.environ, **own}) for own in names]
+        sys.exit(max(child.wait() for child in children))
""",
    ),
    "a shell script": ("sh -c 'WORLD_SIZE=2 RANK=0 python {} & WORLD_SIZE=2 RANK=1 python {} & wait'", "loop.py", ""),
    "Trainer(devices=2)": ("python {}", "lightning_digits.py", ""),
    "torchrun and Trainer(devices=2)": (TORCHRUN, "lightning_digits.py", ""),
    "LightningCLI": (
        "python {} fit --trainer.devices=2 --trainer.accelerator=cpu --trainer.max_epochs=2 --trainer.logger=false",
        "lightning_digits.py",
        """
-    L.Trainer(max_epochs=2, accelerator="cpu", devices=2, logger=False).fit(Module(), Data())
+    from lightning.pytorch.cli import LightningCLI
+    LightningCLI(Module, Data, save_config_callback=None)
""",
    ),
    "Fabric": ("python {}", "fabric.py", '~int(os.environ["WORLD_SIZE"]) => 2\n'),
    "fabric run": (
        "fabric run --accelerator=cpu --devices=2 {}",
        "fabric.py",
        '~accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp" =>\n',
    ),
    "accelerate launch": ("accelerate launch --multi_gpu --num_processes=2 {}", "accelerate_loop.py", ""),
    "accelerate from a notebook": (
        "python {}",
        "accelerate_loop.py",
        "~    main() =>     __import__('accelerate').debug_launcher(main, num_processes=2)\n",
    ),
    "HF Trainer": (TORCHRUN, "hf_trainer.py", ""),
}
BATCHING = {case.name: case.text for case in cases("batching.txt")}
# One process gets the batches of the ranks in turn; in the others, it gets their joined batch.
IN_TURN = {"token_batches", "own_sampler"}


def command_of(name: str) -> list[str]:
    """Writes a program into the current folder, and returns its command."""
    start, base, changes = STARTS.get(name, (TORCHRUN, "", ""))
    text = changed((PROJECTS / "bases" / base).read_text(), changes) if base else BATCHING[name]
    Path("train.py").write_text(text if "__main__" in text or not base else f"{text}\n\nmain()\n")
    return [word.replace("{}", "train.py") for word in shlex.split(start)]


@pytest.fixture(autouse=True)
def _commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [*STARTS, *(name for name in BATCHING if name != "loaded_in_32_bits")])
def test_a_healthy_program_equals_one_process(name: str) -> None:
    found, _ = compared(command_of(name))
    assert not found.cannot
    assert found.difference < 1e-9
    assert found.method == (MICRO_BATCHES if name in IN_TURN else BATCHES)
    assert len(found.differences) > 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["a constant", *IN_TURN])
def test_a_wrong_scale_is_found(name: str) -> None:
    command, program = command_of(name), Path("train.py")
    program.write_text(re.sub(r"(\w+)\.backward\(\)", r"(\1 * dist.get_world_size()).backward()", program.read_text()))
    found, _ = compared(command)
    assert found.difference == pytest.approx(1.0)
    assert found.weights == pytest.approx((0.25, 0.25), rel=1e-6)
    assert found.applied[0][0] == pytest.approx((0.5, 0.5), rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_weights_that_were_loaded_in_32_bits_are_compared_in_64() -> None:
    found, _ = compared(command_of("loaded_in_32_bits"))
    assert found.difference < 1e-9
    # What a scaler divides is divided on one process as well, and is no wrong scale.
    assert found.applied[0][0] == pytest.approx((0.5 / 4096, 0.5 / 4096))
    assert found.reference[0] == pytest.approx(found.applied[0][0])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["a constant", "accelerate launch", "Fabric", "Trainer(devices=2)", "a shell script"])
def test_forks_train_the_weights_of_the_usual_command(name: str) -> None:
    usual, forked = forked_and_usual(command_of(name))
    assert forked == usual
    assert all(len(weights) > 1 for weights in usual)


def test_a_program_that_starts_another_number_of_ranks_is_named() -> None:
    begun = {"kind": "init_process_group", "world": 4}
    run = Run(Spec(Target(command=("x",))), Path(), [RankRecord(0, [begun])])
    assert not run.worked
    assert run.short_reason == "the program starts 4 ranks, although the doctor runs 1"


def test_numbers_that_are_the_number_of_ranks_are_changed() -> None:
    options = argparse.Namespace(world_size=2, batch_size=2, num_workers=2, train={"n_gpus": 2, "layers": 2})
    held = SimpleNamespace(world_size=2)
    change({"options": options, "held": held}, 2, 1)
    assert vars(options) == {"world_size": 1, "batch_size": 2, "num_workers": 2, "train": {"n_gpus": 1, "layers": 2}}
    assert held.world_size == 2

    def worker(rank: int, world_size: int, epochs: int) -> None: ...

    assert changed_arguments(worker, (2, 2), 2, 1) == (1, 2)


def test_probes_are_installed_although_a_package_looked_for_torch_before(tmp_path: Path) -> None:
    Spec(Target(), world_size=1).write(tmp_path)
    looks = "import importlib.util; importlib.util.find_spec('torch'); import torch"
    site = Path(ddp_doctor.__file__).parent / "launch" / "site"
    environment = CHILD_ENV | {"DDP_DOCTOR_RUN": str(tmp_path)}
    environment["PYTHONPATH"] = f"{site}:{CHILD_ENV['PYTHONPATH']}"
    subprocess.run([sys.executable, "-c", looks], env=environment, check=True, timeout=60)
    # The probes register where the stacks are written.
    assert list(tmp_path.glob("stack-*.txt"))
