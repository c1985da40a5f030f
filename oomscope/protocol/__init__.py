"""What crosses process and file boundaries.

Standard library only, Python 3.9: it is also loaded inside the job.
"""
