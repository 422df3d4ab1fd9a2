"""Discrete-event simulation of a plan's task graph.

The cost model of `hrm` says how long each lane (GPU, CPU, either direction of the link, staging copy, disk) is busy and
takes the longest as the time of a pass. It does not see lanes wait for each other. The simulator walks the tasks of a
schedule one by one, and so prices those waits and the bandwidth that lanes share.

It imports `hrm`, never `runtime` and never torch.
"""
