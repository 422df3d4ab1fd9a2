"""Nothing yet. Here will come the execution of a plan on a GPU, and the calibration of a hardware profile.

It may import `hrm` and is the only package that may import torch (`pip install '.[runtime]'`); never `simulator`.
"""
