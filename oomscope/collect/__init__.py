"""Readers outside the job: NVML, /proc and cgroup, py-spy."""
