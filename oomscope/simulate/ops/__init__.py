"""What single operations need: copies to the host, shapes that depend on values, memory inside kernels, attention."""
