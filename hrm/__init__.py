"""Plan batch generation of mixture-of-experts models that do not fit the GPU.

Data flows one way: profile + model + workload -> work -> search -> plan -> report.
"""

__version__ = "0.1.0"
