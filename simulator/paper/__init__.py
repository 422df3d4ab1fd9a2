"""Figures and tables of the MoE-Lightning paper that a simulation has a part in; the others are in `hrm.paper`."""
