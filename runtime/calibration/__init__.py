"""Measures the machine and writes a hardware profile of it: `hrm calibrate`. It runs no task graph."""
