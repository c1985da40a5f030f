"""Readers that stay outside the job: NVML, /proc and cgroups, the kernel log, py-spy.

What can hang (a GPU driver) runs in a child process of its own; what is read arrives as plain records
(`collect.base`).
"""
