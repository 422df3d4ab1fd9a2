"""The execution of a plan: its task graph with real tensors, on one CUDA GPU or with a CPU in its place.

It may import `hrm` and is the only package that may import torch (`pip install '.[runtime]'`); never `simulator`.
"""
