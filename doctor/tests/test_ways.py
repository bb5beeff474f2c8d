"""Programs that start their ranks, and make their batches, in many ways are compared with one process."""

import os
import shlex
import sys
from pathlib import Path

import pytest
from projects.cases import PROJECTS, changed
from suite import EVERYTHING

from ddp_doctor import examine

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
    "Trainer(devices=2)": ("python {}", "module.py", '~int(os.environ["WORLD_SIZE"]) => 2\n'),
    "torchrun and Trainer(devices=2)": (TORCHRUN, "module.py", '~int(os.environ["WORLD_SIZE"]) => 2\n'),
    "LightningCLI": (
        "python {} fit --trainer.devices=2 --trainer.accelerator=cpu --trainer.max_epochs=2 --trainer.logger=false",
        "module.py",
        """
-L.seed_everything(3, verbose=False) ... trainer.fit(Module(), Data())
+from lightning.pytorch.cli import LightningCLI
+LightningCLI(Module, Data, save_config_callback=None)
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
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [*STARTS, *BATCHING])
def test_a_healthy_program_equals_one_process(name: str) -> None:
    report = examine(command=command_of(name), only=["LD014"], timeout=float(os.environ.get("DOCTOR_TIMEOUT", "60")))
    assert not report.faults
    assert report.comparison and report.comparison.made, report
    assert max(report.comparison.differences) < 1e-9
