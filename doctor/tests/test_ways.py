"""Programs that start their ranks, and make their batches, in many ways are compared with one process."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from compared_command import compared, forked_and_usual
from doctor_support import CHILD_ENV
from projects.cases import PROJECTS, changed
from suite import EVERYTHING

import ddp_doctor
from ddp_doctor.launch.starters import change
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
        '~accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp" =>\n~fabric.launch() =>\n',
    ),
    "accelerate launch": ("accelerate launch --multi_gpu --num_processes=2 {}", "accelerate_loop.py", ""),
    "accelerate from a notebook": (
        "python {}",
        "accelerate_loop.py",
        "~    main() =>     __import__('accelerate').debug_launcher(main, num_processes=2)\n",
    ),
    "HF Trainer": (TORCHRUN, "hf_trainer.py", ""),
    # Weights of a named type, as loaded ones have, and a scaler.
    "loaded in 32 bits": (
        TORCHRUN,
        "loop.py",
        """
~nn.Linear(16, 32) => nn.Linear(16, 32, dtype=torch.float32)
~nn.Linear(32, 4) => nn.Linear(32, 4, dtype=torch.float32)
~randn(size, 16 => randn(size, 16, dtype=torch.float32
~DDP(net) => DDP(net) if world_size > 1 else net
 optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
+scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
-loss.backward()
-optimizer.step()
+scaler.scale(loss).backward()
+scaler.step(optimizer)
+scaler.update()
""",
    ),
}
# Programs of the suite that make their batches in other ways, and start with torchrun.
BATCHING = ("permutation_of_all", "batches_by_next", "endless_shards", "token_weighted_loss", "gan_loop")


def command_of(name: str) -> list[str]:
    """Writes a program into the current folder, and returns its command."""
    start, base, changes = STARTS.get(name, (TORCHRUN, "", ""))
    if name in STARTS:
        text = changed((PROJECTS / "bases" / base).read_text(), changes)
    else:
        (text,) = (case.text for case in EVERYTHING if case.name == name)
    Path("train.py").write_text(text if "__main__" in text else f"{text}\n\nmain()\n")
    return [word.replace("{}", "train.py") for word in shlex.split(start)]


@pytest.fixture(autouse=True)
def _commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [*STARTS, *BATCHING])
def test_a_healthy_program_equals_one_process(name: str) -> None:
    found = compared(command_of(name))
    assert not found.cannot
    assert found.difference < 1e-9
    assert len(found.differences) > 1


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


def test_probes_are_installed_although_a_package_looked_for_torch_before(tmp_path: Path) -> None:
    Spec(Target(), world_size=1).write(tmp_path)
    looks = "import importlib.util; importlib.util.find_spec('torch'); import torch; torch.manual_seed.__wrapped__"
    site = Path(ddp_doctor.__file__).parent / "launch" / "site"
    environment = CHILD_ENV | {"DDP_DOCTOR_RUN": str(tmp_path)}
    environment["PYTHONPATH"] = f"{site}:{CHILD_ENV['PYTHONPATH']}"
    subprocess.run([sys.executable, "-c", looks], env=environment, check=True, timeout=60)
