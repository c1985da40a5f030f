"""What single operations need.

Copies to the host, shapes that depend on values, memory inside kernels, attention.
"""
