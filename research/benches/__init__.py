"""What the package costs and gives, one module for each bench, as `EXPERIMENT`.

Times are ratios of runs in turn in one process, medians of them; peaks of memory are a process's own.
"""
