"""Code for GPUs on a machine without one: torch's functions accept CUDA devices, and compute on the CPU.

`cuda` replaces functions and methods of torch in this process, before the probes and the user's code. A tensor lies in
the memory of the CPU, but says that it is on the device to which the program has moved it.
"""
