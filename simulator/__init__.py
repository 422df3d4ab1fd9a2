"""Nothing yet. Here will come the discrete-event simulation of a plan's task graph.

What it is for: the cost model of `hrm` says how long each lane (GPU, CPU, either direction of the link, staging copy,
disk) is busy and takes the longest as the time of a pass. It does not see lanes wait for each other. The simulator will
walk the tasks of a schedule one by one, and so price those waits and the bandwidth that lanes share.

It may import `hrm`, never `runtime` and never torch.
"""
