"""How much memory a process that a test started has used at most."""

from __future__ import annotations

# For the head of a script. Not ru_maxrss: Linux lets it start at the peak of the process that started this one, and a
# worker of pytest may have used a gigabyte before.
PEAK_MEGABYTES = """
def peak_megabytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM:"))
"""
