"""A cell of a notebook, which starts a function of the notebook in new processes.

A notebook has no file, and neither has this: python -c "$(cat examples/tutorial/asked/cell.py)"
"""

import multiprocessing


def work():
    """The work of a rank."""


for method in ("spawn", "fork"):
    process = multiprocessing.get_context(method).Process(target=work)
    process.start()
    process.join()
    print(f"{method}: exit code {process.exitcode}", flush=True)
