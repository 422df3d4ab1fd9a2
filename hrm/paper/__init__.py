"""Figures and tables of the MoE-Lightning paper (Cao et al., ASPLOS 2025, arXiv 2411.11217), computed anew.

Each is a function without arguments that returns a small result: a notebook shows its picture, `to_frame()` is its
numbers. What needs a simulation is in `simulator.paper`.
"""
